#include "kernels/cpu/cpu.h"
#include "kernels/cpu/row.h"

Status cross_entropy_max_cpu(float *max, const float *logits, int64_t n, int64_t v, Stream *stream)
{
    (void)stream;
#pragma omp parallel for if (n * v >= CPU_PARALLEL_MIN) schedule(static)
    for (int64_t i = 0; i < n; i++) {
        max[i] = row_max(logits + i * v, v);
    }
    return STATUS_OK;
}

Status cross_entropy_sums_cpu(float *sums, const float *logits, const float *max,
                              const int32_t *labels, int64_t n, int64_t v, int32_t first,
                              Stream *stream)
{
    (void)stream;
    /* Rows without a label cost nothing, and labels come in runs: small pieces keep the threads
     * even. */
#pragma omp parallel for if (n * v >= CPU_PARALLEL_MIN) schedule(static, 8)
    for (int64_t i = 0; i < n; i++) {
        const float *row = logits + i * v;
        sums[2 * i] = 0.0f;
        sums[2 * i + 1] = 0.0f;
        if (labels[i] < 0) {
            continue;
        }
        sums[2 * i] = row_sum_exp(row, max[i], v);
        int64_t target = (int64_t)labels[i] - first;
        if (target >= 0 && target < v) {
            sums[2 * i + 1] = row[target] - max[i];
        }
    }
    return STATUS_OK;
}

/* NOLINTNEXTLINE(readability-function-size): the parameters of the op. */
Status cross_entropy_finish_cpu(float *losses, float *logits, const float *max, const float *sums,
                                const int32_t *labels, int64_t n, int64_t v, int32_t first,
                                float scale, Stream *stream)
{
    (void)stream;
#pragma omp parallel for if (n * v >= CPU_PARALLEL_MIN) schedule(static, 8)
    for (int64_t i = 0; i < n; i++) {
        float *row = logits + i * v;
        if (labels[i] < 0) {
            losses[i] = 0.0f;
            cpu_zero(row, v);
            continue;
        }
        losses[i] = logf(sums[2 * i]) - sums[2 * i + 1];
        float factor = scale / sums[2 * i];
        float row_largest = max[i];
#pragma omp simd
        for (int64_t j = 0; j < v; j++) {
            row[j] = vector_exp(row[j] - row_largest) * factor;
        }
        int64_t target = (int64_t)labels[i] - first;
        if (target >= 0 && target < v) {
            row[target] -= scale;
        }
    }
    return STATUS_OK;
}
