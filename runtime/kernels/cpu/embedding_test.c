#include "kernels/testing.h"

/* Ids of the whole vocabulary, with repeats; the shard has [first, first + v). */
static void check_shard(Fixture *f, int64_t n, int64_t d, int32_t first, int64_t v)
{
    const int32_t vocabulary = 50;
    const float *table = test_floats(f, 1, v * d);
    const float *out_grad = test_floats(f, 2, n * d);
    const float *before = test_floats(f, 3, v * d);
    int32_t *ids = test_memory(f, n, sizeof *ids);
    double *want = test_doubles(f, before, v * d);
    for (int64_t i = 0; i < n; i++) {
        ids[i] = (int32_t)test_below(4, i, vocabulary);
        for (int64_t j = 0; ids[i] >= first && ids[i] < first + v && j < d; j++) {
            want[(ids[i] - first) * d + j] += (double)out_grad[i * d + j];
        }
    }
    float *outs[2];
    float *grads[2];
    for (int t = 0; t < 2; t++) {
        omp_set_num_threads(t + 1);
        outs[t] = test_floats(f, 5, n * d);
        grads[t] = test_copy(f, before, v * d);
        assert_int_equal(
            f->kernels->embedding_forward(outs[t], table, ids, n, d, first, v, f->stream),
            STATUS_OK);
        assert_int_equal(
            f->kernels->embedding_backward(grads[t], out_grad, ids, n, d, first, v, f->stream),
            STATUS_OK);
    }
    assert_same_bits(outs[0], outs[1], n * d);
    assert_same_bits(grads[0], grads[1], v * d);
    for (int64_t i = 0; i < n * d; i++) {
        int64_t row = ids[i / d] - first;
        float expected = row >= 0 && row < v ? table[row * d + i % d] : 0.0f;
        assert_true(outs[0][i] == expected);
    }
    assert_all_near(grads[0], want, v * d, 1e-5, "table_grad");
}

static void test_shards(void **state)
{
    Fixture *f = *state;
    check_shard(f, 0, 8, 0, 50);
    check_shard(f, 9, 0, 0, 50);
    check_shard(f, 9, 3, 20, 0);
    check_shard(f, 23, 5, 0, 50);
    check_shard(f, 23, 5, 17, 16);
    check_shard(f, 23, 5, 33, 17);
    check_shard(f, 901, 67, 17, 16);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_shards),
    };
    return cmocka_run_group_tests(tests, test_setup, test_teardown);
}
