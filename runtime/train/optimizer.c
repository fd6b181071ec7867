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

static int64_t state_bytes(const Optimizer *optimizer)
{
    return range_count(state_shard_range(&optimizer->shard)) * (int64_t)sizeof(float);
}

static Status prepare(Optimizer *optimizer)
{
    const ParamSet *params = optimizer->params;
    const OptimizerSpec *spec = optimizer->spec;
    const Comm *data = optimizer->data;
    bool is_sharded = spec->sharding == VIADUCT__V1__OPTIMIZER_SPEC__SHARDING__ZERO1;
    TRY(state_shard_init(params, is_sharded ? data->size : 1, is_sharded ? data->rank : 0,
                         &optimizer->shard));
    Range range = state_shard_range(&optimizer->shard);
    TRY(param_runs_make(params, is_decayed, range, &optimizer->decayed));
    TRY(param_runs_make(params, is_not_decayed, range, &optimizer->others));
    if (spec->kind == VIADUCT__V1__OPTIMIZER_SPEC__KIND__SGD) {
        return STATUS_OK;
    }
    TRY(device_alloc(params->device, state_bytes(optimizer), (void **)&optimizer->m));
    return device_alloc(params->device, state_bytes(optimizer), (void **)&optimizer->v);
}

Status optimizer_init(Optimizer *optimizer, const OptimizerSpec *spec, ParamSet *params,
                      const Kernels *kernels, Comm *data)
{
    *optimizer = (Optimizer){.spec = spec, .params = params, .kernels = kernels, .data = data};
    Status status = prepare(optimizer);
    if (status != STATUS_OK) {
        optimizer_done(optimizer);
        return status_trace(status, __FILE__, __LINE__);
    }
    return STATUS_OK;
}

void optimizer_done(Optimizer *optimizer)
{
    if (optimizer->m) {
        device_free(optimizer->params->device, optimizer->m, state_bytes(optimizer));
    }
    if (optimizer->v) {
        device_free(optimizer->params->device, optimizer->v, state_bytes(optimizer));
    }
    param_runs_done(&optimizer->decayed);
    param_runs_done(&optimizer->others);
    state_shard_done(&optimizer->shard);
    *optimizer = (Optimizer){0};
}

static Status update_run(const Optimizer *optimizer, const OptimizerStep *step, Range run,
                         double weight_decay, Stream *stream)
{
    const OptimizerSpec *spec = optimizer->spec;
    float *values = optimizer->params->values + run.begin;
    const float *grads = optimizer->params->grads + run.begin;
    if (spec->kind == VIADUCT__V1__OPTIMIZER_SPEC__KIND__SGD) {
        return optimizer->kernels->sgd(values, grads, range_count(run), (float)step->learning_rate,
                                       (float)weight_decay, (float)step->grad_scale, stream);
    }
    const AdamWStep adamw = {
        .learning_rate = step->learning_rate,
        .beta1 = spec->beta1,
        .beta2 = spec->beta2,
        .epsilon = spec->epsilon,
        .weight_decay = weight_decay,
        .grad_scale = (float)step->grad_scale,
        .step = step->number,
    };
    int64_t at = run.begin - state_shard_range(&optimizer->shard).begin;
    return optimizer->kernels->adamw(values, optimizer->m + at, optimizer->v + at, grads,
                                     range_count(run), &adamw, stream);
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
    if (optimizer->shard.num_parts > 1 && optimizer->params->trained_count > 0) {
        TRY(comm_all_gather(optimizer->data, optimizer->params->values, optimizer->shard.bytes,
                            stream));
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
