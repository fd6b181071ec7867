#include "base/queue.h"

#include "base/clock.h"
#include "base/memory.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

struct Queue {
    pthread_mutex_t lock;
    pthread_cond_t not_empty;
    pthread_cond_t not_full;
    size_t capacity; /* elements */
    size_t element_bytes;
    size_t first; /* index of the oldest element */
    size_t count;
    bool closed;
    char *elements;
};

Status queue_create(size_t capacity, size_t element_bytes, Queue **queue_out)
{
    CHECK(capacity > 0 && element_bytes > 0);
    Queue *queue = NULL;
    TRY(MEMORY_NEW(&queue, 1));
    Status status = memory_alloc(capacity, element_bytes, (void **)&queue->elements);
    if (status != STATUS_OK) {
        memory_free(queue);
        return status_trace(status, __FILE__, __LINE__);
    }
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&queue->not_empty, &monotonic);
    pthread_cond_init(&queue->not_full, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&queue->lock, NULL);
    queue->capacity = capacity;
    queue->element_bytes = element_bytes;
    *queue_out = queue;
    return STATUS_OK;
}

void queue_destroy(Queue *queue)
{
    if (!queue) {
        return;
    }
    pthread_cond_destroy(&queue->not_empty);
    pthread_cond_destroy(&queue->not_full);
    pthread_mutex_destroy(&queue->lock);
    memory_free(queue->elements);
    memory_free(queue);
}

static bool wait_until(Queue *queue, pthread_cond_t *condition, int64_t deadline_ns)
{
    struct timespec until = clock_timespec(deadline_ns);
    return pthread_cond_timedwait(condition, &queue->lock, &until) != ETIMEDOUT;
}

Status queue_push(Queue *queue, const void *element, int64_t deadline_ns)
{
    pthread_mutex_lock(&queue->lock);
    bool in_time = true;
    while (!queue->closed && queue->count == queue->capacity && in_time) {
        in_time = wait_until(queue, &queue->not_full, deadline_ns);
    }
    Status status = STATUS_OK;
    if (queue->closed) {
        status = fail(STATUS_ABORTED, "the queue is closed");
    } else if (queue->count == queue->capacity) {
        status = fail(STATUS_TIMEOUT, "the queue stayed full with %zu elements", queue->capacity);
    } else {
        size_t last = (queue->first + queue->count) % queue->capacity;
        memcpy(queue->elements + last * queue->element_bytes, element, queue->element_bytes);
        queue->count++;
        pthread_cond_signal(&queue->not_empty);
    }
    pthread_mutex_unlock(&queue->lock);
    return status;
}

Status queue_pop(Queue *queue, void *element_out, int64_t deadline_ns)
{
    pthread_mutex_lock(&queue->lock);
    bool in_time = true;
    while (!queue->closed && queue->count == 0 && in_time) {
        in_time = wait_until(queue, &queue->not_empty, deadline_ns);
    }
    Status status = STATUS_OK;
    if (queue->count > 0) {
        memcpy(element_out, queue->elements + queue->first * queue->element_bytes,
               queue->element_bytes);
        queue->first = (queue->first + 1) % queue->capacity;
        queue->count--;
        pthread_cond_signal(&queue->not_full);
    } else if (queue->closed) {
        status = fail(STATUS_ABORTED, "the queue is closed");
    } else {
        status = fail(STATUS_TIMEOUT, "the queue stayed empty");
    }
    pthread_mutex_unlock(&queue->lock);
    return status;
}

void queue_close(Queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    queue->closed = true;
    pthread_cond_broadcast(&queue->not_empty);
    pthread_cond_broadcast(&queue->not_full);
    pthread_mutex_unlock(&queue->lock);
}
