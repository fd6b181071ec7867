/* The CPU backend's ops, one file each; kernels.h has their contracts. Streams of the CPU run at
 * once, so every op is done when it returns and `stream` is not looked at. Determinism: work is cut
 * into pieces by sizes, each piece is summed by one thread in one order, so that results do not
 * depend on the number of threads.
 *
 * Threading: pure functions on the caller's memory; any thread.
 */
#ifndef KERNELS_CPU_CPU_H
#define KERNELS_CPU_CPU_H

#include "base/range.h"
#include "kernels/kernels.h"

#include <omp.h>
#include <string.h>

enum {
    /* Elements of work below which waking other threads (some 5 us) costs more than it saves. */
    CPU_PARALLEL_MIN = 1 << 15,
    /* Rows whose columns are summed while they are in the cache, before the next rows are taken. */
    CPU_BLOCK_ROWS = 64,
    CPU_CACHE_LINE = 16, /* floats */
};

/* The columns of [0, d) that the calling thread of a parallel region sums: whole cache lines, so
 * that no two threads write to one. */
static inline Range cpu_thread_columns(int64_t d)
{
    int64_t lines = (d + CPU_CACHE_LINE - 1) / CPU_CACHE_LINE;
    Range part = range_part(lines, omp_get_num_threads(), omp_get_thread_num());
    return range_intersect((Range){part.begin * CPU_CACHE_LINE, part.end * CPU_CACHE_LINE},
                           (Range){0, d});
}

/* The rows of [begin, end) that the calling thread of a parallel region computes. */
static inline Range cpu_thread_rows(int64_t begin, int64_t end)
{
    Range part = range_part(end - begin, omp_get_num_threads(), omp_get_thread_num());
    return (Range){begin + part.begin, begin + part.end};
}

/* memcpy and memset of `count` floats; without any, the pointers may be NULL, which those two
 * forbid. */
static inline void cpu_copy(float *to, const float *from, int64_t count)
{
    if (count > 0) {
        memcpy(to, from, (size_t)count * sizeof *to);
    }
}

static inline void cpu_zero(float *to, int64_t count)
{
    if (count > 0) {
        memset(to, 0, (size_t)count * sizeof *to);
    }
}

Status matmul_cpu(const MatMul *matmul, Stream *stream) STATUS_CHECKED;
Status bias_backward_cpu(float *bias_grad, const float *grad, int64_t n, int64_t d,
                         Stream *stream) STATUS_CHECKED;
Status layer_norm_forward_cpu(float *out, float *mean, float *rstd, const float *x,
                              const float *weight, const float *bias, int64_t n, int64_t d,
                              float epsilon, Stream *stream) STATUS_CHECKED;
Status layer_norm_backward_cpu(float *x_grad, float *weight_grad, float *bias_grad,
                               const float *out_grad, const float *x, const float *weight,
                               const float *mean, const float *rstd, int64_t n, int64_t d,
                               bool accumulate, Stream *stream) STATUS_CHECKED;
Status rms_norm_forward_cpu(float *out, float *rstd, const float *x, const float *weight, int64_t n,
                            int64_t d, float epsilon, Stream *stream) STATUS_CHECKED;
Status rms_norm_backward_cpu(float *x_grad, float *weight_grad, const float *out_grad,
                             const float *x, const float *weight, const float *rstd, int64_t n,
                             int64_t d, bool accumulate, Stream *stream) STATUS_CHECKED;
Status activation_forward_cpu(float *out, const float *x, int64_t count, KernelActivation kind,
                              Stream *stream) STATUS_CHECKED;
Status activation_backward_cpu(float *x_grad, const float *out_grad, const float *x, int64_t count,
                               KernelActivation kind, Stream *stream) STATUS_CHECKED;
Status swiglu_forward_cpu(float *out, const float *gate, const float *up, int64_t count,
                          Stream *stream) STATUS_CHECKED;
Status swiglu_backward_cpu(float *gate_grad, float *up_grad, const float *out_grad,
                           const float *gate, const float *up, int64_t count,
                           Stream *stream) STATUS_CHECKED;
