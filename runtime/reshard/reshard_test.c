#include "base/memory.h"
#include "comm/comm_local.h"
#include "reshard/reshard.h"
#include "reshard/testing.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    SEED = 77001,
    TIMEOUT_MS = 20000,
    WINDOW = 4,
    MESSAGE_BYTES = 1024,
};

/* One rank: a thread. Results are looked at in the main thread, after it joined. */
typedef struct Rank {
    Comm *comm;
    Device *device;
    Stream *stream;
    Reshard *reshard;
    int num_jobs;          /* asked for */
    int num_run;           /* valid pairs */
    int num_wrong;         /* elements */
    int64_t planned_bytes; /* by the plans, over all ranks */
    Status status;
    char message[MESSAGE_BYTES];
    int fault; /* of the rank that has one */
} Rank;

typedef void (*RankMain)(Rank *rank);

typedef struct RankThread {
    Rank *rank;
    RankMain run;
} RankThread;

static void *run_rank(void *argument)
{
    RankThread *thread = argument;
    Rank *rank = thread->rank;
    CHECK(device_open("cpu", 0, &rank->device) == STATUS_OK);
    CHECK(stream_create(rank->device, &rank->stream) == STATUS_OK);
    CHECK(reshard_create(rank->comm, rank->device, kernels_for(rank->device), "vision rows", WINDOW,
                         &rank->reshard) == STATUS_OK);
    thread->run(rank);
    reshard_destroy(rank->reshard);
    stream_destroy(rank->stream);
    device_close(rank->device);
    return NULL;
}

static void run_world(int size, Rank *ranks, RankMain run)
{
    Comm *comms[TESTING_RANKS_MAX];
    pthread_t threads[TESTING_RANKS_MAX];
    RankThread starts[TESTING_RANKS_MAX];
    assert_int_equal(comm_local_create(size, TIMEOUT_MS, comms), STATUS_OK);
    for (int r = 0; r < size; r++) {
        ranks[r].comm = comms[r];
        starts[r] = (RankThread){.rank = &ranks[r], .run = run};
        assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &starts[r]), 0);
    }
    for (int r = 0; r < size; r++) {
        assert_int_equal(pthread_join(threads[r], NULL), 0);
    }
}

static void keep_failure(Rank *rank, Status status)
{
    rank->status = status;
    snprintf(rank->message, sizeof rank->message, "%s", status_message());
}

/* A job of one rank with its own copies of everything, as in a real world. */
typedef struct Work {
    Layout source;
    Layout destination;
    Plan plan;
    float *source_data;
    float *destination_data;
} Work;

static float *make_buffer(int64_t count)
{
    /* Of exactly its size, so that the sanitizer sees one element too many. */
    float *data = NULL;
    assert_int_equal(MEMORY_NEW(&data, count + (count == 0)), STATUS_OK);
    CHECK(data);
    for (int64_t i = 0; i < count; i++) {
        data[i] = NAN;
    }
    return data;
}

static void make_work(const Rank *rank, Work *work, TestingMap *map)
{
    int own = rank->comm->rank;
    work->source_data = make_buffer(layout_rank_count(&work->source, own));
    work->destination_data = make_buffer(layout_rank_count(&work->destination, own));
    testing_map(&work->source, map);
    for (int e = 0; e < map->num_elements; e++) {
        if (map->local[own][e] >= 0) {
            work->source_data[map->local[own][e]] = testing_value(&work->source, own, e);
        }
    }
}

static void check_work(Rank *rank, Work *work, TestingMap *from, TestingMap *to)
{
    int own = rank->comm->rank;
    testing_map(&work->source, from);
    testing_map(&work->destination, to);
    for (int e = 0; e < to->num_elements; e++) {
        if (to->local[own][e] >= 0) {
            float got = work->destination_data[to->local[own][e]];
            rank->num_wrong += got != testing_wanted(&work->source, from, e);
        }
    }
    memory_free(work->source_data);
    memory_free(work->destination_data);
}

static int64_t planned_bytes(const Plan *plan)
{
    int64_t bytes = 0;
    for (int phase = 0; phase < PLAN_PHASE_COUNT; phase++) {
        bytes += plan_moved_count(plan, (PlanPhase)phase) * (int64_t)sizeof(float);
    }
    return bytes;
}

