/* Samples on every rank of a replica: each token once, with its id and label, and every row at the token that
 * waits for it, whatever the cut. */
#include "train/text_batch.h"

#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

#define I TOKEN_IMAGE
#define A TOKEN_AUDIO

static const int32_t first[] = {TOKEN_BOS, I, I, I, 'a', A, A, 'b', TOKEN_EOS};
static const int32_t second[] = {TOKEN_BOS};
static const int32_t third[] = {A, A, A, A, A, 'c', I, 'd', 'e', 'f', 'g', 'h'};

enum {
    TOKENS = (sizeof first + sizeof second + sizeof third) / sizeof(int32_t),
    IMAGE_ROWS = 4,
    AUDIO_ROWS = 7,
    TIMEOUT_MS = 1000
};

typedef struct Seen {
    int tokens[TOKENS];                /* how many cp ranks have each */
    int rows[IMAGE_ROWS + AUDIO_ROWS]; /* how many (cp, tp) ranks have each */
} Seen;

static int32_t id_of(int64_t token)
{
    int64_t num_first = sizeof first / sizeof *first;
    return token < num_first       ? first[token]
           : token < num_first + 1 ? second[0]
                                   : third[token - num_first - 1];
}

/* Which of the replica's rows, images first, goes to a token. */
static int32_t row_of(int64_t token)
{
    int32_t images = 0;
    int32_t clips = 0;
    for (int64_t t = 0; t < token; t++) {
        images += id_of(t) == I;
        clips += id_of(t) == A;
    }
    return id_of(token) == I ? images : IMAGE_ROWS + clips;
}

static void look_at_rank(ShardRank shard, Device *device, Stream *stream, Seen *seen)
{
    TextBatch *text = NULL;
    ModuleBatch batch;
    const TextBatchOptions options = {.device = device,
                                      .shard = shard,
                                      .tokens_max = TOKENS,
                                      .segments_max = 3,
                                      .rows_max = IMAGE_ROWS + AUDIO_ROWS,
                                      .num_encoders = 2,
                                      .media = {SAMPLE_MEDIA_IMAGE, SAMPLE_MEDIA_AUDIO},
                                      .timeout_ms = TIMEOUT_MS};
    assert_int_equal(text_batch_create(&options, &text), STATUS_OK);
    for (int round = 0; round < 2; round++) { /* it can be filled again */
        text_batch_begin(text);
        assert_int_equal(text_batch_add_ids(text, first, sizeof first / sizeof *first), STATUS_OK);
        assert_int_equal(text_batch_add_ids(text, second, 1), STATUS_OK);
        assert_int_equal(text_batch_add_ids(text, third, sizeof third / sizeof *third), STATUS_OK);
        assert_int_equal(text_batch_upload(text, stream, &batch), STATUS_OK);
    }
    const Sequences *sequences = batch.sequences;
    for (int64_t n = 0; n < sequences->rows.count; n++) {
        assert_int_equal(batch.ids[n], id_of(sequences->tokens[n]));
        assert_int_equal(batch.labels[n], -1);
        assert_int_equal(text_batch_find(text, sequences->tokens[n]), n);
        seen->tokens[sequences->tokens[n]] += shard.tp_rank == 0;
    }
    assert_int_equal(batch.num_rows,
                     text_batch_count_rows(text, 0) + text_batch_count_rows(text, 1));
    for (int64_t r = 0; r < batch.num_rows; r++) {
        int64_t local = sequences->rows.part.begin + batch.row_tokens[r];
        int32_t source = text_batch_row_sources(text)[r];
        assert_true(local < sequences->rows.part.end);
        assert_int_equal(source, row_of(sequences->tokens[local]));
        assert_int_equal(source < IMAGE_ROWS, r < text_batch_count_rows(text, 0));
        seen->rows[source]++;
    }
    text_batch_destroy(text);
}

static void test_cuts(void **state)
{
    (void)state;
    Device *device = NULL;
    Stream *stream = NULL;
    assert_int_equal(device_open("cpu", 0, &device), STATUS_OK);
    assert_int_equal(stream_create(device, &stream), STATUS_OK);
    for (int cp = 1; cp <= 4; cp++) {
        for (int tp = 1; tp <= 3; tp++) {
            Seen seen = {0};
            for (int rank = 0; rank < cp * tp; rank++) {
                look_at_rank((ShardRank){cp, rank / tp, tp, rank % tp}, device, stream, &seen);
            }
            for (int t = 0; t < TOKENS; t++) {
                assert_int_equal(seen.tokens[t], 1);
            }
            for (int r = 0; r < IMAGE_ROWS + AUDIO_ROWS; r++) {
                assert_int_equal(seen.rows[r], 1);
            }
        }
    }
    stream_destroy(stream);
    device_close(device);
}

