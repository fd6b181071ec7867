#include "nn/stack.h"

#include "base/memory.h"

#include <inttypes.h>
#include <stdio.h>

static Status declare_blocks(const LayerContext *context, const char *prefix, const BlockSpec *spec,
                             Range layers, Stack *stack)
{
    for (int i = 0; i < stack->num_blocks; i++) {
        char path[sizeof((ParamSpec *)0)->name];
        int length = snprintf(path, sizeof path, "%s.%" PRId64, prefix, layers.begin + i);
        CHECK(length > 0 && (size_t)length < sizeof path);
        TRY(block_declare(context, path, spec, &stack->blocks[i]));
        stack->blocks[i].recompute = stack->recompute;
    }
    return STATUS_OK;
}

Status stack_init(const LayerContext *context, const char *prefix, const BlockSpec *spec,
                  Range layers, Recompute recompute, Stack *stack_out)
{
    int64_t num_blocks = range_count(layers);
    CHECK(num_blocks >= 0 && num_blocks < INT32_MAX);
    Stack stack = {.num_blocks = (int)num_blocks,
                   .width = spec->attention.width,
                   .recompute = recompute,
                   .first_trained = 0};
    TRY(MEMORY_NEW(&stack.blocks, num_blocks));
    Status status = declare_blocks(context, prefix, spec, layers, &stack);
    if (status != STATUS_OK) {
        memory_free(stack.blocks);
        return status_trace(status, __FILE__, __LINE__);
    }
    while (stack.first_trained < stack.num_blocks &&
           !block_is_trained(context, &stack.blocks[stack.first_trained])) {
        stack.first_trained++;
    }
    *stack_out = stack;
    return STATUS_OK;
}

void stack_done(Stack *stack)
{
    memory_free(stack->blocks);
    *stack = (Stack){0};
}

/* ---- memory ---- */

Status stack_acts_init(const Stack *stack, StackActs *acts_out)
{
    StackActs acts = {0};
    TRY(MEMORY_NEW(&acts.x, stack->num_blocks + 1));
    Status status = MEMORY_NEW(&acts.blocks, stack->num_blocks);
    if (status != STATUS_OK) {
        memory_free(acts.x);
        return status_trace(status, __FILE__, __LINE__);
    }
    *acts_out = acts;
    return STATUS_OK;
}

void stack_acts_done(StackActs *acts)
{
    memory_free(acts->x);
    memory_free(acts->blocks);
    *acts = (StackActs){0};
}

void stack_carve_shared(const LayerContext *context, const Stack *stack, Arena *arena,
                        const LayerLimits *limits, StackShared *shared_out)
{
    *shared_out = (StackShared){0};
    if (stack->num_blocks == 0) {
        return;
    }
    const Block *block = &stack->blocks[0]; /* all are alike */
    block_carve_scratch(context, block, arena, limits, &shared_out->scratch);
    block_carve_shared(block, arena, limits, &shared_out->acts);
}

void stack_carve(const LayerContext *context, const Stack *stack, Arena *arena,
                 const LayerLimits *limits, const StackShared *shared, StackActs *acts_out)
{
    (void)context;
    acts_out->x[0] = layer_take(arena, limits->local, stack->width);
    for (int i = 0; i < stack->num_blocks; i++) {
        block_carve(&stack->blocks[i], arena, limits, &shared->acts, &acts_out->blocks[i]);
        acts_out->x[i + 1] = layer_take(arena, limits->local, stack->width);
    }
}

/* ---- forward and backward ---- */

Status stack_forward(const LayerContext *context, const Stack *stack, const StackActs *acts,
                     const StackShared *shared, const Sequences *sequences)
{
    for (int i = 0; i < stack->num_blocks; i++) {
        TRY(block_forward(context, &stack->blocks[i], &acts->blocks[i], &shared->scratch, sequences,
                          acts->x[i + 1], acts->x[i]));
    }
    return STATUS_OK;
}

Status stack_backward(const LayerContext *context, const Stack *stack, const StackActs *acts,
                      const StackShared *shared, const Sequences *sequences, float *grad,
                      bool wants_input_grad)
{
    int lowest = wants_input_grad ? 0 : stack->first_trained;
    for (int i = stack->num_blocks - 1; i >= lowest; i--) {
        TRY(block_backward(context, &stack->blocks[i], &acts->blocks[i], &shared->scratch,
                           sequences, grad, acts->x[i], wants_input_grad || i > lowest));
    }
    return STATUS_OK;
}
