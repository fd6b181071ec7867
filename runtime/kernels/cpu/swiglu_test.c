#include "kernels/testing.h"

static double silu(double x)
{
    return x / (1.0 + exp(-x));
}

static void check_size(Fixture *f, int64_t count)
{
    const float *gate = test_floats(f, 1, count);
    const float *up = test_floats(f, 2, count);
    const float *out_grad = test_floats(f, 3, count);
    float *outs[2];
    float *gate_grads[2];
    float *up_grads[2];
    for (int t = 0; t < 2; t++) {
        omp_set_num_threads(t + 1);
        outs[t] = test_memory(f, count, sizeof(float));
        gate_grads[t] = test_floats(f, 4, count);
        up_grads[t] = test_floats(f, 5, count);
        assert_int_equal(f->kernels->swiglu_forward(outs[t], gate, up, count, f->stream),
                         STATUS_OK);
        assert_int_equal(f->kernels->swiglu_backward(gate_grads[t], up_grads[t], out_grad, gate, up,
                                                     count, f->stream),
                         STATUS_OK);
    }
    assert_same_bits(outs[0], outs[1], count);
    assert_same_bits(gate_grads[0], gate_grads[1], count);
    assert_same_bits(up_grads[0], up_grads[1], count);
    for (int64_t i = 0; i < count; i++) {
        const double h = 1e-5;
        double g = (double)gate[i];
        double u = (double)up[i];
        double slope = (silu(g + h) - silu(g - h)) / (2.0 * h);
        assert_near((double)outs[0][i], silu(g) * u, 1e-6, "out", i);
        assert_near((double)gate_grads[0][i], (double)out_grad[i] * u * slope, 2e-6, "gate_grad",
                    i);
        assert_near((double)up_grads[0][i], (double)out_grad[i] * silu(g), 1e-6, "up_grad", i);
    }
}

static void test_sizes(void **state)
{
    const int64_t counts[] = {0, 1, 31, 40003};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        check_size(*state, counts[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_sizes),
    };
    return cmocka_run_group_tests(tests, test_setup, test_teardown);
}
