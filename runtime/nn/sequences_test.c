/* The tokens of random microbatches on all ranks of random grids, against the cut that shard.h
 * tells. */
#include "base/rng.h"
#include "nn/sequences.h"

/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

#include <stdatomic.h>

enum {
    SEED = 5,
    ROUNDS = 400,
    SEGMENTS_MAX = 6,
    LENGTH_MAX = 20,
    TOKENS_MAX = SEGMENTS_MAX * LENGTH_MAX
};

typedef struct Fixture {
    Device *device;
    Stream *stream;
} Fixture;

static int set_up(void **state)
{
    static Fixture fixture;
    assert_int_equal(device_open("cpu", 0, &fixture.device), STATUS_OK);
    assert_int_equal(stream_create(fixture.device, &fixture.stream), STATUS_OK);
    *state = &fixture;
    return 0;
}

static int tear_down(void **state)
{
    Fixture *fixture = *state;
    stream_destroy(fixture->stream);
    device_close(fixture->device);
    return 0;
}

/* The segment of a token. */
static int segment_of(const int32_t *begins, int64_t token)
{
    int s = 0;
    while (begins[s + 1] <= token) {
        s++;
    }
    return s;
}

static bool holds(const Range *chunks, int num, int64_t token)
{
    for (int c = 0; c < num; c++) {
        if (token >= chunks[c].begin && token < chunks[c].end) {
            return true;
        }
    }
    return false;
}

/* Tokens ascend and are those that shard_chunks gives the rank. */
static void check_tokens(const Sequences *found, const int32_t *begins, int num, ShardRank rank)
{
    assert_int_equal(found->num_keys, begins[num]);
    assert_int_equal(found->rows.count, shard_count(begins, num, rank.cp_size, rank.cp_rank));
    for (int64_t i = 0; i < found->rows.count; i++) {
        int64_t token = found->tokens[i];
        assert_true(i == 0 || found->tokens[i - 1] < token);
        assert_true(token >= 0 && token < begins[num]);
        int s = segment_of(begins, token);
        Range chunks[SHARD_CHUNKS];
        int num_chunks =
            shard_chunks(begins[s + 1] - begins[s], rank.cp_size, rank.cp_rank, chunks);
        assert_true(holds(chunks, num_chunks, token - begins[s]));
        assert_int_equal(found->positions[i], token - begins[s]);
    }
}

/* Runs cover the tokens in order, and each says which key its first token is. */
static void check_runs(const Sequences *found, const int32_t *begins)
{
    int64_t at = 0;
    for (int32_t r = 0; r < found->num_runs; r++) {
        AttentionRun run = found->runs[r];
        assert_int_equal(run.q_begin, at);
        assert_true(run.q_begin < run.q_end && run.q_end <= found->rows.count);
        int s = segment_of(begins, found->tokens[run.q_begin]);
        assert_int_equal(run.key_begin, begins[s]);
        assert_int_equal(run.key_end, begins[s + 1]);
        for (int32_t i = run.q_begin; i < run.q_end; i++) {
            assert_int_equal(found->tokens[i], run.key_begin + run.diagonal + (i - run.q_begin));
        }
        if (r > 0) { /* neighbours would be one run */
            assert_true(found->tokens[run.q_begin] != found->tokens[run.q_begin - 1] + 1 ||
                        found->runs[r - 1].key_begin != run.key_begin);
        }
        at = run.q_end;
    }
    assert_int_equal(at, found->rows.count);
}

static void check_parts(const Sequences *found, ShardRank rank)
{
    Range part = found->rows.part;
    if (rank.tp_size == 1) {
        assert_null(found->rows.begins);
        assert_true(part.begin == 0 && part.end == found->rows.count);
        return;
    }
    for (int r = 0; r < rank.tp_size; r++) {
        Range expected = range_part(found->rows.count, rank.tp_size, r);
        assert_int_equal(found->rows.begins[r], expected.begin);
        assert_int_equal(found->rows.begins[r + 1], expected.end);
    }
    assert_int_equal(part.begin, found->rows.begins[rank.tp_rank]);
    assert_int_equal(part.end, found->rows.begins[rank.tp_rank + 1]);
}

