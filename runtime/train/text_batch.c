#include "train/text_batch.h"

#include "base/clock.h"
#include "base/memory.h"

#include <inttypes.h>
#include <string.h>

/* Arrays of this rank, [tokens_max] or [rows_max] each, one behind the other; on the host and on
 * the device alike. */
typedef struct TextArrays {
    int32_t *ids;
    int32_t *labels;
    int32_t *row_tokens;
    int32_t *row_sources;
} TextArrays;

struct TextBatch {
    TextBatchOptions options;
    /* the replica's tokens, on the host */
    int64_t num_tokens;
    int32_t num_segments;
    int32_t *ids;    /* [tokens_max] */
    int32_t *labels; /* [tokens_max] */
    int32_t
        *row_numbers; /* [tokens_max] of a placeholder: which of its encoder's rows goes there */
    int32_t *segment_begins; /* [segments_max + 1] */
    int64_t whole_rows[STEP_ENCODERS_MAX];
    /* this rank's */
    SequencesBuffer *buffer;
    Sequences sequences;
    int64_t num_rows[STEP_ENCODERS_MAX];
    TextArrays host;
    TextArrays device;
    bool is_uploaded; /* once: copies from `host` may be on their way */
};

static int64_t memory_bytes(const TextBatchOptions *options)
{
    return 2 * (options->tokens_max + options->rows_max) * (int64_t)sizeof(int32_t);
}

static TextArrays lay_out(const TextBatchOptions *options, int32_t *memory)
{
    int32_t *rows = memory + 2 * options->tokens_max;
    return (TextArrays){.ids = memory,
                        .labels = memory + options->tokens_max,
                        .row_tokens = rows,
                        .row_sources = rows + options->rows_max};
}

static Status allocate(TextBatch *batch)
{
    const TextBatchOptions *options = &batch->options;
    int32_t *host = NULL;
    int32_t *device = NULL;
    TRY(MEMORY_NEW(&batch->ids, options->tokens_max));
    TRY(MEMORY_NEW(&batch->labels, options->tokens_max));
    TRY(MEMORY_NEW(&batch->row_numbers, options->tokens_max));
    TRY(MEMORY_NEW(&batch->segment_begins, options->segments_max + 1));
    TRY(device_alloc_host(options->device, memory_bytes(options), (void **)&host));
    batch->host = lay_out(options, host);
    TRY(device_alloc(options->device, memory_bytes(options), (void **)&device));
    batch->device = lay_out(options, device);
    return sequences_buffer_create(options->device, options->shard, options->tokens_max,
                                   options->segments_max, true, &batch->buffer);
}

Status text_batch_create(const TextBatchOptions *options, TextBatch **batch_out)
{
    if (options->tokens_max > INT32_MAX) {
        return fail(STATUS_INVALID,
                    "a microbatch of a replica can have %" PRId64
                    " tokens, at most %d are supported; use more microbatches",
                    options->tokens_max, INT32_MAX);
    }
    TextBatch *batch = NULL;
    TRY(MEMORY_NEW(&batch, 1));
    batch->options = *options;
    Status status = allocate(batch);
    if (status != STATUS_OK) {
        text_batch_destroy(batch);
        return status_trace(status, __FILE__, __LINE__);
    }
    *batch_out = batch;
    return STATUS_OK;
}

void text_batch_destroy(TextBatch *batch)
{
    if (!batch) {
        return;
    }
    const TextBatchOptions *options = &batch->options;
    sequences_buffer_destroy(batch->buffer);
    if (batch->device.ids) {
        device_free(options->device, batch->device.ids, memory_bytes(options));
    }
    if (batch->host.ids) {
        device_free_host(options->device, batch->host.ids, memory_bytes(options));
    }
    memory_free(batch->ids);
    memory_free(batch->labels);
    memory_free(batch->row_numbers);
    memory_free(batch->segment_begins);
    memory_free(batch);
}

/* ---------------------------------------------------------------- packing */

void text_batch_begin(TextBatch *batch)
{
    batch->num_tokens = 0;
    batch->num_segments = 0;
    memset(batch->whole_rows, 0, sizeof batch->whole_rows);
}

static int32_t placeholder_of(const TextBatch *batch, int encoder)
{
    return batch->options.media[encoder] == SAMPLE_MEDIA_IMAGE ? TOKEN_IMAGE : TOKEN_AUDIO;
}

/* Makes the segment of `count` tokens whose ids stand in their place already. */
static void close_segment(TextBatch *batch, int64_t count)
{
    const int32_t *ids = batch->ids + batch->num_tokens;
    int32_t *row_numbers = batch->row_numbers + batch->num_tokens;
    for (int e = 0; e < batch->options.num_encoders; e++) {
        int32_t placeholder = placeholder_of(batch, e);
        for (int64_t t = 0; t < count; t++) {
            if (ids[t] == placeholder) {
                row_numbers[t] = (int32_t)batch->whole_rows[e]++;
            }
        }
    }
    batch->num_tokens += count;
    batch->segment_begins[++batch->num_segments] = (int32_t)batch->num_tokens;
}

