#include "comm/address.h"

#include "base/clock.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    HOST_BYTES = 256,
    KEEPALIVE_SECONDS = 2,
    KEEPALIVE_PROBES = 3,
    UNACKNOWLEDGED_MS = 8000, /* sent data without an answer for so long ends the connection */
};

/* Cuts "host:port" or "[host]:port". */
static bool split_text(const char *text, char *host, char *port)
{
    const char *colon = strrchr(text, ':');
    size_t digits = colon ? strspn(colon + 1, "0123456789") : 0;
    if (!colon || colon == text || digits == 0 || digits > 5 || colon[1 + digits] != '\0' ||
        strtol(colon + 1, NULL, 10) > UINT16_MAX) {
        return false;
    }
    const char *begin = text;
    const char *end = colon;
    if (*begin == '[' && end[-1] == ']') {
        begin++;
        end--;
    } else if (memchr(begin, ':', (size_t)(end - begin))) {
        return false; /* IPv6 without brackets: where the port begins would be a guess */
    }
    if (end <= begin || end - begin >= HOST_BYTES) {
        return false;
    }
    memcpy(host, begin, (size_t)(end - begin));
    host[end - begin] = '\0';
    snprintf(port, 8, "%s", colon + 1);
    return true;
}

static Status format(Address *address)
{
    char host[64];
    char port[8];
    int error = getnameinfo((struct sockaddr *)&address->socket, address->socket_bytes, host,
                            sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
    if (error) {
        return fail(STATUS_IO, "cannot format a socket address: %s", gai_strerror(error));
    }
    bool is_v6 = address->socket.ss_family == AF_INET6;
    snprintf(address->text, sizeof address->text, is_v6 ? "[%.60s]:%s" : "%.60s:%s", host, port);
    return STATUS_OK;
}

Status address_parse(const char *text, Address *address_out)
{
    char host[HOST_BYTES];
    char port[8];
    if (!split_text(text, host, port)) {
        return fail(STATUS_INVALID, "address '%s': expected host:port or [IPv6]:port", text);
    }
    struct addrinfo hints = {.ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_NUMERICSERV | AI_ADDRCONFIG};
    struct in6_addr number;
    if (inet_pton(AF_INET, host, &number) == 1 || inet_pton(AF_INET6, host, &number) == 1) {
        hints.ai_flags = AI_NUMERICSERV | AI_NUMERICHOST;
    }
    struct addrinfo *found = NULL;
    int error = getaddrinfo(host, port, &hints, &found);
    if (error) {
        Status code =
            error == EAI_NONAME || error == EAI_AGAIN ? STATUS_UNAVAILABLE : STATUS_INVALID;
        return fail(code, "address '%s': %s", text, gai_strerror(error));
    }
    Address address = {.socket_bytes = found->ai_addrlen};
    memcpy(&address.socket, found->ai_addr, found->ai_addrlen);
    freeaddrinfo(found);
    TRY(format(&address));
    *address_out = address;
    return STATUS_OK;
}

Status address_of_socket(int fd, Address *address_out)
{
    Address address = {.socket_bytes = sizeof address.socket};
    if (getsockname(fd, (struct sockaddr *)&address.socket, &address.socket_bytes) != 0) {
        return fail(STATUS_IO, "cannot tell a socket's address: %s", strerror(errno));
    }
    TRY(format(&address));
    *address_out = address;
    return STATUS_OK;
}

bool address_is_wildcard(const Address *address)
{
    if (address->socket.ss_family == AF_INET6) {
        const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)&address->socket;
        return IN6_IS_ADDR_UNSPECIFIED(&v6->sin6_addr);
    }
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)&address->socket;
    return v4->sin_addr.s_addr == htonl(INADDR_ANY);
}

socklen_t address_unix(const Address *address, struct sockaddr_un *name_out)
{
    *name_out = (struct sockaddr_un){.sun_family = AF_UNIX};
    /* A leading zero byte makes the name abstract: it lives in the network namespace, not in a
     * folder. */
    int length = snprintf(name_out->sun_path + 1, sizeof name_out->sun_path - 1, "viaduct-comm-%s",
                          address->text);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

void address_tune_tcp(int fd)
{
    /* What the kernel refuses costs speed or the early notice of a lost host, nothing else. */
    const int settings[][3] = {
        {IPPROTO_TCP, TCP_NODELAY, 1},
        {SOL_SOCKET, SO_KEEPALIVE, 1},
        {IPPROTO_TCP, TCP_KEEPIDLE, KEEPALIVE_SECONDS},
        {IPPROTO_TCP, TCP_KEEPINTVL, KEEPALIVE_SECONDS},
        {IPPROTO_TCP, TCP_KEEPCNT, KEEPALIVE_PROBES},
        {IPPROTO_TCP, TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS},
    };
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        (void)setsockopt(fd, settings[i][0], settings[i][1], &settings[i][2], sizeof(int));
    }
}

bool address_is_same_user(int fd)
{
    struct ucred peer;
    socklen_t peer_bytes = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &peer_bytes) == 0 &&
           peer.uid == geteuid();
}

bool address_wait(int fd, short events, int64_t deadline_ns)
{
    for (;;) {
        int64_t left_ns = deadline_ns - clock_now_ns();
        struct pollfd poller = {.fd = fd, .events = events};
        int left_ms = left_ns > 0 ? (int)(left_ns / CLOCK_NS_PER_MS + 1) : 0;
        int count = poll(&poller, 1, left_ms);
        if (count > 0) {
            return true;
        }
        if (left_ns <= 0 || (count < 0 && errno != EINTR)) {
            return false;
        }
    }
}

int address_connect_tcp(const Address *address, int64_t deadline_ns)
{
    int fd = socket(address->socket.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return -1;
    }
    int error = 0;
    if (connect(fd, (const struct sockaddr *)&address->socket, address->socket_bytes) != 0) {
        error = errno;
    }
    if (error == EINPROGRESS) {
        socklen_t error_bytes = sizeof error;
        if (!address_wait(fd, POLLOUT, deadline_ns)) {
            error = ETIMEDOUT;
        } else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &error_bytes) != 0) {
            error = errno;
        }
    }
    if (error) {
        close(fd);
        errno = error;
        return -1;
    }
    address_tune_tcp(fd);
    return fd;
}

int address_connect_unix(const Address *address)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return -1;
    }
    struct sockaddr_un name;
    socklen_t name_bytes = address_unix(address, &name);
    if (connect(fd, (const struct sockaddr *)&name, name_bytes) != 0) {
        int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    return fd;
}