/* Rank after rank, the tokens that shard_chunks gives. */
static void check_key_places(const Sequences *found, const int32_t *begins, int num, ShardRank rank)
{
    if (rank.cp_size == 1) {
        assert_null(found->cp_begins);
        assert_null(found->key_places);
        return;
    }
    int64_t at = 0;
    for (int r = 0; r < rank.cp_size; r++) {
        assert_int_equal(found->cp_begins[r], at);
        for (int s = 0; s < num; s++) {
            Range chunks[SHARD_CHUNKS];
            int num_chunks = shard_chunks(begins[s + 1] - begins[s], rank.cp_size, r, chunks);
            for (int c = 0; c < num_chunks; c++) {
                for (int64_t t = chunks[c].begin; t < chunks[c].end; t++) {
                    assert_int_equal(found->key_places[at++], begins[s] + t);
                }
            }
        }
    }
    assert_int_equal(found->cp_begins[rank.cp_size], at);
    assert_int_equal(at, begins[num]);
}

static void test_random_grids(void **state)
{
    const Fixture *fixture = *state;
    print_message("seed %d\n", SEED);
    Rng rng = {.seed = SEED};
    uint64_t at = 0;
    for (int round = 0; round < ROUNDS; round++) {
        ShardRank rank = {.cp_size = 1 + (int)rng_below(rng, at++, 5),
                          .tp_size = 1 + (int)rng_below(rng, at++, 4)};
        rank.cp_rank = (int)rng_below(rng, at++, (uint64_t)rank.cp_size);
        rank.tp_rank = (int)rng_below(rng, at++, (uint64_t)rank.tp_size);
        SequencesBuffer *buffer = NULL;
        assert_int_equal(
            sequences_buffer_create(fixture->device, rank, TOKENS_MAX, SEGMENTS_MAX, true, &buffer),
            STATUS_OK);
        int64_t before = atomic_load(&fixture->device->allocated_bytes);
        for (int make = 0; make < 3; make++) { /* into the same buffer */
            int num = (int)rng_below(rng, at++, SEGMENTS_MAX + 1);
            uint64_t longest = rng_below(rng, at++, LENGTH_MAX + 1);
            int32_t begins[SEGMENTS_MAX + 1] = {0};
            for (int s = 0; s < num; s++) {
                begins[s + 1] = begins[s] + (int32_t)rng_below(rng, at++, longest + 1);
            }
            Sequences found;
            assert_int_equal(sequences_make(buffer, begins, num, fixture->stream, &found),
                             STATUS_OK);
            check_tokens(&found, begins, num, rank);
            check_runs(&found, begins);
            check_parts(&found, rank);
            check_key_places(&found, begins, num, rank);
        }
        assert_int_equal(atomic_load(&fixture->device->allocated_bytes), before);
        sequences_buffer_destroy(buffer);
    }
}

static void test_positions_only_when_wanted(void **state)
{
    const Fixture *fixture = *state;
    SequencesBuffer *buffer = NULL;
    ShardRank rank = {.cp_size = 1, .tp_size = 1};
    assert_int_equal(sequences_buffer_create(fixture->device, rank, 9, 2, false, &buffer),
                     STATUS_OK);
    Sequences found;
    assert_int_equal(sequences_make(buffer, (const int32_t[]){0, 4, 9}, 2, fixture->stream, &found),
                     STATUS_OK);
    assert_null(found.positions);
    assert_int_equal(found.num_runs, 2);
    sequences_buffer_destroy(buffer);
    sequences_buffer_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_grids),
        cmocka_unit_test(test_positions_only_when_wanted),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
