#include "kernels/cpu/cpu.h"

#include <math.h>

Status adamw_cpu(float *w, float *m, float *v, const float *grad, int64_t count,
                 const AdamWStep *step, Stream *stream)
{
    (void)stream;
    CHECK(step->step >= 1);
    /* Once per call and in double, as torch does; the elements are float. */
    double correction1 = 1.0 - pow(step->beta1, (double)step->step);
    double correction2 = 1.0 - pow(step->beta2, (double)step->step);
    const float step_size = (float)(step->learning_rate / correction1);
    const float root2 = (float)(1.0 / sqrt(correction2));
    const float decay = (float)(1.0 - step->learning_rate * step->weight_decay);
    const float beta2 = (float)step->beta2;
    const float rest1 = (float)(1.0 - step->beta1);
    const float rest2 = (float)(1.0 - step->beta2);
    const float epsilon = (float)step->epsilon;
    const float grad_scale = step->grad_scale;
#pragma omp parallel for simd if (parallel : count >= CPU_PARALLEL_MIN) schedule(simd : static)
    for (int64_t i = 0; i < count; i++) {
        float g = grad[i] * grad_scale;
        float first = m[i] + (g - m[i]) * rest1;
        float second = v[i] * beta2 + g * g * rest2;
        m[i] = first;
        v[i] = second;
        w[i] = w[i] * decay - step_size * (first / (sqrtf(second) * root2 + epsilon));
    }
    return STATUS_OK;
}

Status sgd_cpu(float *w, const float *grad, int64_t count, float learning_rate, float weight_decay,
               float grad_scale, Stream *stream)
{
    (void)stream;
#pragma omp parallel for simd if (parallel : count >= CPU_PARALLEL_MIN) schedule(simd : static)
    for (int64_t i = 0; i < count; i++) {
        w[i] -= learning_rate * (grad_scale * grad[i] + weight_decay * w[i]);
    }
    return STATUS_OK;
}
