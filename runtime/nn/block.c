#include "nn/block.h"

Status block_declare(const LayerContext *context, const char *prefix, const BlockSpec *spec,
                     Block *block_out)
{
    int64_t width = spec->attention.width;
    CHECK(spec->mlp.in == width && spec->mlp.out == width);
    TRY(attention_declare(context, prefix, &spec->attention, &block_out->attention));
    TRY(mlp_declare(context, prefix, &spec->mlp, &block_out->mlp));
    TRY(norm_declare(context, prefix, spec->norm1, spec->norm, width, spec->norm_epsilon,
                     &block_out->norm1));
    return norm_declare(context, prefix, spec->norm2, spec->norm, width, spec->norm_epsilon,
                        &block_out->norm2);
}

void block_carve(const Block *block, Arena *arena, int64_t n, BlockActs *acts_out)
{
    int64_t width = block->norm1.width;
    norm_carve(&block->norm1, arena, n, &acts_out->norm1);
    attention_carve(&block->attention, arena, n, &acts_out->attention);
    acts_out->mid = layer_take(arena, n, width);
    norm_carve(&block->norm2, arena, n, &acts_out->norm2);
    mlp_carve(&block->mlp, arena, n, &acts_out->mlp);
    acts_out->out = layer_take(arena, n, width);
}

void block_carve_scratch(const Block *block, Arena *arena, int64_t n, BlockScratch *scratch_out)
{
    int64_t width = block->norm1.width;
    scratch_out->normed = layer_take(arena, n, width);
    scratch_out->normed_grad = layer_take(arena, n, width);
    int64_t shared = arena->used;
    attention_carve_scratch(&block->attention, arena, n, &scratch_out->attention);
    int64_t attention_end = arena->used;
    arena_rewind(arena, shared);
    mlp_carve_scratch(&block->mlp, arena, n, &scratch_out->mlp);
    if (arena->used < attention_end) {
        arena_take(arena, attention_end - arena->used);
    }
}

Status block_forward(const LayerContext *context, const Block *block, const BlockActs *acts,
                     const BlockScratch *scratch, const Sequences *sequences, const float *x)
{
    int64_t n = sequences->num_tokens;
    float *normed = scratch->normed;
    TRY(norm_forward(context, &block->norm1, &acts->norm1, normed, x, n));
    TRY(attention_forward(context, &block->attention, &acts->attention, sequences, acts->mid,
                          normed, x));
    TRY(norm_forward(context, &block->norm2, &acts->norm2, normed, acts->mid, n));
    return mlp_forward(context, &block->mlp, &acts->mlp, &scratch->mlp, acts->out, normed,
                       acts->mid, n);
}

Status block_backward(const LayerContext *context, const Block *block, const BlockActs *acts,
                      const BlockScratch *scratch, const Sequences *sequences, float *grad,
                      const float *x)
{
    int64_t n = sequences->num_tokens;
    float *normed = scratch->normed;
    float *normed_grad = scratch->normed_grad;
    TRY(norm_forward(context, &block->norm2, &acts->norm2, normed, acts->mid, n));
    TRY(mlp_backward(context, &block->mlp, &acts->mlp, &scratch->mlp, normed_grad, grad, normed,
                     n));
    TRY(norm_backward(context, &block->norm2, &acts->norm2, grad, normed_grad, acts->mid, n, true));
    TRY(norm_forward(context, &block->norm1, &acts->norm1, normed, x, n));
    TRY(attention_backward(context, &block->attention, &acts->attention, &scratch->attention,
                           sequences, normed_grad, grad, normed));
    return norm_backward(context, &block->norm1, &acts->norm1, grad, normed_grad, x, n, true);
}
