#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vector_math.h"

static const float quick_gelu_slope = 1.702f;

Status activation_forward_cpu(float *out, const float *x, int64_t count, KernelActivation kind,
                              Stream *stream)
{
    (void)stream;
    if (kind == KERNEL_ACTIVATION_GELU) {
#pragma omp parallel for simd if (parallel : count >= CPU_PARALLEL_MIN) schedule(simd : static)
        for (int64_t i = 0; i < count; i++) {
            float exponential;
            out[i] = x[i] * vector_normal_cdf(x[i], &exponential);
        }
    } else {
        CHECK(kind == KERNEL_ACTIVATION_QUICK_GELU);
#pragma omp parallel for simd if (parallel : count >= CPU_PARALLEL_MIN) schedule(simd : static)
        for (int64_t i = 0; i < count; i++) {
            out[i] = x[i] * vector_sigmoid(quick_gelu_slope * x[i]);
        }
    }
    return STATUS_OK;
}

Status activation_backward_cpu(float *x_grad, const float *out_grad, const float *x, int64_t count,
                               KernelActivation kind, Stream *stream)
{
    (void)stream;
    if (kind == KERNEL_ACTIVATION_GELU) {
#pragma omp parallel for simd if (parallel : count >= CPU_PARALLEL_MIN) schedule(simd : static)
        for (int64_t i = 0; i < count; i++) {
            float exponential;
            float cdf = vector_normal_cdf(x[i], &exponential);
            float density = 0.39894228f * exponential; /* 1 / sqrt(2 pi) */
            x_grad[i] = out_grad[i] * (cdf + x[i] * density);
        }
    } else {
        CHECK(kind == KERNEL_ACTIVATION_QUICK_GELU);
#pragma omp parallel for simd if (parallel : count >= CPU_PARALLEL_MIN) schedule(simd : static)
        for (int64_t i = 0; i < count; i++) {
            float s = vector_sigmoid(quick_gelu_slope * x[i]);
            x_grad[i] = out_grad[i] * (s + quick_gelu_slope * x[i] * s * (1.0f - s));
        }
    }
    return STATUS_OK;
}
