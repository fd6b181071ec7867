#include "nn/attention.h"

#include <math.h>

/* True when the query heads of every rank are whole groups. The same on all ranks. */
static bool cuts_fall_between_groups(int heads, int group, int tp_size)
{
    for (int rank = 0; rank < tp_size; rank++) {
        if (range_part(heads, tp_size, rank).begin % group != 0) {
            return false;
        }
    }
    return true;
}

Status attention_declare(const LayerContext *context, const char *prefix, const AttentionSpec *spec,
                         Attention *attention_out)
{
    CHECK(spec->kv_heads > 0 && spec->heads % spec->kv_heads == 0);
    CHECK(spec->rope_theta == 0 || spec->head_width % 2 == 0);
    int group = spec->heads / spec->kv_heads;
    int64_t head_width = spec->head_width;
    Range heads = layer_tp_part(context, spec->heads);
    Range kv_heads = {heads.begin / group, (heads.end + group - 1) / group};
    if (range_count(heads) == 0) {
        kv_heads.end = kv_heads.begin;
    }
    *attention_out = (Attention){.heads = (int)range_count(heads),
                                 .kv_heads = (int)range_count(kv_heads),
                                 .head_width = spec->head_width,
                                 .group = group,
                                 .first_head = (int)heads.begin,
                                 .first_kv_head = (int)kv_heads.begin,
                                 .rope_theta = spec->rope_theta,
                                 .causal = spec->causal};
    bool aligned = cuts_fall_between_groups(spec->heads, group, layer_tp_size(context));
    LinearSpec q = {.in = spec->width,
                    .out = spec->heads * head_width,
                    .cut = LINEAR_CUT_OUT,
                    .part = {heads.begin * head_width, heads.end * head_width},
                    .bias = spec->bias,
                    .gain = 1.0f};
    LinearSpec kv = q;
    kv.out = spec->kv_heads * head_width;
    kv.cut = aligned ? LINEAR_CUT_OUT : LINEAR_PICK_OUT;
    kv.part = (Range){kv_heads.begin * head_width, kv_heads.end * head_width};
    LinearSpec o = q;
    o.in = q.out;
    o.out = spec->width;
    o.cut = LINEAR_CUT_IN;
    o.gain = spec->o_gain;
    TRY(linear_declare(context, prefix, spec->q, &q, &attention_out->q));
    TRY(linear_declare(context, prefix, spec->k, &kv, &attention_out->k));
    TRY(linear_declare(context, prefix, spec->v, &kv, &attention_out->v));
    TRY(linear_declare(context, prefix, spec->o, &o, &attention_out->o));
    return STATUS_OK;
}

void attention_carve(const Attention *attention, Arena *arena, int64_t n, AttentionActs *acts_out)
{
    acts_out->q = layer_take(arena, n, attention->q.out);
    acts_out->k = layer_take(arena, n, attention->k.out);
    acts_out->v = layer_take(arena, n, attention->v.out);
    acts_out->out = layer_take(arena, n, attention->q.out);
    acts_out->log_sum_exp = layer_take(arena, n, attention->heads);
}

void attention_carve_scratch(const Attention *attention, Arena *arena, int64_t n,
                             AttentionScratch *scratch_out)
{
    scratch_out->q_grad = layer_take(arena, n, attention->q.out);
    scratch_out->k_grad = layer_take(arena, n, attention->k.out);
    scratch_out->v_grad = layer_take(arena, n, attention->v.out);
    scratch_out->out_grad = layer_take(arena, n, attention->q.out);
}

static AttentionShape shape_of(const Attention *attention, const Sequences *sequences)
{
    return (AttentionShape){.segment_begins = sequences->segment_begins,
                            .num_segments = sequences->num_segments,
                            .num_tokens = sequences->num_tokens,
                            .heads = attention->heads,
                            .kv_heads = attention->kv_heads,
                            .head_width = attention->head_width,
                            .group = attention->group,
                            .first_head = attention->first_head,
                            .first_kv_head = attention->first_kv_head,
                            .causal = attention->causal,
                            .scale = 1.0f / sqrtf((float)attention->head_width)};
}

/* In place on q [N, h] and k [N, k]; `inverse` on their gradients. */
static Status rotate(const LayerContext *context, const Attention *attention,
                     const Sequences *sequences, float *q, float *k, bool inverse)
{
    if (attention->rope_theta == 0) {
        return STATUS_OK;
    }
    TRY(context->kernels->rope(q, sequences->positions, sequences->num_tokens, attention->heads,
                               attention->head_width, attention->rope_theta, inverse,
                               context->stream));
    return context->kernels->rope(k, sequences->positions, sequences->num_tokens,
                                  attention->kv_heads, attention->head_width, attention->rope_theta,
                                  inverse, context->stream);
}

Status attention_forward(const LayerContext *context, const Attention *attention,
                         const AttentionActs *acts, const Sequences *sequences, float *out,
                         const float *x, const float *residual)
{
    int64_t n = sequences->num_tokens;
    TRY(linear_forward(context, &attention->q, acts->q, x, n));
    TRY(linear_forward(context, &attention->k, acts->k, x, n));
    TRY(linear_forward(context, &attention->v, acts->v, x, n));
    TRY(rotate(context, attention, sequences, acts->q, acts->k, false));
    if (attention->heads > 0) {
        AttentionShape shape = shape_of(attention, sequences);
        TRY(context->kernels->attention_forward(acts->out, acts->log_sum_exp, acts->q, acts->k,
                                                acts->v, &shape, context->stream));
    }
    return linear_forward_sum(context, &attention->o, out, acts->out, residual, n);
}

Status attention_backward(const LayerContext *context, const Attention *attention,
                          const AttentionActs *acts, const AttentionScratch *scratch,
                          const Sequences *sequences, float *x_grad, const float *out_grad,
                          const float *x)
{
    int64_t n = sequences->num_tokens;
    TRY(linear_backward(context, &attention->o, scratch->out_grad, out_grad, acts->out, n, false));
    if (attention->heads > 0) {
        AttentionShape shape = shape_of(attention, sequences);
        TRY(context->kernels->attention_backward(
            scratch->q_grad, scratch->k_grad, scratch->v_grad, scratch->out_grad, acts->out,
            acts->log_sum_exp, acts->q, acts->k, acts->v, &shape, context->stream));
    }
    TRY(rotate(context, attention, sequences, scratch->q_grad, scratch->k_grad, true));
    TRY(linear_backward(context, &attention->q, x_grad, scratch->q_grad, x, n, false));
    TRY(linear_backward(context, &attention->k, x_grad, scratch->k_grad, x, n, true));
    TRY(linear_backward(context, &attention->v, x_grad, scratch->v_grad, x, n, true));
    return layer_sum(context, x_grad, n * attention->q.in);
}
