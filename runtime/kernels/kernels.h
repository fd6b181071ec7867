/* Kernels: the arithmetic, one op per file. kernels/cpu is the definition; a GPU backend must agree
 * with it.
 *
 * Conventions, for every op: data pointers are device memory, float32, contiguous row-major,
 * aligned to 4 bytes at least; "=" an output is overwritten, "+=" it is added to. Work goes on
 * `stream`; pointers must live until the stream passed it. Sizes of zero are fine and do nothing.
 * Errors of shape are our own bugs (CHECK); an op fails only for want of resources. On the CPU, ops
 * use the OpenMP threads of the calling thread and sum in an order that depends on sizes only, not
 * on the number of threads where that costs nothing.
 *
 * Legend: N tokens or rows, K keys that attention sees, D width, F inner width, H query heads, G
 * key/value heads, W head width, V vocabulary (local part).
 *
 * Threading: tables are constant; any thread.
 */
#ifndef KERNELS_KERNELS_H
#define KERNELS_KERNELS_H

#include "base/status.h"
#include "device/device.h"

#include <stdbool.h>
#include <stdint.h>

typedef enum KernelActivation {
    KERNEL_ACTIVATION_GELU,       /* x * Phi(x), Phi by erf (Hendrycks and Gimpel 2016) */
    KERNEL_ACTIVATION_QUICK_GELU, /* x * sigmoid(1.702 x), as CLIP */
} KernelActivation;

/* c [m, n] (+)= op(a) @ op(b) (+ bias [n]); op(a) is [m, k]: stored [m, k], or [k, m] when
 * transpose_a; op(b) is [k, n]: stored [k, n], or [n, k] when transpose_b (the form of a weight
 * [out, in]). */
typedef struct MatMul {
    float *c;
    const float *a;
    const float *b;
    const float *bias; /* NULL: none */
    int64_t m, n, k;
    bool transpose_a;
    bool transpose_b;
    bool accumulate; /* += instead of = */
} MatMul;

/* Query tokens that stand side by side in a segment, and the keys of that segment. With `causal`,
 * query q sees keys [key_begin, key_begin + diagonal + (q - q_begin)], else all of [key_begin,
 * key_end). A whole segment that sees itself: q_begin = key_begin, diagonal 0. */
typedef struct AttentionRun {
    int32_t q_begin, q_end;     /* of N */
    int32_t key_begin, key_end; /* of K */
    int32_t diagonal;           /* key of query q_begin, counted from key_begin */
} AttentionRun;

/* Attention of N query tokens over K key tokens, run by run. Runs are not empty and ascend in
 * q_begin; runs of one segment are neighbours with the same keys, and the keys of different
 * segments ascend and do not overlap. Queries in no run do not exist (the runs cover [0, N)); keys
 * that no run names are seen by nobody. Query head h uses key/value head (first_head + h) / group -
 * first_kv_head, where group = query heads per key/value head of the whole model, so that uneven
 * shards work. */
typedef struct AttentionShape {
    const AttentionRun *runs; /* host memory */
    int32_t num_runs;
    int64_t num_tokens; /* N: of q, out and their gradients */
    int64_t num_keys;   /* K: of k, v and their gradients */
    int heads;          /* H, local query heads */
    int kv_heads;       /* local key/value heads */
    int head_width;     /* W */
    int group;          /* query heads per key/value head, of the whole model */
    int first_head;     /* global index of local query head 0 */
    int first_kv_head;  /* global index of local key/value head 0 */
    bool causal;
    float scale; /* usually 1 / sqrt(W) */
} AttentionShape;

typedef struct AdamWStep {
    /* Double, as torch keeps them: 1 - 0.999f is off by 1e-5 of itself. */
    double learning_rate;
    double beta1, beta2, epsilon;
    double weight_decay;
    float grad_scale; /* the gradient is multiplied by this first (clipping) */
    int64_t step;     /* 1 for the first update: bias correction */
} AdamWStep;

