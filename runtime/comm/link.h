/* Link: both directions between this rank and one peer on one lane of a group: two rings and how to
 * wake who is at their other end (the peer itself in shared memory, the endpoint's thread over
 * TCP).
 *
 * Threading: the rank's thread; `is_closed` is set by the endpoint's thread.
 */
#ifndef COMM_LINK_H
#define COMM_LINK_H

#include "comm/bell.h"
#include "comm/ring.h"

/* Collectives and transfers of a group never wait for each other's bytes. */
typedef enum Lane {
    LANE_COLLECTIVE,
    LANE_TRANSFER,
    LANE_COUNT,
} Lane;

/* Ring capacities: a slice of an array of some megabytes, or a microbatch's rows of a small model,
 * leaves without the peer's help. On two cores a sum of 4 MiB took 1.7 ms with rings of 64 KiB, 1.1
 * ms with 256 KiB and 1.0 ms with 1 MiB (4 ranks), and 1.0, 0.9 and 0.3 ms with 2 ranks. */
enum {
    LANE_COLLECTIVE_BYTES = 1 << 20,
    LANE_TRANSFER_BYTES = 1 << 20,
    LINK_CHUNK_BYTES =
        32 << 10, /* published at once: the peer works on one piece while the next is copied */
};

typedef struct Link {
    Ring tx;
    Ring rx;
    Bell *bell;   /* who reads tx and fills rx; NULL: no link (own rank) */
    int event_fd; /* of the endpoint's thread, which waits in epoll, not on the futex; else -1 */
    _Atomic uint32_t
        *is_closed; /* nothing more will come into rx; NULL: never set (shared memory) */
} Link;

static inline int64_t lane_bytes(Lane lane)
{
    return lane == LANE_COLLECTIVE ? LANE_COLLECTIVE_BYTES : LANE_TRANSFER_BYTES;
}

void link_wake(Link *link);

/* Moves a piece of `size_bytes` bytes, of which `ready_bytes` may go now, on from *position (0 at
 * its start) as far as there is room. The piece is over at *position == ring_padded(size_bytes).
 * Returns true when something moved. */
bool link_send(Link *link, const char *data, int64_t size_bytes, int64_t ready_bytes,
               int64_t *position);
bool link_receive(Link *link, char *data, int64_t size_bytes, int64_t *position);

/* Frees `size_bytes` bytes that were read in place. */
void link_consume(Link *link, int64_t size_bytes);

#endif
