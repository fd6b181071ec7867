#include "kernels/cpu/cpu.h"

Status embedding_forward_cpu(float *out, const float *table, const int32_t *ids, int64_t n,
                             int64_t d, int32_t first, int64_t v, Stream *stream)
{
    (void)stream;
#pragma omp parallel for if (n * d >= CPU_PARALLEL_MIN) schedule(static)
    for (int64_t i = 0; i < n; i++) {
        int64_t row = (int64_t)ids[i] - first;
        if (row >= 0 && row < v) {
            cpu_copy(out + i * d, table + row * d, d);
        } else {
            cpu_zero(out + i * d, d);
        }
    }
    return STATUS_OK;
}

/* An id may come many times, so threads share the columns, not the tokens. */
Status embedding_backward_cpu(float *table_grad, const float *out_grad, const int32_t *ids,
                              int64_t n, int64_t d, int32_t first, int64_t v, Stream *stream)
{
    (void)stream;
#pragma omp parallel if (n * d >= CPU_PARALLEL_MIN)
    {
        Range columns = cpu_thread_columns(d);
        for (int64_t i = 0; i < n; i++) {
            int64_t row = (int64_t)ids[i] - first;
            if (row < 0 || row >= v) {
                continue;
            }
            float *to = table_grad + row * d;
            const float *from = out_grad + i * d;
#pragma omp simd
            for (int64_t j = columns.begin; j < columns.end; j++) {
                to[j] += from[j];
            }
        }
    }
    return STATUS_OK;
}
