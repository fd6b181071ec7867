#include "kernels/cpu/cpu.h"

/* Row of x that column group `j` of output row `t` shows; -1: outside the clip. */
static int64_t source_row(int64_t t, int j, int width, int stride, int64_t rows)
{
    int64_t row = stride * t + j - width / 2;
    return row >= 0 && row < rows ? row : -1;
}

static int64_t count_out(int64_t rows, int stride)
{
    return (rows + stride - 1) / stride;
}

Status unfold_cpu(float *out, const float *x, const int32_t *begins, int clips, int64_t w,
                  int width, int stride, Stream *stream)
{
    (void)stream;
    CHECK(width >= 1 && stride >= 1);
    for (int clip = 0; clip < clips; clip++) {
        int64_t rows = begins[clip + 1] - begins[clip];
        int64_t out_rows = count_out(rows, stride);
#pragma omp parallel for if (out_rows * w * width >= CPU_PARALLEL_MIN)
        for (int64_t t = 0; t < out_rows; t++) {
            float *to = out + t * w * width;
            for (int j = 0; j < width; j++) {
                int64_t row = source_row(t, j, width, stride, rows);
                const float *from = x + row * w;
                for (int64_t c = 0; c < w; c++) {
                    to[c * width + j] = row < 0 ? 0.0f : from[c];
                }
            }
        }
        x += rows * w;
        out += out_rows * w * width;
    }
    return STATUS_OK;
}

/* Each element of x collects what it went into, in the order of output rows. */
Status unfold_backward_cpu(float *x_grad, const float *out_grad, const int32_t *begins, int clips,
                           int64_t w, int width, int stride, Stream *stream)
{
    (void)stream;
    CHECK(width >= 1 && stride >= 1);
    for (int clip = 0; clip < clips; clip++) {
        int64_t rows = begins[clip + 1] - begins[clip];
        int64_t out_rows = count_out(rows, stride);
        cpu_zero(x_grad, rows * w);
        for (int64_t t = 0; t < out_rows; t++) {
            const float *from = out_grad + t * w * width;
            for (int j = 0; j < width; j++) {
                int64_t row = source_row(t, j, width, stride, rows);
                if (row < 0) {
                    continue;
                }
                for (int64_t c = 0; c < w; c++) {
                    x_grad[row * w + c] += from[c * width + j];
                }
            }
        }
        x_grad += rows * w;
        out_grad += out_rows * w * width;
    }
    return STATUS_OK;
}
