#include "train/cached_encoder.h"

#include "base/clock.h"
#include "base/hash.h"
#include "base/memory.h"
#include "data/audio.h"

#include <string.h>

/* One item of a microbatch. */
typedef struct CachedItem {
    int64_t input_begin; /* bytes in the batch's input */
    int64_t input_bytes;
    int64_t row_begin;
    int64_t rows;
    RowKey key;
    bool is_found;
} CachedItem;

struct CachedEncoder {
    CachedEncoderOptions options;
    RowCache *cache;        /* on the first tp rank */
    CachedItem *items;      /* [items_max] */
    int32_t *frame_begins;  /* [items_max + 1] of the items that are computed */
    uint8_t *host_input;    /* one microbatch */
    float *host_rows;       /* one microbatch */
    uint8_t *found;         /* [items_max], host */
    uint8_t *found_device;  /* [items_max] */
    uint8_t *missing_input; /* device: the input of the items that are computed, side by side */
    float *missing_rows;    /* device: and their rows */
};

static Device *device_of(const CachedEncoder *cached)
{
    return cached->options.module->params.device;
}

/* ---------------------------------------------------------------- create */

static Status wait(const CachedEncoder *cached)
{
    return stream_wait(cached->options.stream, clock_deadline_in_ms(cached->options.timeout_ms));
}

/* Of all parameters' names and values on this rank. */
static Status hash_weights(const CachedEncoder *cached, uint64_t *hash_out)
{
    const ParamSet *params = &cached->options.module->params;
    int64_t size_bytes = params->count * (int64_t)sizeof(float);
    void *host = NULL;
    TRY(device_alloc_host(params->device, size_bytes, &host));
    Status status = stream_copy(cached->options.stream, host, params->values, size_bytes);
    status = status == STATUS_OK ? wait(cached) : status;
    uint64_t hash = hash_bytes(HASH_SEED, host, (size_t)size_bytes);
    for (int i = 0; i < params->num_params; i++) {
        hash = hash_u64(hash, hash_text(params->params[i].spec.name));
    }
    device_free_host(params->device, host, size_bytes);
    TRY(status);
    *hash_out = hash;
    return STATUS_OK;
}

/* The first rank needs to know the weights of all. */
static Status gather_hashes(const CachedEncoder *cached, uint64_t own, uint64_t *hash_out)
{
    Comm *tp = cached->options.tp;
    Stream *stream = cached->options.stream;
    int64_t size_bytes = tp->size * (int64_t)sizeof(uint64_t);
    uint64_t *hashes = NULL;
    int64_t *begins = NULL;
    void *memory = NULL;
    Status status = MEMORY_NEW(&hashes, tp->size);
    status = status == STATUS_OK ? MEMORY_NEW(&begins, tp->size + 1) : status;
    status = status == STATUS_OK ? device_alloc(device_of(cached), size_bytes, &memory) : status;
    if (status == STATUS_OK) {
        for (int i = 0; i <= tp->size; i++) {
            begins[i] = i * (int64_t)sizeof(uint64_t);
        }
        hashes[tp->rank] = own;
        status = stream_copy(stream, memory, hashes, size_bytes);
    }
    status = status == STATUS_OK ? comm_all_gather(tp, memory, begins, stream) : status;
    status = status == STATUS_OK ? stream_copy(stream, hashes, memory, size_bytes) : status;
    status = status == STATUS_OK ? wait(cached) : status;
    if (status == STATUS_OK) {
        *hash_out = hash_bytes(HASH_SEED, hashes, (size_t)size_bytes);
    }
    if (memory) {
        device_free(device_of(cached), memory, size_bytes);
    }
    memory_free(hashes);
    memory_free(begins);
    return status;
}