/* More places than rows were planned for: an error, not a write past the end. */
static void test_too_many_rows(void **state)
{
    (void)state;
    Device *device = NULL;
    Stream *stream = NULL;
    TextBatch *text = NULL;
    ModuleBatch batch;
    assert_int_equal(device_open("cpu", 0, &device), STATUS_OK);
    assert_int_equal(stream_create(device, &stream), STATUS_OK);
    const TextBatchOptions options = {.device = device,
                                      .shard = {1, 0, 1, 0},
                                      .tokens_max = TOKENS,
                                      .segments_max = 3,
                                      .rows_max = 2,
                                      .num_encoders = 1,
                                      .media = {SAMPLE_MEDIA_IMAGE}};
    assert_int_equal(text_batch_create(&options, &text), STATUS_OK);
    text_batch_begin(text);
    assert_int_equal(text_batch_add_ids(text, first, sizeof first / sizeof *first), STATUS_OK);
    assert_int_equal(text_batch_upload(text, stream, &batch), STATUS_CORRUPT);
    text_batch_destroy(text);
    stream_destroy(stream);
    device_close(device);
}

/* ---- a stream that does nothing before it is waited for, as a device's may ---- */

typedef struct LateCopy {
    void *to;
    const void *from;
    int64_t size_bytes;
} LateCopy;

enum {
    LATE_COPIES_MAX = 64
};

static LateCopy late_copies[LATE_COPIES_MAX];
static int num_late;

static Status late_copy(Stream *stream, void *to, const void *from, int64_t size_bytes)
{
    (void)stream;
    CHECK(num_late < LATE_COPIES_MAX);
    late_copies[num_late++] = (LateCopy){to, from, size_bytes};
    return STATUS_OK;
}

static Status late_wait(Stream *stream, int64_t deadline_ns)
{
    (void)stream;
    (void)deadline_ns;
    for (int i = 0; i < num_late; i++) {
        memcpy(late_copies[i].to, late_copies[i].from, (size_t)late_copies[i].size_bytes);
    }
    num_late = 0;
    return STATUS_OK;
}

/* Filled again while the copies of the first text are still to come: what runs on the stream in
 * between sees the first text. */
static void test_late_stream(void **state)
{
    (void)state;
    Device *device = NULL;
    Stream *stream = NULL;
    TextBatch *text = NULL;
    ModuleBatch batch;
    int32_t seen[sizeof first / sizeof *first];
    assert_int_equal(device_open("cpu", 0, &device), STATUS_OK);
    assert_int_equal(stream_create(device, &stream), STATUS_OK);
    const DeviceOps *ops = device->ops;
    DeviceOps late = *ops;
    late.copy = late_copy;
    late.stream_wait = late_wait;
    device->ops = &late;
    const TextBatchOptions options = {.device = device,
                                      .shard = {1, 0, 1, 0},
                                      .tokens_max = TOKENS,
                                      .segments_max = 3,
                                      .rows_max = IMAGE_ROWS + AUDIO_ROWS,
                                      .num_encoders = 2,
                                      .media = {SAMPLE_MEDIA_IMAGE, SAMPLE_MEDIA_AUDIO},
                                      .timeout_ms = TIMEOUT_MS};
    assert_int_equal(text_batch_create(&options, &text), STATUS_OK);
    text_batch_begin(text);
    assert_int_equal(text_batch_add_ids(text, first, sizeof first / sizeof *first), STATUS_OK);
    assert_int_equal(text_batch_upload(text, stream, &batch), STATUS_OK);
    assert_int_equal(stream_copy(stream, seen, batch.ids, sizeof seen), STATUS_OK);
    text_batch_begin(text);
    assert_int_equal(text_batch_add_ids(text, third, sizeof third / sizeof *third), STATUS_OK);
    assert_int_equal(text_batch_upload(text, stream, &batch), STATUS_OK);
    assert_int_equal(stream_wait(stream, 0), STATUS_OK);
    assert_memory_equal(seen, first, sizeof first);
    text_batch_destroy(text);
    device->ops = ops;
    stream_destroy(stream);
    device_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cuts),
        cmocka_unit_test(test_too_many_rows),
        cmocka_unit_test(test_late_stream),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
