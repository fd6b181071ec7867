#include "base/memory.h"
#include "nn/param.h"
#include "nn/testing.h"

/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

#include <stdatomic.h>

enum {
    SEED = 7
};

static ParamSpec make_spec(const char *name, int num_dims, const int64_t *dims, int shard_dim)
{
    ParamSpec spec = {
        .num_dims = num_dims, .shard_dim = shard_dim, .init = PARAM_INIT_NORMAL, .init_std = 0.5f};
    snprintf(spec.name, sizeof spec.name, "%s", name);
    for (int i = 0; i < num_dims; i++) {
        spec.dims[i] = dims[i];
    }
    return spec;
}

typedef struct Fixture {
    Device *device;
    Stream *stream;
} Fixture;

static int set_up(void **state)
{
    static Fixture fixture;
    assert_int_equal(device_open("cpu", 0, &fixture.device), STATUS_OK);
    assert_int_equal(stream_create(fixture.device, &fixture.stream), STATUS_OK);
    *state = &fixture;
    return 0;
}

static int tear_down(void **state)
{
    Fixture *fixture = *state;
    stream_destroy(fixture->stream);
    device_close(fixture->device);
    return 0;
}

/* Fills `whole` [count] with what `parts` ranks hold of the array when dim `shard_dim` is cut. */
static void gather(const Fixture *fixture, ParamSpec spec, int parts, float *whole, int64_t count)
{
    int64_t seen = 0;
    for (int rank = 0; rank < parts; rank++) {
        ParamSet set;
        param_set_init(&set, fixture->device);
        spec.shard = range_part(spec.dims[spec.shard_dim], parts, rank);
        int index = -1;
        assert_int_equal(param_set_add(&set, &spec, true, &index), STATUS_OK);
        assert_int_equal(param_set_allocate(&set), STATUS_OK);
        assert_int_equal(param_set_fill(&set, SEED, fixture->stream), STATUS_OK);
        const Param *param = &set.params[index];
        for (int64_t i = 0; i < tensor_count(&param->value); i++) {
            int64_t global = testing_global_index(param, i);
            assert_true(global >= 0 && global < count);
            whole[global] = tensor_f32(&param->value)[i];
            seen++;
        }
        param_set_done(&set);
    }
    assert_int_equal(seen, count);
}

static void test_fill_is_the_same_in_every_sharding(void **state)
{
    const int64_t dims[] = {5, 3, 4, 7};
    enum {
        COUNT = 5 * 3 * 4 * 7
    };
    float expected[COUNT];
    gather(*state, make_spec("w", 4, dims, 0), 1, expected, COUNT);
    for (int shard_dim = 0; shard_dim < 4; shard_dim++) {
        for (int parts = 1; parts <= 8; parts++) { /* more parts than rows, too */
            float found[COUNT] = {0};
            gather(*state, make_spec("w", 4, dims, shard_dim), parts, found, COUNT);
            assert_memory_equal(found, expected, sizeof expected);
        }
    }
    float other[COUNT];
    gather(*state, make_spec("w2", 4, dims, 0), 1, other, COUNT);
    assert_memory_not_equal(other, expected, sizeof expected);
}

static void test_normal_values(void **state)
{
    enum {
        COUNT = 300 * 500 /* more than one chunk of the filling */
    };
    const int64_t dims[] = {300, 500};
    float *values = NULL;
    assert_int_equal(MEMORY_NEW(&values, COUNT), STATUS_OK);
    gather(*state, make_spec("w", 2, dims, 1), 1, values, COUNT);
    double sum = 0;
    double squares = 0;
    for (int64_t i = 0; i < COUNT; i++) {
        sum += values[i];
        squares += (double)values[i] * values[i];
    }
    /* Standard errors: 0.5 / sqrt(150000) = 0.0013 and 0.5 / sqrt(300000) = 0.0009. */
    assert_true(fabs(sum / COUNT) < 0.006);
    assert_true(fabs(sqrt(squares / COUNT) - 0.5) < 0.005);
    memory_free(values);
}

