#include "kernels/cpu/cpu.h"

Status add_table_cpu(float *out, const float *table, int64_t blocks, int64_t t, int64_t d,
                     Stream *stream)
{
    (void)stream;
#pragma omp parallel for if (blocks * t * d >= CPU_PARALLEL_MIN) schedule(static)
    for (int64_t i = 0; i < blocks * t; i++) {
        float *to = out + i * d;
        const float *from = table + i % t * d;
#pragma omp simd
        for (int64_t j = 0; j < d; j++) {
            to[j] += from[j];
        }
    }
    return STATUS_OK;
}

Status add_table_backward_cpu(float *table_grad, const float *out_grad, int64_t blocks, int64_t t,
                              int64_t d, Stream *stream)
{
    (void)stream;
#pragma omp parallel for if (blocks * t * d >= CPU_PARALLEL_MIN) schedule(static)
    for (int64_t i = 0; i < t; i++) {
        float *to = table_grad + i * d;
        for (int64_t block = 0; block < blocks; block++) {
            const float *from = out_grad + (block * t + i) * d;
#pragma omp simd
            for (int64_t j = 0; j < d; j++) {
                to[j] += from[j];
            }
        }
    }
    return STATUS_OK;
}
