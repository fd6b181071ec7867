/* Linear: out = x weight^T + bias, weight [out, in], whole or cut over tp.
 *
 * - LINEAR_CUT_OUT: rows of the weight are cut: x is whole, out is local [N, out/tp]. No sum in
 *   forward; x_grad is this rank's addend.
 * - LINEAR_CUT_IN: columns of the weight are cut: x is local [N, in/tp], out is summed over tp,
 *   x_grad is local.
 * - LINEAR_PICK_OUT: every rank has the whole weight but uses rows `part` only, so each has a part
 *   of the gradient (grad_is_partial).
 *
 * Threading: as layer.h.
 */
#ifndef NN_LINEAR_H
#define NN_LINEAR_H

#include "nn/layer.h"

typedef enum LinearCut {
    LINEAR_CUT_OUT,
    LINEAR_CUT_IN,
    LINEAR_PICK_OUT,
} LinearCut;

typedef struct LinearSpec {
    int64_t in, out; /* global */
    LinearCut cut;
    Range part; /* of the dim that is cut or picked from */
    bool bias;
    float gain; /* initial weights have the standard deviation gain / sqrt(3 in), as torch.nn.Linear
                   has */
} LinearSpec;

typedef struct Linear {
    int weight;      /* parameter index */
    int bias;        /* parameter index, -1: none */
    int64_t in, out; /* local */
    int64_t first;   /* LINEAR_PICK_OUT: first row of the weight that is used */
    LinearCut cut;
} Linear;

/* Adds "<prefix>.<name>.weight" and ".bias". */
Status linear_declare(const LayerContext *context, const char *prefix, const char *name,
                      const LinearSpec *spec, Linear *linear_out) STATUS_CHECKED;

/* LINEAR_CUT_OUT, LINEAR_PICK_OUT: out [N, out/tp] = x [N, in] weight^T + bias. */
Status linear_forward(const LayerContext *context, const Linear *linear, float *out, const float *x,
                      int64_t n) STATUS_CHECKED;

/* LINEAR_CUT_IN: out [n, out] = residual [n, out] + sum over tp of x [N, in/tp] weight^T + bias.
 * `residual` may be NULL. `full` [N, out] is scratch for rows that are cut over tp; else not
 * used. */
Status linear_forward_sum(const LayerContext *context, const Linear *linear, const ShardRows *rows,
                          float *out, float *full, const float *x,
                          const float *residual) STATUS_CHECKED;

/* weight_grad += out_grad^T x; bias_grad += column sums of out_grad; x_grad (+)= out_grad weight,
 * this rank's addend when out is cut. x_grad NULL: not wanted. All on N whole rows; x is not read
 * when the weight is frozen. */
Status linear_backward(const LayerContext *context, const Linear *linear, float *x_grad,
                       const float *out_grad, const float *x, int64_t n,
                       bool accumulate) STATUS_CHECKED;

/* The two halves of linear_backward: parameters and x. */
Status linear_backward_params(const LayerContext *context, const Linear *linear,
                              const float *out_grad, const float *x, int64_t n) STATUS_CHECKED;
Status linear_backward_x(const LayerContext *context, const Linear *linear, float *x_grad,
                         const float *out_grad, int64_t n, bool accumulate) STATUS_CHECKED;

bool linear_is_trained(const LayerContext *context, const Linear *linear);

#endif
