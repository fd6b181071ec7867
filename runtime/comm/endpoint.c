#include "comm/endpoint.h"

#include "base/clock.h"
#include "base/memory.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum {
    EVENTS_PER_WAIT = 64,
    LISTEN_BACKLOG = 512,
    GUESTS_MAX = 64,       /* strangers cannot use up descriptors: the oldest is cut off */
    GUEST_MS = 3000,       /* to say Hello */
    LINGER_MS = 2000,      /* for the peer to end its direction */
    LISTEN_PAUSE_MS = 100, /* when descriptors have run out */
};

static uint64_t watch_token(const CommEndpoint *endpoint, int watch)
{
    return ((uint64_t)endpoint->watches[watch].generation << 32) | (uint32_t)watch;
}

void endpoint_rewatch(CommEndpoint *endpoint, int watch, uint32_t events)
{
    Watch *entry = &endpoint->watches[watch];
    if (entry->events == events) {
        return;
    }
    struct epoll_event event = {.events = events, .data.u64 = watch_token(endpoint, watch)};
    int action = events == 0 ? EPOLL_CTL_DEL : entry->events == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
    CHECK(epoll_ctl(endpoint->epoll_fd, action, entry->fd, &event) == 0);
    entry->events = events;
}

Status endpoint_watch(CommEndpoint *endpoint, WatchKind kind, int fd, uint32_t events,
                      int *watch_out)
{
    int watch = 0;
    while (watch < endpoint->num_watches && endpoint->watches[watch].kind != WATCH_FREE) {
        watch++;
    }
    if (watch == endpoint->num_watches) {
        TRY(memory_grow((void **)&endpoint->watches, &endpoint->watch_capacity, (size_t)watch + 1,
                        sizeof *endpoint->watches));
        endpoint->watches[watch] = (Watch){0};
        endpoint->num_watches++;
    }
    Watch *entry = &endpoint->watches[watch];
    *entry = (Watch){.kind = kind, .fd = fd, .generation = entry->generation + 1};
    endpoint_rewatch(endpoint, watch, events);
    *watch_out = watch;
    return STATUS_OK;
}

void endpoint_unwatch(CommEndpoint *endpoint, int watch)
{
    endpoint_rewatch(endpoint, watch, 0);
    close(endpoint->watches[watch].fd);
    endpoint->watches[watch].kind = WATCH_FREE;
}

void channel_adopt(CommEndpoint *endpoint, Channel *channel, int watch)
{
    Watch *entry = &endpoint->watches[watch];
    entry->kind = WATCH_CHANNEL;
    entry->channel = channel;
    entry->deadline_ns = 0;
    channel->watch = watch;
    channel->is_unix = entry->is_unix;
    channel->was_connected = true;
    pthread_cond_broadcast(&endpoint->changed);
}

Status channel_connect(CommEndpoint *endpoint, Channel *channel, int fd, bool is_unix)
{
    int watch = -1;
    TRY(endpoint_watch(endpoint, WATCH_CHANNEL, fd, EPOLLIN, &watch));
    endpoint->watches[watch].is_unix = is_unix;
    channel_adopt(endpoint, channel, watch);
    return STATUS_OK;
}

void channel_disconnect(CommEndpoint *endpoint, Channel *channel)
{
    if (channel->watch < 0) {
        return;
    }
    Watch *entry = &endpoint->watches[channel->watch];
    shutdown(entry->fd, SHUT_WR);
    entry->kind = WATCH_LINGER;
    entry->channel = NULL;
    entry->deadline_ns = clock_deadline_in_ms(LINGER_MS);
    endpoint_rewatch(endpoint, channel->watch, EPOLLIN);
    channel->watch = -1;
}

static void cut_off_oldest_guest(CommEndpoint *endpoint)
{
    int oldest = -1;
    int num_guests = 0;
    for (int i = 0; i < endpoint->num_watches; i++) {
        const Watch *entry = &endpoint->watches[i];
        if (entry->kind != WATCH_GUEST) {
            continue;
        }
        num_guests++;
        if (oldest < 0 || entry->deadline_ns < endpoint->watches[oldest].deadline_ns) {
            oldest = i;
        }
    }
    if (num_guests >= GUESTS_MAX) {
        endpoint_unwatch(endpoint, oldest);
    }
}

