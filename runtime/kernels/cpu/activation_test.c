#include "kernels/testing.h"

static double apply(double x, KernelActivation kind)
{
    return kind == KERNEL_ACTIVATION_GELU ? 0.5 * x * (1.0 + erf(x / sqrt(2.0)))
                                          : x / (1.0 + exp(-1.702 * x));
}

static void check_kind(Fixture *f, KernelActivation kind, int64_t count)
{
    float *x = test_floats(f, 1, count);
    for (int64_t i = 0; i < count; i++) {
        x[i] *= 3.0f;
    }
    const float *out_grad = test_floats(f, 2, count);
    float *outs[2];
    float *grads[2];
    for (int t = 0; t < 2; t++) {
        omp_set_num_threads(t + 1);
        outs[t] = test_memory(f, count, sizeof(float));
        grads[t] = test_copy(f, out_grad, count); /* in place */
        assert_int_equal(f->kernels->activation_forward(outs[t], x, count, kind, f->stream),
                         STATUS_OK);
        assert_int_equal(
            f->kernels->activation_backward(grads[t], grads[t], x, count, kind, f->stream),
            STATUS_OK);
    }
    assert_same_bits(outs[0], outs[1], count);
    assert_same_bits(grads[0], grads[1], count);
    for (int64_t i = 0; i < count; i++) {
        const double h = 1e-5;
        double at = (double)x[i];
        double slope = (apply(at + h, kind) - apply(at - h, kind)) / (2.0 * h);
        assert_near((double)outs[0][i], apply(at, kind), 6e-7, "out", i);
        assert_near((double)grads[0][i], (double)out_grad[i] * slope, 2e-6, "x_grad", i);
    }
}

static void test_kinds(void **state)
{
    const int64_t counts[] = {0, 1, 3, 33, 40001};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        check_kind(*state, KERNEL_ACTIVATION_GELU, counts[i]);
        check_kind(*state, KERNEL_ACTIVATION_QUICK_GELU, counts[i]);
    }
}

/* Large values must neither overflow nor lose their NaN. */
static void test_far_values(void **state)
{
    Fixture *f = *state;
    const float x[5] = {-1000.0f, 1000.0f, -60.0f, 60.0f, NAN};
    const float one[5] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
    for (int kind = KERNEL_ACTIVATION_GELU; kind <= KERNEL_ACTIVATION_QUICK_GELU; kind++) {
        float out[5];
        float grad[5];
        assert_int_equal(
            f->kernels->activation_forward(out, x, 5, (KernelActivation)kind, f->stream),
            STATUS_OK);
        assert_int_equal(
            f->kernels->activation_backward(grad, one, x, 5, (KernelActivation)kind, f->stream),
            STATUS_OK);
        assert_true(fabsf(out[0]) < 1e-6f && out[1] == 1000.0f);
        assert_true(fabsf(out[2]) < 1e-6f && out[3] == 60.0f);
        assert_true(fabsf(grad[0]) < 1e-6f && grad[1] == 1.0f && grad[3] == 1.0f);
        assert_true(isnan(out[4]) && isnan(grad[4]));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_kinds),
        TEST(test_far_values),
    };
    return cmocka_run_group_tests(tests, test_setup, test_teardown);
}
