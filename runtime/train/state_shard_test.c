/* Cuts of random parameter sets: they cover the trained part, fall between rows, and lie within
 * half a row of equal parts. */
#include "base/rng.h"
#include "train/state_shard.h"

#include <stdio.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    SETS = 400,
    PARAMS_MAX = 9,
    PARTS_MAX = 7,
    BOUNDARIES_MAX = 2000,
    SEED = 20260,
};

typedef struct Random {
    Rng rng;
    uint64_t index;
} Random;

static int pick(Random *random, int low, int high)
{
    return low + (int)rng_below(random->rng, random->index++, (uint64_t)high - (uint64_t)low + 1);
}

static void declare_one(Random *random, ParamSet *set, int number)
{
    ParamSpec spec = {.num_dims = pick(random, 1, 3), .shard_dim = -1};
    snprintf(spec.name, sizeof spec.name, "%s.%d", pick(random, 0, 3) ? "trained" : "frozen",
             number);
    for (int d = 0; d < spec.num_dims; d++) {
        spec.dims[d] = pick(random, pick(random, 0, 5) ? 1 : 0, d == 0 ? 40 : 7);
    }
    if (pick(random, 0, 1)) {
        spec.shard_dim = pick(random, 0, spec.num_dims - 1);
        spec.shard = range_part(spec.dims[spec.shard_dim], 3, pick(random, 0, 2));
    }
    int index = 0;
    assert_int_equal(param_set_add(set, &spec, true, &index), STATUS_OK);
}

/* All places between rows of trained parameters, ascending, by stepping over the rows one by one.
 * Returns their number. */
static int list_boundaries(const ParamSet *set, int64_t *places, int64_t *row_max_out)
{
    int num = 0;
    int64_t at = 0;
    places[num++] = 0;
    *row_max_out = 0;
    for (int i = 0; i < set->num_params; i++) {
        const Tensor *value = &set->params[i].value;
        int64_t row = 1;
        for (int d = 1; d < value->num_dims; d++) {
            row *= value->dims[d];
        }
        for (int64_t r = 0; set->params[i].is_trained && row > 0 && r < value->dims[0]; r++) {
            at += row;
            assert_in_range(num, 0, BOUNDARIES_MAX - 1);
            places[num++] = at;
            *row_max_out = row > *row_max_out ? row : *row_max_out;
        }
    }
    assert_int_equal(at, set->trained_count);
    return num;
}

/* A place between rows is as near to equal parts as any. */
static void check_cut(int64_t cut, int64_t trained_count, int parts, int part,
                      const int64_t *places, int num_places)
{
    /* in units of 1 / parts elements, so that nothing is rounded */
    int64_t ideal = trained_count * part;
    int64_t best = INT64_MAX;
    bool is_between = false;
    for (int i = 0; i < num_places; i++) {
        int64_t off = llabs(places[i] * parts - ideal);
        best = off < best ? off : best;
        is_between = is_between || places[i] == cut;
    }
    assert_true(is_between);
    /* the cut is nearest to the ideal rounded down, which is off by less than one element */
    assert_in_range(llabs(cut * parts - ideal), 0, best + 2 * (int64_t)parts);
}

static void check_set(const ParamSet *set)
{
    static int64_t places[BOUNDARIES_MAX];
    int64_t row_max = 0;
    int num_places = list_boundaries(set, places, &row_max);
    for (int parts = 1; parts <= PARTS_MAX; parts++) {
        int64_t at = 0;
        for (int part = 0; part < parts; part++) {
            StateShard shard;
            assert_int_equal(state_shard_init(set, parts, part, &shard), STATUS_OK);
            Range range = state_shard_range(&shard);
            assert_int_equal(shard.num_parts, parts);
            assert_int_equal(range.begin, at);
            assert_in_range(range.end, at, set->trained_count);
            check_cut(range.begin, set->trained_count, parts, part, places, num_places);
            assert_in_range(llabs(range.begin * parts - set->trained_count * part), 0,
                            (row_max + 1) * parts);
            assert_int_equal(shard.bytes[part], 4 * range.begin);
            assert_int_equal(shard.bytes[part + 1], 4 * range.end);
            at = range.end;
            state_shard_done(&shard);
        }
        assert_int_equal(at, set->trained_count);
    }
}

static void test_random_sets(void **state)
{
    (void)state;
    print_message("seed %d\n", SEED);
    Random random = {.rng = {.seed = SEED, .stream = 1}};
    Device *device = NULL;
    assert_int_equal(device_open("cpu", 0, &device), STATUS_OK);
    char pattern[] = "frozen.*";
    char *const patterns[] = {pattern};
    for (int s = 0; s < SETS; s++) {
        ParamSet set;
        param_set_init(&set, device);
        param_set_freeze(&set, patterns, 1);
        int num = pick(&random, 0, PARAMS_MAX);
        for (int i = 0; i < num; i++) {
            declare_one(&random, &set, i);
        }
        assert_int_equal(param_set_allocate(&set), STATUS_OK);
        check_set(&set);
        param_set_done(&set);
    }
    device_close(device);
}

/* Worked out by hand: a matrix [5, 4] and a vector [6]: places 0 4 8 12 16 20 21 ... 26. */
static void test_by_hand(void **state)
{
    (void)state;
    Device *device = NULL;
    assert_int_equal(device_open("cpu", 0, &device), STATUS_OK);
    ParamSet set;
    param_set_init(&set, device);
    int index = 0;
    ParamSpec matrix = {.name = "matrix", .num_dims = 2, .dims = {5, 4}, .shard_dim = -1};
    ParamSpec vector = {.name = "vector", .num_dims = 1, .dims = {6}, .shard_dim = -1};
    assert_int_equal(param_set_add(&set, &matrix, true, &index), STATUS_OK);
    assert_int_equal(param_set_add(&set, &vector, true, &index), STATUS_OK);
    assert_int_equal(param_set_allocate(&set), STATUS_OK);
    static const int64_t expected[] = {0, 8, 12, 20, 26}; /* equal parts: 0 6.5 13 19.5 26 */
    StateShard shard;
    assert_int_equal(state_shard_init(&set, 4, 3, &shard), STATUS_OK);
    for (int p = 0; p <= 4; p++) {
        assert_int_equal(shard.begins[p], expected[p]);
    }
    state_shard_done(&shard);
    param_set_done(&set);
    device_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_by_hand),
        cmocka_unit_test(test_random_sets),
    };
    return cmocka_run_group_tests_name("state_shard", tests, NULL, NULL);
}
