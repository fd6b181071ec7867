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

/* Ranks without heads or width multiply over nothing (k = 0), which gives their zero to the sums. */
static Status multiply(const LayerContext *context, const MatMul *product)
{
    return context->kernels->matmul(product, context->stream);
}

static const float *used_weight(const LayerContext *context, const Linear *linear)
{
    return layer_value(context, linear->weight) + linear->first * linear->in;
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

Status linear_forward_sum(const LayerContext *context, const Linear *linear, float *out,
                          const float *x, const float *residual, int64_t n)
{
    CHECK(linear->cut == LINEAR_CUT_IN);
    int64_t count = n * linear->out;
    /* What is added once goes into rank 0's addend. */
    bool first = layer_tp_rank(context) == 0;
    if (first && residual) {
        TRY(stream_copy(context->stream, out, residual, count * (int64_t)sizeof(float)));
    }
    TRY(multiply(context, &(MatMul){.c = out,
                                    .a = x,
                                    .b = used_weight(context, linear),
                                    .bias = first ? used_bias(context, linear) : NULL,
                                    .m = n,
                                    .n = linear->out,
                                    .k = linear->in,
                                    .transpose_b = true,
                                    .accumulate = first && residual}));
    return layer_sum(context, out, count);
}

Status linear_backward(const LayerContext *context, const Linear *linear, float *x_grad,
                       const float *out_grad, const float *x, int64_t n, bool accumulate)
{
    if (linear->bias >= 0) {
        TRY(context->kernels->bias_backward(layer_grad(context, linear->bias) + linear->first,
                                            out_grad, n, linear->out, context->stream));
    }
    TRY(multiply(context,
                 &(MatMul){.c = layer_grad(context, linear->weight) + linear->first * linear->in,
                           .a = out_grad,
                           .b = x,
                           .m = linear->out,
                           .n = linear->in,
                           .k = n,
                           .transpose_a = true,
                           .accumulate = true}));
    if (!x_grad) {
        return STATUS_OK;
    }
    return multiply(context, &(MatMul){.c = x_grad,
                                       .a = out_grad,
                                       .b = used_weight(context, linear),
                                       .m = n,
                                       .n = linear->in,
                                       .k = linear->out,
                                       .accumulate = accumulate});
}
