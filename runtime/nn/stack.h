/* Stack: a run of transformer blocks with the memory policy of what backward needs: the body of
 * every module.
 *
 * Recompute: with none, all is kept; selective computes the MLP's inner activations again (the
 * widest ones); full keeps only each block's input and runs the block's forward again before its
 * backward. The results are the same bits.
 *
 * Use: stack_init; carve one StackActs for each microbatch in flight and one StackShared for
 * all; the input [n, D] is written to stack_input, forward leaves the output in stack_output.
 * Threading: as layer.h.
 */
#ifndef NN_STACK_H
#define NN_STACK_H

#include "nn/block.h"

typedef struct Stack {
    int num_blocks;
    Block *blocks;
    int64_t width; /* D */
    Recompute recompute;
    int first_trained; /* the lowest block with a trained parameter; num_blocks: none */
} Stack;

/* Of one microbatch in flight. */
typedef struct StackActs {
    float **x; /* [num_blocks + 1] of [n, D]: input of each block, and the output of the last */
    BlockActs *blocks; /* [num_blocks]; what is computed again points into the shared memory */
} StackActs;

/* One for all microbatches of a module; several stacks of alike blocks may share it. */
typedef struct StackShared {
    BlockScratch scratch;
    BlockActs acts; /* of the block at hand, where it is computed again */
} StackShared;

/* Declares blocks "<prefix>.<layer>" for each layer of `layers`. Owned: stack_done. */
Status stack_init(const LayerContext *context, const char *prefix, const BlockSpec *spec,
                  Range layers, Recompute recompute, Stack *stack_out) STATUS_CHECKED;
void stack_done(Stack *stack);

/* The arrays of pointers. Owned: stack_acts_done. */
Status stack_acts_init(const Stack *stack, StackActs *acts_out) STATUS_CHECKED;
void stack_acts_done(StackActs *acts);

/* shared first: acts may point into it. An empty stack carves its one [n, D]. */
void stack_carve_shared(const LayerContext *context, const Stack *stack, Arena *arena,
                        const LayerLimits *limits, StackShared *shared_out);
void stack_carve(const LayerContext *context, const Stack *stack, Arena *arena,
                 const LayerLimits *limits, const StackShared *shared, StackActs *acts_out);

static inline float *stack_input(const StackActs *acts)
{
    return acts->x[0];
}

static inline float *stack_output(const Stack *stack, const StackActs *acts)
{
    return acts->x[stack->num_blocks];
}

Status stack_forward(const LayerContext *context, const Stack *stack, const StackActs *acts,
                     const StackShared *shared, const Sequences *sequences) STATUS_CHECKED;

/* grad [n, D]: on entry of the output; on return of the input when `wants_input_grad`, else
 * undefined: backward then ends at the lowest block with a trained parameter. */
Status stack_backward(const LayerContext *context, const Stack *stack, const StackActs *acts,
                      const StackShared *shared, const Sequences *sequences, float *grad,
                      bool wants_input_grad) STATUS_CHECKED;

#endif
