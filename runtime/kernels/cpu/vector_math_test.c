#include "kernels/cpu/vector_math.h"
#include "kernels/testing.h"

#include <float.h>

/* In loops over arrays, so that the vectorised form is what is tested. */
enum {
    CHUNK = 4096
};

static float from_index(int64_t i, int64_t count, float low, float high)
{
    return low + (high - low) * (float)((double)i / (double)count);
}

static void test_exp(void **state)
{
    (void)state;
    float x[CHUNK];
    float y[CHUNK];
    const int64_t count = 1 << 20;
    double worst = 0.0;
    for (int64_t begin = 0; begin < count; begin += CHUNK) {
        for (int i = 0; i < CHUNK; i++) {
            x[i] = from_index(begin + i, count, -87.3365f, 88.7228f);
        }
        for (int i = 0; i < CHUNK; i++) {
            y[i] = vector_exp(x[i]);
        }
        for (int i = 0; i < CHUNK; i++) {
            double want = exp((double)x[i]);
            double ulp = (double)(nextafterf((float)want, INFINITY) - (float)want);
            worst = fmax(worst, fabs((double)y[i] - want) / ulp);
        }
    }
    print_message("exp: %.3f ulp at most\n", worst);
    assert_true(worst < 2.0);
}

static void test_exp_edges(void **state)
{
    (void)state;
    float x[16] = {0.0f,   -0.0f,    -INFINITY, INFINITY, 88.73f,  1e30f,     -1e30f, -87.4f,
                   -88.0f, -FLT_MAX, FLT_MAX,   1e-30f,   -1e-30f, 88.72283f, 1.0f,   NAN};
    float y[16];
    for (int i = 0; i < 16; i++) {
        y[i] = vector_exp(x[i]);
    }
    assert_true(y[0] == 1.0f && y[1] == 1.0f && y[11] == 1.0f && y[12] == 1.0f);
    assert_true(y[2] == 0.0f && y[6] == 0.0f && y[7] == 0.0f && y[8] == 0.0f && y[9] == 0.0f);
    assert_true(y[3] == INFINITY && y[4] == INFINITY && y[5] == INFINITY && y[10] == INFINITY);
    assert_true(y[13] > 3.4e38f && isfinite(y[13]));
    assert_true(isnan(y[15]));
    assert_true(vector_sigmoid(-INFINITY) == 0.0f && vector_sigmoid(INFINITY) == 1.0f);
    assert_true(vector_sigmoid(-100.0f) == 0.0f && isnan(vector_sigmoid(NAN)));
}

static void test_normal_cdf(void **state)
{
    (void)state;
    const int64_t count = 1 << 20;
    double worst = 0.0;
    for (int64_t i = 0; i < count; i++) {
        float x = from_index(i, count, -15.0f, 15.0f);
        float exponential;
        double want = 0.5 * erfc(-(double)x / sqrt(2.0));
        worst = fmax(worst, fabs((double)vector_normal_cdf(x, &exponential) - want));
        assert_near((double)exponential, exp(-0.5 * (double)x * (double)x), 1e-6, "exp", i);
    }
    print_message("normal distribution: %.3g off at most\n", worst);
    assert_true(worst < 3e-7);
    float exponential;
    assert_true(isnan(vector_normal_cdf(NAN, &exponential)));
    assert_true(vector_normal_cdf(INFINITY, &exponential) == 1.0f);
    assert_true(vector_normal_cdf(-INFINITY, &exponential) == 0.0f);
}

static void test_sincos(void **state)
{
    (void)state;
    const int64_t count = 1 << 20;
    double worst = 0.0;
    for (int64_t i = 0; i < count; i++) {
        /* dense near 0, and all over the range */
        float x = i % 2 ? from_index(i, count, -10.0f, 10.0f)
                        : from_index(i, count, -1048576.0f, 1048576.0f);
        float s;
        float c;
        vector_sincos(x, &s, &c);
        worst = fmax(worst, fabs((double)s - sin((double)x)));
        worst = fmax(worst, fabs((double)c - cos((double)x)));
    }
    print_message("sin and cos: %.3g off at most\n", worst);
    assert_true(worst < 1.5e-7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exp),
        cmocka_unit_test(test_exp_edges),
        cmocka_unit_test(test_normal_cdf),
        cmocka_unit_test(test_sincos),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
