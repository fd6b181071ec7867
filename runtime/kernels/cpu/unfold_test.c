#include "kernels/testing.h"

enum {
    CHANNELS_OUT = 2,
    CLIPS_MAX = 8
};

typedef struct Case {
    int32_t begins[CLIPS_MAX + 1];
    int clips;
    int64_t w;
    int width, stride;
} Case;

/* Clips of one row, of fewer rows than the width, of none, and a large one for several threads. */
static const Case cases[] = {
    {{0, 1, 8, 8, 14}, 4, 3, 1, 1},  {{0, 1, 8, 8, 14}, 4, 3, 3, 1},
    {{0, 1, 8, 8, 14}, 4, 3, 3, 2},  {{0, 1, 8, 8, 14}, 4, 5, 5, 3},
    {{0, 1, 8, 8, 14}, 4, 3, 4, 2},  {{0, 2, 5}, 2, 1, 7, 2},
    {{0, 6, 7, 13}, 3, 2, 2, 5},     {{0, 2, 300, 601}, 3, 80, 3, 1},
    {{0, 2, 300, 601}, 3, 80, 3, 2}, {{0}, 0, 3, 3, 1},
};

static int64_t count_out_rows(const Case *c)
{
    int64_t rows = 0;
    for (int clip = 0; clip < c->clips; clip++) {
        for (int64_t t = 0; t < c->begins[clip + 1] - c->begins[clip]; t += c->stride) {
            rows++;
        }
    }
    return rows;
}

/* y [T', C] = the convolution of each clip of x with weight [C, W, width], padded with zeros. */
static void convolve(const Case *c, const double *x, const double *weight, double *y)
{
    for (int clip = 0; clip < c->clips; clip++) {
        int64_t end = c->begins[clip + 1];
        for (int64_t centre = c->begins[clip]; centre < end; centre += c->stride) {
            for (int64_t i = 0; i < CHANNELS_OUT * c->w * c->width; i++) {
                int64_t row = centre - c->width / 2 + i % c->width;
                int64_t channel = i / c->width % c->w;
                bool inside = row >= c->begins[clip] && row < end;
                y[i / c->width / c->w] += inside ? weight[i] * x[row * c->w + channel] : 0.0;
            }
            y += CHANNELS_OUT;
        }
    }
}

/* What an op of one thread and of two write, over what was there before; compared bit by bit. */
static const float *run_op(Fixture *f, const Case *c, bool backward, const float *from,
                           int64_t count)
{
    float *results[2];
    for (int t = 0; t < 2; t++) {
        omp_set_num_threads(t + 1);
        results[t] = test_floats(f, 9, count);
        assert_int_equal((backward ? f->kernels->unfold_backward
                                   : f->kernels->unfold)(results[t], from, c->begins, c->clips,
                                                         c->w, c->width, c->stride, f->stream),
                         STATUS_OK);
    }
    assert_same_bits(results[0], results[1], count);
    return results[0];
}

/* Unfolding and a product with the weights is a convolution. */
static void test_convolution(void **state)
{
    Fixture *f = *state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const Case *c = &cases[i];
        int64_t out_rows = count_out_rows(c);
        int64_t cols = c->w * c->width;
        int64_t x_count = c->begins[c->clips] * c->w;
        const float *x = test_floats(f, 1, x_count);
        const float *weight = test_floats(f, 2, CHANNELS_OUT * cols);
        const float *out = run_op(f, c, false, x, out_rows * cols);
        double *want = test_memory(f, out_rows * CHANNELS_OUT, sizeof(double));
        convolve(c, test_doubles(f, x, x_count), test_doubles(f, weight, CHANNELS_OUT * cols),
                 want);
        for (int64_t at = 0; at < out_rows * CHANNELS_OUT; at++) {
            double got = 0.0;
            for (int64_t j = 0; j < cols; j++) {
                got += (double)weight[at % CHANNELS_OUT * cols + j] *
                       (double)out[at / CHANNELS_OUT * cols + j];
            }
            /* Both sum in double what was only copied. */
            assert_near(got, want[at], 1e-12, "convolution", at);
        }
    }
}

typedef struct Reference {
    const Case *of;
    double *x;
    const double *weight;
    const double *y_grad; /* [T', C] */
    double *y;
    int64_t y_count;
} Reference;

static double loss(const void *context)
{
    const Reference *r = context;
    memset(r->y, 0, (size_t)r->y_count * sizeof *r->y);
    convolve(r->of, r->x, r->weight, r->y);
    double sum = 0.0;
    for (int64_t i = 0; i < r->y_count; i++) {
        sum += r->y_grad[i] * r->y[i];
    }
    return sum;
}

/* Backward of the product y_grad @ weight is the gradient of the convolution. */
static void test_gradient(void **state)
{
    Fixture *f = *state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const Case *c = &cases[i];
        int64_t out_rows = count_out_rows(c);
        int64_t cols = c->w * c->width;
        int64_t x_count = c->begins[c->clips] * c->w;
        int64_t y_count = out_rows * CHANNELS_OUT;
        const float *weight = test_floats(f, 2, CHANNELS_OUT * cols);
        const float *y_grad = test_floats(f, 3, y_count);
        float *out_grad = test_memory(f, out_rows * cols, sizeof *out_grad);
        for (int64_t at = 0; at < out_rows * cols; at++) {
            for (int64_t channel = 0; channel < CHANNELS_OUT; channel++) {
                out_grad[at] +=
                    y_grad[at / cols * CHANNELS_OUT + channel] * weight[channel * cols + at % cols];
            }
        }
        const float *x_grad = run_op(f, c, true, out_grad, x_count);
        const Reference r = {c,
                             test_doubles(f, test_floats(f, 1, x_count), x_count),
                             test_doubles(f, weight, CHANNELS_OUT * cols),
                             test_doubles(f, y_grad, y_count),
                             test_memory(f, y_count, sizeof(double)),
                             y_count};
        assert_gradient(loss, &r, r.x, x_count, x_grad, NULL, 1e-5, "x_grad");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_convolution),
        TEST(test_gradient),
    };
    return cmocka_run_group_tests(tests, test_setup, test_teardown);
}
