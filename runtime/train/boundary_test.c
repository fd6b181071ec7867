/* Rows over random layouts of random jobs, ranks as threads: what stands where is worked out here
 * token by token, and each row must arrive where its token is and its gradient come back, several
 * microbatches in flight. And a rank that means other samples than its peers is told so instead of
 * training on a mispair. */
#include "base/memory.h"
#include "base/rng.h"
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
    CASES = 120,
    SEED = 11,
    MODULE_RANKS_MAX = 8,
    RANKS_MAX = JOB_MODULES_MAX * MODULE_RANKS_MAX + 2,
    SAMPLES = 14,
    SAMPLE_ITEMS_MAX = 4,
    ITEM_ROWS_MAX = 20,
    MICROBATCHES = 4,
    STEPS = 2,
    WINDOW = 2,
    WIDTH = 3,
    ROWS_MAX = SAMPLES * SAMPLE_ITEMS_MAX * ITEM_ROWS_MAX,
    /* The name of a row: sample, item among those of its media, row of it. */
    ID_ITEM = 32,
    ID_SAMPLE = 8 * ID_ITEM,
    IDS = SAMPLES * ID_SAMPLE,
    TIMEOUT_MS = 20000
};

_Static_assert(ID_ITEM >= ITEM_ROWS_MAX && ID_SAMPLE >= SAMPLE_ITEMS_MAX * ID_ITEM, "ids differ");

typedef enum End {
    END_ENCODER,
    END_DECODER,
    END_COUNT,
} End;

typedef struct Case {
    int test;
    int draws;
    int world_size;
    int num_modules;
    ModuleSpec specs[JOB_MODULES_MAX];
    Grid grids[JOB_MODULES_MAX];
    int extra_tokens[JOB_MODULES_MAX];
    SampleItem items[SAMPLES][SAMPLE_ITEMS_MAX];
    StepSample samples[SAMPLES];
    int64_t order[SAMPLES];
    StepSource source;
} Case;

/* Uniform in [low, high]. */
static int pick(Case *random, int low, int high)
{
    return low + (int)rng_below((Rng){SEED, (uint64_t)random->test}, (uint64_t)random->draws++,
                                (uint64_t)high - (uint64_t)low + 1);
}

/* ---- random jobs ---- */

static void make_modules(Case *job)
{
    static const int uneven[3][2] = {{3, 2}, {2, 3}, {5, 4}}; /* replicas that do not divide */
    job->num_modules = 2 + pick(job, 0, 2);
    for (int i = 0; i < job->num_modules; i++) {
        int *sizes = job->grids[i].sizes;
        do {
            sizes[GRID_AXIS_TP] = pick(job, 1, 3);
            sizes[GRID_AXIS_CP] = pick(job, 1, 3);
            sizes[GRID_AXIS_DP] = pick(job, 1, 5);
            sizes[GRID_AXIS_PP] = pick(job, 1, 2);
            if (job->test < 9) {
                job->num_modules = 2;
                sizes[GRID_AXIS_DP] = uneven[job->test % 3][i];
            }
        } while (grid_size(&job->grids[i]) > MODULE_RANKS_MAX);
        viaduct__v1__module_spec__init(&job->specs[i]);
        job->specs[i].sequence_parallel = pick(job, 0, 1);
        job->extra_tokens[i] = pick(job, 0, 1);
    }
}

/* Pools of their own, one pool, or grids that begin anywhere. */
static void place_modules(Case *job)
{
    int how = job->test % 3;
    int end = pick(job, 0, 2);
    for (int i = 0; i < job->num_modules; i++) {
        Grid *grid = &job->grids[i];
        grid->first_rank = how == 0 ? end : how == 1 ? 1 : pick(job, 0, 4);
        int next = grid->first_rank + grid_size(grid);
        end = next > end ? next : end;
    }
    job->world_size = end;
}

