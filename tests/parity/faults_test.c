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

static void check_fault(const ModuleOps *vision, const ModuleOps *llm, const char *what)
{
    static const int images[] = {2, 0, 7, 1, 0, 1, 3, 0, 1};
    ParityData data;
    parity_data_write(&data, images, sizeof images / sizeof *images);
    ParityRank ranks[PARITY_RANKS_MAX];
    const ParityOptions options = {
        .shard = data.shard, .layout = {1, 2, 1, 2}, .steps = 1, .batch = 6, .seed = SEED};
    JobSpec *spec = parity_spec(&options);
    ParityReference reference;
    parity_reference_make(&reference, spec, (Range){0, 0});
    ParityRun run = {.spec = spec,
                     .layout = options.layout,
                     .vision = vision,
                     .llm = llm,
                     .visit = compare,
                     .context = &reference};
    parity_run(&run, ranks);
    int failures = 0;
    double worst_loss = 0;
    double worst_grad = 0;
    for (int i = 0; i < parity_ranks(options.layout); i++) {
        assert_int_equal(ranks[i].status, STATUS_OK);
        failures += ranks[i].report.failures;
        worst_loss = larger(worst_loss, ranks[i].report.worst_loss);
        worst_grad = larger(worst_grad, ranks[i].report.worst_grad);
    }
    printf("%s: %d differences; loss %.3g, gradients %.3g times what is allowed\n", what, failures,
           worst_loss, worst_grad);
    bool is_caught = vision || llm;
    assert_int_equal(failures > 0, is_caught);
    assert_int_equal(worst_grad > caught_ratio, is_caught);
    parity_reference_free(&reference);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
    parity_data_remove(&data);
}

static void test_faults(void **state)
{
    (void)state;
    check_fault(NULL, NULL, "no fault");
    check_fault(&faulty_vision_doubled, NULL, "doubled encoder gradient");
    check_fault(&faulty_vision_swapped, NULL, "swapped images");
    check_fault(&faulty_vision_dropped, NULL, "dropped row");
    check_fault(NULL, &faulty_llm_halved, "gradient divided by dp");
}

/* ---- ranks that do not plan the same ---- */

static void check_refused(const ParityOptions *options, const ParityOptions *other,
                          const char *expected)
{
    ParityRank ranks[PARITY_RANKS_MAX];
    JobSpec *spec = parity_spec(options);
    JobSpec *encoder_spec = parity_spec(other);
    ParityRun run = {.spec = spec, .encoder_spec = encoder_spec, .layout = options->layout};
    parity_run(&run, ranks);
    for (int i = 0; i < parity_ranks(options->layout); i++) {
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
    parity_data_write(&data, images, 3);
    const ParityOptions options = {
        .shard = data.shard, .layout = {1, 2, 1, 1}, .steps = 1, .batch = 2, .seed = SEED};
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