static ReshardJob job_of(const Work *work, uint64_t tag)
{
    return (ReshardJob){.source = &work->source,
                        .destination = &work->destination,
                        .plan = &work->plan,
                        .source_data = work->source_data,
                        .destination_data = work->destination_data,
                        .tag = tag};
}

/* Random pairs, up to WINDOW under way; when a rank finishes one is its own random choice. */
static void run_random(Rank *rank)
{
    Work works[WINDOW] = {0};
    TestingMap *maps = NULL;
    assert_int_equal(MEMORY_NEW(&maps, 2), STATUS_OK);
    CHECK(maps);
    TestingRng own_random = {.rng = {.seed = SEED, .stream = 1000 + (uint64_t)rank->comm->rank}};
    int num_started = 0;
    int num_finished = 0;
    for (int i = 0; i < rank->num_jobs && rank->status == STATUS_OK; i++) {
        Work *work = &works[num_started % WINDOW];
        TestingRng random = {.rng = {.seed = SEED, .stream = (uint64_t)i}};
        testing_pair(&random, rank->comm->size, &work->source, &work->destination);
        if (plan_make(&work->source, &work->destination, &work->plan) != STATUS_OK) {
            continue;
        }
        rank->planned_bytes += planned_bytes(&work->plan);
        make_work(rank, work, maps);
        ReshardJob job = job_of(work, (uint64_t)i);
        Status status = reshard_start(rank->reshard, &job, rank->stream);
        num_started++;
        while (status == STATUS_OK &&
               (num_started - num_finished == WINDOW ||
                (num_started > num_finished && testing_pick(&own_random, 0, 2) == 0))) {
            status = reshard_finish(rank->reshard, rank->stream);
            if (status == STATUS_OK) {
                check_work(rank, &works[num_finished++ % WINDOW], &maps[0], &maps[1]);
            }
        }
        keep_failure(rank, status);
    }
    while (rank->status == STATUS_OK && num_finished < num_started) {
        keep_failure(rank, reshard_finish(rank->reshard, rank->stream));
        check_work(rank, &works[num_finished++ % WINDOW], &maps[0], &maps[1]);
    }
    if (rank->status == STATUS_OK) {
        /* Nobody leaves while others still send. */
        keep_failure(rank, comm_barrier(rank->comm, rank->stream));
    }
    rank->num_run = num_started;
    for (int i = 0; i < WINDOW; i++) {
        layout_done(&works[i].source);
        layout_done(&works[i].destination);
        plan_done(&works[i].plan);
    }
    memory_free(maps);
}

static void test_random_pairs(void **state)
{
    (void)state;
    print_message("seed %d\n", SEED);
    for (int size = 2; size <= TESTING_RANKS_MAX; size++) {
        Rank ranks[TESTING_RANKS_MAX] = {0};
        for (int r = 0; r < size; r++) {
            ranks[r].num_jobs = 150;
        }
        run_world(size, ranks, run_random);
        int64_t sent = 0;
        for (int r = 0; r < size; r++) {
            if (ranks[r].status != STATUS_OK) {
                fail_msg("rank %d of %d: %s", r, size, ranks[r].message);
            }
            assert_int_equal(ranks[r].num_wrong, 0);
            assert_true(ranks[r].num_run > 100);
            assert_int_equal(ranks[r].num_run, ranks[0].num_run);
            sent += ranks[r].comm->bytes_sent;
        }
        assert_int_equal(sent, ranks[0].planned_bytes);
        print_message("%d ranks: %d jobs, %lld bytes\n", size, ranks[0].num_run, (long long)sent);
        for (int r = 0; r < size; r++) {
            comm_destroy(ranks[r].comm);
        }
    }
}

enum {
    LARGE_ROWS = 6000,
    LARGE_COLS = 100,
};

static float large_value(int64_t row, int64_t col)
{
    return (float)(row * LARGE_COLS + col);
}

/* Ranks 0, 1 hold all rows, 2 the first half of the columns, 3 to 5 all; shares of more than a
 * ring's megabyte, runs alone and short ones together: every 5th item is small, and the
 * destination's order is not the source's. */
