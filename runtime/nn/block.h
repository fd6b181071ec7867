/* Block: one pre-norm transformer layer: mid = x + attention(norm1(x)); out = mid +
 * mlp(norm2(mid)). The encoders and the decoder are stacks of it (stack.h). Over tp: one sum
 * after each half, forward and backward; with sequence parallelism it is cut into a gather
 * before the half and a sum of parts after it.
 *
 * Threading: as layer.h.
 */
#ifndef NN_BLOCK_H
#define NN_BLOCK_H

#include "nn/attention.h"
#include "nn/mlp.h"
#include "nn/norm.h"

typedef struct BlockSpec {
    const char *norm1, *norm2; /* names below the prefix */
    NormKind norm;
    float norm_epsilon;
    AttentionSpec attention;
    MlpSpec mlp;
} BlockSpec;

/* What backward computes again instead of finding it in BlockActs. */
typedef enum Recompute {
    RECOMPUTE_NONE,
    RECOMPUTE_SELECTIVE, /* the MLP's inner activations */
    RECOMPUTE_FULL,      /* everything, from the block's input */
} Recompute;

typedef struct Block {
    Norm norm1;
    Attention attention;
    Norm norm2;
    Mlp mlp;
    Recompute recompute;
} Block;

typedef struct BlockActs {
    NormActs norm1;
    AttentionActs attention;
    float *mid; /* [n, D] */
    NormActs norm2;
    MlpActs mlp;
} BlockActs;

/* One for all blocks of a module. */
typedef struct BlockScratch {
    float *normed;              /* [n, D]: the output of a norm */
    float *normed_grad;         /* [n, D] */
    AttentionScratch attention; /* shares memory with mlp */
    MlpScratch mlp;
} BlockScratch;

/* Recompute none; the owner of the acts may set another. */
Status block_declare(const LayerContext *context, const char *prefix, const BlockSpec *spec,
                     Block *block_out) STATUS_CHECKED;

/* What the block computes again is taken from `shared`, which needs not be given otherwise. */
void block_carve(const Block *block, Arena *arena, const LayerLimits *limits,
                 const BlockActs *shared, BlockActs *acts_out);
/* What block_carve takes from `shared`; the rest is not set. */
void block_carve_shared(const Block *block, Arena *arena, const LayerLimits *limits,
                        BlockActs *shared_out);
void block_carve_scratch(const LayerContext *context, const Block *block, Arena *arena,
                         const LayerLimits *limits, BlockScratch *scratch_out);

/* out [n, D] from x [n, D]. */
Status block_forward(const LayerContext *context, const Block *block, const BlockActs *acts,
                     const BlockScratch *scratch, const Sequences *sequences, float *out,
                     const float *x) STATUS_CHECKED;

/* grad [n, D]: on entry of the block's output; on return of its input x [n, D] when
 * `wants_input_grad`, else undefined. */
Status block_backward(const LayerContext *context, const Block *block, const BlockActs *acts,
                      const BlockScratch *scratch, const Sequences *sequences, float *grad,
                      const float *x, bool wants_input_grad) STATUS_CHECKED;

bool block_is_trained(const LayerContext *context, const Block *block);

#endif
