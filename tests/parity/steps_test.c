/* Steps that are out of the ordinary: without images, with more replicas than samples, without
 * labels, clipped, not finite, stopped; and evaluation. */
#include "base/memory.h"
#include "tests/parity/faulty.h"
#include "tests/parity/parity_data.h"
#include "tests/parity/parity_reference.h"

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
    SEED = 4
};

static const int uneven[] = {2, 0, 7, 1, 0, 1, 3, 0, 1};

static void compare(ParityRank *rank, const TrainerStep *step)
{
    parity_compare(rank->run->context, rank, step);
}

/* One job against the truth. */
static void check_job(const ParityOptions *options, const ModuleOps *faulty, Range masked,
                      const char *what)
{
    ParityRank ranks[PARITY_RANKS_MAX];
    JobSpec *spec = parity_spec(options);
    ParityReference reference;
    parity_reference_make(&reference, spec, masked);
    ParityRun run = {.spec = spec, .faulty = faulty, .visit = compare, .context = &reference};
    parity_run(&run, ranks);
    parity_expect_good(&run, ranks, what);
    parity_reference_free(&reference);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

/* ---- no images ---- */

/* How many microbatches of one sample each have no image, and how many steps. */
static void count_text(const ParityOptions *options, const int *images, int num, int *microbatches,
                       int *steps)
{
    JobSpec *spec = parity_spec(options);
    *microbatches = 0;
    *steps = 0;
    for (int s = 0; s < options->steps; s++) {
        int text = 0;
        for (int i = 0; i < options->batch; i++) {
            text += images[parity_reference_sample(spec, num, s * options->batch + i)] == 0;
        }
        *steps += text == options->batch;
        *microbatches += text < options->batch ? text : 0;
    }
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

static void test_text_only(void **state)
{
    (void)state;
    static const int images[] = {0, 0, 3, 0, 1};
    const ParityLayout layouts[] = {PARITY_PLAIN(1, 2, 2, 1), PARITY_PLAIN(2, 1, 1, 2)};
    ParityData data;
    parity_data_write(&data, images, NULL, 5);
    for (int i = 0; i < 2; i++) {
        const ParityOptions options = {.shard = data.shard,
                                       .layout = layouts[i],
                                       .steps = 5,
                                       .batch = 2,
                                       .microbatches = 2,
                                       .seed = SEED};
        int microbatches = 0;
        int steps = 0;
        count_text(&options, images, 5, &microbatches, &steps);
        printf("%d steps and %d more microbatches without an image\n", steps, microbatches);
        assert_true(microbatches > 0 && steps > 0 && steps < options.steps);
        check_job(&options, NULL, (Range){0, 0}, "text only");
    }
    parity_data_remove(&data);
}

static void test_no_image_at_all(void **state)
{
    (void)state;
    static const int images[] = {0, 0, 0};
    ParityData data;
    parity_data_write(&data, images, NULL, 3);
    const ParityOptions options = {.shard = data.shard,
                                   .layout = PARITY_PLAIN(1, 2, 1, 2),
                                   .steps = 2,
                                   .batch = 3,
                                   .seed = SEED};
    check_job(&options, NULL, (Range){0, 0}, "no image at all");
    parity_data_remove(&data);
}

/* ---- more replicas and microbatches than samples; labels; clipping ---- */

static void test_few_samples(void **state)
{
    (void)state;
    ParityData data;
    parity_data_write(&data, uneven, NULL, sizeof uneven / sizeof *uneven);
    ParityOptions options = {.shard = data.shard, .steps = 3, .batch = 2, .seed = SEED};
    for (int microbatches = 1; microbatches <= 3; microbatches += 2) {
        options.microbatches = microbatches;
        options.layout = PARITY_PLAIN(1, 5, 1, 3);
        check_job(&options, NULL, (Range){0, 0}, "few samples");
        options.layout = PARITY_PLAIN(2, 2, 2, 3);
        check_job(&options, NULL, (Range){0, 0}, "few samples");
    }
    parity_data_remove(&data);
}

/* A batch larger than the data set, so that a sample occurs more than once in a step. */
static void test_small_data(void **state)
{
    (void)state;
    static const int images[] = {2, 0, 1};
    ParityData data;
    parity_data_write(&data, images, NULL, 3);
    const ParityOptions options = {.shard = data.shard,
                                   .layout = PARITY_PLAIN(1, 2, 2, 1),
                                   .steps = 2,
                                   .batch = 8,
                                   .microbatches = 2,
                                   .seed = SEED};
    check_job(&options, NULL, (Range){0, 0}, "small data");
    parity_data_remove(&data);
}

static void test_masked_microbatch(void **state)
{
    (void)state;
    ParityData data;
    parity_data_write(&data, uneven, NULL, sizeof uneven / sizeof *uneven);
    const ParityOptions options = {.shard = data.shard,
                                   .layout = PARITY_PLAIN(1, 2, 2, 1),
                                   .steps = 3,
                                   .batch = 4,
                                   .microbatches = FAULTY_MICROBATCHES,
                                   .seed = SEED};
    check_job(&options, faulty_ops(FAULTY_LLM_MASKED), (Range){0, 2}, "masked");
    parity_data_remove(&data);
}

static void test_clipping(void **state)
{
    (void)state;
    ParityData data;
    parity_data_write(&data, uneven, NULL, sizeof uneven / sizeof *uneven);
    const ParityOptions options = {.shard = data.shard,
                                   .layout = PARITY_PLAIN(2, 2, 2, 1),
                                   .steps = 3,
                                   .batch = 4,
                                   .seed = SEED,
                                   .max_grad_norm = 0.25};
    check_job(&options, NULL, (Range){0, 0}, "clipping");
    parity_data_remove(&data);
}

/* ---- not finite ---- */

typedef struct Dropped {
    const char *module;
    float *weights[PARITY_RANKS_MAX]; /* after the first step */
} Dropped;

/* The second step is dropped by all ranks together and leaves the weights alone; the third counts
 * again. */
static void check_dropped(ParityRank *rank, const TrainerStep *step)
{
    Dropped *dropped = rank->run->context;
    const ParamSet *params = &trainer_module(rank->trainer, parity_serves(rank, 0) ? 0 : 1)->params;
    float **weights = &dropped->weights[rank->rank];
    size_t size_bytes = (size_t)params->count * sizeof(float);
    if (step->step == 1) {
        CHECK(MEMORY_NEW(weights, params->count) == STATUS_OK);
        memcpy(*weights, params->values, size_bytes);
    }
    bool is_bad = step->step == 2;
    if (step->committed == is_bad || strcmp(step->module, is_bad ? dropped->module : "") != 0) {
        parity_report_fail(&rank->report, "step %lld: committed %d, module \"%s\"",
                           (long long)step->step, step->committed, step->module);
    }
    bool is_same = memcmp(*weights, params->values, size_bytes) == 0;
    if (step->step > 1 && is_same != is_bad) {
        parity_report_fail(&rank->report, "step %lld: weights %s", (long long)step->step,
                           is_same ? "did not change" : "changed");
    }
}

static void check_not_finite(const char *shard, const ModuleOps *faulty, const char *module)
{
    ParityRank ranks[PARITY_RANKS_MAX];
    Dropped dropped = {.module = module};
    const ParityOptions options = {.shard = shard,
                                   .layout = PARITY_PLAIN(1, 2, 2, 1),
                                   .steps = 3,
                                   .batch = 6,
                                   .microbatches = FAULTY_MICROBATCHES,
                                   .seed = SEED};
    JobSpec *spec = parity_spec(&options);
    ParityRun run = {.spec = spec, .faulty = faulty, .visit = check_dropped, .context = &dropped};
    parity_run(&run, ranks);
    parity_expect_good(&run, ranks, "not finite");
    for (int i = 0; i < PARITY_RANKS_MAX; i++) {
        memory_free(dropped.weights[i]);
    }
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

static void test_not_finite(void **state)
{
    (void)state;
    ParityData data;
    parity_data_write(&data, uneven, NULL, sizeof uneven / sizeof *uneven);
    check_not_finite(data.shard, faulty_ops(FAULTY_VISION_NOT_FINITE), "vision");
    check_not_finite(data.shard, faulty_ops(FAULTY_VISION_BAD_ROWS), "vision");
    check_not_finite(data.shard, faulty_ops(FAULTY_LLM_NOT_FINITE), "llm");
    parity_data_remove(&data);
}

/* ---- stop ---- */

static void stop_at_two(ParityRank *rank, const TrainerStep *step)
{
    if (step->step == 2 && rank->rank == 1) {
        trainer_stop(rank->trainer, "the test has seen enough");
    }
}

static void test_stop(void **state)
{
    (void)state;
    ParityData data;
    parity_data_write(&data, uneven, NULL, sizeof uneven / sizeof *uneven);
    ParityRank ranks[PARITY_RANKS_MAX];
    const ParityOptions options = {.shard = data.shard,
                                   .layout = PARITY_PLAIN(1, 2, 2, 1),
                                   .steps = 1000,
                                   .batch = 2,
                                   .seed = SEED};
    JobSpec *spec = parity_spec(&options);
    ParityRun run = {.spec = spec, .visit = stop_at_two};
    parity_run(&run, ranks);
    for (int i = 0; i < parity_ranks(&run); i++) {
        assert_int_equal(ranks[i].status, STATUS_ABORTED);
        if (!strstr(ranks[i].message, "step 2, ") && !strstr(ranks[i].message, "step 3, ")) {
            fail_msg("rank %d: \"%s\" does not name the step", i, ranks[i].message);
        }
    }
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
    parity_data_remove(&data);
}

/* One rank's bad file ends the job on all ranks; its own message says where. */
static void test_bad_image(void **state)
{
    (void)state;
    static const int images[] = {1, 0};
    ParityData data;
    parity_data_write(&data, images, NULL, 2);
    parity_data_spoil(&data);
    ParityRank ranks[PARITY_RANKS_MAX];
    const ParityOptions options = {.shard = data.shard,
                                   .layout = PARITY_PLAIN(1, 2, 2, 1),
                                   .steps = 3,
                                   .batch = 2,
                                   .seed = SEED};
    JobSpec *spec = parity_spec(&options);
    ParityRun run = {.spec = spec};
    parity_run(&run, ranks);
    int named = 0;
    for (int i = 0; i < parity_ranks(&run); i++) {
        assert_int_not_equal(ranks[i].status, STATUS_OK);
        named += strstr(ranks[i].message, "step 1, microbatch 0, ENCODE") &&
                 strstr(ranks[i].message, "sample-00");
    }
    if (named == 0) {
        fail_msg("rank 0: %s", ranks[0].message);
    }
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
    parity_data_remove(&data);
}

/* ---- evaluation ---- */

static void near(double found, double expected)
{
    if (!(fabs(found - expected) <= 1e-5 * fabs(expected))) {
        fail_msg("%.9g, expected %.9g", found, expected);
    }
}

/* Held-out loss of the trained weights, with right images and with others', by the truth. */
static void check_losses(const ParityRun *run, ParityReference *reference, const int *images,
                         int num)
{
    int64_t samples[16];
    int64_t from[16];
    int with_items[16];
    int count = 0;
    for (int i = 0; i < num; i++) {
        samples[i] = i;
        from[i] = i;
        if (images[i] > 0) {
            with_items[count++] = i;
        }
    }
    near(run->heldout_loss,
         parity_reference_loss(reference, reference->dataset, samples, samples, num));
    for (int i = 0; i < count; i++) {
        from[with_items[i]] = with_items[(i + (count + 1) / 2) % count];
    }
    near(run->heldout_loss_shuffled,
         parity_reference_loss(reference, reference->dataset, samples, from, num));
    assert_true(run->heldout_loss != run->heldout_loss_shuffled);
}

static void test_evaluation(void **state)
{
    (void)state;
    static const ParityLayout layouts[] = {
        {.vision = {0}},
        {.vision = {.dp = 3}, .llm = {.tp = 2, .dp = 2}},
        {.vision = {.tp = 2}, .llm = {.dp = 3}},
        {.vision = {.cp = 2}, .llm = {.cp = 2, .pp = 2, .dp = 2}},
        {.vision = {.dp = 4},
         .llm = {.tp = 2, .pp = 2, .is_sequence_parallel = true},
         .is_colocated = true},
        {.vision = {.pp = 2}, .llm = {.tp = 2, .cp = 3, .is_sequence_parallel = true}},
        {.vision = {.tp = 2}, .llm = {.pp = 2, .chunks = 2}},
    };
    enum {
        NUM = sizeof uneven / sizeof *uneven
    };
    ParityData data;
    parity_data_write(&data, uneven, NULL, NUM);
    char first[8][64] = {""};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        ParityRank ranks[PARITY_RANKS_MAX];
        const ParityOptions options = {.shard = data.shard,
                                       .heldout = data.shard,
                                       .layout = layouts[i],
                                       .steps = 2,
                                       .batch = 4,
                                       .microbatches = 2,
                                       .captions = 4,
                                       .seed = SEED};
        JobSpec *spec = parity_spec(&options);
        ParityReference reference;
        parity_reference_make(&reference, spec, (Range){0, 0});
        ParityRun run = {.spec = spec, .is_whole = true};
        parity_run(&run, ranks);
        parity_expect_good(&run, ranks, "evaluation");
        check_losses(&run, &reference, uneven, NUM);
        assert_int_equal(run.num_captions, 4);
        if (i == 0) {
            memcpy(first, run.captions, sizeof first);
            printf("caption: %s\n", first[1]);
            assert_non_null(strstr(first[0], "sample-00|a  0|"));
        }
        for (int c = 0; c < 4; c++) {
            assert_string_equal(run.captions[c], first[c]);
        }
        parity_reference_free(&reference);
        viaduct__v1__job_spec__free_unpacked(spec, NULL);
    }
    parity_data_remove(&data);
}

int main(void)
{
    printf("seed %d\n", SEED);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text_only),         cmocka_unit_test(test_no_image_at_all),
        cmocka_unit_test(test_few_samples),       cmocka_unit_test(test_small_data),
        cmocka_unit_test(test_masked_microbatch), cmocka_unit_test(test_clipping),
        cmocka_unit_test(test_not_finite),        cmocka_unit_test(test_stop),
        cmocka_unit_test(test_bad_image),         cmocka_unit_test(test_evaluation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
