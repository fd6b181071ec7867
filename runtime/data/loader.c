#include "data/loader.h"

#include "base/clock.h"
#include "base/memory.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

enum {
    MESSAGE_BYTES = 1024
};

/* A batch's place in the ring. Guarded by the lock, but for the pixels of items that are under way.
 * */
typedef struct Batch {
    LoaderItem *items; /* [images_max] */
    int64_t num_items;
    int64_t num_begun; /* handed to a thread */
    int64_t num_done;
    uint8_t *pixels; /* u8 [images_max, size, size, 3] */
    Status status;   /* of the first bad item, in the order of items */
    int64_t bad_item;
    char message[MESSAGE_BYTES];
} Batch;

struct Loader {
    const Dataset *dataset;
    int64_t images_max;
    int64_t image_bytes; /* of one decoded image */
    int depth;
    int num_threads;
    pthread_t *threads;
    pthread_mutex_t lock;
    pthread_cond_t work;   /* there may be an item to begin, or the end */
    pthread_cond_t ready;  /* a batch is done */
    Batch *batches;        /* [depth], a ring */
    int64_t num_requested; /* batches since the beginning; batch b stands at b % depth */
    int64_t num_taken;
    int64_t num_released;
    int64_t next_work; /* the oldest batch with an item not begun */
    bool ending;
};

static Batch *batch_at(const Loader *loader, int64_t index)
{
    return &loader->batches[index % loader->depth];
}

/* With the lock: the next item to decode; false when there is none. */
static bool begin_item(Loader *loader, Batch **batch_out, int64_t *item_out)
{
    while (loader->next_work < loader->num_requested) {
        Batch *batch = batch_at(loader, loader->next_work);
        if (batch->num_begun < batch->num_items) {
            *batch_out = batch;
            *item_out = batch->num_begun++;
            return true;
        }
        loader->next_work++;
    }
    return false;
}

/* With the lock. */
static void end_item(Loader *loader, Batch *batch, int64_t item, Status status)
{
    if (status != STATUS_OK && (batch->status == STATUS_OK || item < batch->bad_item)) {
        batch->status = status;
        batch->bad_item = item;
        size_t length = strnlen(status_message(), MESSAGE_BYTES - 1);
        memcpy(batch->message, status_message(), length);
        batch->message[length] = '\0';
    }
    batch->num_done++;
    if (batch->num_done == batch->num_items) {
        pthread_cond_signal(&loader->ready);
    }
}

static void *work_thread(void *argument)
{
    Loader *loader = argument;
    pthread_mutex_lock(&loader->lock);
    while (!loader->ending) {
        Batch *batch = NULL;
        int64_t item = 0;
        if (!begin_item(loader, &batch, &item)) {
            /* The owner ends this wait at the latest in loader_destroy. */
            pthread_cond_wait(&loader->work, &loader->lock);
            continue;
        }
        LoaderItem wanted = batch->items[item];
        pthread_mutex_unlock(&loader->lock);
        Status status = dataset_read_image(loader->dataset, wanted.sample, wanted.image,
                                           batch->pixels + item * loader->image_bytes);
        pthread_mutex_lock(&loader->lock);
        end_item(loader, batch, item, status);
    }
    pthread_mutex_unlock(&loader->lock);
    return NULL;
}

static Status allocate(Loader *loader, int threads)
{
    TRY(MEMORY_NEW(&loader->threads, threads));
    TRY(MEMORY_NEW(&loader->batches, loader->depth));
    for (int i = 0; i < loader->depth; i++) {
        Batch *batch = &loader->batches[i];
        TRY(MEMORY_NEW(&batch->items, loader->images_max));
        TRY(memory_alloc((size_t)loader->images_max, (size_t)loader->image_bytes,
                         (void **)&batch->pixels));
    }
    return STATUS_OK;
}

static Status start_threads(Loader *loader, int threads)
{
    for (int i = 0; i < threads; i++) {
        int result = pthread_create(&loader->threads[i], NULL, work_thread, loader);
        if (result != 0) {
            return fail(STATUS_EXHAUSTED, "cannot start loader thread %d of %d: %s", i, threads,
                        strerror(result));
        }
        loader->num_threads++;
    }
    return STATUS_OK;
}

