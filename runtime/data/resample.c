#include "data/resample.h"

#include "base/memory.h"

#include <math.h>
#include <string.h>

enum {
    ZERO_CROSSINGS = 32, /* of the sinc on each side */
    PHASES_MAX = 512,    /* between two input samples; finer places are interpolated */
    LANES = 8,           /* of a vector register: taps are a multiple of it */
};

static const double window_beta = 7.857; /* Kaiser's, for 80 dB */
/* The middle of the filter's edge, of the lower rate's half: with the window's edge it ends at 1. */
static const double cutoff = 0.92;

/* For each phase p of `phases` + 1, the weights [taps] of the input samples around a place that is p / phases
 * of the way from one to the next. */
typedef struct Filter {
    int64_t half; /* taps on each side */
    int64_t taps; /* 2 half */
    int64_t phases;
    float *weights; /* [phases + 1, taps] */
} Filter;

static int64_t gcd(int64_t a, int64_t b)
{
    while (b != 0) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* The modified Bessel function of order 0, by its series; x of at most 10. */
static double bessel_i0(double x)
{
    double term = 1;
    double sum = 1;
    for (int k = 1; term > sum * 1e-12; k++) {
        term *= (x / 2 / k) * (x / 2 / k);
        sum += term;
    }
    return sum;
}

int64_t resample_reach(int rate_in, int rate_out)
{
    double widening = rate_in > rate_out ? (double)rate_in / rate_out : 1;
    int64_t half = (int64_t)ceil(ZERO_CROSSINGS * widening);
    return (half + LANES / 2 - 1) / (LANES / 2) * (LANES / 2);
}

/* The filter at `t` input samples from its middle, times I0(beta); its zero crossings stand `spacing`
 * apart. */
static double filter_at(double t, double spacing)
{
    double u = t / spacing / ZERO_CROSSINGS;
    if (u <= -1 || u >= 1) {
        return 0;
    }
    double window = bessel_i0(window_beta * sqrt(1 - u * u));
    double angle = M_PI * cutoff * t / spacing;
    double sinc = fabs(angle) < 1e-9 ? 1 : sin(angle) / angle;
    return cutoff / spacing * sinc * window;
}

static Status make_filter(int rate_in, int rate_out, Filter *filter_out)
{
    int64_t places = rate_out / gcd(rate_in, rate_out); /* that output samples come to stand at */
    double spacing = rate_in > rate_out ? (double)rate_in / rate_out : 1;
    Filter filter = {.half = resample_reach(rate_in, rate_out),
                     .phases = places < PHASES_MAX ? places : PHASES_MAX};
    filter.taps = 2 * filter.half;
    double window_top = bessel_i0(window_beta);
    TRY(MEMORY_NEW(&filter.weights, (filter.phases + 1) * filter.taps));
    for (int64_t p = 0; p <= filter.phases; p++) {
        for (int64_t k = 0; k < filter.taps; k++) {
            double t = (double)(k - filter.half + 1) - (double)p / (double)filter.phases;
            filter.weights[p * filter.taps + k] = (float)(filter_at(t, spacing) / window_top);
        }
    }
    *filter_out = filter;
    return STATUS_OK;
}

/* x [taps] . weights [taps] */
static float dot(const float *x, const float *weights, int64_t taps)
{
    float sums[LANES] = {0};
    for (int64_t k = 0; k < taps; k += LANES) {
        for (int lane = 0; lane < LANES; lane++) {
            sums[lane] += x[k + lane] * weights[k + lane];
        }
    }
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) {
        sum += sums[lane];
    }
    return sum;
}

/* padded: `half` zeros, in [count], taps zeros. */
static void run_filter(const Filter *filter, const float *padded, int64_t count, int rate_in,
                       int rate_out, int64_t num_out, float *out)
{
    for (int64_t n = 0; n < num_out; n++) {
        int64_t place = n * rate_in; /* in units of 1 / rate_out of an input sample */
        int64_t before = place / rate_out;
        if (before >= count + filter->half) {
            out[n] = 0;
            continue;
        }
        double phase = (double)(place % rate_out) * (double)filter->phases / rate_out;
        int64_t p = (int64_t)phase;
        float part = (float)(phase - (double)p);
        const float *x = padded + before + 1; /* the first tap: input sample before - half + 1 */
        const float *weights = filter->weights + p * filter->taps;
        float value = dot(x, weights, filter->taps);
        if (part > 0) {
            float next = dot(x, weights + filter->taps, filter->taps);
            value += part * (next - value);
        }
        out[n] = value;
    }
}

Status resample(const float *in, int64_t count, int rate_in, int rate_out, int64_t num_out,
                float *out)
{
    CHECK(count >= 0 && num_out >= 0 && rate_in > 0 && rate_out > 0);
    Filter filter = {0};
    float *padded = NULL;
    TRY(make_filter(rate_in, rate_out, &filter));
    Status status = MEMORY_NEW(&padded, filter.half + count + 2 * filter.taps);
    if (status == STATUS_OK) {
        memcpy(padded + filter.half, in, (size_t)count * sizeof *in);
        run_filter(&filter, padded, count, rate_in, rate_out, num_out, out);
    }
    memory_free(padded);
    memory_free(filter.weights);
    TRY(status);
    return STATUS_OK;
}
