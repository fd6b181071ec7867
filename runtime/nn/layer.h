/* Layer: what every layer of nn works with, and the tensor-parallel sums between them.
 *
 * A layer is plain data: indices of its parameters and its local sizes. `<layer>_declare` adds its
 * parameters to the set, forward and backward stand side by side. Activations that enter and leave
 * a block are whole and equal on all tp ranks, [N, D]; inside, heads and widths are local, [N,
 * F/tp]. Backward adds to parameter gradients and overwrites activation gradients unless it says
 * otherwise. Nothing here allocates after declaration.
 *
 * Legend: N tokens, D width, F inner width, H query heads, K key/value heads, W head width, V
 * vocabulary; X/tp is this rank's part of X, by range_part, possibly empty.
 *
 * Threading: the step thread.
 */
#ifndef NN_LAYER_H
#define NN_LAYER_H

#include "base/arena.h"
#include "comm/comm.h"
#include "kernels/kernels.h"
#include "nn/param.h"

typedef struct LayerContext {
    const Kernels *kernels;
    Stream *stream;
    Comm *tp; /* NULL: size 1 */
    ParamSet *params;
} LayerContext;

int layer_tp_rank(const LayerContext *context);
int layer_tp_size(const LayerContext *context);

/* This rank's part of `length`. */
Range layer_tp_part(const LayerContext *context, int64_t length);

/* data [count] = its sum over tp, the same on all ranks. Nothing when tp is 1. */
Status layer_sum(const LayerContext *context, float *data, int64_t count) STATUS_CHECKED;

/* Local value and gradient of a parameter; NULL for index -1 (the layer has none). */
float *layer_value(const LayerContext *context, int index);
float *layer_grad(const LayerContext *context, int index);

/* Adds parameter "<prefix>.<name>" with the rest of `spec`. A replicated one counts on tp rank 0
 * only. */
Status layer_add_param(const LayerContext *context, const char *prefix, const char *name,
                       ParamSpec spec, int *index_out) STATUS_CHECKED;

/* [rows, cols] floats from the arena. */
float *layer_take(Arena *arena, int64_t rows, int64_t cols);

#endif
