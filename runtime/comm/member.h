/* Member: one rank's view of its world: who is there, who is gone, what went wrong, and how the
 * rank waits.
 *
 * A world's first failure ends it for everybody: it is kept here with its text, told to all other
 * members, and every present and later operation of the rank returns it.
 *
 * Threading: owned by the rank's thread. member_abort and member_note_*: any thread.
 */
#ifndef COMM_MEMBER_H
#define COMM_MEMBER_H

#include "comm/bell.h"
#include "comm/comm.h"
#include "comm/link.h"

#include <pthread.h>

typedef struct Member Member;
typedef struct Group Group;

enum {
    FAILURE_TEXT_BYTES = 480,
    PEER_NAME_BYTES = 96,
};

typedef enum PeerState {
    PEER_STATE_ALIVE,
    PEER_STATE_LEFT, /* destroyed its world in good order: what it sent is still there */
    PEER_STATE_DEAD, /* its sign of life ended without a word */
} PeerState;

/* What a new group's members tell each other while they split. */
typedef struct GroupOffer {
    uint64_t group_id; /* by the group's first rank: unique in the world */
    uint64_t
        region; /* by the lowest rank of those that share memory: where the group's rings are */
} GroupOffer;

typedef struct MemberOps {
    /* Finds room for a group's rings in the memory this rank shares. */
    Status (*offer_region)(Member *member, const Group *group, uint64_t *region_out);
    /* Connects the links of a group whose peers' world ranks are filled in. */
    Status (*open_links)(Member *member, Group *group, GroupOffer offer);
    /* Also after open_links failed. Waits until what was sent is on its way. */
    void (*close_links)(Member *member, Group *group);
    /* Tells all other members; does not wait. Any thread. */
    void (*tell_failure)(Member *member, Status code, const char *text);
    /* The world's end for this rank: says goodbye and frees the member. */
    void (*leave)(Member *member);
} MemberOps;

struct Member {
    const MemberOps *ops;
    int rank; /* in the world */
    int size;
    Bell *bell;    /* this rank's own */
    Group *groups; /* all of this rank's comms in this world */
    uint64_t num_groups_made;
    char (*names)[PEER_NAME_BYTES]; /* [size] "127.0.0.1:4000", or "" */
    bool *shares_memory;            /* [size] with this rank; constant once the world stands */
    _Atomic int *peer_states;       /* [size] PeerState */
    _Atomic int alert;              /* a failure or a death is there to be looked at */
    pthread_mutex_t lock;           /* guards the failure */
    Status failure;
    char failure_text[FAILURE_TEXT_BYTES];
};

/* How far an operation is with one peer. */
typedef enum PeerNeed {
    PEER_NEED_NOTHING,
    PEER_NEED_RECEIVE, /* something has to come from it */
    PEER_NEED_SEND,    /* something has to go to it (and perhaps to come) */
    PEER_NEED_SILENT,  /* nothing has come from it yet */
} PeerNeed;

/* One wait: a collective or comm_wait. */
typedef struct Operation {
    Group *group;
    const char *name; /* "all_reduce" */
    Lane lane;
    void *state;
    Status (*progress)(void *state, bool *moved); /* NULL: only the requests move */
    bool (*is_done)(const void *state);
    PeerNeed (*need)(const void *state, int peer); /* peer: rank in the group */
} Operation;

/* Fills in an empty member; `bell` may still be missing. */
Status member_init(Member *member, const MemberOps *ops, int rank, int size) STATUS_CHECKED;
void member_done(Member *member);

/* Runs the operation to its end, moving all requests of the rank meanwhile. A failure is the
 * world's. */
Status operation_run(const Operation *operation) STATUS_CHECKED;

/* Records the failure of `operation` on the group if it is the world's first, tells the others, and
 * returns what is recorded as this thread's status. */
Status member_fail(const Group *group, const char *operation, Status code,
                   const char *text) STATUS_CHECKED;

/* The failure recorded, or STATUS_OK. `operation` names what was tried. */
Status member_check(const Group *group, const char *operation) STATUS_CHECKED;

/* What is recorded, without making it this thread's status. */
Status member_failure(Member *member, char text_out[FAILURE_TEXT_BYTES]) STATUS_CHECKED;

/* Somebody asked for the end. Any thread. */
void member_abort(Member *member, const char *reason);

/* What others tell: their failure; that they died or left. Wakes the rank. */
void member_note_failure(Member *member, Status code, const char *text);
void member_note_peer(Member *member, int rank, PeerState state);

#endif
