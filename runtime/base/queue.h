/* Queue: a bounded first-in first-out queue of fixed-size elements between threads.
 *
 * Elements are copied in and out; what they point to changes owner with them.
 * Threading: any number of producers and consumers. Every wait has a deadline.
 */
#ifndef BASE_QUEUE_H
#define BASE_QUEUE_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

typedef struct Queue Queue;

/* Owned by the caller: queue_destroy. */
Status queue_create(size_t capacity, size_t element_bytes, Queue **queue_out) STATUS_CHECKED;

/* No thread may be inside the queue any more. */
void queue_destroy(Queue *queue);

/* Waits for room. STATUS_TIMEOUT; STATUS_ABORTED once closed. */
Status queue_push(Queue *queue, const void *element, int64_t deadline_ns) STATUS_CHECKED;

/* Waits for an element. STATUS_TIMEOUT; STATUS_ABORTED once closed and empty. */
Status queue_pop(Queue *queue, void *element_out, int64_t deadline_ns) STATUS_CHECKED;

/* Wakes everybody: pushes fail from now on, pops drain what is left. Idempotent. */
void queue_close(Queue *queue);

#endif