static void make_samples(Case *job)
{
    int rows_max = pick(job, 1, ITEM_ROWS_MAX);
    int gap_max = pick(job, 0, 12);
    for (int s = 0; s < SAMPLES; s++) {
        StepSample *sample = &job->samples[s];
        sample->items = job->items[s];
        sample->num_items = pick(job, 0, SAMPLE_ITEMS_MAX);
        int counts[SAMPLE_MEDIA_COUNT] = {0};
        for (int i = 0; i < sample->num_items; i++) {
            SampleItem *item = &job->items[s][i];
            item->media = (SampleMedia)pick(job, 0, SAMPLE_MEDIA_COUNT - 1);
            item->index = counts[item->media]++;
            item->rows = pick(job, 0, 5) == 0 ? 0 : pick(job, 1, rows_max);
            item->first_token = sample->num_tokens + pick(job, 0, gap_max);
            sample->num_tokens = item->first_token + item->rows;
        }
        sample->num_tokens += pick(job, 1, 1 + gap_max);
        job->order[s] = s;
    }
}

static void make_case(int test, Case *job)
{
    memset(job, 0, sizeof *job);
    job->test = test;
    make_modules(job);
    place_modules(job);
    make_samples(job);
    job->source = (StepSource){
        .samples = job->samples,
        .num_samples = SAMPLES,
        .order = job->order,
        .num_ordered = SAMPLES,
        .batch = pick(job, SAMPLES / 2, SAMPLES),
        .microbatches = pick(job, 1, MICROBATCHES),
        .num_encoders = job->num_modules - 1,
        .llm_dp = job->grids[job->num_modules - 1].sizes[GRID_AXIS_DP],
    };
    for (int e = 0; e < job->source.num_encoders; e++) {
        job->source.encoders[e] =
            (StepEncoder){.media = e % SAMPLE_MEDIA_COUNT, .dp = job->grids[e].sizes[GRID_AXIS_DP]};
    }
}

static Place place_of(const Case *job, int rank)
{
    Place place = {.rank = rank, .world_size = job->world_size, .num_modules = job->num_modules};
    for (int i = 0; i < job->num_modules; i++) {
        PlaceModule *module = &place.modules[i];
        *module = (PlaceModule){.name = i + 1 < job->num_modules ? "encoder" : "llm",
                                .spec = &job->specs[i],
                                .grid = job->grids[i],
                                .chunks = 1,
                                .is_here = grid_contains(&job->grids[i], rank)};
        if (module->is_here) {
            module->coords = grid_coords(&module->grid, rank);
        }
    }
    return place;
}

/* ---- what stands where, token by token ---- */

/* Whether a cp rank has token `at` of a segment: of 2 cp chunks, those at its place from both
 * ends. */
static bool is_on_cp_rank(int64_t length, int64_t at, int cp_size, int cp_rank)
{
    int chunk = 0;
    while (at >= range_part(length, 2 * (int64_t)cp_size, chunk).end) {
        chunk++;
    }
    return chunk == cp_rank || chunk == 2 * cp_size - 1 - cp_rank;
}

/* Cuts the tokens of a cp rank, each the name of its row or -1, to those of its tp rank; leaves
 * names only. */
static int cut_tokens(const Case *job, int module, GridCoords coords, int32_t *tokens, int num)
{
    Range part = {0, num};
    if (job->specs[module].sequence_parallel) {
        part = range_part(num, job->grids[module].sizes[GRID_AXIS_TP], coords.at[GRID_AXIS_TP]);
    }
    int count = 0;
    for (int64_t i = part.begin; i < part.end; i++) {
        if (tokens[i] >= 0) {
            tokens[count++] = tokens[i];
        }
    }
    return count;
}

