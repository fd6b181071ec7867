#include "kernels/cpu/cpu.h"

Status add_cpu(float *out, const float *a, const float *b, int64_t count, Stream *stream)
{
    (void)stream;
#pragma omp parallel for simd if (parallel : count >= CPU_PARALLEL_MIN) schedule(simd : static)
    for (int64_t i = 0; i < count; i++) {
        out[i] = a[i] + b[i];
    }
    return STATUS_OK;
}

Status accumulate_cpu(float *out, const float *x, int64_t count, Stream *stream)
{
    (void)stream;
#pragma omp parallel for simd if (parallel : count >= CPU_PARALLEL_MIN) schedule(simd : static)
    for (int64_t i = 0; i < count; i++) {
        out[i] += x[i];
    }
    return STATUS_OK;
}

Status scale_cpu(float *x, float factor, int64_t count, Stream *stream)
{
    (void)stream;
#pragma omp parallel for simd if (parallel : count >= CPU_PARALLEL_MIN) schedule(simd : static)
    for (int64_t i = 0; i < count; i++) {
        x[i] *= factor;
    }
    return STATUS_OK;
}