Status rope_cpu(float *x, const int32_t *positions, int64_t n, int heads, int head_width,
                float theta, bool inverse, Stream *stream) STATUS_CHECKED;
Status attention_forward_cpu(float *out, float *log_sum_exp, const float *q, const float *k,
                             const float *v, const AttentionShape *shape,
                             Stream *stream) STATUS_CHECKED;
Status attention_backward_cpu(float *q_grad, float *k_grad, float *v_grad, const float *out_grad,
                              const float *out, const float *log_sum_exp, const float *q,
                              const float *k, const float *v, const AttentionShape *shape,
                              Stream *stream) STATUS_CHECKED;
Status embedding_forward_cpu(float *out, const float *table, const int32_t *ids, int64_t n,
                             int64_t d, int32_t first, int64_t v, Stream *stream) STATUS_CHECKED;
Status embedding_backward_cpu(float *table_grad, const float *out_grad, const int32_t *ids,
                              int64_t n, int64_t d, int32_t first, int64_t v,
                              Stream *stream) STATUS_CHECKED;
Status cross_entropy_max_cpu(float *max, const float *logits, int64_t n, int64_t v,
                             Stream *stream) STATUS_CHECKED;
Status cross_entropy_sums_cpu(float *sums, const float *logits, const float *max,
                              const int32_t *labels, int64_t n, int64_t v, int32_t first,
                              Stream *stream) STATUS_CHECKED;
Status cross_entropy_finish_cpu(float *losses, float *logits, const float *max, const float *sums,
                                const int32_t *labels, int64_t n, int64_t v, int32_t first,
                                float scale, Stream *stream) STATUS_CHECKED;
Status patches_forward_cpu(float *patches, const uint8_t *pixels, const float mean[3],
                           const float std[3], int64_t images, int size, int patch,
                           Stream *stream) STATUS_CHECKED;
Status unfold_cpu(float *out, const float *x, const int32_t *begins, int clips, int64_t w,
                  int width, int stride, Stream *stream) STATUS_CHECKED;
Status unfold_backward_cpu(float *x_grad, const float *out_grad, const int32_t *begins, int clips,
                           int64_t w, int width, int stride, Stream *stream) STATUS_CHECKED;
Status add_table_cpu(float *out, const float *table, int64_t blocks, int64_t t, int64_t d,
                     Stream *stream) STATUS_CHECKED;
Status add_table_backward_cpu(float *table_grad, const float *out_grad, int64_t blocks, int64_t t,
                              int64_t d, Stream *stream) STATUS_CHECKED;
Status gather_rows_cpu(float *out, const float *x, const int32_t *index, int64_t n, int64_t d,
                       Stream *stream) STATUS_CHECKED;
Status scatter_rows_cpu(float *out, const float *x, const int32_t *index, int64_t n, int64_t d,
                        Stream *stream) STATUS_CHECKED;
Status copy_matrix_cpu(float *to, int64_t to_stride, const float *from, int64_t from_stride,
                       int64_t rows, int64_t cols, Stream *stream) STATUS_CHECKED;
Status add_cpu(float *out, const float *a, const float *b, int64_t count,
               Stream *stream) STATUS_CHECKED;
Status accumulate_cpu(float *out, const float *x, int64_t count, Stream *stream) STATUS_CHECKED;
Status scale_cpu(float *x, float factor, int64_t count, Stream *stream) STATUS_CHECKED;
Status sum_cpu(double *sum, const float *x, int64_t count, Stream *stream) STATUS_CHECKED;
Status sum_squares_cpu(double *sum, const float *x, int64_t count, Stream *stream) STATUS_CHECKED;
Status argmax_rows_cpu(float *value, int32_t *index, const float *x, int64_t n, int64_t v,
                       int32_t first, Stream *stream) STATUS_CHECKED;
Status adamw_cpu(float *w, float *m, float *v, const float *grad, int64_t count,
                 const AdamWStep *step, Stream *stream) STATUS_CHECKED;
Status sgd_cpu(float *w, const float *grad, int64_t count, float learning_rate, float weight_decay,
               float grad_scale, Stream *stream) STATUS_CHECKED;

#endif
