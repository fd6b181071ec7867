/* Endpoint, inside: the thread that accepts connections, watches signs of life and pumps bytes
 * between TCP sockets and rings.
 *
 * Each pair of ranks of a world has one control channel (a Unix socket where they share memory,
 * else TCP), which carries the end of the world: failures, goodbyes, and by its own end a death.
 * Ranks on different hosts have one TCP channel more per group and lane; the thread moves its bytes
 * from and to rings in this process, so that the rank sees rings only. A connection begins with a
 * Hello that names world, group, lane and both ranks; whoever says anything else is cut off.
 *
 * Threading: everything here is guarded by endpoint->lock, except a ring's other side, which is its
 * rank's.
 */
#ifndef COMM_ENDPOINT_H
#define COMM_ENDPOINT_H

#include "comm/address.h"
#include "comm/comm_host.h"
#include "comm/member.h"

enum {
    CHANNEL_CONTROL = -1, /* in the place of a lane */
    HELLO_VERSION = 1,
};

#define HELLO_MAGIC \
    UINT64_C(0x636d6d6f63445631) /* also tells little-endian hosts, the only kind served */

/* The first bytes of every connection, from who dials. */
typedef struct Hello {
    uint64_t magic;
    uint32_t version;
    int32_t lane; /* Lane, or CHANNEL_CONTROL */
    uint64_t key;
    uint64_t digest; /* of the members and how they connect */
    uint64_t group_id;
    int32_t from; /* ranks of the world */
    int32_t to;
    uint64_t reserved[2];
} Hello;

_Static_assert(sizeof(Hello) == 64, "wire format");

typedef enum Verdict {
    VERDICT_ACCEPTED = 1,
    VERDICT_LATER,    /* this process has not opened that world or group (yet) */
    VERDICT_MISMATCH, /* the same key, but other members */
    VERDICT_TAKEN,    /* there is such a connection already */
    VERDICT_VERSION,
    VERDICT_USE_TCP, /* this rank takes part over TCP only */
} Verdict;

typedef struct HelloReply {
    uint64_t magic;
    uint32_t verdict;
    uint32_t version;
} HelloReply;

_Static_assert(sizeof(HelloReply) == 16, "wire format");

typedef enum ControlKind {
    CONTROL_FAILURE = 1,
    CONTROL_LEAVE,
    CONTROL_MEMORY, /* with the descriptor of the shared memory */
} ControlKind;

typedef struct ControlMessage {
    uint32_t kind;
    uint32_t code; /* Status */
    char text[504];
} ControlMessage;

_Static_assert(sizeof(ControlMessage) == 512, "wire format");
_Static_assert(FAILURE_TEXT_BYTES <= sizeof(((ControlMessage *)0)->text), "a failure fits");

typedef struct HostWorld HostWorld;

typedef struct Channel {
    HostWorld *world;
    struct Channel *next; /* all lanes, or all control channels, of the world */
    int peer;             /* rank in the world */
    int lane;             /* Lane, or CHANNEL_CONTROL */
    uint64_t group_id;
    bool was_connected;
    bool is_unix;   /* connected over the Unix socket: the peer shares memory */
    bool is_remote; /* the peer was reached, but wants TCP */
    int watch;      /* index in the endpoint's table; -1: not connected (any more) */
    /* Control channels. */
    ControlMessage inbox;
    size_t inbox_bytes;
    /* Lanes: the rings' sides of the endpoint's thread. */
    char *memory;
    Ring fill;       /* socket -> rank */
    Ring drain;      /* rank -> socket */
    bool is_full;    /* nothing is read from the socket until the rank makes room */
    bool is_clogged; /* nothing is written until the socket can take more */
    bool is_in_over;
    bool is_out_over;
    _Atomic uint32_t is_closed; /* is_in_over, for the rank */
} Channel;

/* One rank's world on this endpoint. */
struct HostWorld {
    Member member; /* first */
    CommEndpoint *endpoint;
    HostWorld *next;
    uint64_t key;
    uint64_t digest;
    bool tcp_only;
    Address *addresses; /* [size] */
    Channel *controls;  /* [size]; the own entry is not used */
    Channel *lanes;     /* list */
    int memory_fd;      /* of the memory shared inside the host; -1 */
    int memory_from;    /* the rank that made it */
    struct Segment *segment;
};

typedef enum WatchKind {
    WATCH_FREE,
    WATCH_EVENT, /* the endpoint's own wake-up */
    WATCH_LISTEN,
    WATCH_GUEST, /* has not said Hello */
    WATCH_CHANNEL,
    WATCH_LINGER, /* ours is sent; waits for the peer's end so that nothing of ours is cut off */
} WatchKind;

typedef struct Watch {
    WatchKind kind;
    int fd;
    uint32_t generation; /* tells events of an earlier owner of the entry */
    uint32_t events;     /* what epoll looks for; 0: not in epoll */
    bool is_unix;
    int64_t deadline_ns; /* of guests, lingerers and paused listeners; 0: none */
    Channel *channel;
    Hello hello;
    size_t hello_bytes;
} Watch;

struct CommEndpoint {
    Address address;
    int epoll_fd;
    int event_fd;
    Bell bell; /* of the endpoint's thread: claimed notices are followed by a write to event_fd */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a channel was connected, lost or drained; memory arrived */
    bool is_closing;
    HostWorld *worlds;
    Watch *watches;
    size_t watch_capacity;
    int num_watches; /* entries used or used before */
};

/* All with the lock held. */
Status endpoint_watch(CommEndpoint *endpoint, WatchKind kind, int fd, uint32_t events,
                      int *watch_out) STATUS_CHECKED;
/* Changes what epoll looks for. */
void endpoint_rewatch(CommEndpoint *endpoint, int watch, uint32_t events);
/* Forgets and closes. */
void endpoint_unwatch(CommEndpoint *endpoint, int watch);
/* Makes the socket the channel's and starts to watch it. */
Status channel_connect(CommEndpoint *endpoint, Channel *channel, int fd,
                       bool is_unix) STATUS_CHECKED;
void channel_adopt(CommEndpoint *endpoint, Channel *channel, int watch);
/* Ends our direction; the socket is closed when the peer ended its own, or soon. */
void channel_disconnect(CommEndpoint *endpoint, Channel *channel);

/* Sends one message without waiting; a peer that is gone is noticed elsewhere. `fd_to_pass`: -1 for
 * none. */
void control_send(const CommEndpoint *endpoint, const Channel *channel, ControlKind kind,
                  Status code, const char *text, int fd_to_pass);
/* What epoll reported for the channel. */
void control_receive(CommEndpoint *endpoint, Channel *channel);
void lane_handle(CommEndpoint *endpoint, Channel *channel, uint32_t events);
/* Moves what ranks wrote, and reads on where they made room. Returns true when something moved. */
bool lane_pump(CommEndpoint *endpoint, Channel *channel);
bool lane_is_drained(Channel *channel);

#endif
