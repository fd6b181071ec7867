#include "kernels/cpu/cpu.h"

Status gather_rows_cpu(float *out, const float *x, const int32_t *index, int64_t n, int64_t d,
                       Stream *stream)
{
    (void)stream;
#pragma omp parallel for if (n * d >= CPU_PARALLEL_MIN) schedule(static)
    for (int64_t i = 0; i < n; i++) {
        cpu_copy(out + i * d, x + index[i] * d, d);
    }
    return STATUS_OK;
}

Status scatter_rows_cpu(float *out, const float *x, const int32_t *index, int64_t n, int64_t d,
                        Stream *stream)
{
    (void)stream;
#pragma omp parallel for if (n * d >= CPU_PARALLEL_MIN) schedule(static)
    for (int64_t i = 0; i < n; i++) {
        cpu_copy(out + index[i] * d, x + i * d, d);
    }
    return STATUS_OK;
}

Status copy_matrix_cpu(float *to, int64_t to_stride, const float *from, int64_t from_stride,
                       int64_t rows, int64_t cols, Stream *stream)
{
    (void)stream;
#pragma omp parallel for if (rows * cols >= CPU_PARALLEL_MIN) schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        cpu_copy(to + i * to_stride, from + i * from_stride, cols);
    }
    return STATUS_OK;
}
