/* Optimizer: AdamW or SGD over a module's flat buffer, with the learning rate's course. Weight
 * decay applies to the parameters that say so.
 * Threading: the step thread.
 */
#ifndef TRAIN_OPTIMIZER_H
#define TRAIN_OPTIMIZER_H

#include "job/job_spec.h"
#include "kernels/kernels.h"
#include "train/param_runs.h"

typedef struct Optimizer {
    const OptimizerSpec *spec; /* borrowed, as all here */
    ParamSet *params;
    const Kernels *kernels;
    float *m; /* [params->count]; NULL with SGD */
    float *v;
    ParamRuns decayed;
    ParamRuns others;
} Optimizer;

typedef struct OptimizerStep {
    double learning_rate;
    double grad_scale; /* of clipping */
    int64_t number;    /* 1 for the first update */
} OptimizerStep;

Status optimizer_init(Optimizer *optimizer, const OptimizerSpec *spec, ParamSet *params,
                      const Kernels *kernels) STATUS_CHECKED;
void optimizer_done(Optimizer *optimizer);

Status optimizer_update(Optimizer *optimizer, const OptimizerStep *step,
                        Stream *stream) STATUS_CHECKED;

/* Linear from 0 over warmup_steps, then half a cosine down to min_learning_rate, reached one step
 * after the last (Loshchilov and Hutter 2017). `step` is 1 for the first. Pure. */
double optimizer_learning_rate(const OptimizerSpec *spec, int64_t steps, int64_t step);

/* What gradients are multiplied by so that their norm is at most max_grad_norm, as
 * torch.nn.utils.clip_grad_norm_. Pure. */
double optimizer_grad_scale(const OptimizerSpec *spec, double grad_norm);

#endif
