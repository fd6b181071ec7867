/* Norm: layer norm (weight and bias) or RMS norm (weight) over the width, of the n rows between
 * layers. Every tp rank does all of it, on equal inputs, so gradients are equal too; with sequence
 * parallelism each works on rows of its own and has a part of the gradient (grad_is_partial).
 *
 * Threading: as layer.h.
 */
#ifndef NN_NORM_H
#define NN_NORM_H

#include "nn/layer.h"

typedef enum NormKind {
    NORM_KIND_LAYER,
    NORM_KIND_RMS,
} NormKind;

typedef struct Norm {
    NormKind kind;
    int weight; /* parameter index */
    int bias;   /* parameter index; -1 for RMS */
    int64_t width;
    float epsilon;
} Norm;

typedef struct NormActs {
    float *mean;    /* [n]; not used by RMS */
    float *rstd;    /* [n] */
    float *dropped; /* [D]: takes the gradient of a frozen parameter beside a trained one; not used
                     * by RMS */
} NormActs;

/* Adds "<prefix>.<name>.weight" and, for layer norm, ".bias". */
Status norm_declare(const LayerContext *context, const char *prefix, const char *name,
                    NormKind kind, int64_t width, float epsilon, Norm *norm_out) STATUS_CHECKED;

void norm_carve(const Norm *norm, Arena *arena, int64_t n, NormActs *acts_out);

/* out [n, D] = norm(x [n, D]). Running it again in backward costs less than keeping its output. */
Status norm_forward(const LayerContext *context, const Norm *norm, const NormActs *acts, float *out,
                    const float *x, int64_t n) STATUS_CHECKED;

/* x_grad [n, D] (+)= ; out_grad, x [n, D]. */
Status norm_backward(const LayerContext *context, const Norm *norm, const NormActs *acts,
                     float *x_grad, const float *out_grad, const float *x, int64_t n,
                     bool accumulate) STATUS_CHECKED;

bool norm_is_trained(const LayerContext *context, const Norm *norm);

#endif
