/* Sums over one row. Each keeps four running vectors (a quarter of the row each), since one alone
 * would wait for the latency of its own additions; the order depends on the length only.
 *
 * Threading: pure functions.
 */
#ifndef KERNELS_CPU_ROW_H
#define KERNELS_CPU_ROW_H

#include "kernels/cpu/vector_math.h"

/* sum x[i] */
static inline float row_sum(const float *x, int64_t count)
{
    int64_t q = count / 4;
    float s0 = 0.0f;
    float s1 = 0.0f;
    float s2 = 0.0f;
    float s3 = 0.0f;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t i = 0; i < q; i++) {
        s0 += x[i];
        s1 += x[q + i];
        s2 += x[2 * q + i];
        s3 += x[3 * q + i];
    }
    for (int64_t i = 4 * q; i < count; i++) {
        s0 += x[i];
    }
    return (s0 + s1) + (s2 + s3);
}

/* sum (x[i] - mean)^2 */
static inline float row_sum_squares(const float *x, float mean, int64_t count)
{
    int64_t q = count / 4;
    float s0 = 0.0f;
    float s1 = 0.0f;
    float s2 = 0.0f;
    float s3 = 0.0f;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t i = 0; i < q; i++) {
        s0 += (x[i] - mean) * (x[i] - mean);
        s1 += (x[q + i] - mean) * (x[q + i] - mean);
        s2 += (x[2 * q + i] - mean) * (x[2 * q + i] - mean);
        s3 += (x[3 * q + i] - mean) * (x[3 * q + i] - mean);
    }
    for (int64_t i = 4 * q; i < count; i++) {
        s0 += (x[i] - mean) * (x[i] - mean);
    }
    return (s0 + s1) + (s2 + s3);
}

/* sum a[i] b[i] */
static inline float row_dot(const float *a, const float *b, int64_t count)
{
    int64_t q = count / 4;
    float s0 = 0.0f;
    float s1 = 0.0f;
    float s2 = 0.0f;
    float s3 = 0.0f;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t i = 0; i < q; i++) {
        s0 += a[i] * b[i];
        s1 += a[q + i] * b[q + i];
        s2 += a[2 * q + i] * b[2 * q + i];
        s3 += a[3 * q + i] * b[3 * q + i];
    }
    for (int64_t i = 4 * q; i < count; i++) {
        s0 += a[i] * b[i];
    }
    return (s0 + s1) + (s2 + s3);
}

/* sum a[i] b[i] (c[i] - mean) */
static inline float row_dot_centred(const float *a, const float *b, const float *c, float mean,
                                    int64_t count)
{
    int64_t q = count / 4;
    float s0 = 0.0f;
    float s1 = 0.0f;
    float s2 = 0.0f;
    float s3 = 0.0f;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t i = 0; i < q; i++) {
        s0 += a[i] * b[i] * (c[i] - mean);
        s1 += a[q + i] * b[q + i] * (c[q + i] - mean);
        s2 += a[2 * q + i] * b[2 * q + i] * (c[2 * q + i] - mean);
        s3 += a[3 * q + i] * b[3 * q + i] * (c[3 * q + i] - mean);
    }
    for (int64_t i = 4 * q; i < count; i++) {
        s0 += a[i] * b[i] * (c[i] - mean);
    }
    return (s0 + s1) + (s2 + s3);
}

/* max x[i]; -infinity for none. NaN is passed over. */
static inline float row_max(const float *x, int64_t count)
{
    int64_t q = count / 4;
    float m0 = -INFINITY;
    float m1 = -INFINITY;
    float m2 = -INFINITY;
    float m3 = -INFINITY;
#pragma omp simd reduction(max : m0, m1, m2, m3)
    for (int64_t i = 0; i < q; i++) {
        m0 = x[i] > m0 ? x[i] : m0;
        m1 = x[q + i] > m1 ? x[q + i] : m1;
        m2 = x[2 * q + i] > m2 ? x[2 * q + i] : m2;
        m3 = x[3 * q + i] > m3 ? x[3 * q + i] : m3;
    }
    for (int64_t i = 4 * q; i < count; i++) {
        m0 = x[i] > m0 ? x[i] : m0;
    }
    m0 = m1 > m0 ? m1 : m0;
    m2 = m3 > m2 ? m3 : m2;
    return m2 > m0 ? m2 : m0;
}

/* sum e^(x[i] - max) */
static inline float row_sum_exp(const float *x, float max, int64_t count)
{
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) {
        sum += vector_exp(x[i] - max);
    }
    return sum;
}

#endif