static int list_encoder(const Case *job, const StepPlan *plan, int e, int m, GridCoords coords,
                        int32_t *ids)
{
    int num = 0;
    Range items = plan->microbatches[m].crossings[e].encoder_items[coords.at[GRID_AXIS_DP]];
    for (int64_t i = items.begin; i < items.end; i++) {
        const StepItem *item = &plan->items[e][i];
        int extra = job->extra_tokens[e];
        int id = (int)item->load.sample * ID_SAMPLE + item->load.index * ID_ITEM;
        for (int t = 0; t < extra + item->rows; t++) {
            if (is_on_cp_rank(extra + item->rows, t, job->grids[e].sizes[GRID_AXIS_CP],
                              coords.at[GRID_AXIS_CP])) {
                ids[num++] = t < extra ? -1 : id + t - extra;
            }
        }
    }
    return cut_tokens(job, e, coords, ids, num);
}

/* The row of encoder `e` that stands at a token of a sample, or -1. */
static int32_t id_at(const Case *job, int e, int64_t s, int t)
{
    const StepSample *sample = &job->samples[s];
    for (int i = 0; i < sample->num_items; i++) {
        const SampleItem *item = &sample->items[i];
        if (item->media == job->source.encoders[e].media && t >= item->first_token &&
            t < item->first_token + item->rows) {
            return (int32_t)s * ID_SAMPLE + item->index * ID_ITEM + t - item->first_token;
        }
    }
    return -1;
}

static int list_decoder(const Case *job, const StepPlan *plan, int e, int m, GridCoords coords,
                        bool is_whole, int32_t *ids)
{
    int llm = job->num_modules - 1;
    int num = 0;
    Range samples = plan->microbatches[m].llm_samples[coords.at[GRID_AXIS_DP]];
    for (int64_t i = samples.begin; i < samples.end; i++) {
        int64_t s = plan->samples[i];
        for (int t = 0; t < job->samples[s].num_tokens; t++) {
            int32_t id = id_at(job, e, s, t);
            if (is_whole
                    ? id >= 0
                    : is_on_cp_rank(job->samples[s].num_tokens, t,
                                    job->grids[llm].sizes[GRID_AXIS_CP], coords.at[GRID_AXIS_CP])) {
                ids[num++] = id;
            }
        }
    }
    return is_whole ? num : cut_tokens(job, llm, coords, ids, num);
}

/* The names of the rows that a rank has at an end, in their order; returns how many. */
static int list_rows(const Case *job, const StepPlan *plan, int e, int m, End end, int rank,
                     bool is_whole, int32_t *ids)
{
    int module = end == END_ENCODER ? e : job->num_modules - 1;
    const Grid *grid = &job->grids[module];
    if (!grid_contains(grid, rank)) {
        return 0;
    }
    GridCoords coords = grid_coords(grid, rank);
    if (coords.at[GRID_AXIS_PP] != (end == END_ENCODER ? grid->sizes[GRID_AXIS_PP] - 1 : 0)) {
        return 0;
    }
    return end == END_ENCODER ? list_encoder(job, plan, e, m, coords, ids)
                              : list_decoder(job, plan, e, m, coords, is_whole, ids);
}

/* Rows that some rank of one end needs and no rank that has rows there has as one of the other
 * end. */
static int64_t count_crossing(const Case *job, const StepPlan *plan, int e, int m, End from,
                              bool is_whole)
{
    static char is_needed[IDS], is_had[IDS];
    static int32_t ids[ROWS_MAX * 2];
    memset(is_needed, 0, sizeof is_needed);
    memset(is_had, 0, sizeof is_had);
    for (int rank = 0; rank < job->world_size; rank++) {
        int num = list_rows(job, plan, e, m, (End)!from, rank, is_whole, ids);
        for (int i = 0; i < num; i++) {
            is_needed[ids[i]] = 1;
        }
        int has = num > 0 ? list_rows(job, plan, e, m, from, rank, is_whole, ids) : 0;
        for (int i = 0; i < has; i++) {
            is_had[ids[i]] = 1;
        }
    }
    int64_t count = 0;
    for (int i = 0; i < IDS; i++) {
        count += is_needed[i] && !is_had[i];
    }
    return count;
}

/* ---- one rank ---- */

typedef struct Buffers {
    float rows[END_COUNT][WINDOW][ROWS_MAX * WIDTH];
    float grads[END_COUNT][WINDOW][ROWS_MAX * WIDTH];
} Buffers;

