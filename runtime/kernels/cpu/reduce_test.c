#include "kernels/testing.h"

#include <float.h>

static void check_sums(Fixture *f, int64_t count)
{
    const float *x = test_floats(f, 1, count);
    double want = 3.0;
    double want_squares = 5.0;
    for (int64_t i = 0; i < count; i++) {
        want += (double)x[i];
        want_squares += (double)x[i] * (double)x[i];
    }
    double sums[2];
    double squares[2];
    for (int t = 0; t < 2; t++) {
        omp_set_num_threads(t + 1);
        sums[t] = 3.0;
        squares[t] = 5.0;
        assert_int_equal(f->kernels->sum(&sums[t], x, count, f->stream), STATUS_OK);
        assert_int_equal(f->kernels->sum_squares(&squares[t], x, count, f->stream), STATUS_OK);
    }
    assert_memory_equal(&sums[0], &sums[1], sizeof sums[0]);
    assert_memory_equal(&squares[0], &squares[1], sizeof squares[0]);
    assert_near(sums[0], want, 1e-10, "sum", count);
    assert_near(squares[0], want_squares, 1e-12, "sum of squares", count);
}

static void test_sums(void **state)
{
    const int64_t counts[] = {0, 1, 63, 65, 100003};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        check_sums(*state, counts[i]);
    }
}

static void test_sum_squares_of_extremes(void **state)
{
    Fixture *f = *state;
    const float values[] = {NAN, INFINITY, -INFINITY, FLT_MAX};
    for (int i = 0; i < 4; i++) {
        float *x = test_floats(f, 1, 200);
        x[130] = values[i];
        double sum = 0.0;
        assert_int_equal(f->kernels->sum_squares(&sum, x, 200, f->stream), STATUS_OK);
        assert_true(isfinite(sum) == (i == 3));
    }
}

static void check_argmax(Fixture *f, int64_t n, int64_t v)
{
    float *x = test_floats(f, 1, n * v);
    for (int64_t i = 0; i < n * v; i++) {
        x[i] = floorf(2.0f * x[i]); /* many equal ones */
    }
    for (int threads = 1; threads <= 2; threads++) {
        omp_set_num_threads(threads);
        float *value = test_memory(f, n, sizeof *value);
        int32_t *index = test_memory(f, n, sizeof *index);
        assert_int_equal(f->kernels->argmax_rows(value, index, x, n, v, 100, f->stream), STATUS_OK);
        for (int64_t i = 0; i < n; i++) {
            int64_t best = 0;
            for (int64_t j = 1; j < v; j++) {
                best = x[i * v + j] > x[i * v + best] ? j : best;
            }
            assert_int_equal(index[i], 100 + best);
            assert_true(value[i] == x[i * v + best]);
        }
    }
}

static void test_argmax(void **state)
{
    check_argmax(*state, 0, 4);
    check_argmax(*state, 3, 1);
    check_argmax(*state, 200, 7);
    check_argmax(*state, 101, 501);
}

static void test_argmax_without_numbers(void **state)
{
    Fixture *f = *state;
    const float x[] = {NAN, NAN, NAN, 2.0f, -INFINITY, -INFINITY};
    float value[3];
    int32_t index[3];
    assert_int_equal(f->kernels->argmax_rows(value, index, x, 3, 2, 10, f->stream), STATUS_OK);
    assert_true(value[0] == -INFINITY && index[0] == 10);
    assert_true(value[1] == 2.0f && index[1] == 11);
    assert_true(value[2] == -INFINITY && index[2] == 10);
    assert_int_equal(f->kernels->argmax_rows(value, index, x, 1, 0, 10, f->stream), STATUS_OK);
    assert_true(value[0] == -INFINITY && index[0] == 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_sums),
        TEST(test_sum_squares_of_extremes),
        TEST(test_argmax),
        TEST(test_argmax_without_numbers),
    };
    return cmocka_run_group_tests(tests, test_setup, test_teardown);
}
