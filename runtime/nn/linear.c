#include "nn/linear.h"

#include <math.h>
#include <stdio.h>

static Status declare_weight(const LayerContext *context, const char *prefix,
                             const LinearSpec *spec, int *index_out)
{
    bool cut = spec->cut != LINEAR_PICK_OUT;
    ParamSpec weight = {.num_dims = 2,
                        .dims = {spec->out, spec->in},
                        .shard_dim = cut ? (spec->cut == LINEAR_CUT_IN ? 1 : 0) : -1,
                        .shard = cut ? spec->part : (Range){0, 0},
                        .grad_is_partial = !cut,
                        .decay = true,
                        .init = PARAM_INIT_NORMAL,
                        .init_std = spec->gain / sqrtf(3.0f * (float)spec->in)};
    return layer_add_param(context, prefix, "weight", weight, index_out);
}

/* The bias of a LINEAR_CUT_IN is whole on every rank and its gradient is the same on each. */
static Status declare_bias(const LayerContext *context, const char *prefix, const LinearSpec *spec,
                           int *index_out)
{
    bool cut = spec->cut == LINEAR_CUT_OUT;
    ParamSpec bias = {.num_dims = 1,
                      .dims = {spec->out},
                      .shard_dim = cut ? 0 : -1,
                      .shard = cut ? spec->part : (Range){0, 0},
                      .grad_is_partial = spec->cut == LINEAR_PICK_OUT,
                      .init = PARAM_INIT_ZEROS};
    return layer_add_param(context, prefix, "bias", bias, index_out);
}

Status linear_declare(const LayerContext *context, const char *prefix, const char *name,
                      const LinearSpec *spec, Linear *linear_out)
{
    char path[128];
    int length = snprintf(path, sizeof path, "%s.%s", prefix, name);
    CHECK(length > 0 && (size_t)length < sizeof path);
    int64_t part = range_count(spec->part);
    *linear_out = (Linear){.bias = -1,
                           .in = spec->cut == LINEAR_CUT_IN ? part : spec->in,
                           .out = spec->cut == LINEAR_CUT_IN ? spec->out : part,
                           .first = spec->cut == LINEAR_PICK_OUT ? spec->part.begin : 0,
                           .cut = spec->cut};
    TRY(declare_weight(context, path, spec, &linear_out->weight));
    if (spec->bias) {
        TRY(declare_bias(context, path, spec, &linear_out->bias));
    }
    return STATUS_OK;
}

/* Ranks without heads or width multiply over nothing (k = 0), which gives their zero to the
 * sums. */
static Status multiply(const LayerContext *context, const MatMul *product)
{
    return context->kernels->matmul(product, context->stream);
}

static const float *used_weight(const LayerContext *context, const Linear *linear)
{
    return layer_value(context, linear->weight) + linear->first * linear->in;
}

/* The gradient of the rows that are used. */
static float *used_grad(const LayerContext *context, int index, int64_t first)
{
    float *grad = layer_grad(context, index);
    return grad ? grad + first : NULL;
}

static const float *used_bias(const LayerContext *context, const Linear *linear)
{
    return linear->bias < 0 ? NULL : layer_value(context, linear->bias) + linear->first;
}

Status linear_forward(const LayerContext *context, const Linear *linear, float *out, const float *x,
                      int64_t n)
{
    CHECK(linear->cut != LINEAR_CUT_IN);
    return multiply(context, &(MatMul){.c = out,
                                       .a = x,
                                       .b = used_weight(context, linear),
                                       .bias = used_bias(context, linear),
                                       .m = n,
                                       .n = linear->out,
                                       .k = linear->in,
                                       .transpose_b = true});
}

Status linear_forward_sum(const LayerContext *context, const Linear *linear, const ShardRows *rows,
                          float *out, float *full, const float *x, const float *residual)
{
    CHECK(linear->cut == LINEAR_CUT_IN);
    float *addend = layer_addend(rows, out, full);
    /* What is added once goes into rank 0's addend; but rows that are cut have their residual on
     * one rank only. */
    bool is_first = layer_tp_rank(context) == 0;
    bool accumulate = is_first && residual && addend == out;
    int64_t width = linear->out;
    if (accumulate) {
        TRY(stream_copy(context->stream, out, residual,
                        rows->count * width * (int64_t)sizeof(float)));
    }
    TRY(multiply(context, &(MatMul){.c = addend,
                                    .a = x,
                                    .b = used_weight(context, linear),
                                    .bias = is_first ? used_bias(context, linear) : NULL,
                                    .m = rows->count,
                                    .n = width,
                                    .k = linear->in,
                                    .transpose_b = true,
                                    .accumulate = accumulate}));
    if (addend == out || !residual) {
        return layer_reduce_to(context, rows, out, addend, width);
    }
    TRY(layer_reduce(context, rows, addend, width));
    return context->kernels->add(out, addend + rows->part.begin * width, residual,
                                 range_count(rows->part) * width, context->stream);
}

Status linear_backward_params(const LayerContext *context, const Linear *linear,
                              const float *out_grad, const float *x, int64_t n)
{
    float *bias_grad = used_grad(context, linear->bias, linear->first);
    if (bias_grad) {
        TRY(context->kernels->bias_backward(bias_grad, out_grad, n, linear->out, context->stream));
    }
    float *weight_grad = used_grad(context, linear->weight, linear->first * linear->in);
    if (!weight_grad) {
        return STATUS_OK;
    }
    return multiply(context, &(MatMul){.c = weight_grad,
                                       .a = out_grad,
                                       .b = x,
                                       .m = linear->out,
                                       .n = linear->in,
                                       .k = n,
                                       .transpose_a = true,
                                       .accumulate = true});
}

Status linear_backward_x(const LayerContext *context, const Linear *linear, float *x_grad,
                         const float *out_grad, int64_t n, bool accumulate)
{
    return multiply(context, &(MatMul){.c = x_grad,
                                       .a = out_grad,
                                       .b = used_weight(context, linear),
                                       .m = n,
                                       .n = linear->in,
                                       .k = linear->out,
                                       .accumulate = accumulate});
}

Status linear_backward(const LayerContext *context, const Linear *linear, float *x_grad,
                       const float *out_grad, const float *x, int64_t n, bool accumulate)
{
    TRY(linear_backward_params(context, linear, out_grad, x, n));
    if (!x_grad) {
        return STATUS_OK;
    }
    return linear_backward_x(context, linear, x_grad, out_grad, n, accumulate);
}

bool linear_is_trained(const LayerContext *context, const Linear *linear)
{
    return layer_is_trained(context, linear->weight) || layer_is_trained(context, linear->bias);
}
