/* Who is to blame for a value that is not finite, and whether ranks that differ find out. */
#include "comm/comm_local.h"
#include "train/vote.h"

#include <math.h>
#include <pthread.h>
#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    RANKS = 3,
    TIMEOUT_MS = 20000
};

static void test_culprit(void **state)
{
    (void)state;
    Ballot sum = {.loss_sum = 3.0, .squares = {1.0, 1.0, 2.0}, .rows_squares = {1.0, 1.0}};
    assert_int_equal(vote_culprit(&sum, 3), -1);
    sum.squares[1] = NAN;
    assert_int_equal(vote_culprit(&sum, 3), 1);
    sum.squares[2] = INFINITY; /* its rows' gradients were bad before the encoder's */
    assert_int_equal(vote_culprit(&sum, 3), 2);
    sum.squares[2] = 2.0;
    sum.loss_sum = NAN;
    assert_int_equal(vote_culprit(&sum, 3), 2);
    sum.rows_squares[0] = INFINITY; /* and the rows before the loss */
    assert_int_equal(vote_culprit(&sum, 3), 0);
}

typedef struct Rank {
    Comm *world;
    uint64_t value;
    Ballot ballot;
    Status agreed;
    Status voted;
    char message[256];
} Rank;

static void *rank_main(void *context)
{
    Rank *rank = context;
    Device *device = NULL;
    Stream *stream = NULL;
    double values[BALLOT_VALUES] = {0};
    CHECK(device_open("cpu", 0, &device) == STATUS_OK);
    CHECK(stream_create(device, &stream) == STATUS_OK);
    rank->agreed = vote_agree(rank->world, values, rank->value, "plan", stream, TIMEOUT_MS);
    if (rank->agreed != STATUS_OK) {
        strncpy(rank->message, status_message(), sizeof rank->message - 1);
    }
    memset(values, 0, sizeof values);
    values[1] = 100.0; /* what kernels have summed: squares[1] */
    rank->voted = vote_run(rank->world, values, &rank->ballot, stream, TIMEOUT_MS);
    stream_destroy(stream);
    device_close(device);
    comm_destroy(rank->world);
    return NULL;
}

static void run_ranks(Rank *ranks, const uint64_t *values)
{
    Comm *comms[RANKS];
    pthread_t threads[RANKS];
    assert_int_equal(comm_local_create(RANKS, TIMEOUT_MS, comms), STATUS_OK);
    for (int i = 0; i < RANKS; i++) {
        ranks[i] = (Rank){.world = comms[i], .value = values[i]};
        ranks[i].ballot = (Ballot){.squares = {0.0, 1.0}, .loss_sum = i, .bytes = 1e15 + i};
        assert_int_equal(pthread_create(&threads[i], NULL, rank_main, &ranks[i]), 0);
    }
    for (int i = 0; i < RANKS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
}

static void test_agreement(void **state)
{
    (void)state;
    static const uint64_t same[RANKS] = {UINT64_MAX, UINT64_MAX, UINT64_MAX};
    static const uint64_t low[RANKS] = {UINT64_C(7) << 40, UINT64_C(7) << 40,
                                        UINT64_C(7) << 40 | 1};
    static const uint64_t high[RANKS] = {UINT64_C(1) << 63, 0, UINT64_C(1) << 63};
    Rank ranks[RANKS];
    run_ranks(ranks, same);
    for (int i = 0; i < RANKS; i++) {
        assert_int_equal(ranks[i].agreed, STATUS_OK);
    }
    run_ranks(ranks, low);
    for (int i = 0; i < RANKS; i++) {
        assert_int_equal(ranks[i].agreed, STATUS_INVALID);
        assert_non_null(strstr(ranks[i].message, "the same plan"));
    }
    run_ranks(ranks, high);
    for (int i = 0; i < RANKS; i++) {
        assert_int_equal(ranks[i].agreed, STATUS_INVALID);
    }
}

static void test_sums(void **state)
{
    (void)state;
    static const uint64_t same[RANKS] = {1, 1, 1};
    Rank ranks[RANKS];
    run_ranks(ranks, same);
    for (int i = 0; i < RANKS; i++) {
        assert_int_equal(ranks[i].voted, STATUS_OK);
        assert_true(ranks[i].ballot.squares[1] == 303.0);
        assert_true(ranks[i].ballot.loss_sum == 3.0);
        assert_true(ranks[i].ballot.bytes == 3e15 + 3);
        assert_true(ranks[i].ballot.squares[0] == 0.0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_culprit),
        cmocka_unit_test(test_agreement),
        cmocka_unit_test(test_sums),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
