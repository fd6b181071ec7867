#include "base/rng.h"
#include "nn/shard.h"

/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    SEED = 3,
    LENGTH_MAX = 100,
    LONG_LENGTH_MAX = 1000,
    CP_MAX = 9,
    SEGMENTS_MAX = 12
};

static void test_every_token_stands_on_one_rank(void **state)
{
    (void)state;
    for (int cp = 1; cp <= CP_MAX; cp++) {
        for (int64_t length = 0; length <= LENGTH_MAX; length++) {
            int ranks[LENGTH_MAX] = {0}; /* that hold each token */
            for (int r = 0; r < cp; r++) {
                Range chunks[SHARD_CHUNKS];
                int num = shard_chunks(length, cp, r, chunks);
                int64_t last = -1; /* an end: chunks ascend, do not touch and are not empty */
                int64_t count = 0;
                for (int c = 0; c < num; c++) {
                    assert_true(chunks[c].begin > last && chunks[c].begin < chunks[c].end);
                    last = chunks[c].end;
                    for (int64_t t = chunks[c].begin; t < chunks[c].end; t++) {
                        ranks[t]++;
                        count++;
                    }
                }
                assert_true(last <= length);
                assert_int_equal(count, shard_chunks_count(length, cp, r));
            }
            for (int64_t t = 0; t < length; t++) {
                assert_int_equal(ranks[t], 1);
            }
        }
    }
}

static void test_zigzag(void **state)
{
    (void)state;
    Range chunks[SHARD_CHUNKS];
    /* 17 in 6: 3 3 3 3 3 2, beginning at 0 3 6 9 12 15. */
    assert_int_equal(shard_chunks(17, 3, 0, chunks), 2);
    assert_true(chunks[0].begin == 0 && chunks[0].end == 3);
    assert_true(chunks[1].begin == 15 && chunks[1].end == 17);
    assert_int_equal(shard_chunks(17, 3, 1, chunks), 2);
    assert_true(chunks[0].begin == 3 && chunks[0].end == 6);
    assert_true(chunks[1].begin == 12 && chunks[1].end == 15);
    assert_int_equal(shard_chunks(17, 3, 2, chunks), 1); /* neighbours */
    assert_true(chunks[0].begin == 6 && chunks[0].end == 12);
    assert_int_equal(shard_chunks(17, 1, 0, chunks), 1);
    assert_true(chunks[0].begin == 0 && chunks[0].end == 17);
    assert_int_equal(shard_chunks(1, 2, 1, chunks), 0);
    assert_int_equal(shard_chunks(0, 2, 0, chunks), 0);
}

/* Query and key pairs of causal attention on a rank. */
static int64_t causal_pairs(int64_t length, int cp, int rank)
{
    Range chunks[SHARD_CHUNKS];
    int num = shard_chunks(length, cp, rank, chunks);
    int64_t pairs = 0;
    for (int c = 0; c < num; c++) {
        pairs +=
            (chunks[c].end * (chunks[c].end + 1) - chunks[c].begin * (chunks[c].begin + 1)) / 2;
    }
    return pairs;
}

/* Equal when 2 cp divides the length. Else ranks differ by at most what two tokens cost, of about
 * length^2 / (2 cp): by one token, which costs up to `length` pairs, and by chunks that begin up to
 * cp tokens later in sum, which costs up to `length` / 2 for their length / (2 cp) tokens. */
static void test_causal_work_is_balanced(void **state)
{
    (void)state;
    for (int cp = 1; cp <= CP_MAX; cp++) {
        for (int64_t length = 0; length <= LONG_LENGTH_MAX; length++) {
            int64_t least = INT64_MAX;
            int64_t most = 0;
            for (int r = 0; r < cp; r++) {
                int64_t pairs = causal_pairs(length, cp, r);
                least = pairs < least ? pairs : least;
                most = pairs > most ? pairs : most;
            }
            int64_t allowed = length % (2 * (int64_t)cp) == 0 ? 0 : 2 * length;
            assert_true(most - least <= allowed);
        }
    }
}

static void test_no_rank_has_more_than_the_most(void **state)
{
    (void)state;
    print_message("seed %d\n", SEED);
    Rng rng = {.seed = SEED};
    uint64_t at = 0;
    for (int round = 0; round < 3000; round++) {
        int cp = 1 + (int)rng_below(rng, at++, CP_MAX);
        int num = (int)rng_below(rng, at++, SEGMENTS_MAX + 1);
        uint64_t longest = 1 + rng_below(rng, at++, 20);
        int32_t begins[SEGMENTS_MAX + 1] = {0};
        for (int s = 0; s < num; s++) {
            begins[s + 1] = begins[s] + (int32_t)rng_below(rng, at++, longest + 1);
        }
        int64_t total = 0;
        for (int r = 0; r < cp; r++) {
            int64_t count = shard_count(begins, num, cp, r);
            assert_true(count <= shard_count_max(begins[num], num, cp));
            assert_true(count <= shard_count_max(begins[num] + 5, num + 3, cp));
            total += count;
        }
        assert_int_equal(total, begins[num]);
    }
}

/* The bound is not merely an upper one. */
static void test_the_most_is_reached(void **state)
{
    (void)state;
    const int32_t ones[] = {0, 1, 2, 3, 4};
    assert_int_equal(shard_count(ones, 4, 3, 0), 4);
    assert_int_equal(shard_count_max(4, 4, 3), 4);
    assert_int_equal(shard_count_max(4, 100, 3), 4);
    const int32_t one[] = {0, 24};
    assert_int_equal(shard_count(one, 1, 3, 1), 8);
    assert_int_equal(shard_count_max(24, 1, 3), 8);
    assert_int_equal(shard_count_max(25, 1, 3), 9);
    assert_int_equal(shard_count_max(25, 7, 1), 25);
    assert_int_equal(shard_count_max(0, 7, 2), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_token_stands_on_one_rank),
        cmocka_unit_test(test_zigzag),
        cmocka_unit_test(test_causal_work_is_balanced),
        cmocka_unit_test(test_no_rank_has_more_than_the_most),
        cmocka_unit_test(test_the_most_is_reached),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
