/* Attention: self attention over packed sequences with grouped query heads: q, k, v projections,
 * rotary positions if wanted, attention, output projection, residual. Over tp the query heads are
 * cut by range_part.
 *
 * Key/value heads follow the query heads: where every cut falls between groups each rank holds the
 * key/value heads of its query heads; else every rank holds all k and v weights, uses the heads its
 * query heads need, and the gradients are partial sums. A rank without heads adds zeros.
 *
 * Over cp each rank has queries for its own tokens and gathers the keys and values of all; backward
 * sums their gradients the other way. A rank without tokens takes part with nothing.
 *
 * Threading: as layer.h.
 */
#ifndef NN_ATTENTION_H
#define NN_ATTENTION_H

#include "nn/linear.h"
#include "nn/sequences.h"

typedef struct AttentionSpec {
    const char *q, *k, *v, *o; /* names below the prefix */
    int64_t width;
    int heads, kv_heads; /* global; heads is a multiple of kv_heads */
    int head_width;
    bool bias;        /* on all four projections */
    float rope_theta; /* 0: no rotary positions */
    bool causal;
    float o_gain; /* of the initial weights of `o`; the others have 1 (linear.h) */
} AttentionSpec;

typedef struct Attention {
    Linear q, k, v, o;
    int heads, kv_heads; /* local */
    int head_width;
    int group; /* query heads per key/value head */
    int first_head, first_kv_head;
    float rope_theta;
    bool causal;
} Attention;

/* Kept from forward to backward; h = H/tp W, k = G/tp W. */
typedef struct AttentionActs {
    float *q;           /* [N, h], rotated */
    float *k;           /* [N, k], rotated */
    float *v;           /* [N, k] */
    float *out;         /* [N, h] */
    float *log_sum_exp; /* [N, H/tp] */
} AttentionActs;

/* One for all layers: nothing of it lives between forward and backward. */
typedef struct AttentionScratch {
    float *full; /* [N, D]: rows that are cut over tp, put together; NULL when not cut */
    /* over cp; NULL when cp is 1 */
    float
        *exchange; /* [2 K, k]: rank after rank, its keys and then its values, or their gradients */
    float *keys;   /* [K, k]: of all tokens of the replica */
    float *values; /* [K, k] */
    /* backward only */
    float *q_grad;   /* [N, h] */
    float *k_grad;   /* [K, k] */
    float *v_grad;   /* [K, k] */
    float *out_grad; /* [N, h] */
} AttentionScratch;

Status attention_declare(const LayerContext *context, const char *prefix, const AttentionSpec *spec,
                         Attention *attention_out) STATUS_CHECKED;

void attention_carve(const Attention *attention, Arena *arena, int64_t n,
                     AttentionActs *acts_out); /* n: N */
void attention_carve_scratch(const LayerContext *context, const Attention *attention, Arena *arena,
                             const LayerLimits *limits, AttentionScratch *scratch_out);

/* out [n, D] = residual [n, D] + attention(x [n, D]), summed over tp. */
Status attention_forward(const LayerContext *context, const Attention *attention,
                         const AttentionActs *acts, const AttentionScratch *scratch,
                         const Sequences *sequences, float *out, const float *x,
                         const float *residual) STATUS_CHECKED;

/* x_grad [n, D] = the gradient through the projections, summed over tp; the residual's is out_grad
 * [n, D] itself. x_grad NULL: not wanted. */
Status attention_backward(const LayerContext *context, const Attention *attention,
                          const AttentionActs *acts, const AttentionScratch *scratch,
                          const Sequences *sequences, float *x_grad, const float *out_grad,
                          const float *x) STATUS_CHECKED;

bool attention_is_trained(const LayerContext *context, const Attention *attention);

#endif
