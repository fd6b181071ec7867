#include "train/text_batch.h"

#include "base/memory.h"

#include <inttypes.h>
#include <string.h>

enum {
    ARRAYS = 3 /* ids, positions, labels */
};

static int64_t memory_bytes(const TextBatch *batch)
{
    return (ARRAYS * batch->tokens_max + batch->rows_max) * (int64_t)sizeof(int32_t);
}

static int32_t *ids_of(const TextBatch *batch, int32_t *memory)
{
    (void)batch;
    return memory;
}

static int32_t *positions_of(const TextBatch *batch, int32_t *memory)
{
    return memory + batch->tokens_max;
}

static int32_t *labels_of(const TextBatch *batch, int32_t *memory)
{
    return memory + 2 * batch->tokens_max;
}

static int32_t *row_tokens_of(const TextBatch *batch, int32_t *memory)
{
    return memory + ARRAYS * batch->tokens_max;
}

static Status allocate(TextBatch *batch)
{
    TRY(device_alloc_host(batch->device, memory_bytes(batch), (void **)&batch->host));
    TRY(device_alloc(batch->device, memory_bytes(batch), (void **)&batch->memory));
    return MEMORY_NEW(&batch->segment_begins, batch->segments_max + 1);
}

Status text_batch_init(TextBatch *batch, Device *device, int64_t tokens_max, int32_t segments_max,
                       int64_t rows_max)
{
    if (tokens_max > INT32_MAX) {
        return fail(STATUS_INVALID,
                    "a microbatch of a replica can have %" PRId64
                    " tokens, at most %d are supported; use more microbatches",
                    tokens_max, INT32_MAX);
    }
    *batch = (TextBatch){.device = device,
                         .tokens_max = tokens_max,
                         .segments_max = segments_max,
                         .rows_max = rows_max};
    Status status = allocate(batch);
    if (status != STATUS_OK) {
        text_batch_done(batch);
        return status_trace(status, __FILE__, __LINE__);
    }
    return STATUS_OK;
}

void text_batch_done(TextBatch *batch)
{
    if (batch->memory) {
        device_free(batch->device, batch->memory, memory_bytes(batch));
    }
    if (batch->host) {
        device_free_host(batch->device, batch->host, memory_bytes(batch));
    }
    memory_free(batch->segment_begins);
    *batch = (TextBatch){0};
}

void text_batch_begin(TextBatch *batch)
{
    batch->num_tokens = 0;
    batch->num_segments = 0;
    batch->num_rows = 0;
    batch->segment_begins[0] = 0;
}

/* Makes the segment of `count` tokens whose ids stand in their place already; returns its rows in
 * *rows_out. */
static Status close_segment(TextBatch *batch, int64_t count, int64_t *rows_out)
{
    const int32_t *ids = ids_of(batch, batch->host) + batch->num_tokens;
    int32_t *positions = positions_of(batch, batch->host) + batch->num_tokens;
    int32_t *row_tokens = row_tokens_of(batch, batch->host);
    int64_t rows_before = batch->num_rows;
    for (int64_t t = 0; t < count; t++) {
        positions[t] = (int32_t)t;
        if (ids[t] == TOKEN_IMAGE) {
            if (batch->num_rows == batch->rows_max) {
                return fail(STATUS_CORRUPT,
                            "more image tokens than the %" PRId64 " rows of a microbatch",
                            batch->rows_max);
            }
            row_tokens[batch->num_rows++] = (int32_t)(batch->num_tokens + t);
        }
    }
    batch->num_tokens += count;
    batch->segment_begins[++batch->num_segments] = (int32_t)batch->num_tokens;
    *rows_out = batch->num_rows - rows_before;
    return STATUS_OK;
}

static void check_room(const TextBatch *batch, int64_t count)
{
    CHECK(batch->num_segments < batch->segments_max);
    CHECK(batch->num_tokens + count <= batch->tokens_max);
}

Status text_batch_add(TextBatch *batch, const Dataset *dataset, int64_t sample, int64_t num_rows)
{
    const SampleInfo *info = dataset_sample(dataset, sample);
    check_room(batch, info->num_tokens);
    TRY(dataset_read_tokens(dataset, sample, ids_of(batch, batch->host) + batch->num_tokens,
                            labels_of(batch, batch->host) + batch->num_tokens));
    int64_t rows = 0;
    TRY(close_segment(batch, info->num_tokens, &rows));
    if (rows != num_rows) {
        return fail(STATUS_CORRUPT,
                    "sample \"%s\" has %" PRId64 " image tokens, its images yield %" PRId64 " rows",
                    info->key, rows, num_rows);
    }
    return STATUS_OK;
}

Status text_batch_add_ids(TextBatch *batch, const int32_t *ids, int32_t num_ids)
{
    check_room(batch, num_ids);
    int32_t *labels = labels_of(batch, batch->host) + batch->num_tokens;
    memcpy(ids_of(batch, batch->host) + batch->num_tokens, ids, (size_t)num_ids * sizeof *ids);
    for (int32_t t = 0; t < num_ids; t++) {
        labels[t] = -1;
    }
    int64_t rows = 0;
    return close_segment(batch, num_ids, &rows);
}

static Status copy(const TextBatch *batch, Stream *stream, const int32_t *array, int64_t count)
{
    return stream_copy(stream, batch->memory + (array - batch->host), array,
                       count * (int64_t)sizeof *array);
}

Status text_batch_upload(TextBatch *batch, Stream *stream, ModuleBatch *batch_out)
{
    TRY(copy(batch, stream, ids_of(batch, batch->host), batch->num_tokens));
    TRY(copy(batch, stream, positions_of(batch, batch->host), batch->num_tokens));
    TRY(copy(batch, stream, labels_of(batch, batch->host), batch->num_tokens));
    TRY(copy(batch, stream, row_tokens_of(batch, batch->host), batch->num_rows));
    *batch_out = (ModuleBatch){
        .num_tokens = batch->num_tokens,
        .num_segments = batch->num_segments,
        .segment_begins = batch->segment_begins,
        .ids = ids_of(batch, batch->memory),
        .positions = positions_of(batch, batch->memory),
        .labels = labels_of(batch, batch->memory),
        .num_rows = batch->num_rows,
        .row_tokens = row_tokens_of(batch, batch->memory),
    };
    return STATUS_OK;
}