/* Accepts all who wait. */
static void accept_guests(CommEndpoint *endpoint, int listener)
{
    bool is_unix = endpoint->watches[listener].is_unix;
    for (;;) {
        int fd = accept4(endpoint->watches[listener].fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) {
            continue;
        }
        if (fd < 0) {
            bool is_drained = errno == EAGAIN;
            endpoint_rewatch(endpoint, listener, is_drained ? EPOLLIN : 0);
            endpoint->watches[listener].deadline_ns =
                is_drained ? 0 : clock_deadline_in_ms(LISTEN_PAUSE_MS);
            return;
        }
        if (is_unix && !address_is_same_user(fd)) {
            close(fd);
            continue;
        }
        if (!is_unix) {
            address_tune_tcp(fd);
        }
        cut_off_oldest_guest(endpoint);
        int watch = -1;
        if (endpoint_watch(endpoint, WATCH_GUEST, fd, EPOLLIN, &watch) != STATUS_OK) {
            close(fd); /* no memory for one more: the guest will try again */
            continue;
        }
        endpoint->watches[watch].is_unix = is_unix;
        endpoint->watches[watch].deadline_ns = clock_deadline_in_ms(GUEST_MS);
    }
}

static Channel *find_channel(HostWorld *world, const Hello *hello)
{
    if (hello->lane == CHANNEL_CONTROL) {
        return &world->controls[hello->from];
    }
    Channel *channel = world->lanes;
    while (channel && (channel->peer != hello->from || channel->group_id != hello->group_id ||
                       channel->lane != hello->lane)) {
        channel = channel->next;
    }
    return channel;
}

/* Who dials is the higher rank of the two. */
static Verdict judge(CommEndpoint *endpoint, const Watch *guest, Channel **channel_out)
{
    const Hello *hello = &guest->hello;
    if (hello->version != HELLO_VERSION) {
        return VERDICT_VERSION;
    }
    HostWorld *world = endpoint->worlds;
    while (world && world->key != hello->key) {
        world = world->next;
    }
    if (!world) {
        return VERDICT_LATER;
    }
    if (hello->digest != world->digest || hello->to != world->member.rank ||
        hello->from <= hello->to || hello->from >= world->member.size) {
        return VERDICT_MISMATCH;
    }
    if (guest->is_unix && world->tcp_only) {
        return VERDICT_USE_TCP;
    }
    Channel *channel = find_channel(world, hello);
    if (!channel) {
        return VERDICT_LATER;
    }
    *channel_out = channel;
    return channel->was_connected ? VERDICT_TAKEN : VERDICT_ACCEPTED;
}

/* Reads on in the guest's Hello; when it is complete the guest gets an answer and becomes a channel
 * or leaves. */
