#include "data/loader.h"

#include "base/clock.h"
#include "base/memory.h"
#include "data/audio.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

enum {
    MESSAGE_BYTES = 1024
};

/* A batch's place in the ring. Guarded by the lock, but for the data of items that are under way. */
typedef struct Batch {
    LoaderItem *items; /* [items_max] */
    int64_t *begins;   /* [items_max] bytes: where each item's data stands */
    int64_t num_items;
    int64_t num_begun; /* handed to a thread */
    int64_t num_done;
    uint8_t *data;
    Status status; /* of the first bad item, in the order of items */
    int64_t bad_item;
    char message[MESSAGE_BYTES];
} Batch;

struct Loader {
    const Dataset *dataset;
    SampleMedia media;
    int64_t items_max;
    int64_t rows_max;
    int64_t batch_bytes; /* of the data of a batch */
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

/* `data`: as many bytes as loader_item_bytes says. */
static Status read_item(const Loader *loader, const LoaderItem *item, uint8_t *data)
{
    if (loader->media == SAMPLE_MEDIA_IMAGE) {
        TRY(dataset_read_image(loader->dataset, item->sample, item->index, data));
    } else {
        TRY(dataset_read_audio(loader->dataset, item->sample, item->index, item->rows,
                               (float *)(void *)data));
    }
    return STATUS_OK;
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
        uint8_t *data = batch->data + batch->begins[item];
        pthread_mutex_unlock(&loader->lock);
        Status status = read_item(loader, &wanted, data);
        pthread_mutex_lock(&loader->lock);
        end_item(loader, batch, item, status);
    }
    pthread_mutex_unlock(&loader->lock);
    return NULL;
}

int64_t loader_item_bytes(const Loader *loader, int32_t rows)
{
    if (loader->media == SAMPLE_MEDIA_IMAGE) {
        int64_t side = dataset_image_size(loader->dataset);
        return side * side * 3;
    }
    return audio_frames(rows) * dataset_mels(loader->dataset) * (int64_t)sizeof(float);
}

static Status allocate(Loader *loader, int threads)
{
    /* Images are all of one size; of clips the rows count. */
    bool is_image = loader->media == SAMPLE_MEDIA_IMAGE;
    size_t units = (size_t)(is_image ? loader->items_max : loader->rows_max);
    size_t unit_bytes = (size_t)loader_item_bytes(loader, 1);
    loader->batch_bytes = (int64_t)(units * unit_bytes);
    TRY(MEMORY_NEW(&loader->threads, threads));
    TRY(MEMORY_NEW(&loader->batches, loader->depth));
    for (int i = 0; i < loader->depth; i++) {
        Batch *batch = &loader->batches[i];
        TRY(MEMORY_NEW(&batch->items, loader->items_max));
        TRY(MEMORY_NEW(&batch->begins, loader->items_max));
        TRY(memory_alloc(units, unit_bytes, (void **)&batch->data));
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

Status loader_create(const Dataset *dataset, SampleMedia media, int threads, int depth,
                     int64_t items_max, int64_t rows_max, Loader **loader_out)
{
    CHECK(threads > 0 && depth > 0 && items_max >= 0 && rows_max >= 0);
    Loader *loader = NULL;
    TRY(MEMORY_NEW(&loader, 1));
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&loader->lock, NULL);
    pthread_cond_init(&loader->work, NULL);
    pthread_cond_init(&loader->ready, &monotonic);
    pthread_condattr_destroy(&monotonic);
    loader->dataset = dataset;
    loader->media = media;
    loader->depth = depth;
    loader->items_max = items_max;
    loader->rows_max = rows_max;
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
        memory_free(loader->batches[i].begins);
        memory_free(loader->batches[i].data);
    }
    memory_free(loader->batches);
    memory_free(loader->threads);
    pthread_cond_destroy(&loader->ready);
    pthread_cond_destroy(&loader->work);
    pthread_mutex_destroy(&loader->lock);
    memory_free(loader);
}

/* Copies the items and finds their places. */
static void set_items(const Loader *loader, Batch *batch, const LoaderItem *items,
                      int64_t num_items)
{
    int64_t begin = 0;
    for (int64_t i = 0; i < num_items; i++) {
        batch->items[i] = items[i];
        batch->begins[i] = begin;
        begin += loader_item_bytes(loader, items[i].rows);
    }
    CHECK(begin <= loader->batch_bytes);
    batch->num_items = num_items;
}

Status loader_request(Loader *loader, const LoaderItem *items, int64_t num_items)
{
    CHECK(num_items >= 0 && num_items <= loader->items_max);
    pthread_mutex_lock(&loader->lock);
    bool has_room = loader->num_requested - loader->num_released < loader->depth;
    if (has_room) {
        Batch *batch = batch_at(loader, loader->num_requested++);
        set_items(loader, batch, items, num_items);
        batch->num_begun = 0;
        batch->num_done = 0;
        batch->status = STATUS_OK;
        pthread_cond_broadcast(&loader->work);
    }
    pthread_mutex_unlock(&loader->lock);
    if (!has_room) {
        return fail(STATUS_EXHAUSTED, "the loader has %d batches under way already", loader->depth);
    }
    return STATUS_OK;
}

Status loader_take(Loader *loader, int64_t deadline_ns, const uint8_t **data_out)
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
        return fail(STATUS_TIMEOUT, "%lld of %lld %s of a batch were not decoded in time",
                    (long long)(batch->num_items - num_done), (long long)batch->num_items,
                    loader->media == SAMPLE_MEDIA_IMAGE ? "images" : "clips");
    }
    if (batch->status != STATUS_OK) {
        loader_release(loader);
        return fail(batch->status, "%s", batch->message);
    }
    *data_out = batch->data;
    return STATUS_OK;
}

void loader_release(Loader *loader)
{
    CHECK(loader->num_released < loader->num_taken);
    pthread_mutex_lock(&loader->lock);
    loader->num_released++;
    pthread_mutex_unlock(&loader->lock);
}
