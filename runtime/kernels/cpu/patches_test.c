#include "kernels/testing.h"

static void check_size(Fixture *f, int64_t images, int size, int patch)
{
    const float mean[3] = {0.48f, 0.46f, 0.41f};
    const float std[3] = {0.27f, 0.26f, 0.28f};
    int64_t count = images * size * size * 3;
    int64_t side = size / patch;
    uint8_t *pixels = test_memory(f, count, 1);
    for (int64_t i = 0; i < count; i++) {
        pixels[i] = (uint8_t)test_below(1, i, 256);
    }
    float *results[2];
    for (int t = 0; t < 2; t++) {
        omp_set_num_threads(t + 1);
        results[t] = test_memory(f, count, sizeof(float));
        assert_int_equal(f->kernels->patches_forward(results[t], pixels, mean, std, images, size,
                                                     patch, f->stream),
                         STATUS_OK);
    }
    assert_same_bits(results[0], results[1], count);
    /* From each pixel to its place in the patches. */
    for (int64_t i = 0; i < count; i++) {
        int64_t c = i % 3;
        int64_t x = i / 3 % size;
        int64_t y = i / 3 / size % size;
        int64_t image = i / 3 / size / size;
        int64_t row = (image * side + y / patch) * side + x / patch;
        int64_t col = (c * patch + y % patch) * patch + x % patch;
        double want = ((double)pixels[i] / 255.0 - (double)mean[c]) / (double)std[c];
        assert_near((double)results[0][row * 3 * patch * patch + col], want, 1e-6, "patch", i);
    }
}

static void test_sizes(void **state)
{
    check_size(*state, 0, 8, 4);
    check_size(*state, 1, 4, 4);
    check_size(*state, 2, 15, 5);
    check_size(*state, 3, 70, 14);
    check_size(*state, 1, 128, 16);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_sizes),
    };
    return cmocka_run_group_tests(tests, test_setup, test_teardown);
}
