#include "kernels/testing.h"

static void check_gather_and_scatter(Fixture *f, int64_t n, int64_t rows, int64_t d)
{
    const float *x = test_floats(f, 1, rows * d);
    const float *untouched = test_floats(f, 2, rows * d);
    int32_t *index = test_memory(f, n, sizeof *index);
    for (int64_t i = 0; i < n; i++) {
        index[i] = (int32_t)rng_permute((Rng){TEST_SEED, 3}, i, rows);
    }
    for (int threads = 1; threads <= 2; threads++) {
        omp_set_num_threads(threads);
        float *gathered = test_floats(f, 4, n * d);
        float *scattered = test_copy(f, untouched, rows * d);
        assert_int_equal(f->kernels->gather_rows(gathered, x, index, n, d, f->stream), STATUS_OK);
        assert_int_equal(f->kernels->scatter_rows(scattered, gathered, index, n, d, f->stream),
                         STATUS_OK);
        float *want = test_copy(f, untouched, rows * d);
        for (int64_t i = 0; i < n * d; i++) {
            int64_t at = index[i / d] * d + i % d;
            assert_true(gathered[i] == x[at]);
            want[at] = x[at];
        }
        assert_same_bits(scattered, want, rows * d);
    }
}

static void test_gather_and_scatter(void **state)
{
    check_gather_and_scatter(*state, 0, 4, 3);
    check_gather_and_scatter(*state, 3, 5, 0);
    check_gather_and_scatter(*state, 5, 9, 3);
    check_gather_and_scatter(*state, 300, 450, 129);
}

static void check_copy_matrix(Fixture *f, int64_t rows, int64_t cols, int64_t to_stride,
                              int64_t from_stride)
{
    /* The last row ends with its columns: nothing behind it may be touched. */
    int64_t to_count = rows > 0 ? (rows - 1) * to_stride + cols : 0;
    int64_t from_count = rows > 0 ? (rows - 1) * from_stride + cols : 0;
    const float *from = test_floats(f, 1, from_count);
    for (int threads = 1; threads <= 2; threads++) {
        omp_set_num_threads(threads);
        float *to = test_floats(f, 2, to_count);
        float *want = test_floats(f, 2, to_count);
        assert_int_equal(
            f->kernels->copy_matrix(to, to_stride, from, from_stride, rows, cols, f->stream),
            STATUS_OK);
        for (int64_t i = 0; i < rows * cols; i++) {
            want[i / cols * to_stride + i % cols] = from[i / cols * from_stride + i % cols];
        }
        assert_same_bits(to, want, to_count);
    }
}

static void test_copy_matrix(void **state)
{
    check_copy_matrix(*state, 0, 3, 5, 7);
    check_copy_matrix(*state, 4, 0, 5, 7);
    check_copy_matrix(*state, 4, 3, 5, 7);
    check_copy_matrix(*state, 300, 130, 391, 130);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_gather_and_scatter),
        TEST(test_copy_matrix),
    };
    return cmocka_run_group_tests(tests, test_setup, test_teardown);
}
