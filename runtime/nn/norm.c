#include "nn/norm.h"

#include <stdio.h>

Status norm_declare(const LayerContext *context, const char *prefix, const char *name,
                    NormKind kind, int64_t width, float epsilon, Norm *norm_out)
{
    char path[128];
    int length = snprintf(path, sizeof path, "%s.%s", prefix, name);
    CHECK(length > 0 && (size_t)length < sizeof path);
    *norm_out = (Norm){.kind = kind, .bias = -1, .width = width, .epsilon = epsilon};
    ParamSpec weight = {.num_dims = 1,
                        .dims = {width},
                        .shard_dim = -1,
                        .grad_is_partial = context->is_sequence_parallel,
                        .init = PARAM_INIT_ONES};
    TRY(layer_add_param(context, path, "weight", weight, &norm_out->weight));
    if (kind == NORM_KIND_LAYER) {
        ParamSpec bias = weight;
        bias.init = PARAM_INIT_ZEROS;
        TRY(layer_add_param(context, path, "bias", bias, &norm_out->bias));
    }
    return STATUS_OK;
}

void norm_carve(const Norm *norm, Arena *arena, int64_t n, NormActs *acts_out)
{
    bool is_layer = norm->kind == NORM_KIND_LAYER;
    acts_out->mean = is_layer ? layer_take(arena, n, 1) : NULL;
    acts_out->rstd = layer_take(arena, n, 1);
    acts_out->dropped = is_layer ? layer_take(arena, 1, norm->width) : NULL;
}

Status norm_forward(const LayerContext *context, const Norm *norm, const NormActs *acts, float *out,
                    const float *x, int64_t n)
{
    const float *weight = layer_value(context, norm->weight);
    if (norm->kind == NORM_KIND_RMS) {
        return context->kernels->rms_norm_forward(out, acts->rstd, x, weight, n, norm->width,
                                                  norm->epsilon, context->stream);
    }
    return context->kernels->layer_norm_forward(out, acts->mean, acts->rstd, x, weight,
                                                layer_value(context, norm->bias), n, norm->width,
                                                norm->epsilon, context->stream);
}

Status norm_backward(const LayerContext *context, const Norm *norm, const NormActs *acts,
                     float *x_grad, const float *out_grad, const float *x, int64_t n,
                     bool accumulate)
{
    const float *weight = layer_value(context, norm->weight);
    float *weight_grad = layer_grad(context, norm->weight);
    if (norm->kind == NORM_KIND_RMS) {
        return context->kernels->rms_norm_backward(x_grad, weight_grad, out_grad, x, weight,
                                                   acts->rstd, n, norm->width, accumulate,
                                                   context->stream);
    }
    /* The kernel makes both gradients or none. */
    float *bias_grad = layer_grad(context, norm->bias);
    if (weight_grad || bias_grad) {
        weight_grad = weight_grad ? weight_grad : acts->dropped;
        bias_grad = bias_grad ? bias_grad : acts->dropped;
    }
    return context->kernels->layer_norm_backward(x_grad, weight_grad, bias_grad, out_grad, x,
                                                 weight, acts->mean, acts->rstd, n, norm->width,
                                                 accumulate, context->stream);
}

bool norm_is_trained(const LayerContext *context, const Norm *norm)
{
    return layer_is_trained(context, norm->weight) || layer_is_trained(context, norm->bias);
}
