/* Group: the Comm of the backends local and host: links to all other ranks, and what runs over
 * them. What differs between the two (how links come to be, how signs of life are read) is in
 * MemberOps; from here on there is one code path, hence the same sums.
 *
 * Threading: as comm.h.
 */
#ifndef COMM_GROUP_H
#define COMM_GROUP_H

#include "base/range.h"
#include "comm/comm.h"
#include "comm/member.h"

enum {
    GROUP_REQUESTS_MAX = COMM_REQUESTS_MAX,
    FRAME_MAGIC = 0x56444d46,
};

/* A started request. Slots in use are linked in the order of comm_start. */
typedef struct RequestSlot {
    CommTransfer *transfers; /* borrowed */
    int num_transfers;
    int num_left; /* not yet done */
    bool is_used;
    struct RequestSlot *previous;
    struct RequestSlot *next;
} RequestSlot;

/* The transfer that is next with one peer in one direction. */
typedef struct Cursor {
    RequestSlot *slot; /* NULL: nothing listed */
    int index;
    bool is_headed;          /* its header is through */
    int64_t header_position; /* bytes of the header sent */
    int64_t position;        /* bytes of the payload moved, padding included */
    uint64_t count;          /* transfers done */
} Cursor;

/* The head of everything that goes over a link: both ends must have the same idea of it. */
typedef struct FrameHeader {
    uint32_t magic;
    uint8_t operation; /* GroupOperation */
    uint8_t reduce;
    uint8_t dtype;
    uint8_t unused;
    int32_t root;
    uint32_t sender;   /* rank in the group */
    uint64_t sequence; /* collectives: calls on this comm before; transfers: messages between the
                          pair before */
    int64_t count;     /* elements; bytes of a broadcast or transfer; members of a split */
    uint64_t digest;   /* of begins, or of a split's members and label; a transfer's tag */
    GroupOffer offer;  /* splits only; not compared */
    uint64_t reserved; /* 0 */
} FrameHeader;

_Static_assert(sizeof(FrameHeader) == RING_ALIGNMENT, "a header is one aligned piece");

/* How far the collective under way is with one peer. Positions are in bytes, padding included. */
typedef struct PeerStep {
    bool takes_part;
    bool is_header_seen;
    Range contribution; /* bytes of ours that the peer sums */
    Range result;       /* bytes that the peer sends back */
    FrameHeader header; /* that we send */
    int64_t header_sent;
    int64_t contribution_sent;
    int64_t result_sent;
    int64_t contribution_taken; /* of the peer's share in our sum */
    int64_t result_taken;
    GroupOffer offer; /* the peer's */
} PeerStep;

typedef struct GroupPeer {
    int world_rank;
    Link links[LANE_COUNT];
    Cursor sends;
    Cursor receives;
    PeerStep step;
} GroupPeer;

struct Group {
    Comm comm; /* first: a Comm of these backends is a Group */
    Member *member;
    Group *next; /* in the member's list */
    uint64_t id; /* unique in the world; the world itself is 0 */
    char *label;
    GroupPeer *peers;     /* [size], the own entry without links */
    uint64_t sequence;    /* collective calls so far */
    const void **sources; /* [size], where a sum's contributions lie */
    RequestSlot slots[GROUP_REQUESTS_MAX];
    RequestSlot *first_slot;
    RequestSlot *last_slot;
    void *backend; /* of open_links, close_links */
};

/* A group without links, listed with its member. `world_ranks` has `size` entries. */
Status group_create(Member *member, const CommOps *ops, const char *label, int rank, int size,
                    const int *world_ranks, Group **group_out) STATUS_CHECKED;
/* Frees it; its links are closed already. */
void group_free(Group *group);

/* Rings of a group among ranks that share memory: rings[from][to][lane] in one region of zeroed
 * pages. */
int64_t group_region_bytes(int size);
void group_link_shared(Group *group, int peer, char *region, Bell *peer_bell);

/* "rank 1 of 'llm tp' (rank 3 of the world, 127.0.0.1:4000)" */
void group_peer_name(const Group *group, int peer, char *name, size_t name_bytes);

/* For the backends' tables. */
Status group_split(Comm *comm, const int *ranks, int num_ranks, const char *label,
                   Comm **comm_out) STATUS_CHECKED;
void group_destroy(Comm *comm);
void group_abort(Comm *comm, const char *reason);

#endif
