/* The course of the learning rate and clipping against values worked out by hand, runs of
 * parameters, one update against double precision, and replicas with a part of the state each
 * against one with all. */
#include "base/rng.h"
#include "comm/comm_local.h"
#include "train/optimizer.h"

#include <math.h>
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
        const char *name;
        int64_t size;
        bool decay;
    } params[] = {{"a", 3, true},  {"b", 4, true},        {"c", 0, false}, {"d", 2, true},
                  {"e", 5, false}, {"frozen.f", 8, true}, {"g", 1, true}};
    char pattern[] = "frozen.*";
    char *const patterns[] = {pattern};
    Device *device = NULL;
    assert_int_equal(device_open("cpu", 0, &device), STATUS_OK);
    ParamSet set;
    param_set_init(&set, device);
    param_set_freeze(&set, patterns, 1);
    for (size_t i = 0; i < sizeof params / sizeof *params; i++) {
        ParamSpec spec = {
            .num_dims = 1, .dims = {params[i].size}, .shard_dim = -1, .decay = params[i].decay};
        snprintf(spec.name, sizeof spec.name, "%s", params[i].name);
        int index = 0;
        assert_int_equal(param_set_add(&set, &spec, true, &index), STATUS_OK);
    }
    assert_int_equal(param_set_allocate(&set), STATUS_OK);
    static const struct {
        Range within;
        int num;
        Range runs[2];
    } cases[] = {{{0, 15}, 2, {{0, 9}, {14, 15}}},
                 {{2, 14}, 1, {{2, 9}}},
                 {{9, 14}, 0, {{0}}},
                 {{8, 23}, 2, {{8, 9}, {14, 15}}}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        ParamRuns runs;
        assert_int_equal(param_runs_make(&set, is_decayed, cases[c].within, &runs), STATUS_OK);
        assert_int_equal(runs.num, cases[c].num);
        int64_t count = 0;
        for (int i = 0; i < runs.num; i++) {
            assert_int_equal(runs.runs[i].begin, cases[c].runs[i].begin);
            assert_int_equal(runs.runs[i].end, cases[c].runs[i].end);
            count += range_count(runs.runs[i]);
        }
        assert_int_equal(runs.count, count);
        param_runs_done(&runs);
    }
    param_set_done(&set);
    device_close(device);
}

enum {
    REPLICAS_MAX = 5,
    STEPS = 4,
    TIMEOUT_MS = 60 * 1000,
    SEED = 77,
};

typedef struct Replica {
    const OptimizerSpec *spec;
    Comm *comm; /* the replicas */
    pthread_t thread;
    Status status;
    Device *device;
    Stream *stream;
    ParamSet set;
    Optimizer optimizer;
} Replica;

static OptimizerSpec make_spec(bool is_sgd, bool is_sharded)
{
    OptimizerSpec spec = VIADUCT__V1__OPTIMIZER_SPEC__INIT;
    spec.kind =
        is_sgd ? VIADUCT__V1__OPTIMIZER_SPEC__KIND__SGD : VIADUCT__V1__OPTIMIZER_SPEC__KIND__ADAMW;
    spec.sharding = is_sharded ? VIADUCT__V1__OPTIMIZER_SPEC__SHARDING__ZERO1
                               : VIADUCT__V1__OPTIMIZER_SPEC__SHARDING__NONE;
    spec.weight_decay = 0.1;
    spec.beta1 = 0.9;
    spec.beta2 = 0.999;
    spec.epsilon = 1e-8;
    return spec;
}

/* Sizes that no number of replicas divides; one parameter does not change. */
static Status declare(ParamSet *set, Device *device)
{
    static const ParamSpec specs[] = {
        {.name = "matrix", .num_dims = 2, .dims = {37, 19}, .decay = true},
        {.name = "bias", .num_dims = 1, .dims = {37}},
        {.name = "frozen.matrix", .num_dims = 2, .dims = {5, 5}, .decay = true},
        {.name = "patch", .num_dims = 4, .dims = {11, 3, 5, 5}, .decay = true},
        {.name = "norm", .num_dims = 1, .dims = {3}},
    };
    static char pattern[] = "frozen.*";
    static char *const patterns[] = {pattern};
    param_set_init(set, device);
    param_set_freeze(set, patterns, 1);
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        ParamSpec spec = specs[i];
        spec.shard_dim = -1;
        spec.init = PARAM_INIT_NORMAL;
        spec.init_std = 0.5f;
        int index = 0;
        TRY(param_set_add(set, &spec, true, &index));
    }
    return param_set_allocate(set);
}

static Status replica_train(Replica *replica)
{
    ParamSet *set = &replica->set;
    TRY(declare(set, replica->device));
    TRY(param_set_fill(set, SEED, replica->stream));
    TRY(optimizer_init(&replica->optimizer, replica->spec, set, kernels_for(replica->device),
                       replica->comm));
    for (int64_t number = 1; number <= STEPS; number++) {
        Rng rng = {.seed = SEED, .stream = (uint64_t)number};
        for (int64_t i = 0; i < set->trained_count; i++) {
            set->grads[i] = rng_normal(rng, (uint64_t)i);
        }
        const OptimizerStep step = {
            .learning_rate = 0.01 * (double)number, .grad_scale = 0.7, .number = number};
        TRY(optimizer_update(&replica->optimizer, &step, replica->stream));
    }
    return STATUS_OK;
}

static void *work(void *argument)
{
    Replica *replica = argument;
    CHECK(device_open("cpu", 0, &replica->device) == STATUS_OK);
    CHECK(stream_create(replica->device, &replica->stream) == STATUS_OK);
    replica->status = replica_train(replica);
    return NULL;
}

