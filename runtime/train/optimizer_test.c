/* The course of the learning rate and clipping against values worked out by hand, and runs of
 * parameters. */
#include "train/optimizer.h"

#include <math.h>
#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

static void near(double found, double expected)
{
    if (fabs(found - expected) > 1e-12 * (1.0 + fabs(expected))) {
        fail_msg("%.17g, expected %.17g", found, expected);
    }
}

static void test_learning_rate(void **state)
{
    (void)state;
    OptimizerSpec spec = VIADUCT__V1__OPTIMIZER_SPEC__INIT;
    spec.learning_rate = 1.0;
    spec.min_learning_rate = 0.2;
    spec.warmup_steps = 4;
    /* 4 of warm-up, then cosine over 8: at its begin, middle and one step before the end */
    near(optimizer_learning_rate(&spec, 12, 1), 0.25);
    near(optimizer_learning_rate(&spec, 12, 4), 1.0);
    near(optimizer_learning_rate(&spec, 12, 5), 1.0);
    near(optimizer_learning_rate(&spec, 12, 9), 0.6);
    near(optimizer_learning_rate(&spec, 12, 12), 0.2 + 0.8 * 0.5 * (1.0 - cos(acos(-1.0) / 8.0)));
    near(optimizer_learning_rate(&spec, 12, 13), 0.2);
    /* all warm-up */
    near(optimizer_learning_rate(&spec, 2, 2), 0.5);
    near(optimizer_learning_rate(&spec, 4, 5), 1.0);
    spec.warmup_steps = 0;
    near(optimizer_learning_rate(&spec, 1, 1), 1.0);
    spec.min_learning_rate = 1.0;
    near(optimizer_learning_rate(&spec, 10, 7), 1.0);
}

static void test_clipping(void **state)
{
    (void)state;
    OptimizerSpec spec = VIADUCT__V1__OPTIMIZER_SPEC__INIT;
    near(optimizer_grad_scale(&spec, 100.0), 1.0);
    spec.max_grad_norm = 2.0;
    near(optimizer_grad_scale(&spec, 1.5), 1.0);
    near(optimizer_grad_scale(&spec, 8.0), 2.0 / 8.000001);
}

static bool is_decayed(const Param *param)
{
    return param->spec.decay;
}

static void test_runs(void **state)
{
    (void)state;
    static const struct {
        int64_t size;
        bool decay;
    } params[] = {{3, true}, {4, true}, {0, false}, {2, true}, {5, false}, {1, true}};
    Device *device = NULL;
    assert_int_equal(device_open("cpu", 0, &device), STATUS_OK);
    ParamSet set;
    param_set_init(&set, device);
    for (size_t i = 0; i < sizeof params / sizeof *params; i++) {
        ParamSpec spec = {
            .num_dims = 1, .dims = {params[i].size}, .shard_dim = -1, .decay = params[i].decay};
        int index = 0;
        assert_int_equal(param_set_add(&set, &spec, true, &index), STATUS_OK);
    }
    ParamRuns runs;
    assert_int_equal(param_runs_make(&set, is_decayed, &runs), STATUS_OK);
    assert_int_equal(runs.num, 2);
    assert_int_equal(runs.count, 10);
    assert_int_equal(runs.runs[0].begin, 0);
    assert_int_equal(runs.runs[0].end, 9);
    assert_int_equal(runs.runs[1].begin, 14);
    assert_int_equal(runs.runs[1].end, 15);
    param_runs_done(&runs);
    param_set_done(&set);
    device_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_learning_rate),
        cmocka_unit_test(test_clipping),
        cmocka_unit_test(test_runs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
