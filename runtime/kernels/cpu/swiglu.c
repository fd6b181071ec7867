#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vector_math.h"

Status swiglu_forward_cpu(float *out, const float *gate, const float *up, int64_t count,
                          Stream *stream)
{
    (void)stream;
#pragma omp parallel for simd if (parallel : count >= CPU_PARALLEL_MIN) schedule(simd : static)
    for (int64_t i = 0; i < count; i++) {
        out[i] = gate[i] * vector_sigmoid(gate[i]) * up[i];
    }
    return STATUS_OK;
}

Status swiglu_backward_cpu(float *gate_grad, float *up_grad, const float *out_grad,
                           const float *gate, const float *up, int64_t count, Stream *stream)
{
    (void)stream;
#pragma omp parallel for simd if (parallel : count >= CPU_PARALLEL_MIN) schedule(simd : static)
    for (int64_t i = 0; i < count; i++) {
        float g = out_grad[i];
        float s = vector_sigmoid(gate[i]);
        float silu = gate[i] * s;
        float slope = s + silu * (1.0f - s);
        float gate_slope = g * up[i] * slope;
        up_grad[i] = g * silu;
        gate_grad[i] = gate_slope;
    }
    return STATUS_OK;
}