Status loader_create(const Dataset *dataset, int threads, int depth, int64_t images_max,
                     Loader **loader_out)
{
    CHECK(threads > 0 && depth > 0 && images_max >= 0);
    Loader *loader = NULL;
    TRY(MEMORY_NEW(&loader, 1));
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&loader->lock, NULL);
    pthread_cond_init(&loader->work, NULL);
    pthread_cond_init(&loader->ready, &monotonic);
    pthread_condattr_destroy(&monotonic);
    int64_t side = dataset_image_size(dataset);
    loader->dataset = dataset;
    loader->depth = depth;
    loader->images_max = images_max;
    loader->image_bytes = side * side * 3;
    Status status = allocate(loader, threads);
    if (status == STATUS_OK) {
        status = start_threads(loader, threads);
    }
    if (status != STATUS_OK) {
        loader_destroy(loader);
        return status_trace(status, __FILE__, __LINE__);
    }
    *loader_out = loader;
    return STATUS_OK;
}

void loader_destroy(Loader *loader)
{
    if (!loader) {
        return;
    }
    pthread_mutex_lock(&loader->lock);
    loader->ending = true;
    pthread_cond_broadcast(&loader->work);
    pthread_mutex_unlock(&loader->lock);
    for (int i = 0; i < loader->num_threads; i++) {
        pthread_join(loader->threads[i], NULL);
    }
    for (int i = 0; loader->batches && i < loader->depth; i++) {
        memory_free(loader->batches[i].items);
        memory_free(loader->batches[i].pixels);
    }
    memory_free(loader->batches);
    memory_free(loader->threads);
    pthread_cond_destroy(&loader->ready);
    pthread_cond_destroy(&loader->work);
    pthread_mutex_destroy(&loader->lock);
    memory_free(loader);
}

Status loader_request(Loader *loader, const LoaderItem *items, int64_t num_items)
{
    CHECK(num_items >= 0 && num_items <= loader->images_max);
    pthread_mutex_lock(&loader->lock);
    bool has_room = loader->num_requested - loader->num_released < loader->depth;
    if (has_room) {
        Batch *batch = batch_at(loader, loader->num_requested++);
        batch->num_items = num_items;
        batch->num_begun = 0;
        batch->num_done = 0;
        batch->status = STATUS_OK;
        if (num_items > 0) {
            memcpy(batch->items, items, (size_t)num_items * sizeof *items);
        }
        pthread_cond_broadcast(&loader->work);
    }
    pthread_mutex_unlock(&loader->lock);
    if (!has_room) {
        return fail(STATUS_EXHAUSTED, "the loader has %d batches under way already", loader->depth);
    }
    return STATUS_OK;
}

Status loader_take(Loader *loader, int64_t deadline_ns, const uint8_t **pixels_out)
{
    CHECK(loader->num_taken == loader->num_released); /* one at a time */
    pthread_mutex_lock(&loader->lock);
    CHECK(loader->num_taken < loader->num_requested);
    const Batch *batch = batch_at(loader, loader->num_taken);
    struct timespec until = clock_timespec(deadline_ns);
    bool in_time = true;
    while (batch->num_done < batch->num_items && in_time) {
        in_time = pthread_cond_timedwait(&loader->ready, &loader->lock, &until) != ETIMEDOUT;
    }
    int64_t num_done = batch->num_done;
    bool is_done = num_done == batch->num_items;
    loader->num_taken += is_done;
    pthread_mutex_unlock(&loader->lock);
    if (!is_done) {
        return fail(STATUS_TIMEOUT, "%lld of %lld images of a batch were not decoded in time",
                    (long long)(batch->num_items - num_done), (long long)batch->num_items);
    }
    if (batch->status != STATUS_OK) {
        loader_release(loader);
        return fail(batch->status, "%s", batch->message);
    }
    *pixels_out = batch->pixels;
    return STATUS_OK;
}

void loader_release(Loader *loader)
{
    CHECK(loader->num_released < loader->num_taken);
    pthread_mutex_lock(&loader->lock);
    loader->num_released++;
    pthread_mutex_unlock(&loader->lock);
}
