#include "nn/mlp.h"

Status mlp_declare(const LayerContext *context, const char *prefix, const MlpSpec *spec,
                   Mlp *mlp_out)
{
    *mlp_out = (Mlp){.kind = spec->kind};
    LinearSpec up = {.in = spec->in,
                     .out = spec->inner,
                     .cut = LINEAR_CUT_OUT,
                     .part = layer_tp_part(context, spec->inner),
                     .bias = spec->bias,
                     .gain = 1.0f};
    LinearSpec down = up;
    down.in = spec->inner;
    down.out = spec->out;
    down.cut = LINEAR_CUT_IN;
    down.gain = spec->down_gain;
    if (spec->kind == MLP_KIND_SWIGLU) {
        TRY(linear_declare(context, prefix, spec->gate, &up, &mlp_out->gate));
    }
    TRY(linear_declare(context, prefix, spec->up, &up, &mlp_out->up));
    TRY(linear_declare(context, prefix, spec->down, &down, &mlp_out->down));
    return STATUS_OK;
}

void mlp_carve(const Mlp *mlp, Arena *arena, int64_t n, MlpActs *acts_out)
{
    bool gated = mlp->kind == MLP_KIND_SWIGLU;
    acts_out->gate = gated ? layer_take(arena, n, mlp->up.out) : NULL;
    acts_out->up = layer_take(arena, n, mlp->up.out);
}

void mlp_carve_scratch(const Mlp *mlp, Arena *arena, int64_t n, MlpScratch *scratch_out)
{
    bool gated = mlp->kind == MLP_KIND_SWIGLU;
    scratch_out->inner = layer_take(arena, n, mlp->up.out);
    scratch_out->inner_grad = layer_take(arena, n, mlp->up.out);
    scratch_out->gate_grad = gated ? layer_take(arena, n, mlp->up.out) : NULL;
}

static KernelActivation activation_of(const Mlp *mlp)
{
    return mlp->kind == MLP_KIND_QUICK_GELU ? KERNEL_ACTIVATION_QUICK_GELU : KERNEL_ACTIVATION_GELU;
}

/* inner [N, F/tp] from what is kept. */
static Status activate(const LayerContext *context, const Mlp *mlp, const MlpActs *acts,
                       float *inner, int64_t n)
{
    int64_t count = n * mlp->up.out;
    if (mlp->kind == MLP_KIND_SWIGLU) {
        return context->kernels->swiglu_forward(inner, acts->gate, acts->up, count,
                                                context->stream);
    }
    return context->kernels->activation_forward(inner, acts->up, count, activation_of(mlp),
                                                context->stream);
}

Status mlp_forward(const LayerContext *context, const Mlp *mlp, const MlpActs *acts,
                   const MlpScratch *scratch, float *out, const float *x, const float *residual,
                   int64_t n)
{
    if (mlp->kind == MLP_KIND_SWIGLU) {
        TRY(linear_forward(context, &mlp->gate, acts->gate, x, n));
    }
    TRY(linear_forward(context, &mlp->up, acts->up, x, n));
    TRY(activate(context, mlp, acts, scratch->inner, n));
    return linear_forward_sum(context, &mlp->down, out, scratch->inner, residual, n);
}

Status mlp_backward(const LayerContext *context, const Mlp *mlp, const MlpActs *acts,
                    const MlpScratch *scratch, float *x_grad, const float *out_grad, const float *x,
                    int64_t n)
{
    int64_t count = n * mlp->up.out;
    float *inner_grad = scratch->inner_grad;
    TRY(activate(context, mlp, acts, scratch->inner, n));
    TRY(linear_backward(context, &mlp->down, inner_grad, out_grad, scratch->inner, n, false));
    if (mlp->kind == MLP_KIND_SWIGLU) {
        float *up_grad = scratch->inner; /* free since down's weight gradient is made */
        TRY(context->kernels->swiglu_backward(scratch->gate_grad, up_grad, inner_grad, acts->gate,
                                              acts->up, count, context->stream));
        TRY(linear_backward(context, &mlp->gate, x_grad, scratch->gate_grad, x, n, false));
        TRY(linear_backward(context, &mlp->up, x_grad, up_grad, x, n, true));
    } else {
        TRY(context->kernels->activation_backward(inner_grad, inner_grad, acts->up, count,
                                                  activation_of(mlp), context->stream));
        TRY(linear_backward(context, &mlp->up, x_grad, inner_grad, x, n, false));
    }
    return layer_sum(context, x_grad, n * mlp->up.in);
}
