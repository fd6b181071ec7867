/* Ring: bytes from one producer to one consumer through shared memory, without locks and without
 * waiting.
 *
 * Layout: one page with both positions on cache lines of their own, then `capacity` bytes (a power
 * of two). Fresh zeroed memory is an empty ring; pages are touched as bytes first pass through
 * them. Each side keeps its own position privately and checks what it reads of the other's: a
 * position that cannot be makes the ring broken, never an access outside of it. What travels is cut
 * into pieces that start at multiples of RING_ALIGNMENT, so that numbers can be used where they
 * lie.
 *
 * Threading: one producer, one consumer, each with its own Ring over the same memory.
 */
#ifndef COMM_RING_H
#define COMM_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    RING_HEADER_BYTES = 4096,
    RING_ALIGNMENT = 64,
};

typedef struct RingShared {
    _Atomic uint64_t written;    /* bytes ever written; stored by the producer */
    _Atomic uint32_t is_starved; /* the producer wants to be woken when there is room */
    char unused0[52];
    _Atomic uint64_t consumed; /* bytes ever consumed; stored by the consumer */
    char unused1[56];
} RingShared;

_Static_assert(sizeof(RingShared) <= RING_HEADER_BYTES, "the data starts on its own page");

typedef struct Ring {
    RingShared *shared; /* borrowed */
    char *bytes;        /* [capacity] */
    uint64_t capacity;
    uint64_t position; /* of this side: bytes ever written, or consumed */
    bool is_broken;    /* the other side's position made no sense */
} Ring;

static inline int64_t ring_total_bytes(int64_t capacity)
{
    return RING_HEADER_BYTES + capacity;
}

static inline int64_t ring_padded(int64_t size_bytes)
{
    return (size_bytes + RING_ALIGNMENT - 1) / RING_ALIGNMENT * RING_ALIGNMENT;
}

/* `memory` holds ring_total_bytes(capacity) bytes, zeroed before either side attached, aligned to a
 * cache line. */
void ring_attach(Ring *ring, void *memory, int64_t capacity);

/* Producer. Room in one piece; *to_out is where it lies. No room at all marks the producer as
 * starved. */
int64_t ring_space(Ring *ring, char **to_out);
/* Publishes what was put there. */
void ring_commit(Ring *ring, int64_t size_bytes);
/* Copies in up to `size_bytes` and publishes; returns how many. `data` NULL: leaves the bytes as
 * they are (padding). */
int64_t ring_write(Ring *ring, const void *data, int64_t size_bytes);

/* Consumer. Readable bytes in one piece; *from_out is where they lie. */
int64_t ring_peek(Ring *ring, const char **from_out);
/* Frees what was read. Returns true when the producer should be woken. */
bool ring_consume(Ring *ring, int64_t size_bytes);

#endif
