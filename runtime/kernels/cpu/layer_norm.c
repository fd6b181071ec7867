#include "kernels/cpu/cpu.h"
#include "kernels/cpu/row.h"

/* NOLINTNEXTLINE(readability-function-size): the parameters of the op. */
Status layer_norm_forward_cpu(float *out, float *mean, float *rstd, const float *x,
                              const float *weight, const float *bias, int64_t n, int64_t d,
                              float epsilon, Stream *stream)
{
    (void)stream;
#pragma omp parallel for if (n * d >= CPU_PARALLEL_MIN) schedule(static)
    for (int64_t i = 0; i < n; i++) {
        const float *row = x + i * d;
        float *to = out + i * d;
        float m = row_sum(row, d) / (float)d;
        float r = 1.0f / sqrtf(row_sum_squares(row, m, d) / (float)d + epsilon);
        mean[i] = m;
        rstd[i] = r;
#pragma omp simd
        for (int64_t j = 0; j < d; j++) {
            to[j] = (row[j] - m) * r * weight[j] + bias[j];
        }
    }
    return STATUS_OK;
}

typedef struct Backward {
    float *x_grad;         /* [N, D], = or += */
    float *weight_grad;    /* [D], += */
    float *bias_grad;      /* [D], += */
    const float *out_grad; /* [N, D] */
    const float *x;        /* [N, D] */
    const float *weight;   /* [D] */
    const float *mean;     /* [N] */
    const float *rstd;     /* [N] */
    int64_t d;
    bool accumulate;
} Backward;

/* With h = (x - mean) rstd and g = out_grad weight:  x_grad = rstd (g - mean(g) - h mean(g h)). */
static void x_grad_row(const Backward *b, int64_t i)
{
    int64_t d = b->d;
    const float *x = b->x + i * d;
    const float *out_grad = b->out_grad + i * d;
    const float *weight = b->weight;
    float *x_grad = b->x_grad + i * d;
    float m = b->mean[i];
    float r = b->rstd[i];
    float mean_g = row_dot(out_grad, weight, d) / (float)d;
    float mean_gh = row_dot_centred(out_grad, weight, x, m, d) * r / (float)d;
    /* NOLINTNEXTLINE(bugprone-branch-clone): the branches differ inside the pragma. */
    if (b->accumulate) {
#pragma omp simd
        for (int64_t j = 0; j < d; j++) {
            x_grad[j] += r * (out_grad[j] * weight[j] - mean_g - (x[j] - m) * r * mean_gh);
        }
    } else {
#pragma omp simd
        for (int64_t j = 0; j < d; j++) {
            x_grad[j] = r * (out_grad[j] * weight[j] - mean_g - (x[j] - m) * r * mean_gh);
        }
    }
}

/* weight_grad += sum of out_grad h, bias_grad += sum of out_grad, over `rows` and `columns`; two
 * rows at a time. */
static void add_weight_grads(const Backward *b, Range rows, Range columns)
{
    int64_t d = b->d;
    float *weight_grad = b->weight_grad;
    float *bias_grad = b->bias_grad;
    for (int64_t i = rows.begin; i < rows.end; i += 2) {
        const float *x0 = b->x + i * d;
        const float *g0 = b->out_grad + i * d;
        float m0 = b->mean[i];
        float r0 = b->rstd[i];
        bool pair = i + 1 < rows.end;
        /* A last row alone is its own partner with weight 0. */
        const float *x1 = pair ? x0 + d : x0;
        const float *g1 = pair ? g0 + d : g0;
        float m1 = pair ? b->mean[i + 1] : m0;
        float r1 = pair ? b->rstd[i + 1] : 0.0f;
        float one = pair ? 1.0f : 0.0f;
#pragma omp simd
        for (int64_t j = columns.begin; j < columns.end; j++) {
            weight_grad[j] += g0[j] * ((x0[j] - m0) * r0) + g1[j] * ((x1[j] - m1) * r1);
            bias_grad[j] += g0[j] + g1[j] * one;
        }
    }
}

/* The parameters of the op, some written through the struct. */
/* NOLINTNEXTLINE(readability-function-size,readability-non-const-parameter) */
Status layer_norm_backward_cpu(float *x_grad, float *weight_grad, float *bias_grad,
                               const float *out_grad, const float *x, const float *weight,
                               const float *mean, const float *rstd, int64_t n, int64_t d,
                               bool accumulate, Stream *stream)
{
    (void)stream;
    CHECK((weight_grad == NULL) == (bias_grad == NULL));
    const Backward b = {x_grad, weight_grad, bias_grad, out_grad, x,
                        weight, mean,        rstd,      d,        accumulate};
#pragma omp parallel if (n * d >= CPU_PARALLEL_MIN)
    {
        Range columns = cpu_thread_columns(d);
        for (int64_t begin = 0; begin < n; begin += CPU_BLOCK_ROWS) {
            int64_t end = begin + CPU_BLOCK_ROWS < n ? begin + CPU_BLOCK_ROWS : n;
            if (weight_grad) {
                add_weight_grads(&b, (Range){begin, end}, columns);
            }
            Range mine = cpu_thread_rows(begin, end);
            for (int64_t i = mine.begin; i < mine.end; i++) {
                x_grad_row(&b, i);
            }
        }
    }
    return STATUS_OK;
}
