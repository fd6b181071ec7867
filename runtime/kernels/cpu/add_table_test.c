#include "kernels/testing.h"

static void check_size(Fixture *f, int64_t blocks, int64_t t, int64_t d)
{
    int64_t count = blocks * t * d;
    const float *x = test_floats(f, 1, count); /* out before, and out_grad */
    const float *table = test_floats(f, 2, t * d);
    float *outs[2];
    float *grads[2];
    for (int i = 0; i < 2; i++) {
        omp_set_num_threads(i + 1);
        outs[i] = test_copy(f, x, count);
        grads[i] = test_copy(f, table, t * d);
        assert_int_equal(f->kernels->add_table(outs[i], table, blocks, t, d, f->stream), STATUS_OK);
        assert_int_equal(f->kernels->add_table_backward(grads[i], x, blocks, t, d, f->stream),
                         STATUS_OK);
    }
    assert_same_bits(outs[0], outs[1], count);
    assert_same_bits(grads[0], grads[1], t * d);
    double *want = test_doubles(f, table, t * d);
    for (int64_t i = 0; i < count; i++) {
        assert_true(outs[0][i] == x[i] + table[i % (t * d)]);
        want[i % (t * d)] += (double)x[i];
    }
    assert_all_near(grads[0], want, t * d, 2e-6, "table_grad");
}

static void test_sizes(void **state)
{
    check_size(*state, 0, 3, 5);
    check_size(*state, 3, 0, 5);
    check_size(*state, 1, 1, 1);
    check_size(*state, 3, 5, 7);
    check_size(*state, 7, 50, 131);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_sizes),
    };
    return cmocka_run_group_tests(tests, test_setup, test_teardown);
}
