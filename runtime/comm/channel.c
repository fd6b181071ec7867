#include "comm/endpoint.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

static int channel_fd(const CommEndpoint *endpoint, const Channel *channel)
{
    return endpoint->watches[channel->watch].fd;
}

void control_send(const CommEndpoint *endpoint, const Channel *channel, ControlKind kind,
                  Status code, const char *text, int fd_to_pass)
{
    if (channel->watch < 0) {
        return;
    }
    ControlMessage message = {.kind = kind, .code = (uint32_t)code};
    size_t length = strlen(text);
    size_t text_max = sizeof message.text - 1;
    memcpy(message.text, text, length < text_max ? length : text_max);
    struct iovec piece = {.iov_base = &message, .iov_len = sizeof message};
    struct msghdr header = {.msg_iov = &piece, .msg_iovlen = 1};
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr aligned;
    } extra = {0};
    if (fd_to_pass >= 0) {
        header.msg_control = extra.bytes;
        header.msg_controllen = sizeof extra.bytes;
        struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(rights), &fd_to_pass, sizeof(int));
    }
    /* A handful of messages in a connection's life always fit into its buffer; if the connection is
     * broken, its end tells the peer. */
    ssize_t sent = sendmsg(channel_fd(endpoint, channel), &header, MSG_DONTWAIT | MSG_NOSIGNAL);
    (void)sent;
}

static void handle_memory(HostWorld *world, int from, int *fd)
{
    /* Only the lowest rank of the host gives memory, and once; which rank that is this one may not
     * know yet. */
    if (*fd >= 0 && world->memory_fd < 0 && from < world->member.rank) {
        world->memory_fd = *fd;
        world->memory_from = from;
        *fd = -1;
    }
}

static void handle_message(Channel *channel, int *fd)
{
    HostWorld *world = channel->world;
    ControlMessage *message = &channel->inbox;
    message->text[sizeof message->text - 1] = '\0';
    switch ((ControlKind)message->kind) {
    case CONTROL_FAILURE:
        member_note_failure(&world->member,
                            message->code > STATUS_OK && message->code < STATUS_COUNT
                                ? (Status)message->code
                                : STATUS_ABORTED,
                            message->text);
        break;
    case CONTROL_LEAVE:
        member_note_peer(&world->member, channel->peer, PEER_STATE_LEFT);
        break;
    case CONTROL_MEMORY:
        handle_memory(world, channel->peer, fd);
        break;
    default:
        member_note_failure(&world->member, STATUS_CORRUPT, "a control message makes no sense");
        break;
    }
}

/* One read; *fd_out is a descriptor that came along, or -1. */
static ssize_t receive_some(int fd, Channel *channel, int *fd_out)
{
    struct iovec piece = {.iov_base = (char *)&channel->inbox + channel->inbox_bytes,
                          .iov_len = sizeof channel->inbox - channel->inbox_bytes};
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr aligned;
    } extra = {0};
    struct msghdr header = {.msg_iov = &piece,
                            .msg_iovlen = 1,
                            .msg_control = extra.bytes,
                            .msg_controllen = sizeof extra.bytes};
    ssize_t received = recvmsg(fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    *fd_out = -1;
    struct cmsghdr *rights = received >= 0 ? CMSG_FIRSTHDR(&header) : NULL;
    if (rights && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS &&
        rights->cmsg_len == CMSG_LEN(sizeof(int))) {
        memcpy(fd_out, CMSG_DATA(rights), sizeof(int));
    }
    return received;
}

/* The sign of life ended: in good order only after a goodbye. */
static void lose(CommEndpoint *endpoint, Channel *channel)
{
    Member *member = &channel->world->member;
    endpoint_unwatch(endpoint, channel->watch);
    channel->watch = -1;
    if (atomic_load(&member->peer_states[channel->peer]) == PEER_STATE_ALIVE) {
        member_note_peer(member, channel->peer, PEER_STATE_DEAD);
    }
}

