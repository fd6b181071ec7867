#include "comm/link.h"

#include <string.h>
#include <unistd.h>

static int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

void link_wake(Link *link)
{
    if (link->event_fd < 0) {
        bell_ring(link->bell);
    } else if (bell_claim(link->bell)) {
        uint64_t one = 1;
        ssize_t written = write(link->event_fd, &one, sizeof one);
        (void)written; /* fails only when the counter is full: then the thread is being woken anyway
                        */
    }
}

bool link_send(Link *link, const char *data, int64_t size_bytes, int64_t ready_bytes,
               int64_t *position)
{
    int64_t before = *position;
    while (*position < ready_bytes) {
        int64_t wanted = min_i64(ready_bytes - *position, LINK_CHUNK_BYTES);
        int64_t sent = ring_write(&link->tx, data + *position, wanted);
        *position += sent;
        if (sent > 0) {
            link_wake(link);
        }
        if (sent < wanted) {
            return *position != before;
        }
    }
    int64_t padding = ring_padded(size_bytes) - *position;
    if (ready_bytes == size_bytes && padding > 0) {
        int64_t sent = ring_write(&link->tx, NULL, padding);
        *position += sent;
        if (sent > 0) {
            link_wake(link);
        }
    }
    return *position != before;
}

void link_consume(Link *link, int64_t size_bytes)
{
    if (ring_consume(&link->rx, size_bytes)) {
        link_wake(link);
    }
}

bool link_receive(Link *link, char *data, int64_t size_bytes, int64_t *position)
{
    int64_t before = *position;
    int64_t end = ring_padded(size_bytes);
    while (*position < end) {
        const char *from = NULL;
        int64_t piece = min_i64(ring_peek(&link->rx, &from), end - *position);
        if (piece == 0) {
            break;
        }
        piece = min_i64(piece, LINK_CHUNK_BYTES);
        int64_t payload = min_i64(piece, size_bytes - *position);
        if (payload > 0) {
            memcpy(data + *position, from, (size_t)payload);
        }
        link_consume(link, piece);
        *position += piece;
    }
    return *position != before;
}