static Status prepare(CachedEncoder *cached)
{
    const CachedEncoderOptions *options = &cached->options;
    Device *device = device_of(cached);
    uint64_t own = 0;
    uint64_t weights = 0;
    TRY(MEMORY_NEW(&cached->items, options->items_max));
    TRY(MEMORY_NEW(&cached->frame_begins, options->items_max + 1));
    TRY(MEMORY_NEW(&cached->found, options->items_max));
    TRY(device_alloc(device, options->items_max, (void **)&cached->found_device));
    TRY(device_alloc(device, options->input_bytes, (void **)&cached->missing_input));
    TRY(device_alloc(device, options->rows_bytes, (void **)&cached->missing_rows));
    TRY(device_alloc_host(device, options->input_bytes, (void **)&cached->host_input));
    TRY(device_alloc_host(device, options->rows_bytes, (void **)&cached->host_rows));
    TRY(hash_weights(cached, &own));
    TRY(gather_hashes(cached, own, &weights));
    weights = hash_u64(weights, options->model);
    if (options->tp->rank > 0) {
        return STATUS_OK;
    }
    return row_cache_open(options->spec->directory, options->spec->size_bytes_max, weights,
                          &cached->cache);
}

Status cached_encoder_create(const CachedEncoderOptions *options, CachedEncoder **cached_out)
{
    CachedEncoder *cached = NULL;
    TRY(MEMORY_NEW(&cached, 1));
    cached->options = *options;
    Status status = prepare(cached);
    if (status != STATUS_OK) {
        cached_encoder_destroy(cached);
        return status_trace(status, __FILE__, __LINE__);
    }
    *cached_out = cached;
    return STATUS_OK;
}

void cached_encoder_destroy(CachedEncoder *cached)
{
    if (!cached) {
        return;
    }
    const CachedEncoderOptions *options = &cached->options;
    Device *device = device_of(cached);
    row_cache_close(cached->cache);
    device_free(device, cached->found_device, options->items_max);
    device_free(device, cached->missing_input, options->input_bytes);
    device_free(device, cached->missing_rows, options->rows_bytes);
    if (cached->host_input) {
        device_free_host(device, cached->host_input, options->input_bytes);
    }
    if (cached->host_rows) {
        device_free_host(device, cached->host_rows, options->rows_bytes);
    }
    memory_free(cached->items);
    memory_free(cached->frame_begins);
    memory_free(cached->found);
    memory_free(cached);
}

/* ---------------------------------------------------------------- forward */

static const uint8_t *input_of(const ModuleBatch *batch)
{
    return batch->pixels ? batch->pixels : (const uint8_t *)batch->frames;
}

static void find_places(CachedEncoder *cached, const ModuleBatch *batch)
{
    const CachedEncoderOptions *options = &cached->options;
    int64_t rows = options->module->ops->count_rows(options->module, batch);
    int64_t input = 0;
    int64_t row = 0;
    for (int64_t i = 0; i < batch->num_items; i++) {
        CachedItem *item = &cached->items[i];
        if (options->item_bytes > 0) {
            item->input_bytes = options->item_bytes;
            item->rows = rows / batch->num_items;
        } else {
            int64_t frames = batch->frame_begins[i + 1] - batch->frame_begins[i];
            item->input_bytes = frames * options->frame_bytes;
            item->rows = frames / AUDIO_FRAMES_A_ROW;
        }
        item->input_begin = input;
        item->row_begin = row;
        input += item->input_bytes;
        row += item->rows;
    }
    CHECK(row == rows);
}

/* On the first tp rank: reads what is there into rows_out. */
static Status read_rows(CachedEncoder *cached, const ModuleBatch *batch, float *rows_out)
{
    const CachedEncoderOptions *options = &cached->options;
    const CachedItem *last = &cached->items[batch->num_items - 1];
    TRY(stream_copy(options->stream, cached->host_input, input_of(batch),
                    last->input_begin + last->input_bytes));
    TRY(wait(cached));
    for (int64_t i = 0; i < batch->num_items; i++) {
        CachedItem *item = &cached->items[i];
        float *host = cached->host_rows + item->row_begin * options->width;
        item->key = row_cache_key(cached->cache, cached->host_input + item->input_begin,
                                  item->input_bytes, item->rows, options->width);
        item->is_found =
            row_cache_read(cached->cache, &item->key, item->rows, options->width, host);
        cached->found[i] = item->is_found;
        if (item->is_found) {
            TRY(stream_copy(options->stream, rows_out + item->row_begin * options->width, host,
                            item->rows * options->width * (int64_t)sizeof(float)));
        }
    }
    return STATUS_OK;
}

