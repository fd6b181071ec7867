#include "kernels/testing.h"

static const double epsilon = 1e-6;

typedef struct Reference {
    double *x;      /* [N, D] */
    double *weight; /* [D] */
    double *out_grad;
    int64_t n, d;
} Reference;

static double row_rstd(const Reference *r, int64_t i)
{
    double mean = 0.0;
    for (int64_t j = 0; j < r->d; j++) {
        mean += pow(r->x[i * r->d + j], 2.0) / (double)r->d;
    }
    return 1.0 / sqrt(mean + epsilon);
}

static double loss(const void *context)
{
    const Reference *r = context;
    double sum = 0.0;
    for (int64_t i = 0; i < r->n; i++) {
        double rstd = row_rstd(r, i);
        for (int64_t j = 0; j < r->d; j++) {
            int64_t at = i * r->d + j;
            sum += r->out_grad[at] * r->x[at] * rstd * r->weight[j];
        }
    }
    return sum;
}

typedef struct Result {
    float *out, *rstd, *x_grad, *weight_grad;
} Result;

static void check_size(Fixture *f, int64_t n, int64_t d, bool accumulate)
{
    const float *x = test_floats(f, 1, n * d);
    const float *weight = test_floats(f, 2, d);
    const float *out_grad = test_floats(f, 3, n * d);
    const float *x_before = test_floats(f, 4, n * d);
    const float *weight_before = test_floats(f, 5, d);
    Result results[2];
    for (int t = 0; t < 2; t++) {
        omp_set_num_threads(t + 1);
        Result *r = &results[t];
        *r = (Result){test_memory(f, n * d, 4), test_memory(f, n, 4), test_copy(f, x_before, n * d),
                      test_copy(f, weight_before, d)};
        assert_int_equal(f->kernels->rms_norm_forward(r->out, r->rstd, x, weight, n, d,
                                                      (float)epsilon, f->stream),
                         STATUS_OK);
        assert_int_equal(f->kernels->rms_norm_backward(r->x_grad, r->weight_grad, out_grad, x,
                                                       weight, r->rstd, n, d, accumulate,
                                                       f->stream),
                         STATUS_OK);
    }
    const Result *got = &results[0];
    /* Frozen: x_grad is the same without the other. */
    float *frozen_grad = test_copy(f, x_before, n * d);
    assert_int_equal(f->kernels->rms_norm_backward(frozen_grad, NULL, out_grad, x, weight,
                                                   got->rstd, n, d, accumulate, f->stream),
                     STATUS_OK);
    assert_same_bits(got->x_grad, frozen_grad, n * d);
    assert_same_bits(got->out, results[1].out, n * d);
    assert_same_bits(got->x_grad, results[1].x_grad, n * d);
    assert_same_bits(got->weight_grad, results[1].weight_grad, d);
    Reference reference = {test_doubles(f, x, n * d), test_doubles(f, weight, d),
                           test_doubles(f, out_grad, n * d), n, d};
    for (int64_t i = 0; i < n; i++) {
        double rstd = row_rstd(&reference, i);
        assert_near((double)got->rstd[i], rstd, 2e-6, "rstd", i);
        for (int64_t j = 0; j < d; j++) {
            double want = reference.x[i * d + j] * rstd * reference.weight[j];
            assert_near((double)got->out[i * d + j], want, 2e-6, "out", i * d + j);
        }
    }
    assert_gradient(loss, &reference, reference.x, n * d, got->x_grad, accumulate ? x_before : NULL,
                    1e-5, "x_grad");
    assert_gradient(loss, &reference, reference.weight, d, got->weight_grad, weight_before, 1e-5,
                    "weight_grad");
}

static void test_sizes(void **state)
{
    const int64_t sizes[][2] = {{0, 5}, {1, 1}, {3, 5}, {65, 17}, {301, 131}};
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
