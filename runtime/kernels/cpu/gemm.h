/* Gemm: one product of strided matrices by the calling thread: the wrapper of oneDNN.
 * Threading: no state; any thread.
 */
#ifndef KERNELS_CPU_GEMM_H
#define KERNELS_CPU_GEMM_H

#include <stdbool.h>
#include <stdint.h>

/* c [m, n] = alpha op(a) @ op(b) + beta c. Strides are elements between stored rows; a is stored
 * [m, k], or [k, m] when transpose_a, and b likewise. beta 0 overwrites, whatever c held. */
typedef struct Gemm {
    float *c;
    const float *a;
    const float *b;
    int64_t c_stride, a_stride, b_stride;
    int64_t m, n, k;
    float alpha, beta;
    bool transpose_a;
    bool transpose_b;
} Gemm;

/* False when the library fails, which it does for want of memory only. The order of the sums
 * depends on the sizes. */
bool gemm_compute(const Gemm *gemm);

#endif
