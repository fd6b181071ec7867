/* Layer: what every layer of nn works with, and the exchange over tp between and inside them.
 *
 * A layer is plain data: indices of its parameters and its local sizes. `<layer>_declare` adds
 * its parameters to the set, forward and backward stand side by side. Activations between layers
 * are [n, D]: all of the cp rank's N tokens, equal on all tp ranks, or with sequence parallelism
 * this tp rank's part of them (ShardRows). Inside a layer tokens are whole and heads and widths
 * are local, [N, F/tp]. Over cp each rank has tokens of its own, and every parameter's gradient
 * is a part: the trainer sums it. Backward adds to parameter gradients (frozen parameters have
 * none and cost nothing) and overwrites activation gradients unless it says otherwise. Nothing
 * here allocates after declaration.
 *
 * Legend: N tokens of this cp rank, n of them between layers, K of the replica, D width, F inner
 * width, H query heads, G key/value heads, W head width, V vocabulary; X/tp is this rank's part
 * of X, by range_part, possibly empty.
 *
 * Threading: the step thread.
 */
#ifndef NN_LAYER_H
#define NN_LAYER_H

#include "base/arena.h"
#include "comm/comm.h"
#include "kernels/kernels.h"
#include "nn/param.h"
#include "nn/sequences.h"

typedef struct LayerContext {
    const Kernels *kernels;
    Stream *stream;
    Comm *tp;                  /* NULL: size 1 */
    Comm *cp;                  /* NULL: size 1 */
    bool is_sequence_parallel; /* tokens between layers are cut over tp */
    ParamSet *params;
} LayerContext;

enum {
    LAYER_RANKS_MAX = 1024, /* of tp or cp: exchanges list all ranks' parts on the stack */
};

/* The most that one rank meets in a microbatch. */
typedef struct LayerLimits {
    int64_t tokens; /* N */
    int64_t local;  /* n */
    int64_t keys;   /* K */
} LayerLimits;

int layer_tp_rank(const LayerContext *context);
int layer_tp_size(const LayerContext *context);
int layer_cp_size(const LayerContext *context);

/* True when tokens between layers really are cut: sequence parallelism over more than one rank. */
bool layer_cuts_rows(const LayerContext *context);

/* This rank's part of `length`. */
Range layer_tp_part(const LayerContext *context, int64_t length);

/* This rank among those of its replica; tp_size 1 unless tokens are cut over tp. */
ShardRank layer_shard_rank(const LayerContext *context);

/* data [count] = its sum over tp, the same on all ranks. Nothing when tp is 1. */
Status layer_sum(const LayerContext *context, float *data, int64_t count) STATUS_CHECKED;

/* Into a layer: full [N, width], of which rows->part holds this rank's rows, becomes whole on
 * all tp ranks. Nothing when rows are not cut. */
Status layer_gather(const LayerContext *context, const ShardRows *rows, float *full,
                    int64_t width) STATUS_CHECKED;
/* Out of a layer: full [N, width] is an addend on each tp rank; rows->part of it becomes that
 * part of the sum (all of it when rows are not cut), the rest is undefined. */
Status layer_reduce(const LayerContext *context, const ShardRows *rows, float *full,
                    int64_t width) STATUS_CHECKED;

/* *whole_out [N, width] = the rows x [n, width] of all tp ranks: x itself when rows are not cut,
 * else `full` [N, width], which need not be given otherwise. */
Status layer_join(const LayerContext *context, const ShardRows *rows, float *full, const float *x,
                  int64_t width, const float **whole_out) STATUS_CHECKED;
/* Where a layer puts its addend [N, width] of `out` [n, width]: out itself when rows are not cut,
 * else `full` [N, width]. layer_reduce_to then makes `out` of it. */
float *layer_addend(const ShardRows *rows, float *out, float *full);
Status layer_reduce_to(const LayerContext *context, const ShardRows *rows, float *out,
                       float *addend, int64_t width) STATUS_CHECKED;

/* begins [size + 1] of rows, as bytes of rows of `width` floats. STATUS_UNSUPPORTED beyond
 * LAYER_RANKS_MAX. */
Status layer_byte_begins(const int64_t *begins, int size, int64_t width,
                         int64_t bytes_out[LAYER_RANKS_MAX + 1]) STATUS_CHECKED;

/* False for index -1 (the layer has none). The same on all tp and cp ranks, unlike whether a
 * parameter's local part is empty: collectives may depend on it. */
bool layer_is_trained(const LayerContext *context, int index);

/* Local value and gradient of a parameter; NULL for index -1 (the layer has none), and the
 * gradient of a frozen one is NULL: not wanted. */
float *layer_value(const LayerContext *context, int index);
float *layer_grad(const LayerContext *context, int index);

/* Adds parameter "<prefix>.<name>" with the rest of `spec`. A replicated one counts on tp rank 0
 * only. */
Status layer_add_param(const LayerContext *context, const char *prefix, const char *name,
                       ParamSpec spec, int *index_out) STATUS_CHECKED;

/* [rows, cols] floats from the arena. */
float *layer_take(Arena *arena, int64_t rows, int64_t cols);

#endif
