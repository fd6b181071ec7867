#include "kernels/cpu/cpu.h"

/* Four rows at a time: one load and store of the sums for four loads of grad. */
static void add_columns(float *sums, const float *grad, int64_t rows, int64_t d, Range columns)
{
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4) {
        const float *g = grad + i * d;
#pragma omp simd
        for (int64_t j = columns.begin; j < columns.end; j++) {
            sums[j] += (g[j] + g[d + j]) + (g[2 * d + j] + g[3 * d + j]);
        }
    }
    for (; i < rows; i++) {
#pragma omp simd
        for (int64_t j = columns.begin; j < columns.end; j++) {
            sums[j] += grad[i * d + j];
        }
    }
}

Status bias_backward_cpu(float *bias_grad, const float *grad, int64_t n, int64_t d, Stream *stream)
{
    (void)stream;
#pragma omp parallel if (n * d >= CPU_PARALLEL_MIN)
    add_columns(bias_grad, grad, n, d, cpu_thread_columns(d));
    return STATUS_OK;
}
