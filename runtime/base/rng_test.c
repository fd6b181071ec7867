#include "base/rng.h"

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

/* The known answers that the authors of Philox publish with their code (Random123, kat_vectors). */
static void test_known_answers(void **state)
{
    (void)state;
    assert_int_equal(rng_bits64((Rng){0, 0}, 0), UINT64_C(0x6627e8d5e169c58d));
    assert_int_equal(rng_bits64((Rng){UINT64_MAX, UINT64_MAX}, UINT64_MAX),
                     UINT64_C(0x408f276d41c83b0e));
    Rng pi = {UINT64_C(0x299f31d0a4093822), UINT64_C(0x0370734413198a2e)};
    assert_int_equal(rng_bits64(pi, UINT64_C(0x85a308d3243f6a88)), UINT64_C(0xd16cfe0994fdcceb));
    assert_int_equal(rng_bits(pi, UINT64_C(0x85a308d3243f6a88)), 0xd16cfe09);
}

static void test_permutation_hits_everything_once(void **state)
{
    (void)state;
    enum {
        COUNT_MAX = 300
    };
    int unmoved = 0;
    for (int64_t count = 1; count <= COUNT_MAX; count++) {
        char seen[COUNT_MAX] = {0};
        for (int64_t i = 0; i < count; i++) {
            int64_t to = rng_permute((Rng){7, (uint64_t)count}, i, count);
            assert_in_range(to, 0, count - 1);
            assert_int_equal(seen[to]++, 0);
            unmoved += count == COUNT_MAX && to == i;
        }
    }
    assert_true(unmoved < 10); /* one is expected */
    int64_t large = rng_permute((Rng){7, 1}, INT64_C(999999999999), INT64_C(1000000000000));
    assert_in_range(large, 0, INT64_C(999999999999));
}

/* Mean and variance within five standard errors. */
static void test_moments(void **state)
{
    (void)state;
    enum {
        COUNT = 100000
    };
    Rng rng = {3, 9};
    double sum = 0.0;
    double squares = 0.0;
    double uniform = 0.0;
    for (uint64_t i = 0; i < COUNT; i++) {
        double x = rng_normal(rng, i);
        assert_true(isfinite(x));
        sum += x;
        squares += x * x;
        float u = rng_uniform(rng, i);
        assert_true(u >= 0.0f && u < 1.0f);
        uniform += u;
        assert_true(rng_below(rng, i, 3) < 3);
    }
    assert_true(fabs(sum / COUNT) < 5.0 / sqrt(COUNT));
    assert_true(fabs(squares / COUNT - 1.0) < 5.0 * sqrt(2.0 / COUNT));
    assert_true(fabs(uniform / COUNT - 0.5) < 5.0 * sqrt(1.0 / 12.0 / COUNT));
}

static void test_streams_differ(void **state)
{
    (void)state;
    int equal = 0;
    for (uint64_t i = 0; i < 1000; i++) {
        equal += rng_bits((Rng){1, 1}, i) == rng_bits((Rng){1, 2}, i);
        equal += rng_bits((Rng){1, 1}, i) == rng_bits((Rng){2, 1}, i);
    }
    assert_int_equal(equal, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known_answers),
        cmocka_unit_test(test_permutation_hits_everything_once),
        cmocka_unit_test(test_moments),
        cmocka_unit_test(test_streams_differ),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
