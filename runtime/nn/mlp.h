/* Mlp: down(activation(up(x))), or SwiGLU: down(silu(gate(x)) * up(x)). The inner width is cut over
 * tp. The projector is one, too.
 *
 * Threading: as layer.h.
 */
#ifndef NN_MLP_H
#define NN_MLP_H

#include "nn/linear.h"

typedef enum MlpKind {
    MLP_KIND_GELU,
    MLP_KIND_QUICK_GELU,
    MLP_KIND_SWIGLU,
} MlpKind;

typedef struct MlpSpec {
    const char *gate; /* name below the prefix; SwiGLU only */
    const char *up, *down;
    MlpKind kind;
    int64_t in, inner, out;
    bool bias;
    float down_gain; /* of the initial weights of `down`; the others have 1 (linear.h) */
} MlpSpec;

typedef struct Mlp {
    MlpKind kind;
    Linear gate; /* SwiGLU only */
    Linear up, down;
} Mlp;

typedef struct MlpActs {
    float *gate; /* [N, F/tp]; SwiGLU only */
    float *up;   /* [N, F/tp], before the activation */
} MlpActs;

/* Between layers nothing of it lives: one serves all. The activation is computed again in backward.
 */
typedef struct MlpScratch {
    float *full; /* [N, max(in, out)]: rows that are cut over tp, put together; NULL when not cut */
    float *inner;      /* [N, F/tp], after the activation */
    float *inner_grad; /* [N, F/tp] */
    float *gate_grad;  /* [N, F/tp]; SwiGLU only */
} MlpScratch;

Status mlp_declare(const LayerContext *context, const char *prefix, const MlpSpec *spec,
                   Mlp *mlp_out) STATUS_CHECKED;

void mlp_carve(const Mlp *mlp, Arena *arena, int64_t n, MlpActs *acts_out);
void mlp_carve_scratch(const LayerContext *context, const Mlp *mlp, Arena *arena, int64_t n,
                       MlpScratch *scratch_out); /* n: N */

/* out [n, out] = residual + mlp(x [n, in]), summed over tp. `residual` [n, out] may be NULL. */
Status mlp_forward(const LayerContext *context, const Mlp *mlp, const MlpActs *acts,
                   const MlpScratch *scratch, const ShardRows *rows, float *out, const float *x,
                   const float *residual) STATUS_CHECKED;

/* x_grad [n, in] = the gradient through the products, summed over tp; the residual's is out_grad
 * [n, out] itself. x_grad NULL: not wanted. */
Status mlp_backward(const LayerContext *context, const Mlp *mlp, const MlpActs *acts,
                    const MlpScratch *scratch, const ShardRows *rows, float *x_grad,
                    const float *out_grad, const float *x) STATUS_CHECKED;

/* The part of forward that acts keep, without the output: for backward when they were not kept. */
Status mlp_forward_acts(const LayerContext *context, const Mlp *mlp, const MlpActs *acts,
                        const MlpScratch *scratch, const ShardRows *rows,
                        const float *x) STATUS_CHECKED;

bool mlp_is_trained(const LayerContext *context, const Mlp *mlp);

#endif
