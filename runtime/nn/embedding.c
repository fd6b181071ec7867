#include "nn/embedding.h"

#include <stdio.h>

Status embedding_declare(const LayerContext *context, const char *prefix, const char *name,
                         int64_t vocabulary, int64_t width, float init_std,
                         Embedding *embedding_out)
{
    char path[128];
    int length = snprintf(path, sizeof path, "%s.%s", prefix, name);
    CHECK(length > 0 && (size_t)length < sizeof path);
    Range part = layer_tp_part(context, vocabulary);
    *embedding_out = (Embedding){.part = part, .width = width};
    ParamSpec table = {.num_dims = 2,
                       .dims = {vocabulary, width},
                       .shard_dim = 0,
                       .shard = part,
                       .decay = true,
                       .init = PARAM_INIT_NORMAL,
                       .init_std = init_std};
    return layer_add_param(context, path, "weight", table, &embedding_out->table);
}

Linear embedding_as_head(const Embedding *embedding)
{
    return (Linear){.weight = embedding->table,
                    .bias = -1,
                    .in = embedding->width,
                    .out = range_count(embedding->part),
                    .cut = LINEAR_CUT_OUT};
}

Status embedding_forward(const LayerContext *context, const Embedding *embedding,
                         const ShardRows *rows, float *out, float *full, const int32_t *ids)
{
    float *addend = layer_addend(rows, out, full);
    TRY(context->kernels->embedding_forward(
        addend, layer_value(context, embedding->table), ids, rows->count, embedding->width,
        (int32_t)embedding->part.begin, range_count(embedding->part), context->stream));
    return layer_reduce_to(context, rows, out, addend, embedding->width);
}

Status embedding_backward(const LayerContext *context, const Embedding *embedding,
                          const ShardRows *rows, const float *out_grad, float *full,
                          const int32_t *ids)
{
    if (!layer_is_trained(context, embedding->table)) {
        return STATUS_OK;
    }
    const float *whole_grad = NULL; /* [N, D] */
    TRY(layer_join(context, rows, full, out_grad, embedding->width, &whole_grad));
    return context->kernels->embedding_backward(
        layer_grad(context, embedding->table), whole_grad, ids, rows->count, embedding->width,
        (int32_t)embedding->part.begin, range_count(embedding->part), context->stream);
}
