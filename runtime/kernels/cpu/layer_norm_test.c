#include "kernels/testing.h"

static const double epsilon = 1e-5;

typedef struct Reference {
    double *x;      /* [N, D] */
    double *weight; /* [D] */
    double *bias;   /* [D] */
    double *out_grad;
    int64_t n, d;
} Reference;

static void row_statistics(const Reference *r, int64_t i, double *mean_out, double *rstd_out)
{
    double mean = 0.0;
    double variance = 0.0;
    for (int64_t j = 0; j < r->d; j++) {
        mean += r->x[i * r->d + j] / (double)r->d;
    }
    for (int64_t j = 0; j < r->d; j++) {
        variance += pow(r->x[i * r->d + j] - mean, 2.0) / (double)r->d;
    }
    *mean_out = mean;
    *rstd_out = 1.0 / sqrt(variance + epsilon);
}

static double output(const Reference *r, int64_t i, int64_t j, double mean, double rstd)
{
    return (r->x[i * r->d + j] - mean) * rstd * r->weight[j] + r->bias[j];
}

/* sum out_grad . out: its derivatives are the gradients. */
static double loss(const void *context)
{
    const Reference *r = context;
    double sum = 0.0;
    for (int64_t i = 0; i < r->n; i++) {
        double mean;
        double rstd;
        row_statistics(r, i, &mean, &rstd);
        for (int64_t j = 0; j < r->d; j++) {
            sum += r->out_grad[i * r->d + j] * output(r, i, j, mean, rstd);
        }
    }
    return sum;
}

typedef struct Result {
    float *out, *mean, *rstd;
    float *x_grad, *weight_grad, *bias_grad;
} Result;

static void check_size(Fixture *f, int64_t n, int64_t d, bool accumulate)
{
    float *x = test_floats(f, 1, n * d);
    for (int64_t i = 0; i < n * d; i++) {
        x[i] = 3.0f * x[i] + 5.0f; /* a mean that must not be forgotten */
    }
    const float *weight = test_floats(f, 2, d);
    const float *bias = test_floats(f, 3, d);
    const float *out_grad = test_floats(f, 4, n * d);
    const float *x_before = test_floats(f, 5, n * d);
    const float *weight_before = test_floats(f, 6, d);
    const float *bias_before = test_floats(f, 7, d);
    Result results[2];
    for (int t = 0; t < 2; t++) {
        omp_set_num_threads(t + 1);
        Result *r = &results[t];
        *r = (Result){test_memory(f, n * d, 4),       test_memory(f, n, 4),
                      test_memory(f, n, 4),           test_copy(f, x_before, n * d),
                      test_copy(f, weight_before, d), test_copy(f, bias_before, d)};
        assert_int_equal(f->kernels->layer_norm_forward(r->out, r->mean, r->rstd, x, weight, bias,
                                                        n, d, (float)epsilon, f->stream),
                         STATUS_OK);
        assert_int_equal(f->kernels->layer_norm_backward(r->x_grad, r->weight_grad, r->bias_grad,
                                                         out_grad, x, weight, r->mean, r->rstd, n,
                                                         d, accumulate, f->stream),
                         STATUS_OK);
    }
    const Result *got = &results[0];
    /* Frozen: x_grad is the same without the others. */
    float *frozen_grad = test_copy(f, x_before, n * d);
    assert_int_equal(f->kernels->layer_norm_backward(frozen_grad, NULL, NULL, out_grad, x, weight,
                                                     got->mean, got->rstd, n, d, accumulate,
                                                     f->stream),
                     STATUS_OK);
    assert_same_bits(got->x_grad, frozen_grad, n * d);
    assert_same_bits(got->out, results[1].out, n * d);
    assert_same_bits(got->x_grad, results[1].x_grad, n * d);
    assert_same_bits(got->weight_grad, results[1].weight_grad, d);
    assert_same_bits(got->bias_grad, results[1].bias_grad, d);
    Reference reference = {test_doubles(f, x, n * d),
                           test_doubles(f, weight, d),
                           test_doubles(f, bias, d),
                           test_doubles(f, out_grad, n * d),
                           n,
                           d};
    for (int64_t i = 0; i < n; i++) {
        double mean;
        double rstd;
        row_statistics(&reference, i, &mean, &rstd);
        assert_near((double)got->mean[i], mean, 2e-6, "mean", i);
        assert_near((double)got->rstd[i], rstd, 2e-5, "rstd", i);
        for (int64_t j = 0; j < d; j++) {
            double want = output(&reference, i, j, mean, rstd);
            assert_near((double)got->out[i * d + j], want, 1e-5, "out", i * d + j);
        }
    }
    assert_gradient(loss, &reference, reference.x, n * d, got->x_grad, accumulate ? x_before : NULL,
                    1e-5, "x_grad");
    assert_gradient(loss, &reference, reference.weight, d, got->weight_grad, weight_before, 1e-5,
                    "weight_grad");
    assert_gradient(loss, &reference, reference.bias, d, got->bias_grad, bias_before, 1e-5,
                    "bias_grad");
}

static void test_sizes(void **state)
{
    const int64_t sizes[][2] = {{0, 5}, {1, 3}, {3, 5}, {65, 17}, {301, 131}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        check_size(*state, sizes[i][0], sizes[i][1], false);
        check_size(*state, sizes[i][0], sizes[i][1], true);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_sizes),
    };
    return cmocka_run_group_tests(tests, test_setup, test_teardown);
}
