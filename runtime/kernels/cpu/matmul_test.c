#include "kernels/testing.h"

typedef struct Case {
    int64_t m, n, k;
} Case;

static const Case cases[] = {
    {0, 5, 7},   {5, 0, 7},     {5, 7, 0},      {1, 1, 1},     {3, 5, 7},
    {70, 65, 9}, {130, 257, 3}, {300, 130, 33}, {64, 64, 700}, {17, 1, 130},
};

static double element(const MatMul *p, const float *before, int64_t i, int64_t j)
{
    double sum = p->accumulate && before ? (double)before[i * p->n + j] : 0.0;
    sum += p->bias ? (double)p->bias[j] : 0.0;
    for (int64_t l = 0; l < p->k; l++) {
        double a = (double)(p->transpose_a ? p->a[l * p->m + i] : p->a[i * p->k + l]);
        double b = (double)(p->transpose_b ? p->b[j * p->k + l] : p->b[l * p->n + j]);
        sum += a * b;
    }
    return sum;
}

/* The four transposes, with and without bias and accumulation, in the bits of `form`. */
static void check_form(Fixture *f, Case size, int form)
{
    const float *before = test_floats(f, 1, size.m * size.n);
    float *results[2];
    MatMul p = {.a = test_floats(f, 2, size.m * size.k),
                .b = test_floats(f, 3, size.k * size.n),
                .bias = form & 4 ? test_floats(f, 4, size.n) : NULL,
                .m = size.m,
                .n = size.n,
                .k = size.k,
                .transpose_a = form & 1,
                .transpose_b = form & 2,
                .accumulate = form & 8};
    for (int threads = 1; threads <= 2; threads++) {
        omp_set_num_threads(threads);
        p.c = results[threads - 1] = test_copy(f, before, size.m * size.n);
        assert_int_equal(f->kernels->matmul(&p, f->stream), STATUS_OK);
        assert_int_equal(omp_get_max_threads(), threads);
    }
    assert_same_bits(results[0], results[1], size.m * size.n);
    for (int64_t i = 0; i < size.m; i++) {
        for (int64_t j = 0; j < size.n; j++) {
            double want = element(&p, before, i, j);
            /* The rounding of k sums of standard normal products, some four times what it is on
             * average. */
            double tolerance = 2e-6 * sqrt((double)size.k + 4.0);
            assert_near((double)p.c[i * size.n + j], want, tolerance, "c", i * size.n + j);
        }
    }
}

static void test_forms(void **state)
{
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int form = 0; form < 16; form++) {
            check_form(*state, cases[i], form);
            test_release(state);
        }
    }
}

/* A weight's gradient: few outputs, long sums. Cut among threads anyhow, but never along the sum.
 */
static void test_long_sum_is_the_same_for_any_threads(void **state)
{
    Fixture *f = *state;
    const int64_t m = 96;
    const int64_t n = 80;
    const int64_t k = 6000;
    MatMul p = {.a = test_floats(f, 1, m * k),
                .b = test_floats(f, 2, k * n),
                .m = m,
                .n = n,
                .k = k,
                .transpose_a = true};
    float *results[3];
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        p.c = results[threads - 1] = test_memory(f, m * n, sizeof(float));
        assert_int_equal(f->kernels->matmul(&p, f->stream), STATUS_OK);
    }
    assert_same_bits(results[0], results[1], m * n);
    assert_same_bits(results[0], results[2], m * n);
    for (int64_t i = 0; i < m * n; i += 97) {
        assert_near((double)p.c[i], element(&p, NULL, i / n, i % n), 2e-4, "c", i);
    }
}

/* Sums long enough for several threads, of too few outputs to give them tiles. */
static void test_long_sums_of_few_outputs(void **state)
{
    Fixture *f = *state;
    const int64_t k = 300000;
    for (int64_t n = 1; n <= 4; n += 3) {
        MatMul p = {.c = test_memory(f, n, sizeof(float)),
                    .a = test_floats(f, 1, k),
                    .b = test_floats(f, 2, k * n),
                    .m = 1,
                    .n = n,
                    .k = k};
        assert_int_equal(f->kernels->matmul(&p, f->stream), STATUS_OK);
        for (int64_t i = 0; i < n; i++) {
            /* Sums of some 500, rounded at most k times by 2^-24 of what they are by then. */
            assert_near((double)p.c[i], element(&p, NULL, 0, i), 1e-3, "c", i);
        }
    }
}

/* "=" must not read what was there. */
static void test_overwrites_nan(void **state)
{
    Fixture *f = *state;
    float c[4] = {NAN, NAN, NAN, NAN};
    MatMul p = {
        .c = c, .a = test_floats(f, 1, 6), .b = test_floats(f, 2, 6), .m = 2, .n = 2, .k = 3};
    assert_int_equal(f->kernels->matmul(&p, f->stream), STATUS_OK);
    for (int i = 0; i < 4; i++) {
        assert_near((double)c[i], element(&p, NULL, i / 2, i % 2), 1e-6, "c", i);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_forms),
        TEST(test_long_sum_is_the_same_for_any_threads),
        TEST(test_long_sums_of_few_outputs),
        TEST(test_overwrites_nan),
    };
    return cmocka_run_group_tests(tests, test_setup, test_teardown);
}
