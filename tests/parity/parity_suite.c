#include "tests/parity/parity_suite.h"

#include "base/clock.h"

#include <stdio.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

static void visit(ParityRank *rank, const TrainerStep *step)
{
    parity_compare(rank->run->context, rank, step);
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

void parity_suite_open(ParitySuite *suite, const ParityOptions *options, const int *images,
                       const int *clips, int num)
{
    *suite = (ParitySuite){.options = *options, .begin_ns = clock_now_ns()};
    parity_data_write(&suite->data, images, clips, num);
    suite->options.shard = suite->data.shard;
    suite->spec = parity_spec(&suite->options);
    parity_reference_make(&suite->reference, suite->spec, (Range){0, 0});
}

void parity_suite_run(ParitySuite *suite, const ParityOptions *options, const char *what)
{
    static ParityRank ranks[PARITY_RANKS_MAX];
    ParityOptions own = *options;
    own.shard = suite->data.shard;
    JobSpec *spec = parity_spec(&own);
    ParityRun run = {.spec = spec, .visit = visit, .context = &suite->reference};
    parity_run(&run, ranks);
    parity_expect_good(&run, ranks, what);
    assert_int_equal(run.num_steps, own.steps);
    int64_t sent = 0;
    int64_t least = 0;
    for (int i = 0; i < parity_ranks(&run); i++) {
        const ParityReport *report = &ranks[i].report;
        suite->worst.worst_loss = larger(suite->worst.worst_loss, report->worst_loss);
        suite->worst.worst_grad = larger(suite->worst.worst_grad, report->worst_grad);
        suite->worst.worst_weight = larger(suite->worst.worst_weight, report->worst_weight);
        sent += ranks[i].bytes_sent;
    }
    for (int i = 0; i < own.steps; i++) {
        least += run.steps[i].boundary_bytes_min;
    }
    if (!own.layout.is_colocated) {
        assert_int_equal(sent, least); /* what the transport was given, not what was planned */
    }
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
    suite->num_cases++;
}

void parity_suite_close(ParitySuite *suite)
{
    printf("%d layouts in %.1f s; largest difference over what is allowed: losses %.3g, gradients "
           "%.3g, weights %.3g\n",
           suite->num_cases, (double)(clock_now_ns() - suite->begin_ns) / (double)CLOCK_NS_PER_S,
           suite->worst.worst_loss, suite->worst.worst_grad, suite->worst.worst_weight);
    parity_reference_free(&suite->reference);
    viaduct__v1__job_spec__free_unpacked(suite->spec, NULL);
    parity_data_remove(&suite->data);
}
