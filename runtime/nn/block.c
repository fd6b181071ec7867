#include "nn/block.h"

Status block_declare(const LayerContext *context, const char *prefix, const BlockSpec *spec,
                     Block *block_out)
{
    int64_t width = spec->attention.width;
    CHECK(spec->mlp.in == width && spec->mlp.out == width);
    block_out->recompute = RECOMPUTE_NONE;
    TRY(attention_declare(context, prefix, &spec->attention, &block_out->attention));
    TRY(mlp_declare(context, prefix, &spec->mlp, &block_out->mlp));
    TRY(norm_declare(context, prefix, spec->norm1, spec->norm, width, spec->norm_epsilon,
                     &block_out->norm1));
    return norm_declare(context, prefix, spec->norm2, spec->norm, width, spec->norm_epsilon,
                        &block_out->norm2);
}

/* ---- memory ---- */

/* All but the MLP's. */
static void carve_halves(const Block *block, Arena *arena, const LayerLimits *limits,
                         BlockActs *acts_out)
{
    norm_carve(&block->norm1, arena, limits->local, &acts_out->norm1);
    attention_carve(&block->attention, arena, limits->tokens, &acts_out->attention);
    acts_out->mid = layer_take(arena, limits->local, block->norm1.width);
    norm_carve(&block->norm2, arena, limits->local, &acts_out->norm2);
}

void block_carve(const Block *block, Arena *arena, const LayerLimits *limits,
                 const BlockActs *shared, BlockActs *acts_out)
{
    switch (block->recompute) {
    case RECOMPUTE_NONE:
        carve_halves(block, arena, limits, acts_out);
        mlp_carve(&block->mlp, arena, limits->tokens, &acts_out->mlp);
        break;
    case RECOMPUTE_SELECTIVE:
        carve_halves(block, arena, limits, acts_out);
        acts_out->mlp = shared->mlp;
        break;
    case RECOMPUTE_FULL:
        *acts_out = *shared;
        break;
    }
}

void block_carve_shared(const Block *block, Arena *arena, const LayerLimits *limits,
                        BlockActs *shared_out)
{
    *shared_out = (BlockActs){0};
    if (block->recompute == RECOMPUTE_FULL) {
        carve_halves(block, arena, limits, shared_out);
    }
    if (block->recompute != RECOMPUTE_NONE) {
        mlp_carve(&block->mlp, arena, limits->tokens, &shared_out->mlp);
    }
}

void block_carve_scratch(const LayerContext *context, const Block *block, Arena *arena,
                         const LayerLimits *limits, BlockScratch *scratch_out)
{
    int64_t width = block->norm1.width;
    scratch_out->normed = layer_take(arena, limits->local, width);
    scratch_out->normed_grad = layer_take(arena, limits->local, width);
    int64_t shared = arena->used;
    attention_carve_scratch(context, &block->attention, arena, limits, &scratch_out->attention);
    int64_t attention_end = arena->used;
    arena_rewind(arena, shared);
    mlp_carve_scratch(context, &block->mlp, arena, limits->tokens, &scratch_out->mlp);
    if (arena->used < attention_end) {
        arena_take(arena, attention_end - arena->used);
    }
}

/* ---- forward and backward ---- */

/* acts norm1, attention and mid from x [n, D]. */
static Status attention_half(const LayerContext *context, const Block *block, const BlockActs *acts,
                             const BlockScratch *scratch, const Sequences *sequences,
                             const float *x)
{
    TRY(norm_forward(context, &block->norm1, &acts->norm1, scratch->normed, x,
                     range_count(sequences->rows.part)));
    return attention_forward(context, &block->attention, &acts->attention, &scratch->attention,
                             sequences, acts->mid, scratch->normed, x);
}

Status block_forward(const LayerContext *context, const Block *block, const BlockActs *acts,
                     const BlockScratch *scratch, const Sequences *sequences, float *out,
                     const float *x)
{
    TRY(attention_half(context, block, acts, scratch, sequences, x));
    TRY(norm_forward(context, &block->norm2, &acts->norm2, scratch->normed, acts->mid,
                     range_count(sequences->rows.part)));
    return mlp_forward(context, &block->mlp, &acts->mlp, &scratch->mlp, &sequences->rows, out,
                       scratch->normed, acts->mid);
}

/* grad [n, D]: of the output, becomes that of mid when `wants_mid`. */
static Status mlp_half_backward(const LayerContext *context, const Block *block,
                                const BlockActs *acts, const BlockScratch *scratch,
                                const Sequences *sequences, float *grad, bool wants_mid)
{
    const ShardRows *rows = &sequences->rows;
    int64_t n = range_count(rows->part);
    TRY(norm_forward(context, &block->norm2, &acts->norm2, scratch->normed, acts->mid, n));
    if (block->recompute != RECOMPUTE_NONE) {
        TRY(mlp_forward_acts(context, &block->mlp, &acts->mlp, &scratch->mlp, rows,
                             scratch->normed));
    }
    bool wants_normed = wants_mid || norm_is_trained(context, &block->norm2);
    float *normed_grad = wants_normed ? scratch->normed_grad : NULL;
    TRY(mlp_backward(context, &block->mlp, &acts->mlp, &scratch->mlp, rows, normed_grad, grad,
                     scratch->normed));
    if (!wants_normed) {
        return STATUS_OK;
    }
    return norm_backward(context, &block->norm2, &acts->norm2, grad, normed_grad, acts->mid, n,
                         true);
}

/* grad [n, D]: of mid, becomes that of x [n, D] when `wants_x`. */
static Status attention_half_backward(const LayerContext *context, const Block *block,
                                      const BlockActs *acts, const BlockScratch *scratch,
                                      const Sequences *sequences, float *grad, const float *x,
                                      bool wants_x)
{
    int64_t n = range_count(sequences->rows.part);
    bool wants_normed = wants_x || norm_is_trained(context, &block->norm1);
    float *normed_grad = wants_normed ? scratch->normed_grad : NULL;
    TRY(norm_forward(context, &block->norm1, &acts->norm1, scratch->normed, x, n));
    TRY(attention_backward(context, &block->attention, &acts->attention, &scratch->attention,
                           sequences, normed_grad, grad, scratch->normed));
    if (!wants_normed) {
        return STATUS_OK;
    }
    return norm_backward(context, &block->norm1, &acts->norm1, grad, normed_grad, x, n, true);
}

Status block_backward(const LayerContext *context, const Block *block, const BlockActs *acts,
                      const BlockScratch *scratch, const Sequences *sequences, float *grad,
                      const float *x, bool wants_input_grad)
{
    if (!wants_input_grad && !block_is_trained(context, block)) {
        return STATUS_OK;
    }
    if (block->recompute == RECOMPUTE_FULL) {
        TRY(attention_half(context, block, acts, scratch, sequences, x));
    }
    bool wants_mid = wants_input_grad || norm_is_trained(context, &block->norm1) ||
                     attention_is_trained(context, &block->attention);
    TRY(mlp_half_backward(context, block, acts, scratch, sequences, grad, wants_mid));
    if (!wants_mid) {
        return STATUS_OK;
    }
    return attention_half_backward(context, block, acts, scratch, sequences, grad, x,
                                   wants_input_grad);
}

bool block_is_trained(const LayerContext *context, const Block *block)
{
    return norm_is_trained(context, &block->norm1) || norm_is_trained(context, &block->norm2) ||
           attention_is_trained(context, &block->attention) || mlp_is_trained(context, &block->mlp);
}
