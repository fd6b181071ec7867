/* Every encoder layout against every decoder layout: losses, every gradient and all weights over
 * three SGD steps equal those of one process. SGD, since AdamW would hide a wrong scale. Samples
 * have 0, 1, 2 and 7 images, steps run over the end of an epoch, microbatches and windows vary. */
#include "base/clock.h"
#include "tests/parity/parity_data.h"
#include "tests/parity/parity_reference.h"

#include <stdio.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    STEPS = 3,
    BATCH = 7,
    SEED = 21
};

static void visit(ParityRank *rank, const TrainerStep *step)
{
    parity_compare(rank->run->context, rank, step);
}

static void gather(ParityReport *worst, const ParityReport *report)
{
    worst->worst_loss =
        report->worst_loss > worst->worst_loss ? report->worst_loss : worst->worst_loss;
    worst->worst_grad =
        report->worst_grad > worst->worst_grad ? report->worst_grad : worst->worst_grad;
    worst->worst_weight =
        report->worst_weight > worst->worst_weight ? report->worst_weight : worst->worst_weight;
}

static void run_case(ParityOptions *options, ParityReference *reference, ParityReport *worst)
{
    ParityRank ranks[PARITY_RANKS_MAX];
    JobSpec *spec = parity_spec(options);
    ParityRun run = {.spec = spec, .layout = options->layout, .visit = visit, .context = reference};
    parity_run(&run, ranks);
    parity_expect_good(&run, ranks, "parity");
    assert_int_equal(run.num_steps, STEPS);
    int64_t sent = 0;
    for (int i = 0; i < parity_ranks(options->layout); i++) {
        gather(worst, &ranks[i].report);
        sent += ranks[i].bytes_sent;
    }
    int64_t least = 0;
    for (int i = 0; i < STEPS; i++) {
        least += run.steps[i].boundary_bytes_min;
    }
    assert_true(least > 0);
    assert_int_equal(sent, least); /* what the transport was given, not what was planned */
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

static void test_all_pairs(void **state)
{
    (void)state;
    static const int images[] = {1, 0, 2, 7, 1, 0, 1, 2, 1, 0, 3};
    static const int encoders[][2] = {{1, 1}, {2, 1}, {4, 1}, {1, 2}, {1, 3}, {1, 5}, {2, 2}};
    static const int llms[][2] = {{1, 1}, {2, 1}, {4, 1}, {1, 2}, {1, 3}, {2, 2}};
    ParityData data;
    parity_data_write(&data, images, sizeof images / sizeof *images);
    ParityOptions options = {
        .shard = data.shard, .steps = STEPS, .batch = BATCH, .warmup = 2, .seed = SEED};
    options.layout = (ParityLayout){1, 1, 1, 1};
    JobSpec *spec = parity_spec(&options);
    ParityReference reference;
    parity_reference_make(&reference, spec, (Range){0, 0});
    ParityReport worst = {0};
    int64_t begin_ns = clock_now_ns();
    int num = 0;
    for (size_t e = 0; e < sizeof encoders / sizeof *encoders; e++) {
        for (size_t l = 0; l < sizeof llms / sizeof *llms; l++, num++) {
            options.layout = (ParityLayout){encoders[e][0], encoders[e][1], llms[l][0], llms[l][1]};
            options.microbatches = 1 + num % 4;
            options.window = 1 + num % 3;
            run_case(&options, &reference, &worst);
        }
    }
    printf("%d layouts in %.1f s; largest difference over what is allowed: losses %.3g, gradients "
           "%.3g, weights %.3g\n",
           num, (double)(clock_now_ns() - begin_ns) / (double)CLOCK_NS_PER_S, worst.worst_loss,
           worst.worst_grad, worst.worst_weight);
    parity_reference_free(&reference);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
    parity_data_remove(&data);
}

int main(void)
{
    printf("seed %d\n", SEED);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_pairs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
