#include "nn/sequences.h"

#include "base/memory.h"

struct SequencesBuffer {
    Device *device;
    ShardRank rank;
    int64_t tokens_max;   /* of the replica */
    int64_t segments_max; /* of the replica */
    int64_t local_max;    /* of this cp rank */
    bool has_positions;
    /* host */
    AttentionRun *runs; /* [SHARD_CHUNKS * segments_max] */
    int64_t *cp_begins; /* [cp + 1] */
    int64_t *tp_begins; /* [tp + 1] */
    int32_t *keys;      /* [tokens_max]: which key each token is, rank after rank */
    int32_t *positions; /* [local_max] */
    /* device */
    int32_t *device_keys;      /* NULL when cp is 1 */
    int32_t *device_positions; /* NULL without positions */
};

static int64_t bytes_of(int64_t count)
{
    return count * (int64_t)sizeof(int32_t);
}

static Status allocate(SequencesBuffer *buffer)
{
    Device *device = buffer->device;
    TRY(MEMORY_NEW(&buffer->runs, SHARD_CHUNKS * buffer->segments_max));
    TRY(MEMORY_NEW(&buffer->cp_begins, buffer->rank.cp_size + 1));
    TRY(MEMORY_NEW(&buffer->tp_begins, buffer->rank.tp_size + 1));
    void *memory = NULL;
    TRY(device_alloc_host(device, bytes_of(buffer->tokens_max), &memory));
    buffer->keys = memory;
    if (buffer->rank.cp_size > 1) {
        TRY(device_alloc(device, bytes_of(buffer->tokens_max), &memory));
        buffer->device_keys = memory;
    }
    if (buffer->has_positions) {
        TRY(device_alloc_host(device, bytes_of(buffer->local_max), &memory));
        buffer->positions = memory;
        TRY(device_alloc(device, bytes_of(buffer->local_max), &memory));
        buffer->device_positions = memory;
    }
    return STATUS_OK;
}

Status sequences_buffer_create(Device *device, ShardRank rank, int64_t tokens_max,
                               int64_t segments_max, bool has_positions,
                               SequencesBuffer **buffer_out)
{
    CHECK(tokens_max >= 0 && tokens_max <= INT32_MAX);
    CHECK(segments_max >= 0 && segments_max <= INT32_MAX / SHARD_CHUNKS);
    CHECK(rank.cp_size > 0 && rank.tp_size > 0 && rank.cp_rank >= 0 && rank.tp_rank >= 0);
    CHECK(rank.cp_rank < rank.cp_size && rank.tp_rank < rank.tp_size);
    SequencesBuffer *buffer = NULL;
    TRY(MEMORY_NEW(&buffer, 1));
    *buffer =
        (SequencesBuffer){.device = device,
                          .rank = rank,
                          .tokens_max = tokens_max,
                          .segments_max = segments_max,
                          .local_max = shard_count_max(tokens_max, segments_max, rank.cp_size),
                          .has_positions = has_positions};
    Status status = allocate(buffer);
    if (status != STATUS_OK) {
        sequences_buffer_destroy(buffer);
        return status_trace(status, __FILE__, __LINE__);
    }
    *buffer_out = buffer;
    return STATUS_OK;
}

void sequences_buffer_destroy(SequencesBuffer *buffer)
{
    if (!buffer) {
        return;
    }
    Device *device = buffer->device;
    if (buffer->keys) {
        device_free_host(device, buffer->keys, bytes_of(buffer->tokens_max));
    }
    if (buffer->device_keys) {
        device_free(device, buffer->device_keys, bytes_of(buffer->tokens_max));
    }
    if (buffer->positions) {
        device_free_host(device, buffer->positions, bytes_of(buffer->local_max));
    }
    if (buffer->device_positions) {
        device_free(device, buffer->device_positions, bytes_of(buffer->local_max));
    }
    memory_free(buffer->runs);
    memory_free(buffer->cp_begins);
    memory_free(buffer->tp_begins);
    memory_free(buffer);
}

