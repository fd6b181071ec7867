/* Two encoder replicas, a decoder of two tp ranks: rows arrive where the plan says and gradients
 * come back, several microbatches in flight; and a rank that means other samples than its peers is
 * told so instead of training on a mispair. */
#include "base/memory.h"
#include "comm/comm_local.h"
#include "train/boundary.h"

#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    RANKS = 4,
    ENCODERS = 2,
    WIDTH = 5,
    ROWS_PER_IMAGE = 3,
    SAMPLES = 6,
    MICROBATCHES = 3,
    WINDOW = 2,
    ROWS_MAX = 64,
    TIMEOUT_MS = 20000
};

static const StepSample samples[SAMPLES] = {{1, 9, 2}, {2, 9, 2}, {0, 9, 2},
                                            {1, 9, 2}, {3, 9, 2}, {1, 9, 2}};
static const int64_t straight[SAMPLES] = {0, 1, 2, 3, 4, 5};
static const int64_t swapped[SAMPLES] = {3, 1, 2, 0, 4, 5}; /* two samples of one image each */

typedef struct Rank {
    Comm *world;
    const int64_t *order;
    Status status;
    char message[512];
    int differences;
    BoundaryCounts counts;
    float rows[WINDOW][ROWS_MAX * WIDTH];
    float grads[WINDOW][ROWS_MAX * WIDTH];
} Rank;

/* What a row holds, by image and place in it. */
static float value_of(const LoaderItem *item, int row, int column)
{
    return (float)item->sample * 1000 + (float)(item->image * 100 + row * 10 + column);
}

/* Fills the rows of items, or counts those that hold something else than factor * value. */
static int visit(const StepPlan *plan, Range items, float *rows, bool fills, float factor)
{
    int differences = 0;
    for (int64_t i = items.begin; i < items.end; i++) {
        for (int j = 0; j < ROWS_PER_IMAGE * WIDTH; j++, rows++) {
            float value = factor * value_of(&plan->items[i], j / WIDTH, j % WIDTH);
            if (fills) {
                *rows = value;
            }
            differences += *rows != value;
        }
    }
    return differences;
}

static Status cross(Rank *rank, Boundary *boundary, const Place *place, const StepPlan *plan,
                    Stream *stream)
{
    for (int m = 0; m < MICROBATCHES; m++) {
        const StepMicrobatch *part = &plan->microbatches[m];
        float *rows = rank->rows[m % WINDOW];
        float *grads = rank->grads[m % WINDOW];
        BoundaryCrossing forward = {.direction = BOUNDARY_ROWS, .plan = plan, .microbatch = m};
        BoundaryCrossing backward = forward;
        backward.direction = BOUNDARY_GRADS;
        if (place->is_encoder) {
            TRY(boundary_finish(boundary, BOUNDARY_ROWS, m - WINDOW + 1, stream));
            visit(plan, part->encoder_items[place->dp], rows, true, 1);
            forward.source = rows;
            backward.destination = grads;
            TRY(boundary_start(boundary, &forward, stream));
            TRY(boundary_start(boundary, &backward, stream));
            TRY(boundary_finish(boundary, BOUNDARY_GRADS, m + 1, stream));
            rank->differences += visit(plan, part->encoder_items[place->dp], grads, false, -1);
        } else {
            forward.destination = rows;
            backward.source = grads;
            TRY(boundary_start(boundary, &forward, stream));
            TRY(boundary_finish(boundary, BOUNDARY_ROWS, m + 1, stream));
            rank->differences += visit(plan, part->llm_items[place->dp], rows, false, 1);
            TRY(boundary_finish(boundary, BOUNDARY_GRADS, m - WINDOW + 1, stream));
            visit(plan, part->llm_items[place->dp], grads, true, -1);
            TRY(boundary_start(boundary, &backward, stream));
        }
    }
    TRY(boundary_finish(boundary, BOUNDARY_ROWS, INT_MAX, stream));
    return boundary_finish(boundary, BOUNDARY_GRADS, INT_MAX, stream);
}

