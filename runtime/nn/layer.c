#include "nn/layer.h"

#include <stdio.h>

int layer_tp_rank(const LayerContext *context)
{
    return context->tp ? context->tp->rank : 0;
}

int layer_tp_size(const LayerContext *context)
{
    return context->tp ? context->tp->size : 1;
}

int layer_cp_size(const LayerContext *context)
{
    return context->cp ? context->cp->size : 1;
}

bool layer_cuts_rows(const LayerContext *context)
{
    return context->is_sequence_parallel && layer_tp_size(context) > 1;
}

Range layer_tp_part(const LayerContext *context, int64_t length)
{
    return range_part(length, layer_tp_size(context), layer_tp_rank(context));
}

ShardRank layer_shard_rank(const LayerContext *context)
{
    bool is_cut = layer_cuts_rows(context);
    return (ShardRank){.cp_size = layer_cp_size(context),
                       .cp_rank = context->cp ? context->cp->rank : 0,
                       .tp_size = is_cut ? layer_tp_size(context) : 1,
                       .tp_rank = is_cut ? layer_tp_rank(context) : 0};
}

/* ---- exchange ---- */

Status layer_sum(const LayerContext *context, float *data, int64_t count)
{
    if (layer_tp_size(context) == 1) {
        return STATUS_OK;
    }
    return comm_all_reduce(context->tp, data, count, DTYPE_F32, COMM_REDUCE_SUM, context->stream);
}

Status layer_byte_begins(const int64_t *begins, int size, int64_t width,
                         int64_t bytes_out[LAYER_RANKS_MAX + 1])
{
    if (size > LAYER_RANKS_MAX) {
        return fail(STATUS_UNSUPPORTED, "a group of %d ranks, at most %d are supported", size,
                    LAYER_RANKS_MAX);
    }
    for (int i = 0; i <= size; i++) {
        bytes_out[i] = begins[i] * width * (int64_t)sizeof(float);
    }
    return STATUS_OK;
}

Status layer_gather(const LayerContext *context, const ShardRows *rows, float *full, int64_t width)
{
    if (!rows->begins) {
        return STATUS_OK;
    }
    int64_t bytes[LAYER_RANKS_MAX + 1];
    TRY(layer_byte_begins(rows->begins, layer_tp_size(context), width, bytes));
    return comm_all_gather(context->tp, full, bytes, context->stream);
}

Status layer_reduce(const LayerContext *context, const ShardRows *rows, float *full, int64_t width)
{
    if (!rows->begins) {
        return layer_sum(context, full, rows->count * width);
    }
    int64_t bytes[LAYER_RANKS_MAX + 1];
    TRY(layer_byte_begins(rows->begins, layer_tp_size(context), width, bytes));
    return comm_reduce_scatter(context->tp, full, bytes, context->stream);
}

Status layer_join(const LayerContext *context, const ShardRows *rows, float *full, const float *x,
                  int64_t width, const float **whole_out)
{
    if (!rows->begins) {
        *whole_out = x;
        return STATUS_OK;
    }
    TRY(stream_copy(context->stream, full + rows->part.begin * width, x,
                    range_count(rows->part) * width * (int64_t)sizeof(float)));
    TRY(layer_gather(context, rows, full, width));
    *whole_out = full;
    return STATUS_OK;
}

float *layer_addend(const ShardRows *rows, float *out, float *full)
{
    return rows->begins ? full : out;
}

Status layer_reduce_to(const LayerContext *context, const ShardRows *rows, float *out,
                       float *addend, int64_t width)
{
    TRY(layer_reduce(context, rows, addend, width));
    if (addend == out) {
        return STATUS_OK;
    }
    return stream_copy(context->stream, out, addend + rows->part.begin * width,
                       range_count(rows->part) * width * (int64_t)sizeof(float));
}

/* ---- parameters ---- */

bool layer_is_trained(const LayerContext *context, int index)
{
    return index >= 0 && context->params->params[index].is_trained;
}

float *layer_value(const LayerContext *context, int index)
{
    return index < 0 ? NULL : tensor_f32(&context->params->params[index].value);
}

float *layer_grad(const LayerContext *context, int index)
{
    return index < 0 ? NULL : tensor_f32(&context->params->params[index].grad);
}

Status layer_add_param(const LayerContext *context, const char *prefix, const char *name,
                       ParamSpec spec, int *index_out)
{
    int length = snprintf(spec.name, sizeof spec.name, "%s.%s", prefix, name);
    CHECK(length > 0 && (size_t)length < sizeof spec.name);
    bool counts = spec.shard_dim >= 0 || layer_tp_rank(context) == 0;
    return param_set_add(context->params, &spec, counts, index_out);
}

float *layer_take(Arena *arena, int64_t rows, int64_t cols)
{
    return arena_take(arena, rows * cols * (int64_t)sizeof(float));
}