typedef struct Rank {
    Comm *world;
    const Case *job;
    const int64_t *order;
    Place place;
    Status status;
    char message[512];
    int differences;
    Boundary *boundaries[STEP_ENCODERS_MAX];
    int64_t bytes;
    int64_t bytes_minimum[STEP_ENCODERS_MAX];
    StepPlan plan;
    Stream *stream;
    Buffers *buffers; /* [encoders] */
} Rank;

/* Fills an end's rows, or counts those that hold something else than factor * what the name
 * says. */
static int visit(Rank *rank, int e, int m, End end, bool is_whole, float *rows, bool fills,
                 float factor)
{
    int32_t ids[ROWS_MAX * 2];
    int num = list_rows(rank->job, &rank->plan, e, m, end, rank->place.rank, is_whole, ids);
    int differences = 0;
    for (int i = 0; i < num * WIDTH; i++) {
        int id = ids[i / WIDTH] * WIDTH + i % WIDTH;
        float value = factor * (float)(1 + e * 100000 + id);
        if (fills) {
            rows[i] = value;
        }
        differences += rows[i] != value;
    }
    if (end == END_DECODER && !is_whole) {
        StepBounds bounds;
        differences += boundary_count_rows(rank->boundaries[e], &rank->plan, m) != num;
        differences += step_plan_bounds(&rank->plan.source, &bounds) != STATUS_OK ||
                       boundary_rows_max(&rank->place, &bounds, e) < num;
    }
    return differences;
}

/* Rows out of one encoder, and into the decoder if this rank is there too. */
static Status start_rows(Rank *rank, int e, int m, bool is_whole)
{
    Boundary *boundary = rank->boundaries[e];
    float(*rows)[WINDOW][ROWS_MAX * WIDTH] = rank->buffers[e].rows;
    TRY(boundary_finish(boundary, BOUNDARY_ROWS, m - WINDOW + 1, rank->stream));
    visit(rank, e, m, END_ENCODER, is_whole, rows[END_ENCODER][m % WINDOW], true, 1);
    const BoundaryCrossing crossing = {
        .direction = BOUNDARY_ROWS,
        .plan = &rank->plan,
        .microbatch = m,
        .kind = is_whole,
        .is_whole = is_whole,
        .source = boundary_is_encoder(boundary) ? rows[END_ENCODER][m % WINDOW] : NULL,
        .destination = boundary_is_decoder(boundary) ? rows[END_DECODER][m % WINDOW] : NULL};
    return boundary_start(boundary, &crossing, rank->stream);
}

static Status finish_rows(Rank *rank, int e, int m, bool is_whole)
{
    if (boundary_is_decoder(rank->boundaries[e])) {
        TRY(boundary_finish(rank->boundaries[e], BOUNDARY_ROWS, m + 1, rank->stream));
        rank->differences += visit(rank, e, m, END_DECODER, is_whole,
                                   rank->buffers[e].rows[END_DECODER][m % WINDOW], false, 1);
    }
    return STATUS_OK;
}

static Status start_grads(Rank *rank, int e, int m)
{
    Boundary *boundary = rank->boundaries[e];
    float(*grads)[WINDOW][ROWS_MAX * WIDTH] = rank->buffers[e].grads;
    TRY(boundary_finish(boundary, BOUNDARY_GRADS, m - WINDOW + 1, rank->stream));
    visit(rank, e, m, END_DECODER, false, grads[END_DECODER][m % WINDOW], true, -1);
    const BoundaryCrossing crossing = {
        .direction = BOUNDARY_GRADS,
        .plan = &rank->plan,
        .microbatch = m,
        .source = boundary_is_decoder(boundary) ? grads[END_DECODER][m % WINDOW] : NULL,
        .destination = boundary_is_encoder(boundary) ? grads[END_ENCODER][m % WINDOW] : NULL};
    return boundary_start(boundary, &crossing, rank->stream);
}