/* What the first tp rank has found, the others have too. */
static Status tell(CachedEncoder *cached, int64_t num_items, float *rows_out)
{
    const CachedEncoderOptions *options = &cached->options;
    Stream *stream = options->stream;
    if (options->tp->size == 1) {
        return STATUS_OK;
    }
    const CachedItem *last = &cached->items[num_items - 1];
    int64_t rows_bytes = (last->row_begin + last->rows) * options->width * (int64_t)sizeof(float);
    TRY(stream_copy(stream, cached->found_device, cached->found, num_items));
    TRY(comm_broadcast(options->tp, cached->found_device, num_items, 0, stream));
    TRY(stream_copy(stream, cached->found, cached->found_device, num_items));
    TRY(comm_broadcast(options->tp, rows_out, rows_bytes, 0, stream));
    TRY(wait(cached));
    for (int64_t i = 0; i < num_items; i++) {
        cached->items[i].is_found = cached->found[i] != 0;
    }
    return STATUS_OK;
}

/* The items that were not found, as a batch of their own. */
static Status gather_missing(CachedEncoder *cached, const ModuleBatch *batch, ModuleBatch *missing)
{
    const CachedEncoderOptions *options = &cached->options;
    int64_t at = 0;
    int64_t num = 0;
    for (int64_t i = 0; i < batch->num_items; i++) {
        const CachedItem *item = &cached->items[i];
        if (item->is_found) {
            continue;
        }
        TRY(stream_copy(options->stream, cached->missing_input + at,
                        input_of(batch) + item->input_begin, item->input_bytes));
        at += item->input_bytes;
        cached->frame_begins[num + 1] =
            cached->frame_begins[num] + (int32_t)(item->rows * AUDIO_FRAMES_A_ROW);
        num++;
    }
    *missing = (ModuleBatch){
        .num_items = num,
        .frame_begins = cached->frame_begins,
        .pixels = batch->pixels ? cached->missing_input : NULL,
        .frames = batch->pixels ? NULL : (const float *)(const void *)cached->missing_input};
    return STATUS_OK;
}

/* Puts computed rows where they belong, and into the cache. */
static Status place_computed(CachedEncoder *cached, int64_t num_items, float *rows_out)
{
    const CachedEncoderOptions *options = &cached->options;
    int64_t row = 0;
    for (int64_t i = 0; i < num_items; i++) {
        const CachedItem *item = &cached->items[i];
        int64_t size_bytes = item->rows * options->width * (int64_t)sizeof(float);
        const float *computed = cached->missing_rows + row * options->width;
        if (item->is_found) {
            continue;
        }
        TRY(stream_copy(options->stream, rows_out + item->row_begin * options->width, computed,
                        size_bytes));
        row += item->rows;
        if (cached->cache) {
            TRY(stream_copy(options->stream, cached->host_rows, computed, size_bytes));
            TRY(wait(cached));
            row_cache_write(cached->cache, &item->key, item->rows, options->width,
                            cached->host_rows);
        }
    }
    return STATUS_OK;
}

Status cached_encoder_forward(CachedEncoder *cached, int slot, const ModuleBatch *batch,
                              float *rows_out)
{
    Module *module = cached->options.module;
    ModuleBatch missing = {0};
    CHECK(batch->num_items <= cached->options.items_max);
    if (batch->num_items == 0) {
        return STATUS_OK;
    }
    find_places(cached, batch);
    if (cached->cache) {
        TRY(read_rows(cached, batch, rows_out));
    }
    TRY(tell(cached, batch->num_items, rows_out));
    TRY(gather_missing(cached, batch, &missing));
    if (missing.num_items == 0) {
        return STATUS_OK;
    }
    TRY(module->ops->forward(module, 0, slot, &missing, cached->missing_rows, NULL));
    return place_computed(cached, batch->num_items, rows_out);
}
