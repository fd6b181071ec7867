#include "kernels/testing.h"

static void check_size(Fixture *f, int64_t count)
{
    const float *a = test_floats(f, 1, count);
    const float *b = test_floats(f, 2, count);
    for (int threads = 1; threads <= 2; threads++) {
        omp_set_num_threads(threads);
        float *sum = test_floats(f, 3, count);
        float *in_place = test_copy(f, a, count);
        float *onto = test_copy(f, b, count);
        float *scaled = test_copy(f, a, count);
        assert_int_equal(f->kernels->add(sum, a, b, count, f->stream), STATUS_OK);
        assert_int_equal(f->kernels->add(in_place, in_place, b, count, f->stream), STATUS_OK);
        assert_int_equal(f->kernels->accumulate(onto, a, count, f->stream), STATUS_OK);
        assert_int_equal(f->kernels->scale(scaled, -2.5f, count, f->stream), STATUS_OK);
        for (int64_t i = 0; i < count; i++) {
            assert_true(sum[i] == a[i] + b[i]);
            assert_true(in_place[i] == a[i] + b[i]);
            assert_true(onto[i] == a[i] + b[i]);
            assert_true(scaled[i] == -2.5f * a[i]);
        }
    }
}

static void test_sizes(void **state)
{
    const int64_t counts[] = {0, 1, 31, 40007};
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
