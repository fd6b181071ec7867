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

void attention_carve_scratch(const LayerContext *context, const Attention *attention, Arena *arena,
                             const LayerLimits *limits, AttentionScratch *scratch_out)
{
    int64_t kv_width = attention->k.out;
    *scratch_out = (AttentionScratch){0};
    if (layer_cuts_rows(context)) {
        scratch_out->full = layer_take(arena, limits->tokens, attention->q.in);
    }
    if (layer_cp_size(context) > 1) {
        scratch_out->exchange = layer_take(arena, 2 * limits->keys, kv_width);
        scratch_out->keys = layer_take(arena, limits->keys, kv_width);
        scratch_out->values = layer_take(arena, limits->keys, kv_width);
    }
    scratch_out->q_grad = layer_take(arena, limits->tokens, attention->q.out);
    scratch_out->k_grad = layer_take(arena, limits->keys, kv_width);
    scratch_out->v_grad = layer_take(arena, limits->keys, kv_width);
    scratch_out->out_grad = layer_take(arena, limits->tokens, attention->q.out);
}

static AttentionShape shape_of(const Attention *attention, const Sequences *sequences)
{
    return (AttentionShape){.runs = sequences->runs,
                            .num_runs = sequences->num_runs,
                            .num_tokens = sequences->rows.count,
                            .num_keys = sequences->num_keys,
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
    int64_t n = sequences->rows.count;
    TRY(context->kernels->rope(q, sequences->positions, n, attention->heads, attention->head_width,
                               attention->rope_theta, inverse, context->stream));
    return context->kernels->rope(k, sequences->positions, n, attention->kv_heads,
                                  attention->head_width, attention->rope_theta, inverse,
                                  context->stream);
}

/* ---- keys and values over cp ---- */

/* Where the keys of cp rank `rank` begin in the exchange; its values follow them. */
static float *exchange_keys(const Attention *attention, const AttentionScratch *scratch,
                            const Sequences *sequences, int rank)
{
    return scratch->exchange + 2 * sequences->cp_begins[rank] * attention->k.out;
}

static float *exchange_values(const Attention *attention, const AttentionScratch *scratch,
                              const Sequences *sequences, int rank)
{
    return exchange_keys(attention, scratch, sequences, rank) +
           (sequences->cp_begins[rank + 1] - sequences->cp_begins[rank]) * attention->k.out;
}

/* scratch keys, values [K, k] = those of all tokens, in their natural order. */
static Status gather_keys(const LayerContext *context, const Attention *attention,
                          const AttentionActs *acts, const AttentionScratch *scratch,
                          const Sequences *sequences)
{
    const Kernels *kernels = context->kernels;
    int64_t width = attention->k.out;
    int own = context->cp->rank;
    int64_t own_bytes = sequences->rows.count * width * (int64_t)sizeof(float);
    TRY(stream_copy(context->stream, exchange_keys(attention, scratch, sequences, own), acts->k,
                    own_bytes));
    TRY(stream_copy(context->stream, exchange_values(attention, scratch, sequences, own), acts->v,
                    own_bytes));
    int64_t bytes[LAYER_RANKS_MAX + 1];
    TRY(layer_byte_begins(sequences->cp_begins, context->cp->size, 2 * width, bytes));
    TRY(comm_all_gather(context->cp, scratch->exchange, bytes, context->stream));
    for (int rank = 0; rank < context->cp->size; rank++) {
        int64_t begin = sequences->cp_begins[rank];
        int64_t count = sequences->cp_begins[rank + 1] - begin;
        const int32_t *places = sequences->key_places + begin;
        TRY(kernels->scatter_rows(scratch->keys, exchange_keys(attention, scratch, sequences, rank),
                                  places, count, width, context->stream));
        TRY(kernels->scatter_rows(scratch->values,
                                  exchange_values(attention, scratch, sequences, rank), places,
                                  count, width, context->stream));
    }
    return STATUS_OK;
}

/* This rank's part of the exchange = the sums over cp of scratch k_grad, v_grad [K, k]. */
static Status reduce_key_grads(const LayerContext *context, const Attention *attention,
                               const AttentionScratch *scratch, const Sequences *sequences)
{
    const Kernels *kernels = context->kernels;
    int64_t width = attention->k.out;
    for (int rank = 0; rank < context->cp->size; rank++) {
        int64_t begin = sequences->cp_begins[rank];
        int64_t count = sequences->cp_begins[rank + 1] - begin;
        const int32_t *places = sequences->key_places + begin;
        TRY(kernels->gather_rows(exchange_keys(attention, scratch, sequences, rank),
                                 scratch->k_grad, places, count, width, context->stream));
        TRY(kernels->gather_rows(exchange_values(attention, scratch, sequences, rank),
                                 scratch->v_grad, places, count, width, context->stream));
    }
    int64_t bytes[LAYER_RANKS_MAX + 1];
    TRY(layer_byte_begins(sequences->cp_begins, context->cp->size, 2 * width, bytes));
    return comm_reduce_scatter(context->cp, scratch->exchange, bytes, context->stream);
}

/* ---- forward ---- */

/* acts out, log_sum_exp from acts q, k, v. */
static Status attend(const LayerContext *context, const Attention *attention,
                     const AttentionActs *acts, const AttentionScratch *scratch,
                     const Sequences *sequences)
{
    if (attention->heads == 0) { /* on all cp ranks */
        return STATUS_OK;
    }
    const float *k = acts->k;
    const float *v = acts->v;
    if (layer_cp_size(context) > 1) {
        TRY(gather_keys(context, attention, acts, scratch, sequences));
        k = scratch->keys;
        v = scratch->values;
    }
    AttentionShape shape = shape_of(attention, sequences);
    return context->kernels->attention_forward(acts->out, acts->log_sum_exp, acts->q, k, v, &shape,
                                               context->stream);
}

Status attention_forward(const LayerContext *context, const Attention *attention,
                         const AttentionActs *acts, const AttentionScratch *scratch,
                         const Sequences *sequences, float *out, const float *x,
                         const float *residual)
{
    const ShardRows *rows = &sequences->rows;
    int64_t n = rows->count;
    const float *whole = NULL; /* [N, D] */
    TRY(layer_join(context, rows, scratch->full, x, attention->q.in, &whole));
    TRY(linear_forward(context, &attention->q, acts->q, whole, n));
    TRY(linear_forward(context, &attention->k, acts->k, whole, n));
    TRY(linear_forward(context, &attention->v, acts->v, whole, n));
    TRY(rotate(context, attention, sequences, acts->q, acts->k, false));
    TRY(attend(context, attention, acts, scratch, sequences));
    return linear_forward_sum(context, &attention->o, rows, out, scratch->full, acts->out,
                              residual);
}

/* ---- backward ---- */

/* Gradients of q, k and v as the projections gave them: scratch q_grad [N, h], and [N, k] each in
 * *k_grad_out and *v_grad_out, from scratch out_grad. */
static Status attend_backward(const LayerContext *context, const Attention *attention,
                              const AttentionActs *acts, const AttentionScratch *scratch,
                              const Sequences *sequences, float **k_grad_out, float **v_grad_out)
{
    *k_grad_out = scratch->k_grad;
    *v_grad_out = scratch->v_grad;
    if (attention->heads == 0) { /* on all cp ranks */
        return STATUS_OK;
    }
    bool is_parted = layer_cp_size(context) > 1;
    if (is_parted) {
        TRY(gather_keys(context, attention, acts, scratch, sequences));
    }
    AttentionShape shape = shape_of(attention, sequences);
    TRY(context->kernels->attention_backward(
        scratch->q_grad, scratch->k_grad, scratch->v_grad, scratch->out_grad, acts->out,
        acts->log_sum_exp, acts->q, is_parted ? scratch->keys : acts->k,
        is_parted ? scratch->values : acts->v, &shape, context->stream));
    if (is_parted) {
        TRY(reduce_key_grads(context, attention, scratch, sequences));
        *k_grad_out = exchange_keys(attention, scratch, sequences, context->cp->rank);
        *v_grad_out = exchange_values(attention, scratch, sequences, context->cp->rank);
    }
    return rotate(context, attention, sequences, scratch->q_grad, *k_grad_out, true);
}

static bool reads_x(const LayerContext *context, const Attention *attention)
{
    return layer_is_trained(context, attention->q.weight) ||
           layer_is_trained(context, attention->k.weight) ||
           layer_is_trained(context, attention->v.weight);
}

/* Through the projections q, k and v; k_grad, v_grad [N, k]. */
static Status inputs_backward(const LayerContext *context, const Attention *attention,
                              const AttentionScratch *scratch, const ShardRows *rows,
                              const float *const grads[3], float *x_grad, const float *x)
{
    const Linear *const linears[3] = {&attention->q, &attention->k, &attention->v};
    const float *whole = NULL; /* [N, D] */
    if (reads_x(context, attention)) {
        TRY(layer_join(context, rows, scratch->full, x, attention->q.in, &whole));
    }
    for (int i = 0; i < 3; i++) {
        TRY(linear_backward_params(context, linears[i], grads[i], whole, rows->count));
    }
    if (!x_grad) {
        return STATUS_OK;
    }
    float *addend = layer_addend(rows, x_grad, scratch->full); /* x is not needed any more */
    for (int i = 0; i < 3; i++) {
        TRY(linear_backward_x(context, linears[i], addend, grads[i], rows->count, i > 0));
    }
    return layer_reduce_to(context, rows, x_grad, addend, attention->q.in);
}

Status attention_backward(const LayerContext *context, const Attention *attention,
                          const AttentionActs *acts, const AttentionScratch *scratch,
                          const Sequences *sequences, float *x_grad, const float *out_grad,
                          const float *x)
{
    const ShardRows *rows = &sequences->rows;
    bool wants_inner = x_grad || linear_is_trained(context, &attention->q) ||
                       linear_is_trained(context, &attention->k) ||
                       linear_is_trained(context, &attention->v);
    if (!wants_inner && !linear_is_trained(context, &attention->o)) {
        return STATUS_OK;
    }
    const float *whole_grad = NULL; /* [N, D] */
    TRY(layer_join(context, rows, scratch->full, out_grad, attention->o.out, &whole_grad));
    TRY(linear_backward(context, &attention->o, wants_inner ? scratch->out_grad : NULL, whole_grad,
                        acts->out, rows->count, false));
    if (!wants_inner) {
        return STATUS_OK;
    }
    float *k_grad = NULL;
    float *v_grad = NULL;
    TRY(attend_backward(context, attention, acts, scratch, sequences, &k_grad, &v_grad));
    const float *const grads[3] = {scratch->q_grad, k_grad, v_grad};
    return inputs_backward(context, attention, scratch, rows, grads, x_grad, x);
}

bool attention_is_trained(const LayerContext *context, const Attention *attention)
{
    return linear_is_trained(context, &attention->q) || linear_is_trained(context, &attention->k) ||
           linear_is_trained(context, &attention->v) || linear_is_trained(context, &attention->o);
}
