/* Address: "host:port" texts, and sockets made from them.
 * Threading: any thread. A host name (not a number) may wait for the resolver.
 */
#ifndef COMM_ADDRESS_H
#define COMM_ADDRESS_H

#include "base/status.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>

enum {
    ADDRESS_TEXT_BYTES = 72 /* "[IPv6 with scope]:port" */
};

typedef struct Address {
    struct sockaddr_storage socket;
    socklen_t socket_bytes;
    char text[ADDRESS_TEXT_BYTES]; /* in numbers: "127.0.0.1:40123", "[::1]:40123" */
} Address;

/* STATUS_INVALID: not "host:port"; STATUS_UNAVAILABLE: the host cannot be resolved. */
Status address_parse(const char *text, Address *address_out) STATUS_CHECKED;

/* What a bound socket is bound to. */
Status address_of_socket(int fd, Address *address_out) STATUS_CHECKED;

bool address_is_wildcard(const Address *address);

/* The abstract Unix socket that goes with a TCP address; returns its length for bind and connect.
 */
socklen_t address_unix(const Address *address, struct sockaddr_un *name_out);

/* No delay for small messages; a host that vanished is noticed by the kernel within seconds. */
void address_tune_tcp(int fd);

/* The process at the other end of a Unix socket belongs to the same user. */
bool address_is_same_user(int fd);

/* Waits until the socket can be read or written (poll's events) or the deadline. */
bool address_wait(int fd, short events, int64_t deadline_ns);

/* A connected, non-blocking socket, or -1 with errno. */
int address_connect_tcp(const Address *address, int64_t deadline_ns);
int address_connect_unix(const Address *address);

#endif