static void make_large(Work *work)
{
    const int64_t dims[] = {LARGE_ROWS, LARGE_COLS};
    layout_reset(&work->source, 2, dims, LAYOUT_COPIES_REPLICATE);
    layout_reset(&work->destination, 2, dims, LAYOUT_COPIES_REPLICATE);
    enum {
        ITEMS = 50
    };
    for (int i = 0; i < ITEMS; i++) {
        for (int side = 0; side < 2; side++) {
            int item = side == 0 ? i : (i * 7 + 3) % ITEMS;
            int64_t begin = 120 * (int64_t)item;
            Range rows = {begin, begin + 120};
            Range parts[] = {{rows.begin, rows.begin + 5}, {rows.begin + 5, rows.end}};
            for (int part = 0; part < 2; part++) {
                for (int rank = side * 3; rank < side * 3 + 3; rank++) {
                    Box box = {.ranges = {parts[part], {0, rank == 2 ? 50 : LARGE_COLS}}};
                    Layout *layout = side == 0 ? &work->source : &work->destination;
                    CHECK(layout_add(layout, rank, box) == STATUS_OK);
                }
            }
        }
    }
}

static void fill_large(const Layout *layout, int rank, float *data, int *num_wrong)
{
    for (int i = 0; i < layout->num_pieces; i++) {
        const LayoutPiece *piece = &layout->pieces[i];
        if (piece->rank != rank) {
            continue;
        }
        float *at = data + piece->offset;
        for (int64_t row = piece->box.ranges[0].begin; row < piece->box.ranges[0].end; row++) {
            for (int64_t col = piece->box.ranges[1].begin; col < piece->box.ranges[1].end; col++) {
                if (num_wrong) {
                    *num_wrong += *at != large_value(row, col);
                } else {
                    *at = large_value(row, col);
                }
                at++;
            }
        }
    }
}

static void run_large(Rank *rank)
{
    int own = rank->comm->rank;
    Work work = {0};
    for (int i = 0; i < 3 && rank->status == STATUS_OK; i++) {
        make_large(&work);
        CHECK(plan_make(&work.source, &work.destination, &work.plan) == STATUS_OK);
        work.source_data = make_buffer(layout_rank_count(&work.source, own));
        work.destination_data = make_buffer(layout_rank_count(&work.destination, own));
        fill_large(&work.source, own, work.source_data, NULL);
        ReshardJob job = job_of(&work, (uint64_t)i);
        Status status = reshard_start(rank->reshard, &job, rank->stream);
        if (status == STATUS_OK) {
            status = reshard_finish(rank->reshard, rank->stream);
        }
        keep_failure(rank, status);
        if (status == STATUS_OK) {
            fill_large(&work.destination, own, work.destination_data, &rank->num_wrong);
        }
        memory_free(work.source_data);
        memory_free(work.destination_data);
    }
    layout_done(&work.source);
    layout_done(&work.destination);
    plan_done(&work.plan);
}

static void test_large(void **state)
{
    (void)state;
    Rank ranks[TESTING_RANKS_MAX] = {0};
    run_world(6, ranks, run_large);
    for (int r = 0; r < 6; r++) {
        if (ranks[r].status != STATUS_OK) {
            fail_msg("rank %d: %s", r, ranks[r].message);
        }
        assert_int_equal(ranks[r].num_wrong, 0);
        comm_destroy(ranks[r].comm);
    }
}

typedef enum Fault {
    FAULT_NONE,
    FAULT_TAG,
    FAULT_ROWS_SWAPPED,
    FAULT_ROWS_MOVED,
} Fault;

/* Rank 0 has rows [0, 3), [3, 6), [6, 9) of which rank 1 needs all; a rank with a fault thinks
 * otherwise. */
