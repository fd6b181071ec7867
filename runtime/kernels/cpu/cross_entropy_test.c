#include "kernels/testing.h"

typedef struct Reference {
    double *logits; /* [N, V] */
    const int32_t *labels;
    int64_t n, v;
    double scale;
} Reference;

static double row_loss(const Reference *r, int64_t i)
{
    if (r->labels[i] < 0) {
        return 0.0;
    }
    const double *row = r->logits + i * r->v;
    double sum = 0.0;
    for (int64_t j = 0; j < r->v; j++) {
        sum += exp(row[j]);
    }
    return log(sum) - row[r->labels[i]];
}

static double loss(const void *context)
{
    const Reference *r = context;
    double sum = 0.0;
    for (int64_t i = 0; i < r->n; i++) {
        sum += row_loss(r, i);
    }
    return r->scale * sum;
}

/* Columns [begin, end) of x [n, v]. */
static float *cut_columns(Fixture *f, const float *x, int64_t n, int64_t v, int64_t begin,
                          int64_t end)
{
    int64_t width = end - begin;
    float *part = test_memory(f, n * width, sizeof *part);
    for (int64_t i = 0; i < n * width; i++) {
        part[i] = x[i / width * v + begin + i % width];
    }
    return part;
}

/* Runs the three steps over vocabulary shards with bounds cuts[0..parts], combining as a group of
 * ranks would. losses [N]; grads [N, V] in one piece. */
/* NOLINTNEXTLINE(readability-function-size): a whole computation, told by its parameters. */
static void run_shards(Fixture *f, const float *logits, const int32_t *labels, int64_t n, int64_t v,
                       const int64_t *cuts, int parts, float scale, float *losses, float *grads)
{
    float *pieces[4];
    float *max = test_memory(f, n, sizeof *max);
    float *sums = test_memory(f, 2 * n, sizeof *sums);
    float *local = test_memory(f, 2 * n, sizeof *local);
    for (int p = 0; p < parts; p++) {
        int64_t width = cuts[p + 1] - cuts[p];
        pieces[p] = cut_columns(f, logits, n, v, cuts[p], cuts[p + 1]);
        assert_int_equal(f->kernels->cross_entropy_max(local, pieces[p], n, width, f->stream),
                         STATUS_OK);
        for (int64_t i = 0; i < n; i++) {
            max[i] = p == 0 || local[i] > max[i] ? local[i] : max[i];
        }
    }
    for (int p = 0; p < parts; p++) {
        assert_int_equal(f->kernels->cross_entropy_sums(local, pieces[p], max, labels, n,
                                                        cuts[p + 1] - cuts[p], (int32_t)cuts[p],
                                                        f->stream),
                         STATUS_OK);
        for (int64_t i = 0; i < 2 * n; i++) {
            sums[i] += local[i];
        }
    }
    for (int p = 0; p < parts; p++) {
        int64_t width = cuts[p + 1] - cuts[p];
        assert_int_equal(f->kernels->cross_entropy_finish(losses, pieces[p], max, sums, labels, n,
                                                          width, (int32_t)cuts[p], scale,
                                                          f->stream),
                         STATUS_OK);
        for (int64_t i = 0; i < n * width; i++) {
            grads[i / width * v + cuts[p] + i % width] = pieces[p][i];
        }
    }
}

static void check_size(Fixture *f, int64_t n, int64_t v, float magnitude)
{
    const float scale = 0.25f;
    float *logits = test_floats(f, 1, n * v);
    for (int64_t i = 0; i < n * v; i++) {
        logits[i] *= magnitude;
    }
    int32_t *labels = test_memory(f, n, sizeof *labels);
    for (int64_t i = 0; i < n; i++) {
        labels[i] = i % 5 == 3 ? -100 : (int32_t)test_below(2, i, v);
    }
    const int64_t cuts[2][4] = {{0, v}, {0, v / 2 + 1, v - 1, v}}; /* whole; three uneven shards */
    float *losses[4];
    float *grads[4];
    for (int form = 0; form < 4; form++) {
        omp_set_num_threads(form % 2 + 1);
        losses[form] = test_floats(f, 3, n);
        grads[form] = test_memory(f, n * v, sizeof(float));
        run_shards(f, logits, labels, n, v, cuts[form / 2], form < 2 ? 1 : 3, scale, losses[form],
                   grads[form]);
    }
    Reference reference = {test_doubles(f, logits, n * v), labels, n, v, (double)scale};
    for (int form = 0; form < 4; form++) {
        for (int64_t i = 0; i < n; i++) {
            assert_near((double)losses[form][i], row_loss(&reference, i), 3e-6, "loss", i);
        }
        assert_gradient(loss, &reference, reference.logits, n * v, grads[form], NULL, 1e-6,
                        "logits");
    }
    assert_same_bits(losses[0], losses[1], n);
    assert_same_bits(grads[0], grads[1], n * v);
    assert_same_bits(losses[2], losses[3], n);
    assert_same_bits(grads[2], grads[3], n * v);
    for (int64_t i = 0; i < n * v; i++) {
        bool counts = labels[i / v] >= 0;
        assert_true(counts || (grads[0][i] == 0.0f && losses[0][i / v] == 0.0f));
        assert_near((double)grads[2][i], (double)grads[0][i], 5e-7, "sharded gradient", i);
    }
}

static void test_whole_and_shards(void **state)
{
    check_size(*state, 0, 9, 1.0f);
    check_size(*state, 1, 4, 1.0f);
    check_size(*state, 7, 33, 1.0f);
    check_size(*state, 7, 33, 60.0f);
    check_size(*state, 71, 503, 4.0f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_whole_and_shards),
    };
    return cmocka_run_group_tests(tests, test_setup, test_teardown);
}