static Status finish_grads(Rank *rank, int e, int m)
{
    if (boundary_is_encoder(rank->boundaries[e])) {
        TRY(boundary_finish(rank->boundaries[e], BOUNDARY_GRADS, m + 1, rank->stream));
        rank->differences += visit(rank, e, m, END_ENCODER, false,
                                   rank->buffers[e].grads[END_ENCODER][m % WINDOW], false, -1);
    }
    return STATUS_OK;
}

/* Encoders run one microbatch ahead, as they do in training. */
static Status cross(Rank *rank, bool is_whole)
{
    int num = rank->plan.source.microbatches;
    int encoders = rank->plan.source.num_encoders;
    for (int at = 0; at <= num; at++) {
        for (int e = 0; e < encoders && at < num; e++) {
            TRY(start_rows(rank, e, at, is_whole));
        }
        for (int e = 0; e < encoders && at > 0; e++) {
            TRY(finish_rows(rank, e, at - 1, is_whole));
        }
        for (int e = 0; e < encoders && at > 0 && !is_whole; e++) {
            TRY(start_grads(rank, e, at - 1));
        }
        for (int e = 0; e < encoders && at > 0 && !is_whole; e++) {
            TRY(finish_grads(rank, e, at - 1));
        }
    }
    for (int e = 0; e < encoders; e++) {
        TRY(boundary_finish(rank->boundaries[e], BOUNDARY_ROWS, INT_MAX, rank->stream));
        TRY(boundary_finish(rank->boundaries[e], BOUNDARY_GRADS, INT_MAX, rank->stream));
    }
    return STATUS_OK;
}

static Status cross_steps(Rank *rank)
{
    for (int64_t step = 1; step <= STEPS; step++) {
        step_plan_make(&rank->plan, step);
        TRY(cross(rank, false));
        TRY(cross(rank, true));
    }
    return STATUS_OK;
}

static Status run_with(Rank *rank, Device *device)
{
    StepSource source = rank->job->source;
    source.order = rank->order;
    for (int e = 0; e < source.num_encoders; e++) {
        const BoundaryOptions options = {.world = rank->world,
                                         .device = device,
                                         .kernels = kernels_for(device),
                                         .place = &rank->place,
                                         .encoder = e,
                                         .extra_tokens = rank->job->extra_tokens[e],
                                         .width = WIDTH,
                                         .window = WINDOW};
        TRY(boundary_create(&options, &rank->boundaries[e]));
    }
    TRY(step_plan_init(&rank->plan, &source));
    TRY(MEMORY_NEW(&rank->buffers, source.num_encoders));
    return cross_steps(rank);
}

static void *rank_main(void *context)
{
    Rank *rank = context;
    Device *device = NULL;
    CHECK(device_open("cpu", 0, &device) == STATUS_OK);
    CHECK(stream_create(device, &rank->stream) == STATUS_OK);
    rank->status = run_with(rank, device);
    if (rank->status != STATUS_OK) {
        snprintf(rank->message, sizeof rank->message, "%s", status_message());
        comm_abort(rank->world, rank->message);
    }
    for (int e = 0; e < STEP_ENCODERS_MAX; e++) {
        if (rank->boundaries[e]) {
            BoundaryCounts counts = boundary_take_counts(rank->boundaries[e]);
            rank->bytes += counts.bytes;
            rank->bytes_minimum[e] = counts.bytes_minimum;
        }
        boundary_destroy(rank->boundaries[e]);
    }
    step_plan_done(&rank->plan);
    memory_free(rank->buffers);
    stream_destroy(rank->stream);
    device_close(device);
    comm_destroy(rank->world);
    return NULL;
}

