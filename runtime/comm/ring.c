#include "comm/ring.h"

#include "base/status.h"

#include <string.h>

void ring_attach(Ring *ring, void *memory, int64_t capacity)
{
    CHECK(capacity >= RING_ALIGNMENT && (capacity & (capacity - 1)) == 0);
    *ring = (Ring){.shared = memory,
                   .bytes = (char *)memory + RING_HEADER_BYTES,
                   .capacity = (uint64_t)capacity};
}

static uint64_t min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

int64_t ring_space(Ring *ring, char **to_out)
{
    uint64_t unread = ring->position - atomic_load(&ring->shared->consumed);
    if (unread > ring->capacity) {
        ring->is_broken = true;
        return 0;
    }
    uint64_t room = ring->capacity - unread;
    if (room == 0) {
        atomic_store(&ring->shared->is_starved, 1);
        return 0;
    }
    uint64_t at = ring->position & (ring->capacity - 1);
    *to_out = ring->bytes + at;
    return (int64_t)min_u64(room, ring->capacity - at);
}

void ring_commit(Ring *ring, int64_t size_bytes)
{
    ring->position += (uint64_t)size_bytes;
    atomic_store(&ring->shared->written, ring->position);
}

int64_t ring_write(Ring *ring, const void *data, int64_t size_bytes)
{
    int64_t done = 0;
    while (done < size_bytes) {
        char *to = NULL;
        int64_t space = ring_space(ring, &to);
        if (space == 0) {
            break;
        }
        int64_t piece = space < size_bytes - done ? space : size_bytes - done;
        if (data) {
            memcpy(to, (const char *)data + done, (size_t)piece);
        }
        ring_commit(ring, piece);
        done += piece;
    }
    return done;
}

int64_t ring_peek(Ring *ring, const char **from_out)
{
    uint64_t readable = atomic_load(&ring->shared->written) - ring->position;
    if (readable > ring->capacity) {
        ring->is_broken = true;
        return 0;
    }
    uint64_t at = ring->position & (ring->capacity - 1);
    *from_out = ring->bytes + at;
    return (int64_t)min_u64(readable, ring->capacity - at);
}

bool ring_consume(Ring *ring, int64_t size_bytes)
{
    ring->position += (uint64_t)size_bytes;
    atomic_store(&ring->shared->consumed, ring->position);
    if (atomic_load(&ring->shared->is_starved) == 0) {
        return false;
    }
    /* Waking for every few bytes would cost more than it moves. A consumer that wants more has
     * emptied the ring, so the producer is always woken in the end. */
    uint64_t unread = atomic_load(&ring->shared->written) - ring->position;
    return unread <= ring->capacity / 4 * 3 && atomic_exchange(&ring->shared->is_starved, 0) != 0;
}
