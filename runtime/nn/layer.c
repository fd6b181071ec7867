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

Range layer_tp_part(const LayerContext *context, int64_t length)
{
    return range_part(length, layer_tp_size(context), layer_tp_rank(context));
}

Status layer_sum(const LayerContext *context, float *data, int64_t count)
{
    if (layer_tp_size(context) == 1) {
        return STATUS_OK;
    }
    return comm_all_reduce(context->tp, data, count, DTYPE_F32, COMM_REDUCE_SUM, context->stream);
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