/* keys_out: which keys the tokens of a cp rank are, in its order. Returns their number. */
static int64_t list_keys(const int32_t *segment_begins, int32_t num_segments, int cp_size,
                         int cp_rank, int32_t *keys_out)
{
    int64_t count = 0;
    for (int32_t s = 0; s < num_segments; s++) {
        int32_t first = segment_begins[s];
        Range chunks[SHARD_CHUNKS];
        int num = shard_chunks((int64_t)segment_begins[s + 1] - first, cp_size, cp_rank, chunks);
        for (int c = 0; c < num; c++) {
            for (int64_t t = chunks[c].begin; t < chunks[c].end; t++) {
                keys_out[count++] = (int32_t)(first + t);
            }
        }
    }
    return count;
}

/* The runs and positions of this rank. Returns the number of runs. */
static int32_t list_runs(SequencesBuffer *buffer, const int32_t *segment_begins,
                         int32_t num_segments)
{
    int32_t num_runs = 0;
    int32_t at = 0; /* of this rank's tokens */
    for (int32_t s = 0; s < num_segments; s++) {
        int32_t first = segment_begins[s];
        int32_t end = segment_begins[s + 1];
        Range chunks[SHARD_CHUNKS];
        int num =
            shard_chunks((int64_t)end - first, buffer->rank.cp_size, buffer->rank.cp_rank, chunks);
        for (int c = 0; c < num; c++) {
            int32_t count = (int32_t)range_count(chunks[c]);
            buffer->runs[num_runs++] = (AttentionRun){.q_begin = at,
                                                      .q_end = at + count,
                                                      .key_begin = first,
                                                      .key_end = end,
                                                      .diagonal = (int32_t)chunks[c].begin};
            for (int32_t i = 0; buffer->has_positions && i < count; i++) {
                buffer->positions[at + i] = (int32_t)chunks[c].begin + i;
            }
            at += count;
        }
    }
    return num_runs;
}

static Status copy_to_device(const SequencesBuffer *buffer, int64_t num_keys, int64_t count,
                             Stream *stream)
{
    if (buffer->device_keys) {
        TRY(stream_copy(stream, buffer->device_keys, buffer->keys, bytes_of(num_keys)));
    }
    if (buffer->has_positions) {
        TRY(stream_copy(stream, buffer->device_positions, buffer->positions, bytes_of(count)));
    }
    return STATUS_OK;
}

static void check_segments(const SequencesBuffer *buffer, const int32_t *segment_begins,
                           int32_t num_segments)
{
    CHECK(num_segments >= 0 && num_segments <= buffer->segments_max);
    CHECK(segment_begins[0] == 0);
    for (int32_t s = 0; s < num_segments; s++) {
        CHECK(segment_begins[s] <= segment_begins[s + 1]);
    }
    CHECK(segment_begins[num_segments] <= buffer->tokens_max);
}

Status sequences_make(SequencesBuffer *buffer, const int32_t *segment_begins, int32_t num_segments,
                      Stream *stream, Sequences *sequences_out)
{
    check_segments(buffer, segment_begins, num_segments);
    ShardRank rank = buffer->rank;
    int64_t num_keys = 0;
    for (int r = 0; r < rank.cp_size; r++) {
        buffer->cp_begins[r] = num_keys;
        num_keys +=
            list_keys(segment_begins, num_segments, rank.cp_size, r, buffer->keys + num_keys);
    }
    buffer->cp_begins[rank.cp_size] = num_keys;
    CHECK(num_keys == segment_begins[num_segments]);
    int64_t begin = buffer->cp_begins[rank.cp_rank];
    int64_t count = buffer->cp_begins[rank.cp_rank + 1] - begin;
    CHECK(count <= buffer->local_max);
    for (int r = 0; r < rank.tp_size; r++) {
        buffer->tp_begins[r] = range_part(count, rank.tp_size, r).begin;
    }
    buffer->tp_begins[rank.tp_size] = count;
    int32_t num_runs = list_runs(buffer, segment_begins, num_segments);
    TRY(copy_to_device(buffer, num_keys, count, stream));
    *sequences_out = (Sequences){
        .num_keys = num_keys,
        .rows = {.count = count,
                 .part = range_part(count, rank.tp_size, rank.tp_rank),
                 .begins = rank.tp_size > 1 ? buffer->tp_begins : NULL},
        .tokens = buffer->keys + begin,
        .num_runs = num_runs,
        .runs = buffer->runs,
        .cp_begins = rank.cp_size > 1 ? buffer->cp_begins : NULL,
        .key_places = buffer->device_keys,
        .positions = buffer->device_positions,
    };
    return STATUS_OK;
}
