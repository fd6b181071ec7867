#include "base/memory.h"
#include "data/resample.h"

#include <math.h>
#include <stdio.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    RATE = 16000,
    NUM = 8000, /* half a second of output */
    EDGE = 1200 /* outputs at the ends that see where the sound begins or ends, at 1000 Hz */
};

static float out[NUM];

/* A sine of this frequency comes out as the same sine times the gain: returns the largest difference from
 * that. */
static double sine_error(int rate, double hertz, double gain)
{
    int64_t count = (int64_t)NUM * rate / RATE + 1;
    float *in = NULL;
    assert_int_equal(MEMORY_NEW(&in, count), STATUS_OK);
    for (int64_t i = 0; i < count; i++) {
        in[i] = (float)sin(2 * M_PI * hertz * (double)i / rate + 0.5);
    }
    assert_int_equal(resample(in, count, rate, RATE, NUM, out), STATUS_OK);
    memory_free(in);
    double largest = 0;
    for (int n = EDGE; n < NUM - EDGE; n++) {
        double expected = gain * sin(2 * M_PI * hertz * n / RATE + 0.5);
        largest = fmax(largest, fabs((double)out[n] - expected));
    }
    return largest;
}

/* 1e-4 is 80 dB, what the window is made for; between phases that are tabulated another 1e-5. A delay of one
 * output sample would be 0.2 and more. */
static void test_sines(void **state)
{
    (void)state;
    static const int rates[] = {1000,  7919,  8000,  11025, 15999, 16000,
                                16001, 22050, 24000, 44100, 48000, 192000};
    for (size_t r = 0; r < sizeof rates / sizeof *rates; r++) {
        double half = (rates[r] < RATE ? rates[r] : RATE) / 2.0;
        static const double parts[] = {0.1, 0.5, 0.83};
        for (int i = 0; i < 3; i++) {
            double error = sine_error(rates[r], half * parts[i], 1);
            if (!(error < 2e-4)) {
                fail_msg("%d Hz, a sine of %g Hz: off by %g", rates[r], half * parts[i], error);
            }
        }
        if (rates[r] > RATE + 3000) { /* above the lower half nothing comes through */
            double error = sine_error(rates[r], half * 1.01, 0);
            if (!(error < 2e-4)) {
                fail_msg("%d Hz, an alias of %g Hz: %g", rates[r], half * 1.01, error);
            }
        }
    }
}

/* A constant stays one: all phases have the same sum. */
static void test_constant(void **state)
{
    (void)state;
    static float ones[NUM];
    for (int i = 0; i < NUM; i++) {
        ones[i] = 1;
    }
    static const int rates[] = {8000, 11025, 44100};
    for (int r = 0; r < 3; r++) {
        int num_out = (int)((int64_t)NUM * RATE / rates[r]);
        num_out = num_out < NUM ? num_out : NUM;
        assert_int_equal(resample(ones, NUM, rates[r], RATE, num_out, out), STATUS_OK);
        for (int n = 200; n < num_out - 200; n++) {
            assert_true(fabsf(out[n] - 1) < 2e-4F);
        }
    }
}

/* After the end there is silence, and what is far away does not matter. */
static void test_ends(void **state)
{
    (void)state;
    static float in[4000];
    static float others[NUM];
    for (int i = 0; i < 4000; i++) {
        in[i] = (float)(i % 37) / 37;
    }
    int64_t reach = resample_reach(8000, RATE);
    assert_int_equal(resample(in, 1000, 8000, RATE, NUM, out), STATUS_OK);
    assert_true(fabsf(out[2 * 1000 + 3]) > 0);
    for (int64_t n = 2 * (1000 + reach); n < NUM; n++) {
        assert_true(out[n] == 0);
    }
    assert_int_equal(resample(in, 4000, 8000, RATE, NUM, others), STATUS_OK);
    for (int64_t n = 0; n < 2 * (1000 - reach); n++) {
        assert_true(out[n] == others[n]);
    }
    assert_int_equal(resample(in, 0, 8000, RATE, 10, out), STATUS_OK);
    assert_true(out[0] == 0 && out[9] == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sines), cmocka_unit_test(test_constant), cmocka_unit_test(test_ends)};
    return cmocka_run_group_tests_name("resample", tests, NULL, NULL);
}
