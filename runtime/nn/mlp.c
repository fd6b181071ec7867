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

void mlp_carve_scratch(const LayerContext *context, const Mlp *mlp, Arena *arena, int64_t n,
                       MlpScratch *scratch_out)
{
    bool gated = mlp->kind == MLP_KIND_SWIGLU;
    int64_t widest = mlp->up.in > mlp->down.out ? mlp->up.in : mlp->down.out;
    scratch_out->full = layer_cuts_rows(context) ? layer_take(arena, n, widest) : NULL;
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

Status mlp_forward_acts(const LayerContext *context, const Mlp *mlp, const MlpActs *acts,
                        const MlpScratch *scratch, const ShardRows *rows, const float *x)
{
    const float *whole = NULL; /* [N, in] */
    TRY(layer_join(context, rows, scratch->full, x, mlp->up.in, &whole));
    if (mlp->kind == MLP_KIND_SWIGLU) {
        TRY(linear_forward(context, &mlp->gate, acts->gate, whole, rows->count));
    }
    return linear_forward(context, &mlp->up, acts->up, whole, rows->count);
}

Status mlp_forward(const LayerContext *context, const Mlp *mlp, const MlpActs *acts,
                   const MlpScratch *scratch, const ShardRows *rows, float *out, const float *x,
                   const float *residual)
{
    TRY(mlp_forward_acts(context, mlp, acts, scratch, rows, x));
    TRY(activate(context, mlp, acts, scratch->inner, rows->count));
    return linear_forward_sum(context, &mlp->down, rows, out, scratch->full, scratch->inner,
                              residual);
}

/* gate_grad (SwiGLU) and *up_grad_out [N, F/tp] from inner_grad [N, F/tp]. */
static Status activation_backward(const LayerContext *context, const Mlp *mlp, const MlpActs *acts,
                                  const MlpScratch *scratch, int64_t n, float **up_grad_out)
{
    int64_t count = n * mlp->up.out;
    if (mlp->kind == MLP_KIND_SWIGLU) {
        *up_grad_out = scratch->inner; /* free since down's weight gradient is made */
        return context->kernels->swiglu_backward(scratch->gate_grad, scratch->inner,
                                                 scratch->inner_grad, acts->gate, acts->up, count,
                                                 context->stream);
    }
    *up_grad_out = scratch->inner_grad;
    return context->kernels->activation_backward(scratch->inner_grad, scratch->inner_grad, acts->up,
                                                 count, activation_of(mlp), context->stream);
}

static bool reads_x(const LayerContext *context, const Mlp *mlp)
{
    return layer_is_trained(context, mlp->up.weight) ||
           (mlp->kind == MLP_KIND_SWIGLU && layer_is_trained(context, mlp->gate.weight));
}

/* What is in front of `down`: the parameters of gate and up, and x. */
static Status inputs_backward(const LayerContext *context, const Mlp *mlp, const MlpActs *acts,
                              const MlpScratch *scratch, const ShardRows *rows, float *x_grad,
                              const float *x)
{
    bool gated = mlp->kind == MLP_KIND_SWIGLU;
    int64_t n = rows->count;
    float *up_grad = NULL;
    TRY(activation_backward(context, mlp, acts, scratch, n, &up_grad));
    const float *whole = NULL; /* [N, in] */
    if (reads_x(context, mlp)) {
        TRY(layer_join(context, rows, scratch->full, x, mlp->up.in, &whole));
    }
    if (gated) {
        TRY(linear_backward_params(context, &mlp->gate, scratch->gate_grad, whole, n));
    }
    TRY(linear_backward_params(context, &mlp->up, up_grad, whole, n));
    if (!x_grad) {
        return STATUS_OK;
    }
    float *addend = layer_addend(rows, x_grad, scratch->full); /* x is not needed any more */
    if (gated) {
        TRY(linear_backward_x(context, &mlp->gate, addend, scratch->gate_grad, n, false));
    }
    TRY(linear_backward_x(context, &mlp->up, addend, up_grad, n, gated));
    return layer_reduce_to(context, rows, x_grad, addend, mlp->up.in);
}

Status mlp_backward(const LayerContext *context, const Mlp *mlp, const MlpActs *acts,
                    const MlpScratch *scratch, const ShardRows *rows, float *x_grad,
                    const float *out_grad, const float *x)
{
    bool wants_inner = x_grad || linear_is_trained(context, &mlp->up) ||
                       (mlp->kind == MLP_KIND_SWIGLU && linear_is_trained(context, &mlp->gate));
    if (!wants_inner && !linear_is_trained(context, &mlp->down)) {
        return STATUS_OK;
    }
    if (layer_is_trained(context, mlp->down.weight)) {
        TRY(activate(context, mlp, acts, scratch->inner, rows->count));
    }
    const float *whole_grad = NULL; /* [N, out] */
    TRY(layer_join(context, rows, scratch->full, out_grad, mlp->down.out, &whole_grad));
    TRY(linear_backward(context, &mlp->down, wants_inner ? scratch->inner_grad : NULL, whole_grad,
                        scratch->inner, rows->count, false));
    if (!wants_inner) {
        return STATUS_OK;
    }
    return inputs_backward(context, mlp, acts, scratch, rows, x_grad, x);
}

bool mlp_is_trained(const LayerContext *context, const Mlp *mlp)
{
    return linear_is_trained(context, &mlp->up) || linear_is_trained(context, &mlp->down) ||
           (mlp->kind == MLP_KIND_SWIGLU && linear_is_trained(context, &mlp->gate));
}