static void run_fault(Rank *rank)
{
    static const Range rows[3][3] = {
        {{0, 3}, {3, 6}, {6, 9}}, {{3, 6}, {0, 3}, {6, 9}}, {{0, 2}, {2, 6}, {6, 9}}};
    int variant = rank->fault == FAULT_ROWS_SWAPPED ? 1 : rank->fault == FAULT_ROWS_MOVED ? 2 : 0;
    Work work = {0};
    const int64_t dims[] = {9, 4};
    layout_init(&work.source, 2, dims, LAYOUT_COPIES_REPLICATE);
    layout_init(&work.destination, 2, dims, LAYOUT_COPIES_REPLICATE);
    for (int i = 0; i < 3; i++) {
        CHECK(layout_add_rows(&work.source, 0, rows[variant][i]) == STATUS_OK);
        CHECK(layout_add_rows(&work.destination, 1, rows[0][2 - i]) == STATUS_OK);
    }
    CHECK(plan_make(&work.source, &work.destination, &work.plan) == STATUS_OK);
    TestingMap *maps = NULL;
    assert_int_equal(MEMORY_NEW(&maps, 2), STATUS_OK);
    CHECK(maps);
    make_work(rank, &work, maps);
    ReshardJob job = job_of(&work, rank->fault == FAULT_TAG ? 90001 : 90002);
    Status status = reshard_start(rank->reshard, &job, rank->stream);
    if (status == STATUS_OK) {
        status = reshard_finish(rank->reshard, rank->stream);
    }
    keep_failure(rank, status);
    if (status == STATUS_OK) {
        check_work(rank, &work, &maps[0], &maps[1]);
    } else {
        memory_free(work.source_data);
        memory_free(work.destination_data);
    }
    memory_free(maps);
    layout_done(&work.source);
    layout_done(&work.destination);
    plan_done(&work.plan);
}

static void test_faults(void **state)
{
    (void)state;
    for (int fault = FAULT_NONE; fault <= FAULT_ROWS_MOVED; fault++) {
        for (int faulty = 0; faulty < 2; faulty++) {
            Rank ranks[TESTING_RANKS_MAX] = {0};
            ranks[faulty].fault = fault;
            run_world(2, ranks, run_fault);
            const char *message = ranks[1].message;
            if (fault == FAULT_NONE) {
                assert_int_equal(ranks[1].status, STATUS_OK);
            } else {
                assert_int_equal(ranks[1].status, STATUS_CORRUPT);
                assert_non_null(strstr(message, "vision rows"));
                assert_non_null(strstr(message, "rank 0"));
                assert_non_null(strstr(message, "rank 1"));
            }
            if (fault == FAULT_TAG) { /* both ranks' tags are told */
                const char *first = strstr(message, "tag ");
                assert_non_null(first);
                assert_non_null(strstr(first + 1, "tag "));
            }
            assert_int_equal(ranks[0].num_wrong + ranks[1].num_wrong, 0);
            comm_destroy(ranks[0].comm);
            comm_destroy(ranks[1].comm);
        }
    }
}

static void run_limits(Rank *rank)
{
    Work work = {0};
    const int64_t dims[] = {0, 4};
    layout_init(&work.source, 2, dims, LAYOUT_COPIES_REPLICATE);
    layout_init(&work.destination, 2, dims, LAYOUT_COPIES_REPLICATE);
    CHECK(plan_make(&work.source, &work.destination, &work.plan) == STATUS_OK);
    ReshardJob job = job_of(&work, 1);
    CHECK(reshard_finish(rank->reshard, rank->stream) == STATUS_CONFLICT);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < WINDOW; i++) {
            CHECK(reshard_start(rank->reshard, &job, rank->stream) == STATUS_OK);
        }
        CHECK(reshard_start(rank->reshard, &job, rank->stream) == STATUS_EXHAUSTED);
        for (int i = 0; i < WINDOW; i++) {
            CHECK(reshard_finish(rank->reshard, rank->stream) == STATUS_OK);
        }
    }
    CHECK(reshard_finish(rank->reshard, rank->stream) == STATUS_CONFLICT);
    layout_done(&work.source);
    layout_done(&work.destination);
    plan_done(&work.plan);
    rank->num_run = 1;
}

/* A job without rows does not wait for the other rank, which never comes. */
static void test_limits(void **state)
{
    (void)state;
    Comm *comms[2];
    assert_int_equal(comm_local_create(2, TIMEOUT_MS, comms), STATUS_OK);
    Rank rank = {.comm = comms[0]};
    RankThread thread = {.rank = &rank, .run = run_limits};
    run_rank(&thread);
    assert_int_equal(rank.num_run, 1);
    comm_destroy(comms[0]);
    comm_destroy(comms[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_random_pairs),
        cmocka_unit_test(test_large),
        cmocka_unit_test(test_faults),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
