#include "train/gradients.h"

static bool is_partial(const Param *param)
{
    return param->spec.grad_is_partial;
}

static bool is_tied(const Param *param)
{
    return param->spec.is_tied;
}

static bool is_counted(const Param *param)
{
    return param->counts;
}

static int64_t staging_bytes(const Gradients *gradients)
{
    int64_t partial = gradients->partial.count;
    int64_t tied = gradients->tied.count;
    return (partial > tied ? partial : tied) * (int64_t)sizeof(float);
}

static Status prepare(Gradients *gradients, bool is_sharded)
{
    const ParamSet *params = gradients->params;
    const Comm *data = gradients->groups.data;
    TRY(state_shard_init(params, is_sharded ? data->size : 1, is_sharded ? data->rank : 0,
                         &gradients->shard));
    Range all = {0, params->trained_count};
    TRY(param_runs_make(params, is_partial, all, &gradients->partial));
    TRY(param_runs_make(params, is_tied, all, &gradients->tied));
    TRY(param_runs_make(params, is_counted, state_shard_range(&gradients->shard),
                        &gradients->counted));
    return device_alloc(params->device, staging_bytes(gradients), (void **)&gradients->staging);
}

Status gradients_init(Gradients *gradients, ParamSet *params, const GradientGroups *groups,
                      bool is_sharded)
{
    *gradients = (Gradients){.params = params, .groups = *groups};
    Status status = prepare(gradients, is_sharded);
    if (status != STATUS_OK) {
        gradients_done(gradients);
        return status_trace(status, __FILE__, __LINE__);
    }
    return STATUS_OK;
}

void gradients_done(Gradients *gradients)
{
    if (gradients->staging) {
        device_free(gradients->params->device, gradients->staging, staging_bytes(gradients));
    }
    param_runs_done(&gradients->partial);
    param_runs_done(&gradients->tied);
    param_runs_done(&gradients->counted);
    state_shard_done(&gradients->shard);
    *gradients = (Gradients){0};
}

Status gradients_zero(Gradients *gradients, Stream *stream)
{
    const ParamSet *params = gradients->params;
    if (params->trained_count == 0) {
        return STATUS_OK; /* there is no buffer */
    }
    return stream_zero(stream, params->grads, params->trained_count * (int64_t)sizeof(float));
}

/* Between the flat buffer and the staging, where the runs stand side by side. */
static Status copy_runs(Gradients *gradients, const ParamRuns *runs, bool into_staging,
                        Stream *stream)
{
    int64_t at = 0;
    for (int i = 0; i < runs->num; i++) {
        Range run = runs->runs[i];
        float *flat = gradients->params->grads + run.begin;
        float *staged = gradients->staging + at;
        TRY(stream_copy(stream, into_staging ? staged : flat, into_staging ? flat : staged,
                        range_count(run) * (int64_t)sizeof(float)));
        at += range_count(run);
    }
    return STATUS_OK;
}

/* One sum over the group for all runs; nothing where there is no group. */
static Status reduce_runs(Gradients *gradients, const ParamRuns *runs, Comm *group, Stream *stream)
{
    if (!group || group->size == 1 || runs->count == 0) {
        return STATUS_OK;
    }
    TRY(copy_runs(gradients, runs, true, stream));
    TRY(comm_all_reduce(group, gradients->staging, runs->count, DTYPE_F32, COMM_REDUCE_SUM,
                        stream));
    return copy_runs(gradients, runs, false, stream);
}

Status gradients_reduce(Gradients *gradients, Stream *stream)
{
    const ParamSet *params = gradients->params;
    Comm *data = gradients->groups.data;
    TRY(reduce_runs(gradients, &gradients->partial, gradients->groups.tp, stream));
    TRY(reduce_runs(gradients, &gradients->tied, gradients->groups.tied, stream));
    if (data->size == 1 || params->trained_count == 0) {
        return STATUS_OK;
    }
    if (gradients->shard.num_parts > 1) {
        return comm_reduce_scatter(data, params->grads, gradients->shard.bytes, stream);
    }
    return comm_all_reduce(data, params->grads, params->trained_count, DTYPE_F32, COMM_REDUCE_SUM,
                           stream);
}

Status gradients_add_square(const Gradients *gradients, const Kernels *kernels, double *square,
                            Stream *stream)
{
    if (gradients->shard.num_parts == 1 && gradients->groups.data->rank != 0) {
        return STATUS_OK; /* a copy of what rank 0 counts */
    }
    for (int i = 0; i < gradients->counted.num; i++) {
        Range run = gradients->counted.runs[i];
        TRY(kernels->sum_squares(square, gradients->params->grads + run.begin, range_count(run),
                                 stream));
    }
    return STATUS_OK;
}