/* Trains `size` replicas at once. */
static void train(Replica *replicas, int size, const OptimizerSpec *spec)
{
    Comm *comms[REPLICAS_MAX];
    assert_int_equal(comm_local_create(size, TIMEOUT_MS, comms), STATUS_OK);
    for (int r = 0; r < size; r++) {
        replicas[r] = (Replica){.spec = spec, .comm = comms[r]};
        assert_int_equal(pthread_create(&replicas[r].thread, NULL, work, &replicas[r]), 0);
    }
    for (int r = 0; r < size; r++) {
        assert_int_equal(pthread_join(replicas[r].thread, NULL), 0);
    }
    for (int r = 0; r < size; r++) {
        assert_int_equal(replicas[r].status, STATUS_OK);
    }
}

static void replicas_done(Replica *replicas, int size)
{
    for (int r = 0; r < size; r++) {
        optimizer_done(&replicas[r].optimizer);
        param_set_done(&replicas[r].set);
        stream_destroy(replicas[r].stream);
        device_close(replicas[r].device);
        comm_destroy(replicas[r].comm);
    }
}

static void same_bits(const float *found, const float *expected, int64_t count)
{
    assert_memory_equal(found, expected, (size_t)count * sizeof(float));
}

static void check_sharded(const Replica *reference, int size, bool is_sgd)
{
    static Replica replicas[REPLICAS_MAX];
    const OptimizerSpec spec = make_spec(is_sgd, true);
    train(replicas, size, &spec);
    int64_t held = 0;
    for (int r = 0; r < size; r++) {
        const Optimizer *optimizer = &replicas[r].optimizer;
        same_bits(replicas[r].set.values, reference->set.values, reference->set.count);
        Range range = state_shard_range(&optimizer->shard);
        held += range_count(range);
        assert_true((optimizer->m == NULL) == is_sgd && (optimizer->v == NULL) == is_sgd);
        if (!is_sgd) {
            same_bits(optimizer->m, reference->optimizer.m + range.begin, range_count(range));
            same_bits(optimizer->v, reference->optimizer.v + range.begin, range_count(range));
        }
    }
    assert_int_equal(held, reference->set.trained_count);
    replicas_done(replicas, size);
}

static void test_sharded(void **state)
{
    (void)state;
    print_message("seed %d\n", SEED);
    for (int is_sgd = 0; is_sgd <= 1; is_sgd++) {
        Replica reference;
        const OptimizerSpec spec = make_spec(is_sgd, false);
        train(&reference, 1, &spec);
        for (int size = 1; size <= REPLICAS_MAX; size++) {
            check_sharded(&reference, size, is_sgd);
        }
        replicas_done(&reference, 1);
    }
}

/* What does not change stays, what changes moved. */
static void test_frozen(void **state)
{
    (void)state;
    Replica replica;
    const OptimizerSpec spec = make_spec(false, false);
    train(&replica, 1, &spec);
    ParamSet before;
    assert_int_equal(declare(&before, replica.device), STATUS_OK);
    assert_int_equal(param_set_fill(&before, SEED, replica.stream), STATUS_OK);
    for (int i = 0; i < before.num_params; i++) {
        const Param *param = &before.params[i];
        const float *after = replica.set.values + param->offset;
        for (int64_t e = 0; e < tensor_count(&param->value); e++) {
            bool is_same = after[e] == tensor_f32(&param->value)[e];
            assert_true(is_same == !param->is_trained);
        }
    }
    param_set_done(&before);
    replicas_done(&replica, 1);
}

/* Settings reach the kernel in double precision: 1 - 0.999f is off by 1.3e-5 of itself, and so v
 * and the weights would be. The kernel itself works in float, with fewer than 8 roundings of 2^-24
 * each. */
static void test_double_settings(void **state)
{
    (void)state;
    Comm *comm = NULL;
    Device *device = NULL;
    Stream *stream = NULL;
    assert_int_equal(comm_local_create(1, TIMEOUT_MS, &comm), STATUS_OK);
    assert_int_equal(device_open("cpu", 0, &device), STATUS_OK);
    assert_int_equal(stream_create(device, &stream), STATUS_OK);
    ParamSet set;
    Optimizer optimizer;
    const OptimizerSpec spec = make_spec(false, false);
    assert_int_equal(declare(&set, device), STATUS_OK);
    assert_int_equal(optimizer_init(&optimizer, &spec, &set, kernels_for(device), comm), STATUS_OK);
    const double grad = 0.3125; /* with its square a float */
    for (int64_t i = 0; i < set.trained_count; i++) {
        set.grads[i] = (float)grad;
    }
    const OptimizerStep step = {.learning_rate = 0.001, .grad_scale = 1.0, .number = 1};
    assert_int_equal(optimizer_update(&optimizer, &step, stream), STATUS_OK);
    double v = (1.0 - 0.999) * grad * grad;
    double m = (1.0 - 0.9) * grad;
    for (int64_t i = 0; i < set.trained_count; i++) {
        assert_true(fabs((double)optimizer.v[i] - v) <= 8 * 0x1p-24 * v);
        assert_true(fabs((double)optimizer.m[i] - m) <= 8 * 0x1p-24 * m);
        /* weights began at 0: the first step is the learning rate, against the gradient */
        assert_true(fabs((double)set.values[i] + 0.001) <= 8 * 0x1p-24 * 0.001);
    }
    optimizer_done(&optimizer);
    param_set_done(&set);
    stream_destroy(stream);
    device_close(device);
    comm_destroy(comm);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_learning_rate), cmocka_unit_test(test_clipping),
        cmocka_unit_test(test_runs),          cmocka_unit_test(test_double_settings),
        cmocka_unit_test(test_frozen),        cmocka_unit_test(test_sharded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
