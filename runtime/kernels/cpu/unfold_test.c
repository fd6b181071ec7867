#include "kernels/testing.h"

enum {
    CLIPS = 4,
    CHANNELS = 3,
    OUT_MAX = 64
};

static const int32_t begins[CLIPS + 1] = {0, 1, 8, 8, 14};

/* Unfolding and a product with the weights is a convolution with zeros around each clip. */
static void check_convolution(Fixture *f, int width, int stride)
{
    int64_t rows = begins[CLIPS];
    const float *x = test_floats(f, 1, rows * CHANNELS);
    const float *weight = test_floats(f, 2, (int64_t)CHANNELS * width);
    float *out = test_memory(f, (int64_t)OUT_MAX * CHANNELS * width, sizeof(float));
    assert_int_equal(f->kernels->unfold(out, x, begins, CLIPS, CHANNELS, width, stride, f->stream),
                     STATUS_OK);
    int64_t at = 0;
    for (int clip = 0; clip < CLIPS; clip++) {
        int64_t length = begins[clip + 1] - begins[clip];
        for (int64_t t = 0; t < length; t += stride, at++) {
            double expected = 0.0;
            double found = 0.0;
            for (int c = 0; c < CHANNELS; c++) {
                for (int j = 0; j < width; j++) {
                    int64_t row = t + j - width / 2;
                    double w = (double)weight[c * width + j];
                    bool inside = row >= 0 && row < length;
                    expected += inside ? w * (double)x[(begins[clip] + row) * CHANNELS + c] : 0.0;
                    found += w * (double)out[(at * CHANNELS + c) * width + j];
                }
            }
            assert_near(found, expected, 1e-6, "convolution", at);
        }
    }
}

/* backward is the transpose: <unfold(x), y> = <x, backward(y)>. */
static void check_transpose(Fixture *f, int width, int stride)
{
    int64_t rows = begins[CLIPS];
    int64_t out_rows = 0;
    for (int clip = 0; clip < CLIPS; clip++) {
        out_rows += (begins[clip + 1] - begins[clip] + stride - 1) / stride;
    }
    int64_t count = out_rows * CHANNELS * width;
    const float *x = test_floats(f, 3, rows * CHANNELS);
    const float *y = test_floats(f, 4, count);
    float *out = test_memory(f, count, sizeof(float));
    float *x_grad = test_floats(f, 5, rows * CHANNELS); /* what is there before must not matter */
    assert_int_equal(f->kernels->unfold(out, x, begins, CLIPS, CHANNELS, width, stride, f->stream),
                     STATUS_OK);
    assert_int_equal(
        f->kernels->unfold_backward(x_grad, y, begins, CLIPS, CHANNELS, width, stride, f->stream),
        STATUS_OK);
    double forward = 0.0;
    double backward = 0.0;
    for (int64_t i = 0; i < count; i++) {
        forward += (double)out[i] * (double)y[i];
    }
    for (int64_t i = 0; i < rows * CHANNELS; i++) {
        backward += (double)x[i] * (double)x_grad[i];
    }
    assert_near(backward, forward, 1e-6, "transpose", 0);
}

static void test_unfold(void **state)
{
    for (int width = 1; width <= 5; width += 2) {
        for (int stride = 1; stride <= 3; stride++) {
            check_convolution(*state, width, stride);
            check_transpose(*state, width, stride);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_unfold),
    };
    return cmocka_run_group_tests(tests, test_setup, test_teardown);
}