/* `order` [ranks] is what each rank takes for the order of samples; NULL: that of the job. */
static void run_ranks(const Case *job, Rank *ranks, const int64_t *const *orders)
{
    Comm *comms[RANKS_MAX];
    pthread_t threads[RANKS_MAX];
    assert_int_equal(comm_local_create(job->world_size, TIMEOUT_MS, comms), STATUS_OK);
    for (int i = 0; i < job->world_size; i++) {
        ranks[i] = (Rank){.world = comms[i],
                          .job = job,
                          .order = orders ? orders[i] : job->order,
                          .place = place_of(job, i)};
        assert_int_equal(pthread_create(&threads[i], NULL, rank_main, &ranks[i]), 0);
    }
    for (int i = 0; i < job->world_size; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
}

/* Bytes that must leave the ends' ranks in all that cross_steps does, of one encoder. */
static int64_t bytes_of(const Case *job, StepPlan *plan, int e)
{
    int64_t rows = 0;
    for (int64_t step = 1; step <= STEPS; step++) {
        step_plan_make(plan, step);
        for (int m = 0; m < job->source.microbatches; m++) {
            rows += count_crossing(job, plan, e, m, END_ENCODER, false);
            rows += count_crossing(job, plan, e, m, END_DECODER, false);
            rows += count_crossing(job, plan, e, m, END_ENCODER, true);
        }
    }
    return rows * WIDTH * (int64_t)sizeof(float);
}

static void check_counts(const Case *job, const Rank *ranks)
{
    StepPlan plan;
    assert_int_equal(step_plan_init(&plan, &job->source), STATUS_OK);
    int64_t bytes = 0;
    int64_t least = 0;
    for (int e = 0; e < job->source.num_encoders; e++) {
        int64_t least_of_encoder = bytes_of(job, &plan, e);
        least += least_of_encoder;
        for (int i = 0; i < job->world_size; i++) {
            bool is_at_end = place_is_last_stage(&ranks[i].place.modules[e]) ||
                             place_is_first_stage(place_decoder(&ranks[i].place));
            assert_int_equal(ranks[i].bytes_minimum[e], is_at_end ? least_of_encoder : 0);
        }
    }
    for (int i = 0; i < job->world_size; i++) {
        bytes += ranks[i].bytes;
    }
    assert_int_equal(bytes, least);
    step_plan_done(&plan);
}

static void test_there_and_back(void **state)
{
    (void)state;
    static Case job;
    static Rank ranks[RANKS_MAX];
    for (int test = 0; test < CASES; test++) {
        make_case(test, &job);
        run_ranks(&job, ranks, NULL);
        for (int i = 0; i < job.world_size; i++) {
            if (ranks[i].status != STATUS_OK || ranks[i].differences != 0) {
                fail_msg("case %d, rank %d: %d differences, %s", test, i, ranks[i].differences,
                         ranks[i].message);
            }
        }
        check_counts(&job, ranks);
    }
}

/* All shapes agree, only the samples do not: the first message says so. */
static void test_swapped_samples(void **state)
{
    (void)state;
    static Case job;
    static Rank ranks[RANKS_MAX];
    const int64_t *orders[RANKS_MAX];
    int64_t swapped[SAMPLES];
    make_case(0, &job);
    job.source.batch = SAMPLES;
    for (int s = 0; s < SAMPLES; s++) {
        job.items[s][0] = (SampleItem){.media = SAMPLE_MEDIA_IMAGE, .rows = 4, .first_token = 2};
        job.samples[s].num_items = 1;
        job.samples[s].num_tokens = 9;
        swapped[s] = s < 2 ? 1 - s : s;
    }
    for (int i = 0; i < job.world_size; i++) {
        bool is_decoder = grid_contains(&job.grids[job.num_modules - 1], i);
        orders[i] = is_decoder ? swapped : job.order;
    }
    run_ranks(&job, ranks, orders);
    int corrupt = 0;
    for (int i = 0; i < job.world_size; i++) {
        bool is_corrupt = ranks[i].status == STATUS_CORRUPT;
        if (is_corrupt && corrupt++ == 0) {
            printf("rank %d: %s\n", i, ranks[i].message);
        }
        assert_int_equal(ranks[i].differences, 0);
    }
    assert_true(corrupt > 0);
}

int main(void)
{
    printf("seed %d\n", SEED);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_there_and_back),
        cmocka_unit_test(test_swapped_samples),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