static void hear_guest(CommEndpoint *endpoint, int watch)
{
    Watch *guest = &endpoint->watches[watch];
    ssize_t received = recv(guest->fd, (char *)&guest->hello + guest->hello_bytes,
                            sizeof guest->hello - guest->hello_bytes, MSG_DONTWAIT);
    if (received < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    guest->hello_bytes += received > 0 ? (size_t)received : 0;
    bool is_known =
        guest->hello_bytes < sizeof guest->hello.magic || guest->hello.magic == HELLO_MAGIC;
    if (received <= 0 || !is_known) {
        endpoint_unwatch(endpoint, watch);
        return;
    }
    if (guest->hello_bytes < sizeof guest->hello) {
        return;
    }
    Channel *channel = NULL;
    Verdict verdict = judge(endpoint, guest, &channel);
    HelloReply reply = {.magic = HELLO_MAGIC, .verdict = verdict, .version = HELLO_VERSION};
    ssize_t sent = send(guest->fd, &reply, sizeof reply, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (verdict == VERDICT_ACCEPTED && sent == (ssize_t)sizeof reply) {
        channel_adopt(endpoint, channel, watch);
    } else {
        endpoint_unwatch(endpoint, watch);
    }
}

/* What still comes over a connection that is over for us is thrown away. */
static void drop_input(CommEndpoint *endpoint, int watch)
{
    char waste[4096];
    ssize_t received = 0;
    do {
        received = recv(endpoint->watches[watch].fd, waste, sizeof waste, MSG_DONTWAIT);
    } while (received > 0);
    if (received == 0 || (errno != EAGAIN && errno != EINTR)) {
        endpoint_unwatch(endpoint, watch);
    }
}

static void handle_event(CommEndpoint *endpoint, const struct epoll_event *event)
{
    int watch = (int)(uint32_t)event->data.u64;
    if (watch_token(endpoint, watch) != event->data.u64) {
        return; /* of an earlier owner of the entry */
    }
    Channel *channel = endpoint->watches[watch].channel;
    uint64_t count = 0;
    ssize_t ignored = 0;
    switch (endpoint->watches[watch].kind) {
    case WATCH_EVENT:
        ignored = read(endpoint->event_fd, &count, sizeof count);
        (void)ignored;
        break;
    case WATCH_LISTEN:
        accept_guests(endpoint, watch);
        break;
    case WATCH_GUEST:
        hear_guest(endpoint, watch);
        break;
    case WATCH_LINGER:
        drop_input(endpoint, watch);
        break;
    case WATCH_CHANNEL:
        if (channel->lane == CHANNEL_CONTROL) {
            control_receive(endpoint, channel);
        } else {
            lane_handle(endpoint, channel, event->events);
        }
        break;
    case WATCH_FREE:
        break;
    }
}

static void end_overdue(CommEndpoint *endpoint)
{
    int64_t now_ns = clock_now_ns();
    for (int i = 0; i < endpoint->num_watches; i++) {
        Watch *entry = &endpoint->watches[i];
        if (entry->kind == WATCH_FREE || entry->deadline_ns == 0 || entry->deadline_ns > now_ns) {
            continue;
        }
        if (entry->kind == WATCH_LISTEN) {
            entry->deadline_ns = 0;
            endpoint_rewatch(endpoint, i, EPOLLIN);
        } else {
            endpoint_unwatch(endpoint, i);
        }
    }
}

static bool pump_all(CommEndpoint *endpoint)
{
    bool moved = false;
    for (HostWorld *world = endpoint->worlds; world; world = world->next) {
        for (Channel *lane = world->lanes; lane; lane = lane->next) {
            moved |= lane_pump(endpoint, lane);
        }
    }
    return moved;
}

/* Milliseconds to the next deadline; -1: there is none. */
static int next_timeout_ms(const CommEndpoint *endpoint)
{
    int64_t next_ns = INT64_MAX;
    for (int i = 0; i < endpoint->num_watches; i++) {
        const Watch *entry = &endpoint->watches[i];
        if (entry->kind != WATCH_FREE && entry->deadline_ns > 0 && entry->deadline_ns < next_ns) {
            next_ns = entry->deadline_ns;
        }
    }
    if (next_ns == INT64_MAX) {
        return -1;
    }
    int64_t left_ns = next_ns - clock_now_ns();
    return left_ns > 0 ? (int)(left_ns / CLOCK_NS_PER_MS + 1) : 0;
}

static void *endpoint_run(void *argument)
{
    CommEndpoint *endpoint = argument;
    struct epoll_event events[EVENTS_PER_WAIT];
    pthread_mutex_lock(&endpoint->lock);
    while (!endpoint->is_closing) {
        /* Whoever writes to a ring from here on wakes us; what was written before is moved now. */
        (void)bell_arm(&endpoint->bell);
        bool moved = pump_all(endpoint);
        int timeout_ms = moved ? 0 : next_timeout_ms(endpoint);
        pthread_mutex_unlock(&endpoint->lock);
        int count = epoll_wait(endpoint->epoll_fd, events, EVENTS_PER_WAIT, timeout_ms);
        bell_disarm(&endpoint->bell);
        pthread_mutex_lock(&endpoint->lock);
        for (int i = 0; i < count; i++) {
            handle_event(endpoint, &events[i]);
        }
        end_overdue(endpoint);
    }
    pthread_mutex_unlock(&endpoint->lock);
    return NULL;
}

/* A listening socket in the table; is_unix: the abstract one that goes with the endpoint's address.
 */
static Status listen_on(CommEndpoint *endpoint, bool is_unix)
{
    struct sockaddr_un unix_name;
    const struct sockaddr *name = (const struct sockaddr *)&endpoint->address.socket;
    socklen_t name_bytes = endpoint->address.socket_bytes;
    if (is_unix) {
        name_bytes = address_unix(&endpoint->address, &unix_name);
        name = (const struct sockaddr *)&unix_name;
    }
    int fd = socket(name->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return fail(STATUS_IO, "cannot make a socket: %s", strerror(errno));
    }
    int one = 1;
    Status status = STATUS_OK;
    if ((!is_unix && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) != 0) ||
        bind(fd, name, name_bytes) != 0) {
        status =
            fail(errno == EADDRINUSE ? STATUS_CONFLICT : STATUS_IO, "cannot listen on %s%s: %s",
                 endpoint->address.text, is_unix ? " (Unix socket)" : "", strerror(errno));
    }
    /* The Unix name needs the port, and a peer that reaches the TCP port takes a missing Unix
     * socket for another host: so the TCP socket is bound first, and listens last. */
    if (status == STATUS_OK && !is_unix) {
        status = address_of_socket(fd, &endpoint->address);
    }
    if (status == STATUS_OK && !is_unix) {
        status = listen_on(endpoint, true);
    }
    if (status == STATUS_OK && listen(fd, LISTEN_BACKLOG) != 0) {
        status =
            fail(STATUS_IO, "cannot listen on %s: %s", endpoint->address.text, strerror(errno));
    }
    int watch = -1;
    if (status == STATUS_OK) {
        status = endpoint_watch(endpoint, WATCH_LISTEN, fd, EPOLLIN, &watch);
    }
    if (status != STATUS_OK) {
        close(fd);
        return status;
    }
    endpoint->watches[watch].is_unix = is_unix;
    return STATUS_OK;
}

static void init_locks(CommEndpoint *endpoint)
{
    pthread_condattr_t attributes;
    CHECK(pthread_mutex_init(&endpoint->lock, NULL) == 0);
    CHECK(pthread_condattr_init(&attributes) == 0);
    CHECK(pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0);
    CHECK(pthread_cond_init(&endpoint->changed, &attributes) == 0);
    pthread_condattr_destroy(&attributes);
}

static void free_endpoint(CommEndpoint *endpoint)
{
    for (int i = 0; i < endpoint->num_watches; i++) {
        if (endpoint->watches[i].kind != WATCH_FREE) {
            endpoint_unwatch(endpoint, i); /* the event descriptor among them */
        }
    }
    if (endpoint->epoll_fd >= 0) {
        close(endpoint->epoll_fd);
    }
    pthread_cond_destroy(&endpoint->changed);
    pthread_mutex_destroy(&endpoint->lock);
    memory_free(endpoint->watches);
    memory_free(endpoint);
}

static Status open_all(CommEndpoint *endpoint)
{
    endpoint->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (endpoint->epoll_fd < 0) {
        return fail(STATUS_IO, "cannot make an epoll descriptor: %s", strerror(errno));
    }
    endpoint->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (endpoint->event_fd < 0) {
        return fail(STATUS_IO, "cannot make an event descriptor: %s", strerror(errno));
    }
    int watch = -1;
    Status status = endpoint_watch(endpoint, WATCH_EVENT, endpoint->event_fd, EPOLLIN, &watch);
    if (status != STATUS_OK) {
        close(endpoint->event_fd);
        return status;
    }
    TRY(listen_on(endpoint, false));
    int error = pthread_create(&endpoint->thread, NULL, endpoint_run, endpoint);
    return error ? fail(STATUS_IO, "cannot start the endpoint's thread: %s", strerror(error))
                 : STATUS_OK;
}

Status comm_endpoint_open(const char *address, CommEndpoint **endpoint_out)
{
    CommEndpoint *endpoint = NULL;
    TRY(MEMORY_NEW(&endpoint, 1));
    endpoint->epoll_fd = -1;
    init_locks(endpoint);
    Status status = address_parse(address, &endpoint->address);
    if (status == STATUS_OK && address_is_wildcard(&endpoint->address)) {
        status = fail(STATUS_INVALID,
                      "endpoint address '%s': give the host under which peers reach this process",
                      address);
    }
    if (status == STATUS_OK) {
        status = open_all(endpoint);
    }
    if (status != STATUS_OK) {
        free_endpoint(endpoint);
        return status_trace(status, __FILE__, __LINE__);
    }
    *endpoint_out = endpoint;
    return STATUS_OK;
}

void comm_endpoint_close(CommEndpoint *endpoint)
{
    if (!endpoint) {
        return;
    }
    pthread_mutex_lock(&endpoint->lock);
    CHECK(endpoint->worlds == NULL);
    endpoint->is_closing = true;
    pthread_mutex_unlock(&endpoint->lock);
    uint64_t one = 1;
    ssize_t written = write(endpoint->event_fd, &one, sizeof one);
    (void)written; /* a full counter wakes the thread as well */
    CHECK(pthread_join(endpoint->thread, NULL) == 0);
    free_endpoint(endpoint);
}

const char *comm_endpoint_address(const CommEndpoint *endpoint)
{
    return endpoint->address.text;
}
