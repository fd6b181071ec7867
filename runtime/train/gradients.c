#include "train/gradients.h"

static bool is_partial(const Param *param)
{
    return param->spec.grad_is_partial;
}

static bool is_counted(const Param *param)
{
    return param->counts;
}

static int64_t staging_bytes(const Gradients *gradients)
{
    return gradients->partial.count * (int64_t)sizeof(float);
}

static Status prepare(Gradients *gradients)
{
    TRY(param_runs_make(gradients->params, is_partial, &gradients->partial));
    TRY(param_runs_make(gradients->params, is_counted, &gradients->counted));
    return device_alloc(gradients->params->device, staging_bytes(gradients),
                        (void **)&gradients->staging);
}

Status gradients_init(Gradients *gradients, ParamSet *params, Comm *tp, Comm *dp)
{
    *gradients = (Gradients){.params = params, .tp = tp, .dp = dp};
    Status status = prepare(gradients);
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
    param_runs_done(&gradients->counted);
    *gradients = (Gradients){0};
}

Status gradients_zero(Gradients *gradients, Stream *stream)
{
    const ParamSet *params = gradients->params;
    return stream_zero(stream, params->grads, params->count * (int64_t)sizeof(float));
}

/* Between the flat buffer and the staging, where the partial runs stand side by side. */
static Status copy_partial(Gradients *gradients, bool into_staging, Stream *stream)
{
    int64_t at = 0;
    for (int i = 0; i < gradients->partial.num; i++) {
        Range run = gradients->partial.runs[i];
        float *flat = gradients->params->grads + run.begin;
        float *staged = gradients->staging + at;
        TRY(stream_copy(stream, into_staging ? staged : flat, into_staging ? flat : staged,
                        range_count(run) * (int64_t)sizeof(float)));
        at += range_count(run);
    }
    return STATUS_OK;
}

Status gradients_reduce(Gradients *gradients, Stream *stream)
{
    const ParamSet *params = gradients->params;
    if (gradients->tp->size > 1 && gradients->partial.count > 0) {
        TRY(copy_partial(gradients, true, stream));
        TRY(comm_all_reduce(gradients->tp, gradients->staging, gradients->partial.count, DTYPE_F32,
                            COMM_REDUCE_SUM, stream));
        TRY(copy_partial(gradients, false, stream));
    }
    if (gradients->dp->size > 1) {
        TRY(comm_all_reduce(gradients->dp, params->grads, params->count, DTYPE_F32, COMM_REDUCE_SUM,
                            stream));
    }
    return STATUS_OK;
}

Status gradients_add_square(const Gradients *gradients, const Kernels *kernels, double *square,
                            Stream *stream)
{
    if (gradients->dp->rank != 0) {
        return STATUS_OK; /* a copy of what rank 0 counts */
    }
    for (int i = 0; i < gradients->counted.num; i++) {
        Range run = gradients->counted.runs[i];
        TRY(kernels->sum_squares(square, gradients->params->grads + run.begin, range_count(run),
                                 stream));
    }
    return STATUS_OK;
}
