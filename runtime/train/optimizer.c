#include "train/optimizer.h"

#include <math.h>

static bool is_decayed(const Param *param)
{
    return param->spec.decay;
}

static bool is_not_decayed(const Param *param)
{
    return !param->spec.decay;
}

static Status prepare(Optimizer *optimizer)
{
    const ParamSet *params = optimizer->params;
    TRY(param_runs_make(params, is_decayed, &optimizer->decayed));
    TRY(param_runs_make(params, is_not_decayed, &optimizer->others));
    if (optimizer->spec->kind == VIADUCT__V1__OPTIMIZER_SPEC__KIND__SGD) {
        return STATUS_OK;
    }
    int64_t size_bytes = params->count * (int64_t)sizeof(float);
    TRY(device_alloc(params->device, size_bytes, (void **)&optimizer->m));
    return device_alloc(params->device, size_bytes, (void **)&optimizer->v);
}

Status optimizer_init(Optimizer *optimizer, const OptimizerSpec *spec, ParamSet *params,
                      const Kernels *kernels)
{
    *optimizer = (Optimizer){.spec = spec, .params = params, .kernels = kernels};
    Status status = prepare(optimizer);
    if (status != STATUS_OK) {
        optimizer_done(optimizer);
        return status_trace(status, __FILE__, __LINE__);
    }
    return STATUS_OK;
}

void optimizer_done(Optimizer *optimizer)
{
    if (!optimizer->params) {
        return;
    }
    int64_t size_bytes = optimizer->params->count * (int64_t)sizeof(float);
    if (optimizer->m) {
        device_free(optimizer->params->device, optimizer->m, size_bytes);
    }
    if (optimizer->v) {
        device_free(optimizer->params->device, optimizer->v, size_bytes);
    }
    param_runs_done(&optimizer->decayed);
    param_runs_done(&optimizer->others);
    *optimizer = (Optimizer){0};
}

static Status update_run(const Optimizer *optimizer, const OptimizerStep *step, Range run,
                         double weight_decay, Stream *stream)
{
    const OptimizerSpec *spec = optimizer->spec;
    float *values = optimizer->params->values + run.begin;
    const float *grads = optimizer->params->grads + run.begin;
    if (!optimizer->m) {
        return optimizer->kernels->sgd(values, grads, range_count(run), (float)step->learning_rate,
                                       (float)weight_decay, (float)step->grad_scale, stream);
    }
    const AdamWStep adamw = {
        .learning_rate = (float)step->learning_rate,
        .beta1 = (float)spec->beta1,
        .beta2 = (float)spec->beta2,
        .epsilon = (float)spec->epsilon,
        .weight_decay = (float)weight_decay,
        .grad_scale = (float)step->grad_scale,
        .step = step->number,
    };
    return optimizer->kernels->adamw(values, optimizer->m + run.begin, optimizer->v + run.begin,
                                     grads, range_count(run), &adamw, stream);
}

Status optimizer_update(Optimizer *optimizer, const OptimizerStep *step, Stream *stream)
{
    for (int i = 0; i < optimizer->decayed.num; i++) {
        TRY(update_run(optimizer, step, optimizer->decayed.runs[i], optimizer->spec->weight_decay,
                       stream));
    }
    for (int i = 0; i < optimizer->others.num; i++) {
        TRY(update_run(optimizer, step, optimizer->others.runs[i], 0.0, stream));
    }
    return STATUS_OK;
}

double optimizer_learning_rate(const OptimizerSpec *spec, int64_t steps, int64_t step)
{
    if (step <= spec->warmup_steps) {
        return spec->learning_rate * (double)step / (double)spec->warmup_steps;
    }
    if (steps <= spec->warmup_steps) {
        return spec->learning_rate;
    }
    double done = (double)(step - 1 - spec->warmup_steps) / (double)(steps - spec->warmup_steps);
    done = done < 1.0 ? done : 1.0;
    double share = 0.5 * (1.0 + cos(3.14159265358979323846 * done));
    return spec->min_learning_rate + (spec->learning_rate - spec->min_learning_rate) * share;
}

double optimizer_grad_scale(const OptimizerSpec *spec, double grad_norm)
{
    if (spec->max_grad_norm <= 0.0 || grad_norm <= spec->max_grad_norm) {
        return 1.0;
    }
    return spec->max_grad_norm / (grad_norm + 1e-6);
}