typedef struct Kernels {
    Status (*matmul)(const MatMul *matmul, Stream *stream);

    /* bias_grad [D] += column sums of grad [N, D] */
    Status (*bias_backward)(float *bias_grad, const float *grad, int64_t n, int64_t d,
                            Stream *stream);

    /* out = (x - mean) / sqrt(var + epsilon) * weight + bias, over D (Ba et al. 2016). mean, rstd
     * [N] are saved for backward. */
    Status (*layer_norm_forward)(float *out, float *mean, float *rstd, const float *x,
                                 const float *weight, const float *bias, int64_t n, int64_t d,
                                 float epsilon, Stream *stream);
    /* x_grad = (accumulate: +=); weight_grad, bias_grad +=, or both NULL: not wanted. */
    Status (*layer_norm_backward)(float *x_grad, float *weight_grad, float *bias_grad,
                                  const float *out_grad, const float *x, const float *weight,
                                  const float *mean, const float *rstd, int64_t n, int64_t d,
                                  bool accumulate, Stream *stream);

    /* out = x / sqrt(mean(x^2) + epsilon) * weight, over D (Zhang and Sennrich 2019). rstd [N] is
     * saved. */
    Status (*rms_norm_forward)(float *out, float *rstd, const float *x, const float *weight,
                               int64_t n, int64_t d, float epsilon, Stream *stream);
    /* As layer_norm_backward; weight_grad may be NULL. */
    Status (*rms_norm_backward)(float *x_grad, float *weight_grad, const float *out_grad,
                                const float *x, const float *weight, const float *rstd, int64_t n,
                                int64_t d, bool accumulate, Stream *stream);

    /* out = activation(x), `count` elements; backward: x_grad = out_grad * activation'(x). x_grad
     * may be out_grad. */
    Status (*activation_forward)(float *out, const float *x, int64_t count, KernelActivation kind,
                                 Stream *stream);
    Status (*activation_backward)(float *x_grad, const float *out_grad, const float *x,
                                  int64_t count, KernelActivation kind, Stream *stream);

    /* out [N, F] = silu(gate) * up (Shazeer 2020); backward: gate_grad, up_grad = */
    Status (*swiglu_forward)(float *out, const float *gate, const float *up, int64_t count,
                             Stream *stream);
    Status (*swiglu_backward)(float *gate_grad, float *up_grad, const float *out_grad,
                              const float *gate, const float *up, int64_t count, Stream *stream);

    /* In place on x [N, H, W]: rotates pairs (i, i + W/2) by positions[n] * theta^(-2i/W), the
     * half-split form of Hugging Face's Llama (Su et al. 2021). positions [N] are device memory.
     * `inverse` rotates back: it is the backward pass. W must be even. */
    Status (*rope)(float *x, const int32_t *positions, int64_t n, int heads, int head_width,
                   float theta, bool inverse, Stream *stream);

    /* out [N, H, W] = softmax(scale q k^T) v in blocks with a running maximum (Dao et al. 2022;
     * Milakov and Gimelshein 2018): no [N, K] matrix is kept. q [N, H, W], k, v [K, G, W];
     * log_sum_exp [N, H] is saved. */
    Status (*attention_forward)(float *out, float *log_sum_exp, const float *q, const float *k,
                                const float *v, const AttentionShape *shape, Stream *stream);
    /* q_grad, k_grad, v_grad = (0 for keys that no run names); probabilities are computed again
     * from log_sum_exp. */
    Status (*attention_backward)(float *q_grad, float *k_grad, float *v_grad, const float *out_grad,
                                 const float *out, const float *log_sum_exp, const float *q,
                                 const float *k, const float *v, const AttentionShape *shape,
                                 Stream *stream);

    /* out [N, D] = row ids[n] - first of table [V, D]; zeros for ids outside [first, first + V):
     * another shard has them. backward: table_grad += . */
    Status (*embedding_forward)(float *out, const float *table, const int32_t *ids, int64_t n,
                                int64_t d, int32_t first, int64_t v, Stream *stream);
    Status (*embedding_backward)(float *table_grad, const float *out_grad, const int32_t *ids,
                                 int64_t n, int64_t d, int32_t first, int64_t v, Stream *stream);

    /* Cross-entropy over a vocabulary cut into shards, in three steps with a reduction over tp
     * after the first and the second: max [N] = largest local logit; then sums [N, 2] = {sum
     * exp(logit - max), target logit - max or 0 if elsewhere}; then logits become their own
     * gradient in place, scale * (softmax - onehot), and losses [N] = log(sums0) - sums1. Rows with
     * label < 0 count nothing: loss 0, gradient 0. logits [N, V], labels [N] global ids. */
    Status (*cross_entropy_max)(float *max, const float *logits, int64_t n, int64_t v,
                                Stream *stream);
    Status (*cross_entropy_sums)(float *sums, const float *logits, const float *max,
                                 const int32_t *labels, int64_t n, int64_t v, int32_t first,
                                 Stream *stream);
    Status (*cross_entropy_finish)(float *losses, float *logits, const float *max,
                                   const float *sums, const int32_t *labels, int64_t n, int64_t v,
                                   int32_t first, float scale, Stream *stream);

    /* patches [images * (size/patch)^2, 3 * patch * patch] from pixels u8 [images, size, size, 3]
     * (RGB), as the matrix whose product with a convolution weight [D, 3, patch, patch] is the
     * patch embedding; value = (pixel/255 - mean[c]) / std[c]. size % patch == 0. */
    Status (*patches_forward)(float *patches, const uint8_t *pixels, const float mean[3],
                              const float std[3], int64_t images, int size, int patch,
                              Stream *stream);

    /* The matrix whose product with a convolution weight [C, W, width]^T is a 1D convolution
     * (Whisper's front end). x [T, W], rows of one clip after another: clip c is rows [begins[c],
     * begins[c + 1]) (host memory). out [T', W * width]: for each clip ceil(T_c / stride) rows; row
     * t holds x[stride * t + j - width / 2][w] at column w * width + j, 0 outside the clip.
     * backward: x_grad = sums of what each element went into. */
    Status (*unfold)(float *out, const float *x, const int32_t *begins, int clips, int64_t w,
                     int width, int stride, Stream *stream);
    Status (*unfold_backward)(float *x_grad, const float *out_grad, const int32_t *begins,
                              int clips, int64_t w, int width, int stride, Stream *stream);

    /* out [B, T, D] += table [T, D] for each of B blocks; backward: table_grad += sums over blocks.
     */
    Status (*add_table)(float *out, const float *table, int64_t blocks, int64_t t, int64_t d,
                        Stream *stream);
    Status (*add_table_backward)(float *table_grad, const float *out_grad, int64_t blocks,
                                 int64_t t, int64_t d, Stream *stream);

    /* out[i] = x[index[i]] / out[index[i]] = x[i], rows of D; index [N] in device memory; indices
     * of a scatter are distinct. */
    Status (*gather_rows)(float *out, const float *x, const int32_t *index, int64_t n, int64_t d,
                          Stream *stream);
    Status (*scatter_rows)(float *out, const float *x, const int32_t *index, int64_t n, int64_t d,
                           Stream *stream);

    /* Copies [rows, cols] between matrices with row strides in elements (cutting qkv apart, class
     * token rows, shards). */
    Status (*copy_matrix)(float *to, int64_t to_stride, const float *from, int64_t from_stride,
                          int64_t rows, int64_t cols, Stream *stream);

    Status (*add)(float *out, const float *a, const float *b, int64_t count,
                  Stream *stream); /* out = a + b; out may be a or b */
    Status (*accumulate)(float *out, const float *x, int64_t count, Stream *stream); /* out += x */
    Status (*scale)(float *x, float factor, int64_t count, Stream *stream); /* x *= factor */

    /* *sum += sum of x[i] in double precision; `sum` in device memory. Fixed order. */
    Status (*sum)(double *sum, const float *x, int64_t count, Stream *stream);
    /* *sum += sum of x[i]^2 in double precision; not finite input gives a not finite sum. */
    Status (*sum_squares)(double *sum, const float *x, int64_t count, Stream *stream);
    /* Largest element of each row: value [N], index [N] (the first of equals) + first. */
    Status (*argmax_rows)(float *value, int32_t *index, const float *x, int64_t n, int64_t v,
                          int32_t first, Stream *stream);

    /* Decoupled weight decay (Loshchilov and Hutter 2019), as torch.optim.AdamW: w *= 1 - lr * wd;
     * m, v updated; w -= lr * mhat / (sqrt(vhat)
     * + epsilon). */
    Status (*adamw)(float *w, float *m, float *v, const float *grad, int64_t count,
                    const AdamWStep *step, Stream *stream);
    /* w -= learning_rate * (grad_scale * grad + weight_decay * w), as torch.optim.SGD without
     * momentum. */
    Status (*sgd)(float *w, const float *grad, int64_t count, float learning_rate,
                  float weight_decay, float grad_scale, Stream *stream);
} Kernels;

/* The table for a device's backend. Constant; valid for the life of the process. */
const Kernels *kernels_for(const Device *device);

#endif