static Status run_with(Rank *rank, Device *device, Stream *stream, const Place *place,
                       const StepSource *source)
{
    StepPlan plan;
    Boundary *boundary = NULL;
    const BoundaryOptions options = {.world = rank->world,
                                     .device = device,
                                     .kernels = kernels_for(device),
                                     .place = place,
                                     .width = WIDTH,
                                     .window = WINDOW};
    TRY(boundary_create(&options, &boundary));
    TRY(step_plan_init(&plan, source));
    step_plan_make(&plan, 1);
    Status status = cross(rank, boundary, place, &plan, stream);
    if (status != STATUS_OK) {
        snprintf(rank->message, sizeof rank->message, "%s", status_message());
        comm_abort(rank->world, rank->message);
    }
    rank->counts = boundary_take_counts(boundary);
    step_plan_done(&plan);
    boundary_destroy(boundary);
    return status;
}

static Status run_rank(Rank *rank)
{
    Device *device = NULL;
    Stream *stream = NULL;
    Place place = {.encoder = {.first_rank = 0, .sizes = {1, 1, ENCODERS, 1}},
                   .llm = {.first_rank = ENCODERS, .sizes = {RANKS - ENCODERS, 1, 1, 1}},
                   .rank = rank->world->rank,
                   .is_encoder = rank->world->rank < ENCODERS};
    place.dp = place.is_encoder ? place.rank : 0;
    place.tp = place.is_encoder ? 0 : place.rank - ENCODERS;
    const StepSource source = {.samples = samples,
                               .num_samples = SAMPLES,
                               .order = rank->order,
                               .num_ordered = SAMPLES,
                               .batch = SAMPLES,
                               .microbatches = MICROBATCHES,
                               .encoder_dp = ENCODERS,
                               .llm_dp = 1,
                               .rows_per_image = ROWS_PER_IMAGE};
    TRY(device_open("cpu", 0, &device));
    TRY(stream_create(device, &stream));
    Status status = run_with(rank, device, stream, &place, &source);
    stream_destroy(stream);
    device_close(device);
    return status;
}

static void *rank_main(void *context)
{
    Rank *rank = context;
    rank->status = run_rank(rank);
    if (rank->status != STATUS_OK && !rank->message[0]) {
        snprintf(rank->message, sizeof rank->message, "%s", status_message());
    }
    comm_destroy(rank->world);
    return NULL;
}

static void run_ranks(Rank *ranks, const int64_t *encoder_order)
{
    Comm *comms[RANKS];
    pthread_t threads[RANKS];
    assert_int_equal(comm_local_create(RANKS, TIMEOUT_MS, comms), STATUS_OK);
    for (int i = 0; i < RANKS; i++) {
        memset(&ranks[i], 0, sizeof ranks[i]);
        ranks[i].world = comms[i];
        ranks[i].order = i < ENCODERS ? encoder_order : straight;
        assert_int_equal(pthread_create(&threads[i], NULL, rank_main, &ranks[i]), 0);
    }
    for (int i = 0; i < RANKS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
}

static void test_there_and_back(void **state)
{
    (void)state;
    static Rank ranks[RANKS];
    run_ranks(ranks, straight);
    int64_t bytes = 0;
    for (int i = 0; i < RANKS; i++) {
        if (ranks[i].status != STATUS_OK) {
            fail_msg("rank %d: %s", i, ranks[i].message);
        }
        assert_int_equal(ranks[i].differences, 0);
        bytes += ranks[i].counts.bytes;
    }
    int64_t least = (int64_t)sizeof(float) * 2 * 8 * ROWS_PER_IMAGE * WIDTH; /* 8 images */
    assert_int_equal(ranks[0].counts.bytes_minimum, least);
    assert_int_equal(bytes, least);
}

/* All shapes agree, only the samples do not: the first message says so. */
static void test_swapped_sample(void **state)
{
    (void)state;
    static Rank ranks[RANKS];
    run_ranks(ranks, swapped);
    int corrupt = 0;
    for (int i = 0; i < RANKS; i++) {
        assert_int_not_equal(ranks[i].status, STATUS_OK);
        if (ranks[i].status == STATUS_CORRUPT) {
            corrupt++;
            printf("rank %d: %s\n", i, ranks[i].message);
        }
    }
    assert_true(corrupt > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_there_and_back),
        cmocka_unit_test(test_swapped_sample),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
