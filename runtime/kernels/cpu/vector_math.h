/* Elementary functions that gcc can turn into vector code: no branches, no calls, no tables.
 * glibc's own are vectorised under -ffast-math only, which would also give up the meaning of NaN
 * and infinity. Error bounds are for float and are tested over the range.
 *
 * Threading: pure functions.
 */
#ifndef KERNELS_CPU_VECTOR_MATH_H
#define KERNELS_CPU_VECTOR_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t vector_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float vector_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* e^x within 2 ulp; 0 below -87.3 (where floats become denormal), infinity above 88.7, NaN for NaN.
 * x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor series to r^7 (the rest is below 2^-28).
 */
static inline float vector_exp(float x)
{
    const float low = -87.33654f; /* ln 2^-126 */
    const float high = 88.72283f; /* ln FLT_MAX */
    /* Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits. */
    const float shift = 0x1.8p23f;
    float shifted = fmaf(x, 0x1.715476p0f, shift);
    float n = shifted - shift;
    /* ln 2 in two parts: n times the first is exact. */
    float r = fmaf(n, -0x1.62e4p-1f, x);
    r = fmaf(n, -0x1.7f7d1cp-20f, r);
    float p = fmaf(r, 1.0f / 5040.0f, 1.0f / 720.0f);
    p = fmaf(p, r, 1.0f / 120.0f);
    p = fmaf(p, r, 1.0f / 24.0f);
    p = fmaf(p, r, 1.0f / 6.0f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    float y = vector_float(vector_bits(p) + (vector_bits(shifted) << 23)); /* p * 2^n */
    y = x < low ? 0.0f : y;
    return !(x <= high) ? x + INFINITY : y;
}

static inline float vector_sigmoid(float x)
{
    return 1.0f / (1.0f + vector_exp(-x));
}

/* The upper tail of the standard normal distribution, 1 - Phi(|x|), within 3e-7, and the factor
 * e^(-x^2 / 2) that its density needs too. Abramowitz and Stegun 1964, formula 7.1.26. */
static inline float vector_normal_tail(float x, float *exp_out)
{
    float z = fabsf(x) * 0.70710678f;
    float t = 1.0f / fmaf(z, 0.3275911f, 1.0f);
    float p = fmaf(t, 1.061405429f, -1.453152027f);
    p = fmaf(p, t, 1.421413741f);
    p = fmaf(p, t, -0.284496736f);
    p = fmaf(p, t, 0.254829592f);
    float e = vector_exp(-0.5f * x * x);
    *exp_out = e;
    return 0.5f * p * t * e;
}

/* The standard normal distribution function. */
static inline float vector_normal_cdf(float x, float *exp_out)
{
    float tail = vector_normal_tail(x, exp_out);
    return x > 0.0f ? 1.0f - tail : tail;
}

/* sin and cos within 1e-7 for |x| < 2^20 radians: reduction by pi/2 in double, then Taylor series
 * on |r| <= pi/4, whose rests (r^11/11!, r^10/10!) are below 3e-8. */
static inline void vector_sincos(float x, float *sin_out, float *cos_out)
{
    const double shift = 0x1.8p52;
    double shifted = (double)x * 0x1.45f306dc9c883p-1 + shift;
    uint64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    uint32_t quarter = (uint32_t)bits;
    float r = (float)((double)x - (shifted - shift) * 0x1.921fb54442d18p0);
    float r2 = r * r;
    float s = fmaf(r2, 1.0f / 362880.0f, -1.0f / 5040.0f);
    s = fmaf(s, r2, 1.0f / 120.0f);
    s = fmaf(s, r2, -1.0f / 6.0f);
    s = fmaf(s * r2, r, r);
    float c = fmaf(r2, 1.0f / 40320.0f, -1.0f / 720.0f);
    c = fmaf(c, r2, 1.0f / 24.0f);
    c = fmaf(c, r2, -0.5f);
    c = fmaf(c, r2, 1.0f);
    float sin_abs = (quarter & 1) ? c : s;
    float cos_abs = (quarter & 1) ? s : c;
    *sin_out = vector_float(vector_bits(sin_abs) ^ ((quarter & 2) << 30));
    *cos_out = vector_float(vector_bits(cos_abs) ^ (((quarter + 1) & 2) << 30));
}

#endif
