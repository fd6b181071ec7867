/* Block: one pre-norm transformer layer: mid = x + attention(norm1(x)); out = mid +
 * mlp(norm2(mid)). The vision encoder and the decoder are stacks of it. Over tp: one sum after each
 * half, forward and backward.
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

typedef struct Block {
    Norm norm1;
    Attention attention;
    Norm norm2;
    Mlp mlp;
} Block;

typedef struct BlockActs {
    NormActs norm1;
    AttentionActs attention;
    float *mid; /* [N, D] */
    NormActs norm2;
    MlpActs mlp;
    float *out; /* [N, D] */
} BlockActs;

/* One for all blocks of a module. */
typedef struct BlockScratch {
    float *normed;              /* [N, D]: the output of a norm */
    float *normed_grad;         /* [N, D] */
    AttentionScratch attention; /* shares memory with mlp */
    MlpScratch mlp;
} BlockScratch;

Status block_declare(const LayerContext *context, const char *prefix, const BlockSpec *spec,
                     Block *block_out) STATUS_CHECKED;

void block_carve(const Block *block, Arena *arena, int64_t n, BlockActs *acts_out);
void block_carve_scratch(const Block *block, Arena *arena, int64_t n, BlockScratch *scratch_out);

/* acts->out [N, D] from x [N, D]. */
Status block_forward(const LayerContext *context, const Block *block, const BlockActs *acts,
                     const BlockScratch *scratch, const Sequences *sequences,
                     const float *x) STATUS_CHECKED;

/* grad [N, D]: on entry of the block's output, on return of its input x [N, D]. */
Status block_backward(const LayerContext *context, const Block *block, const BlockActs *acts,
                      const BlockScratch *scratch, const Sequences *sequences, float *grad,
                      const float *x) STATUS_CHECKED;

#endif
