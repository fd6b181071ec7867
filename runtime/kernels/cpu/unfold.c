/* Rows of a sequence beside their neighbours, and back. */
#include "kernels/cpu/cpu.h"

/* One clip. */
typedef struct Clip {
    int64_t rows;     /* of x */
    int64_t out_rows; /* ceil(rows / stride) */
    int64_t w;
    int width, stride;
} Clip;

static Clip make_clip(const int32_t *begins, int64_t w, int width, int stride)
{
    int64_t rows = begins[1] - begins[0];
    CHECK(rows >= 0 && width >= 1 && stride >= 1);
    return (Clip){rows, (rows + stride - 1) / stride, w, width, stride};
}

/* out [T', W * width] of one clip x [T, W]. */
static void unfold_clip(float *out, const float *x, const Clip *clip)
{
    int64_t w = clip->w;
    int64_t width = clip->width;
#pragma omp parallel for if (clip->out_rows * w * width >= CPU_PARALLEL_MIN) schedule(static)
    for (int64_t t = 0; t < clip->out_rows; t++) {
        float *to = out + t * w * width;
        for (int64_t j = 0; j < width; j++) {
            int64_t row = clip->stride * t + j - width / 2;
            bool inside = row >= 0 && row < clip->rows;
            for (int64_t c = 0; c < w; c++) {
                to[c * width + j] = inside ? x[row * w + c] : 0.0f;
            }
        }
    }
}

/* x_grad [T, W] from out_grad [T', W * width]: each row gathers what it went into, column group by
 * column group. */
static void fold_clip(float *x_grad, const float *out_grad, const Clip *clip)
{
    int64_t w = clip->w;
    int64_t width = clip->width;
#pragma omp parallel for if (clip->rows * w * width >= CPU_PARALLEL_MIN) schedule(static)
    for (int64_t row = 0; row < clip->rows; row++) {
        float *to = x_grad + row * w;
        cpu_zero(to, w);
        for (int64_t j = 0; j < width; j++) {
            int64_t at = row - j + width / 2; /* stride * t */
            int64_t t = at / clip->stride;
            if (at < 0 || at % clip->stride != 0 || t >= clip->out_rows) {
                continue;
            }
            const float *from = out_grad + t * w * width + j;
            for (int64_t c = 0; c < w; c++) {
                to[c] += from[c * width];
            }
        }
    }
}

Status unfold_cpu(float *out, const float *x, const int32_t *begins, int clips, int64_t w,
                  int width, int stride, Stream *stream)
{
    (void)stream;
    for (int c = 0; c < clips; c++) {
        Clip clip = make_clip(begins + c, w, width, stride);
        unfold_clip(out, x + begins[c] * w, &clip);
        out += clip.out_rows * w * width;
    }
    return STATUS_OK;
}

Status unfold_backward_cpu(float *x_grad, const float *out_grad, const int32_t *begins, int clips,
                           int64_t w, int width, int stride, Stream *stream)
{
    (void)stream;
    for (int c = 0; c < clips; c++) {
        Clip clip = make_clip(begins + c, w, width, stride);
        fold_clip(x_grad + begins[c] * w, out_grad, &clip);
        out_grad += clip.out_rows * w * width;
    }
    return STATUS_OK;
}
