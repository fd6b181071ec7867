/* Seeded faults: each makes training wrong without any error of its own, and must be caught by the
 * comparison, with room to spare; and a rank that plans from other data or another seed must be
 * refused before the first step. */
#include "tests/parity/faulty.h"
#include "tests/parity/parity_data.h"
#include "tests/parity/parity_reference.h"

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
    SEED = 9
};

/* How many times what is allowed a fault must be off by. */
static const double caught_ratio = 30;

static void compare(ParityRank *rank, const TrainerStep *step)
{
    parity_compare(rank->run->context, rank, step);
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

/* A job with one fault. `visit`: after each step, what the fault does to the rank. */
typedef struct Fault {
    const char *what;
    void (*visit)(ParityRank *rank, const TrainerStep *step);
    ParityLayout layout;
    int kind; /* of faulty_ops; -1: none */
    bool keeps_parts;
    bool is_none; /* must not be reported */
} Fault;

static void check_fault(const Fault *fault)
{
    static const int images[] = {2, 0, 7, 1, 0, 1, 3, 0, 1};
    ParityData data;
    parity_data_write(&data, images, NULL, sizeof images / sizeof *images);
    ParityRank ranks[PARITY_RANKS_MAX];
    const ParityOptions options = {.shard = data.shard,
                                   .layout = fault->layout,
                                   .steps = 2,
                                   .batch = 6,
                                   .microbatches = FAULTY_MICROBATCHES,
                                   .seed = SEED};
    JobSpec *spec = parity_spec(&options);
    ParityReference reference;
    parity_reference_make(&reference, spec, (Range){0, 0});
    ParityRun run = {.spec = spec,
                     .faulty = fault->kind >= 0 ? faulty_ops((FaultyKind)fault->kind) : NULL,
                     .keeps_parts = fault->keeps_parts,
                     .visit = fault->visit,
                     .context = &reference};
    parity_run(&run, ranks);
    int failures = 0;
    double worst_loss = 0;
    double worst = 0;
    for (int i = 0; i < parity_ranks(&run); i++) {
        assert_int_equal(ranks[i].status, STATUS_OK);
        failures += ranks[i].report.failures;
        worst_loss = larger(worst_loss, ranks[i].report.worst_loss);
        worst = larger(worst, larger(ranks[i].report.worst_grad, ranks[i].report.worst_weight));
    }
    printf("%s: %d differences; loss %.3g, gradients and weights %.3g times what is allowed\n",
           fault->what, failures, worst_loss, worst);
    assert_int_equal(failures > 0, !fault->is_none);
    assert_int_equal(worst > caught_ratio, !fault->is_none);
    parity_reference_free(&reference);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
    parity_data_remove(&data);
}

/* The decoder's update of a step is undone: a module that skipped it. */
static void compare_skipped(ParityRank *rank, const TrainerStep *step)
{
    static _Thread_local float before[1 << 16];
    Module *llm = trainer_module(rank->trainer, 1);
    if (llm) {
        size_t bytes = (size_t)llm->params.count * sizeof(float);
        CHECK(bytes <= sizeof before);
        if (step->step == 2) {
            memcpy(llm->params.values, before, bytes);
        }
        memcpy(before, llm->params.values, bytes);
    }
    compare(rank, step);
}

static void test_faults(void **state)
{
    (void)state;
    const ParityLayout replicas = PARITY_PLAIN(1, 2, 1, 2);
    const ParityLayout context = {.vision = {.dp = 2}, .llm = {.cp = 2}};
    const ParityLayout one = {.vision = {.tp = 2}, .llm = {.tp = 2}, .is_colocated = true};
    const Fault faults[] = {
        {"no fault", compare, replicas, -1, false, true},
        {"no fault with cp", compare, context, -1, false, true},
        {"no fault colocated", compare, one, -1, false, true},
        {"doubled encoder gradient", compare, replicas, FAULTY_VISION_DOUBLED, false, false},
        {"swapped images", compare, replicas, FAULTY_VISION_SWAPPED, false, false},
        {"images of the microbatch before", compare, replicas, FAULTY_VISION_LATE, false, false},
        {"dropped row", compare, replicas, FAULTY_VISION_DROPPED, false, false},
        {"gradient divided by dp", compare, replicas, FAULTY_LLM_HALVED, false, false},
        {"gradient of one cp rank", compare, context, -1, true, false},
        {"mean over unequal microbatches", compare, one, FAULTY_LLM_UNEQUAL, false, false},
        {"an update skipped by one module", compare_skipped, replicas, -1, false, false},
    };
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        check_fault(&faults[i]);
    }
}

/* ---- ranks that do not plan the same ---- */

static void check_refused(const ParityOptions *options, const ParityOptions *other,
                          const char *expected)
{
    ParityRank ranks[PARITY_RANKS_MAX];
    JobSpec *spec = parity_spec(options);
    JobSpec *encoder_spec = parity_spec(other);
    ParityRun run = {.spec = spec, .encoder_spec = encoder_spec};
    parity_run(&run, ranks);
    for (int i = 0; i < parity_ranks(&run); i++) {
        /* The first to see it ends the world, so others may see that instead. */
        bool is_refused = ranks[i].status == STATUS_INVALID || ranks[i].status == STATUS_ABORTED;
        if (!is_refused || !strstr(ranks[i].message, expected)) {
            fail_msg("rank %d: %s", i, ranks[i].message);
        }
    }
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
    viaduct__v1__job_spec__free_unpacked(encoder_spec, NULL);
}

static void test_disagreement(void **state)
{
    (void)state;
    static const int images[] = {1, 0, 2};
    ParityData data;
    parity_data_write(&data, images, NULL, 3);
    const ParityOptions options = {.shard = data.shard,
                                   .layout = PARITY_PLAIN(1, 2, 1, 1),
                                   .steps = 1,
                                   .batch = 2,
                                   .seed = SEED};
    ParityOptions other = options;
    other.seed = SEED + 1;
    check_refused(&options, &other, "the same job");
    parity_data_remove(&data);
}

int main(void)
{
    printf("seed %d\n", SEED);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_disagreement),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
