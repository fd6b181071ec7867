#include "kernels/testing.h"

static int32_t *make_positions(Fixture *f, int64_t n)
{
    int32_t *positions = test_memory(f, n, sizeof *positions);
    for (int64_t i = 0; i < n; i++) {
        positions[i] = (int32_t)(i * 7 % 2000);
    }
    return positions;
}

static void check_size(Fixture *f, int64_t n, int heads, int width)
{
    const double theta = 10000.0;
    int64_t count = n * heads * width;
    const int32_t *positions = make_positions(f, n);
    const float *before = test_floats(f, 1, count);
    float *results[2];
    for (int t = 0; t < 2; t++) {
        omp_set_num_threads(t + 1);
        results[t] = test_copy(f, before, count);
        assert_int_equal(f->kernels->rope(results[t], positions, n, heads, width, (float)theta,
                                          false, f->stream),
                         STATUS_OK);
    }
    assert_same_bits(results[0], results[1], count);
    for (int64_t i = 0; i < n * heads; i++) {
        const float *x = before + i * width;
        const float *got = results[0] + i * width;
        int32_t token = positions[i / heads];
        double position = (double)token;
        for (int j = 0; j < width / 2; j++) {
            double angle = position * pow(theta, -2.0 * j / width);
            double low = (double)x[j] * cos(angle) - (double)x[j + width / 2] * sin(angle);
            double high = (double)x[j + width / 2] * cos(angle) + (double)x[j] * sin(angle);
            /* Angles are rounded to float: 2^-23 of up to 2000 radians. */
            double tolerance = 1e-6 + 4e-7 * angle;
            assert_near((double)got[j], low, tolerance, "low", j);
            assert_near((double)got[j + width / 2], high, tolerance, "high", j);
        }
    }
    /* The transpose of a rotation turns back, so the backward pass is the inverse. */
    assert_int_equal(
        f->kernels->rope(results[0], positions, n, heads, width, (float)theta, true, f->stream),
        STATUS_OK);
    for (int64_t i = 0; i < count; i++) {
        assert_near((double)results[0][i], (double)before[i], 1e-6, "turned back", i);
    }
}

static void test_sizes(void **state)
{
    Fixture *f = *state;
    check_size(f, 0, 3, 8);
    check_size(f, 5, 0, 8);
    check_size(f, 1, 1, 2);
    check_size(f, 13, 3, 10);
    check_size(f, 211, 3, 64);
    check_size(f, 17, 1, 128);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_sizes),
    };
    return cmocka_run_group_tests(tests, test_setup, test_teardown);
}
