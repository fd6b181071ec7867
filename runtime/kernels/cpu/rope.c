#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vector_math.h"

#include <math.h>

enum {
    PAIRS_MAX = 256 /* W / 2 */
};

/* x [H, W] of one token, turned by the angle of each pair; sin is negated to turn back. */
static void rotate(float *x, const float *cosines, const float *sines, int heads, int pairs)
{
    for (int h = 0; h < heads; h++) {
        float *low = x + (int64_t)h * 2 * pairs;
        float *high = low + pairs;
#pragma omp simd
        for (int i = 0; i < pairs; i++) {
            float a = low[i];
            float b = high[i];
            low[i] = a * cosines[i] - b * sines[i];
            high[i] = b * cosines[i] + a * sines[i];
        }
    }
}

Status rope_cpu(float *x, const int32_t *positions, int64_t n, int heads, int head_width,
                float theta, bool inverse, Stream *stream)
{
    (void)stream;
    int pairs = head_width / 2;
    CHECK(head_width % 2 == 0 && pairs <= PAIRS_MAX);
    /* Frequencies and angles are rounded to float, as in Hugging Face's Llama: far positions depend
     * on it. */
    float frequencies[PAIRS_MAX];
    for (int i = 0; i < pairs; i++) {
        frequencies[i] = 1.0f / (float)pow(theta, 2.0 * i / head_width);
    }
    float sign = inverse ? -1.0f : 1.0f;
    int64_t row = (int64_t)heads * head_width;
#pragma omp parallel for if (n * row >= CPU_PARALLEL_MIN) schedule(static)
    for (int64_t t = 0; t < n; t++) {
        float cosines[PAIRS_MAX];
        float sines[PAIRS_MAX];
        float position = (float)positions[t];
#pragma omp simd
        for (int i = 0; i < pairs; i++) {
            float sine;
            vector_sincos(position * frequencies[i], &sine, &cosines[i]);
            sines[i] = sign * sine;
        }
        rotate(x + t * row, cosines, sines, heads, pairs);
    }
    return STATUS_OK;
}