void control_receive(CommEndpoint *endpoint, Channel *channel)
{
    for (;;) {
        int fd = -1;
        ssize_t received = receive_some(channel_fd(endpoint, channel), channel, &fd);
        if (received < 0 && (errno == EAGAIN || errno == EINTR)) {
            break;
        }
        if (received <= 0) {
            lose(endpoint, channel);
            break;
        }
        channel->inbox_bytes += (size_t)received;
        /* A descriptor comes with the first byte of its message, and messages are sent whole. */
        if (channel->inbox_bytes == sizeof channel->inbox) {
            handle_message(channel, &fd);
            channel->inbox_bytes = 0;
        }
        if (fd >= 0) {
            close(fd);
        }
    }
    pthread_cond_broadcast(&endpoint->changed);
}

static bool read_socket(CommEndpoint *endpoint, Channel *channel)
{
    bool moved = false;
    while (!channel->is_in_over) {
        char *to = NULL;
        int64_t space = ring_space(&channel->fill, &to);
        channel->is_full = space == 0;
        if (channel->is_full) {
            break;
        }
        ssize_t received = recv(channel_fd(endpoint, channel), to, (size_t)space, MSG_DONTWAIT);
        if (received < 0 && (errno == EAGAIN || errno == EINTR)) {
            break;
        }
        moved = true;
        if (received <= 0) {
            /* Why the peer ended its lanes it said before, on its control channel. */
            Channel *control = &channel->world->controls[channel->peer];
            if (control->watch >= 0) {
                control_receive(endpoint, control);
            }
            channel->is_in_over = true;
            atomic_store(&channel->is_closed, 1);
            bell_ring_always(channel->world->member.bell);
        } else {
            ring_commit(&channel->fill, received);
            bell_ring(channel->world->member.bell);
        }
    }
    return moved;
}

static bool write_socket(CommEndpoint *endpoint, Channel *channel)
{
    bool moved = false;
    while (!channel->is_out_over && !channel->is_clogged) {
        const char *from = NULL;
        int64_t readable = ring_peek(&channel->drain, &from);
        if (readable == 0) {
            break;
        }
        ssize_t sent = send(channel_fd(endpoint, channel), from, (size_t)readable,
                            MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) {
            continue;
        }
        if (sent < 0) {
            channel->is_clogged = errno == EAGAIN;
            channel->is_out_over = !channel->is_clogged;
            break;
        }
        moved = true;
        if (ring_consume(&channel->drain, sent)) {
            bell_ring(channel->world->member.bell);
        }
    }
    return moved;
}

bool lane_is_drained(Channel *channel)
{
    const char *from = NULL;
    return channel->is_out_over || ring_peek(&channel->drain, &from) == 0;
}

/* A socket of which nothing is wanted must leave epoll: the end of a connection is reported in any
 * case, again and again. */
static void update_interest(CommEndpoint *endpoint, Channel *channel)
{
    uint32_t events = 0;
    if (!channel->is_in_over && !channel->is_full) {
        events |= EPOLLIN;
    }
    if (!channel->is_out_over && channel->is_clogged) {
        events |= EPOLLOUT;
    }
    endpoint_rewatch(endpoint, channel->watch, events);
}

static void after_move(CommEndpoint *endpoint, Channel *channel)
{
    update_interest(endpoint, channel);
    if (lane_is_drained(channel)) {
        pthread_cond_broadcast(&endpoint->changed);
    }
}

void lane_handle(CommEndpoint *endpoint, Channel *channel, uint32_t events)
{
    if (events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) {
        channel->is_clogged = false;
        write_socket(endpoint, channel);
    }
    if (events & (EPOLLIN | EPOLLERR | EPOLLHUP)) {
        read_socket(endpoint, channel);
    }
    after_move(endpoint, channel);
}

bool lane_pump(CommEndpoint *endpoint, Channel *channel)
{
    if (channel->watch < 0) {
        return false;
    }
    bool moved = write_socket(endpoint, channel);
    bool was_full = channel->is_full;
    if (was_full) {
        moved |= read_socket(endpoint, channel);
    }
    if (moved || channel->is_clogged || was_full != channel->is_full) {
        after_move(endpoint, channel);
    }
    return moved;
}
