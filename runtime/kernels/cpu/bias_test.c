#include "kernels/testing.h"

static void check_size(Fixture *f, int64_t n, int64_t d)
{
    const float *grad = test_floats(f, 1, n * d);
    const float *before = test_floats(f, 2, d);
    float *results[2];
    for (int threads = 1; threads <= 2; threads++) {
        omp_set_num_threads(threads);
        results[threads - 1] = test_copy(f, before, d);
        assert_int_equal(f->kernels->bias_backward(results[threads - 1], grad, n, d, f->stream),
                         STATUS_OK);
    }
    assert_same_bits(results[0], results[1], d);
    for (int64_t j = 0; j < d; j++) {
        double want = (double)before[j];
        for (int64_t i = 0; i < n; i++) {
            want += (double)grad[i * d + j];
        }
        assert_near((double)results[0][j], want, 1e-5, "bias_grad", j);
    }
}

static void test_sums_of_columns(void **state)
{
    const int64_t sizes[][2] = {{0, 5}, {5, 0}, {1, 1}, {3, 17}, {7, 16}, {500, 131}, {403, 384}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        check_size(*state, sizes[i][0], sizes[i][1]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_sums_of_columns),
    };
    return cmocka_run_group_tests(tests, test_setup, test_teardown);
}