static void test_flat_buffers(void **state)
{
    const Fixture *fixture = *state;
    ParamSet set;
    param_set_init(&set, fixture->device);
    ParamSpec a = make_spec("a", 2, (const int64_t[]){3, 5}, 0);
    a.shard = (Range){1, 3};
    ParamSpec b = make_spec("b", 1, (const int64_t[]){7}, -1);
    b.init = PARAM_INIT_ONES;
    ParamSpec c = make_spec("c", 2, (const int64_t[]){4, 2}, 0);
    c.shard = (Range){4, 4}; /* nothing of it */
    ParamSpec d = make_spec("d", 1, (const int64_t[]){2}, -1);
    d.init = PARAM_INIT_ZEROS;
    int index[4];
    assert_int_equal(param_set_add(&set, &a, true, &index[0]), STATUS_OK);
    assert_int_equal(param_set_add(&set, &b, false, &index[1]), STATUS_OK);
    assert_int_equal(param_set_add(&set, &c, true, &index[2]), STATUS_OK);
    assert_int_equal(param_set_add(&set, &d, true, &index[3]), STATUS_OK);
    assert_int_equal(param_set_allocate(&set), STATUS_OK);
    assert_int_equal(set.count, 10 + 7 + 0 + 2);
    assert_int_equal(param_set_fill(&set, SEED, fixture->stream), STATUS_OK);
    const int64_t offsets[] = {0, 10, 17, 17};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(index[i], i);
        assert_int_equal(set.params[i].offset, offsets[i]);
        assert_ptr_equal(set.params[i].value.data, set.values + offsets[i]);
        assert_ptr_equal(set.params[i].grad.data, set.grads + offsets[i]);
    }
    assert_true(set.params[0].counts && !set.params[1].counts);
    assert_true(set.values[10] == 1.0f && set.values[16] == 1.0f);
    assert_true(set.values[17] == 0.0f && set.values[18] == 0.0f);
    assert_true(set.values[0] != 0.0f);
    for (int64_t i = 0; i < set.count; i++) {
        assert_true(set.grads[i] == 0.0f);
    }
    param_set_done(&set);
}

static void test_frozen_parameters_have_no_gradient(void **state)
{
    const Fixture *fixture = *state;
    char tower[] = "vision.*.weight";
    char one[] = "head.bias";
    char *const patterns[] = {tower, one};
    /* counts 2, 3, 4, ... by the order declared */
    const char *const names[] = {"vision.a.weight", "vision.a.bias",      "vision.b.c.weight",
                                 "head.weight",     "head.bias",          "head.bias2",
                                 "vision.weights",  "not.vision.x.weight"};
    const bool is_frozen[] = {true, false, true, false, true, false, false, false};
    enum {
        NUM = sizeof names / sizeof names[0]
    };
    int64_t before = atomic_load(&fixture->device->allocated_bytes);
    ParamSet set;
    param_set_init(&set, fixture->device);
    param_set_freeze(&set, patterns, 2);
    for (int i = 0; i < NUM; i++) {
        const int64_t dims[] = {i + 2};
        ParamSpec spec = make_spec(names[i], 1, dims, -1);
        int index = -1;
        assert_int_equal(param_set_add(&set, &spec, true, &index), STATUS_OK);
        assert_int_equal(set.params[index].is_trained, !is_frozen[i]);
    }
    assert_int_equal(param_set_allocate(&set), STATUS_OK);
    assert_int_equal(set.count, 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9);
    assert_int_equal(set.trained_count, 3 + 5 + 7 + 8 + 9);
    assert_int_equal(atomic_load(&fixture->device->allocated_bytes) - before,
                     (set.count + set.trained_count) * (int64_t)sizeof(float));
    const int64_t offsets[] = {32, 0, 34, 3, 38, 8, 15, 23};
    for (int i = 0; i < NUM; i++) {
        const Param *param = &set.params[i];
        assert_int_equal(param->offset, offsets[i]);
        assert_ptr_equal(param->value.data, set.values + offsets[i]);
        assert_ptr_equal(param->grad.data, is_frozen[i] ? NULL : set.grads + offsets[i]);
    }
    param_set_done(&set);
    assert_int_equal(atomic_load(&fixture->device->allocated_bytes), before);
}

static void test_all_frozen(void **state)
{
    const Fixture *fixture = *state;
    char all[] = "*";
    char *const patterns[] = {all};
    ParamSet set;
    param_set_init(&set, fixture->device);
    param_set_freeze(&set, patterns, 1);
    ParamSpec spec = make_spec("w", 1, (const int64_t[]){5}, -1);
    int index = -1;
    assert_int_equal(param_set_add(&set, &spec, true, &index), STATUS_OK);
    assert_int_equal(param_set_allocate(&set), STATUS_OK);
    assert_int_equal(set.count, 5);
    assert_int_equal(set.trained_count, 0);
    assert_null(set.grads);
    assert_int_equal(param_set_fill(&set, SEED, fixture->stream), STATUS_OK);
    assert_true(set.values[0] != 0.0f);
    param_set_done(&set);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fill_is_the_same_in_every_sharding),
        cmocka_unit_test(test_normal_values),
        cmocka_unit_test(test_flat_buffers),
        cmocka_unit_test(test_frozen_parameters_have_no_gradient),
        cmocka_unit_test(test_all_frozen),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
