/* A run resumed from its checkpoint goes on exactly as the undisturbed one: the same losses and
 * weights bit for bit in the same layout, within tolerance in another. */
#include "base/memory.h"
#include "tests/parity/parity_data.h"
#include "tests/parity/parity_job.h"

#include <math.h>
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
    SEED = 33,
    STEPS = 6,
    SAVED = 3
};

/* Weights at the end, by rank. */
typedef struct Ends {
    float *weights[PARITY_RANKS_MAX];
    int64_t counts[PARITY_RANKS_MAX];
} Ends;

static void keep_weights(ParityRank *rank, const TrainerStep *step)
{
    (void)step;
    Ends *ends = rank->run->context;
    int64_t count = 0;
    for (int k = 0; k < rank->layout.num_modules; k++) {
        const Module *module = trainer_module(rank->trainer, k);
        count += module ? module->params.count : 0;
    }
    float *weights = NULL;
    CHECK(MEMORY_NEW(&weights, count) == STATUS_OK);
    ends->weights[rank->rank] = weights;
    ends->counts[rank->rank] = count;
    for (int k = 0; k < rank->layout.num_modules; k++) {
        const Module *module = trainer_module(rank->trainer, k);
        if (module) {
            memcpy(weights, module->params.values, (size_t)module->params.count * sizeof(float));
            weights += module->params.count;
        }
    }
}

static void free_ends(Ends *ends)
{
    for (int i = 0; i < PARITY_RANKS_MAX; i++) {
        memory_free(ends->weights[i]);
    }
}

static void run_job(const ParityOptions *options, const char *resume_from, ParityRun *run,
                    Ends *ends)
{
    ParityRank ranks[PARITY_RANKS_MAX];
    *ends = (Ends){0};
    JobSpec *spec = parity_spec(options);
    *run = (ParityRun){.spec = spec,
                       .resume_from = resume_from,
                       .is_whole = true,
                       .visit = keep_weights,
                       .context = ends};
    parity_run(run, ranks);
    parity_expect_good(run, ranks, resume_from ? "resumed" : "whole");
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

static void check_same(const ParityRun *whole, const ParityRun *resumed, const Ends *whole_ends,
                       const Ends *ends)
{
    assert_int_equal(resumed->num_steps, STEPS - SAVED);
    for (int i = 0; i < resumed->num_steps; i++) {
        const TrainerStep *a = &whole->steps[SAVED + i];
        const TrainerStep *b = &resumed->steps[i];
        assert_int_equal(a->step, b->step);
        assert_true(a->loss == b->loss);
        assert_true(a->grad_norm == b->grad_norm);
        assert_true(a->learning_rate == b->learning_rate);
    }
    for (int i = 0; i < PARITY_RANKS_MAX; i++) {
        assert_int_equal(whole_ends->counts[i], ends->counts[i]);
        if (ends->counts[i] > 0) {
            assert_memory_equal(whole_ends->weights[i], ends->weights[i],
                                (size_t)ends->counts[i] * sizeof(float));
        }
    }
}

/* AdamW magnifies rounding where a gradient is nearly zero, hence 1e-3; without its moments the
 * next losses would be off by 1e-2 and more. */
static void check_near(const ParityRun *whole, const ParityRun *resumed)
{
    assert_int_equal(resumed->num_steps, STEPS - SAVED);
    for (int i = 0; i < resumed->num_steps; i++) {
        double expected = whole->steps[SAVED + i].loss;
        double found = resumed->steps[i].loss;
        if (!(fabs(found - expected) <= 1e-3 * expected)) {
            fail_msg("step %d: loss %.9g, expected %.9g", SAVED + i + 1, found, expected);
        }
    }
}

static void test_resume(void **state)
{
    (void)state;
    static const int images[] = {1, 0, 2, 7, 1};
    ParityData data;
    ParityRun whole;
    ParityRun resumed;
    Ends whole_ends;
    Ends ends;
    char folder[PARITY_PATH_BYTES + 16];
    parity_data_write(&data, images, NULL, 5);
    snprintf(folder, sizeof folder, "%s/checkpoints", data.folder);
    ParityOptions options = {.shard = data.shard,
                             .checkpoints = folder,
                             .checkpoint_every = SAVED,
                             .layout = PARITY_PLAIN(1, 2, 2, 2),
                             .steps = STEPS,
                             .batch = 4,
                             .microbatches = 2,
                             .warmup = 2,
                             .seed = SEED,
                             .is_adamw = true};
    run_job(&options, NULL, &whole, &whole_ends);
    assert_int_equal(whole.num_steps, STEPS);
    assert_non_null(strstr(whole.checkpoint, "step-00000003"));

    options.checkpoints = NULL;
    run_job(&options, whole.checkpoint, &resumed, &ends);
    check_same(&whole, &resumed, &whole_ends, &ends);
    free_ends(&ends);

    options.layout = PARITY_PLAIN(2, 1, 1, 3);
    run_job(&options, whole.checkpoint, &resumed, &ends);
    check_near(&whole, &resumed);
    free_ends(&ends);
    free_ends(&whole_ends);
    parity_data_remove(&data);
}

/* A checkpoint of another job is refused. */
static void test_other_job(void **state)
{
    (void)state;
    static const int images[] = {1, 0, 2};
    ParityData data;
    ParityRun run;
    Ends ends;
    char folder[PARITY_PATH_BYTES + 16];
    parity_data_write(&data, images, NULL, 3);
    snprintf(folder, sizeof folder, "%s/checkpoints", data.folder);
    ParityOptions options = {.shard = data.shard,
                             .checkpoints = folder,
                             .layout = PARITY_PLAIN(1, 1, 1, 1),
                             .steps = 1,
                             .batch = 2,
                             .seed = SEED};
    run_job(&options, NULL, &run, &ends);
    free_ends(&ends);
    char checkpoint[sizeof run.checkpoint];
    memcpy(checkpoint, run.checkpoint, sizeof checkpoint);
    options.seed = SEED + 1;
    options.steps = 2;
    ParityRank ranks[PARITY_RANKS_MAX];
    JobSpec *spec = parity_spec(&options);
    run = (ParityRun){.spec = spec, .resume_from = checkpoint};
    parity_run(&run, ranks);
    for (int i = 0; i < 2; i++) {
        if (ranks[i].status == STATUS_OK || !strstr(ranks[i].message, "seed 33")) {
            fail_msg("rank %d: %s", i, ranks[i].message);
        }
    }
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
    parity_data_remove(&data);
}

int main(void)
{
    printf("seed %d\n", SEED);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_other_job),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
