#include "kernels/testing.h"

/* The formulas of torch.optim.AdamW, in double. */
static void adamw_element(double *w, double *m, double *v, double grad, const AdamWStep *s)
{
    double g = grad * (double)s->grad_scale;
    *w *= 1.0 - s->learning_rate * s->weight_decay;
    *m = s->beta1 * *m + (1.0 - s->beta1) * g;
    *v = s->beta2 * *v + (1.0 - s->beta2) * g * g;
    double m_hat = *m / (1.0 - pow(s->beta1, (double)s->step));
    double v_hat = *v / (1.0 - pow(s->beta2, (double)s->step));
    *w -= s->learning_rate * m_hat / (sqrt(v_hat) + s->epsilon);
}

static void check_adamw(Fixture *f, int64_t count)
{
    const float *start = test_floats(f, 1, count);
    float *w[2];
    float *m[2];
    float *v[2];
    double *want_w = test_doubles(f, start, count);
    double *want_m = test_memory(f, count, sizeof(double));
    double *want_v = test_memory(f, count, sizeof(double));
    for (int t = 0; t < 2; t++) {
        w[t] = test_copy(f, start, count);
        m[t] = test_memory(f, count, sizeof(float));
        v[t] = test_memory(f, count, sizeof(float));
    }
    AdamWStep step = {.learning_rate = 0.01,
                      .beta1 = 0.9,
                      .beta2 = 0.999,
                      .epsilon = 1e-8,
                      .weight_decay = 0.1,
                      .grad_scale = 0.5f};
    for (step.step = 1; step.step <= 5; step.step++) {
        const float *grad = test_floats(f, 10 + (uint64_t)step.step, count);
        for (int t = 0; t < 2; t++) {
            omp_set_num_threads(t + 1);
            assert_int_equal(f->kernels->adamw(w[t], m[t], v[t], grad, count, &step, f->stream),
                             STATUS_OK);
        }
        for (int64_t i = 0; i < count; i++) {
            adamw_element(&want_w[i], &want_m[i], &want_v[i], (double)grad[i], &step);
        }
    }
    assert_same_bits(w[0], w[1], count);
    assert_all_near(w[0], want_w, count, 1e-6, "w");
    assert_all_near(m[0], want_m, count, 1e-6, "m");
    assert_all_near(v[0], want_v, count, 1e-6, "v");
}

static void check_sgd(Fixture *f, int64_t count)
{
    const float *start = test_floats(f, 1, count);
    const float *grad = test_floats(f, 2, count);
    for (int threads = 1; threads <= 2; threads++) {
        omp_set_num_threads(threads);
        float *w = test_copy(f, start, count);
        assert_int_equal(f->kernels->sgd(w, grad, count, 0.125f, 0.5f, 0.25f, f->stream),
                         STATUS_OK);
        for (int64_t i = 0; i < count; i++) {
            double before = (double)start[i];
            double want = before - 0.125 * (0.25 * (double)grad[i] + 0.5 * before);
            assert_near((double)w[i], want, 2e-7, "w", i);
        }
    }
}

static void test_sizes(void **state)
{
    const int64_t counts[] = {0, 1, 33, 40003};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        check_adamw(*state, counts[i]);
        check_sgd(*state, counts[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_sizes),
    };
    return cmocka_run_group_tests(tests, test_setup, test_teardown);
}