static void check_room(const TextBatch *batch, int64_t count)
{
    CHECK(batch->num_segments < batch->options.segments_max);
    CHECK(batch->num_tokens + count <= batch->options.tokens_max);
}

Status text_batch_add(TextBatch *batch, const Dataset *dataset, int64_t sample)
{
    const SampleInfo *info = dataset_sample(dataset, sample);
    int64_t before[STEP_ENCODERS_MAX];
    memcpy(before, batch->whole_rows, sizeof before);
    check_room(batch, info->num_tokens);
    TRY(dataset_read_tokens(dataset, sample, batch->ids + batch->num_tokens,
                            batch->labels + batch->num_tokens));
    close_segment(batch, info->num_tokens);
    for (int e = 0; e < batch->options.num_encoders; e++) {
        int64_t expected = 0;
        for (int32_t i = 0; i < info->num_items; i++) {
            bool is_its = info->items[i].media == batch->options.media[e];
            expected += is_its ? info->items[i].rows : 0;
        }
        int64_t found = batch->whole_rows[e] - before[e];
        if (found != expected) {
            return fail(
                STATUS_CORRUPT,
                "sample \"%s\" has %" PRId64 " placeholders for %s, which yield %" PRId64 " rows",
                info->key, found,
                batch->options.media[e] == SAMPLE_MEDIA_IMAGE ? "images" : "clips", expected);
        }
    }
    return STATUS_OK;
}

Status text_batch_add_ids(TextBatch *batch, const int32_t *ids, int32_t num_ids)
{
    check_room(batch, num_ids);
    memcpy(batch->ids + batch->num_tokens, ids, (size_t)num_ids * sizeof *ids);
    for (int32_t t = 0; t < num_ids; t++) {
        batch->labels[batch->num_tokens + t] = -1;
    }
    close_segment(batch, num_ids);
    return STATUS_OK;
}

/* ---------------------------------------------------------------- this rank's part */

static Status take_rows(TextBatch *batch, int64_t *num_rows_out)
{
    const Sequences *sequences = &batch->sequences;
    Range part = sequences->rows.part;
    int64_t num = 0;
    int64_t base = 0; /* rows of the replica of the encoders before */
    for (int e = 0; e < batch->options.num_encoders; e++) {
        int32_t placeholder = placeholder_of(batch, e);
        int64_t first = num;
        for (int64_t n = part.begin; n < part.end; n++) {
            int32_t token = sequences->tokens[n];
            if (batch->ids[token] != placeholder) {
                continue;
            }
            if (num == batch->options.rows_max) {
                return fail(STATUS_CORRUPT,
                            "more placeholders than the %" PRId64 " rows of a microbatch",
                            batch->options.rows_max);
            }
            batch->host.row_tokens[num] = (int32_t)(n - part.begin);
            batch->host.row_sources[num++] = (int32_t)(base + batch->row_numbers[token]);
        }
        batch->num_rows[e] = num - first;
        base += batch->whole_rows[e];
    }
    *num_rows_out = num;
    return STATUS_OK;
}

static Status copy(Stream *stream, int32_t *to, const int32_t *from, int64_t count)
{
    return stream_copy(stream, to, from, count * (int64_t)sizeof *from);
}

Status text_batch_upload(TextBatch *batch, Stream *stream, ModuleBatch *batch_out)
{
    if (batch->is_uploaded) {
        TRY(stream_wait(stream, clock_deadline_in_ms(batch->options.timeout_ms)));
    }
    batch->is_uploaded = true;
    TRY(sequences_make(batch->buffer, batch->segment_begins, batch->num_segments, stream,
                       &batch->sequences));
    int64_t count = batch->sequences.rows.count;
    for (int64_t n = 0; n < count; n++) {
        batch->host.ids[n] = batch->ids[batch->sequences.tokens[n]];
        batch->host.labels[n] = batch->labels[batch->sequences.tokens[n]];
    }
    int64_t num_rows = 0;
    TRY(take_rows(batch, &num_rows));
    TRY(copy(stream, batch->device.ids, batch->host.ids, count));
    TRY(copy(stream, batch->device.labels, batch->host.labels, count));
    TRY(copy(stream, batch->device.row_tokens, batch->host.row_tokens, num_rows));
    TRY(copy(stream, batch->device.row_sources, batch->host.row_sources, num_rows));
    *batch_out = (ModuleBatch){.sequences = &batch->sequences,
                               .ids = batch->device.ids,
                               .labels = batch->device.labels,
                               .num_rows = num_rows,
                               .row_tokens = batch->device.row_tokens};
    return STATUS_OK;
}

int64_t text_batch_count_rows(const TextBatch *batch, int encoder)
{
    return batch->num_rows[encoder];
}

const int32_t *text_batch_row_sources(const TextBatch *batch)
{
    return batch->device.row_sources;
}

int32_t text_batch_find(const TextBatch *batch, int64_t token)
{
    for (int64_t n = 0; n < batch->sequences.rows.count; n++) {
        if (batch->sequences.tokens[n] == token) {
            return (int32_t)n;
        }
    }
    return -1;
}
