/* Optimizer: AdamW or SGD over the trained part of a module's flat buffer, with the learning rate's
 * course. Weight decay applies to the parameters that say so.
 *
 * Sharded (ZeRO-1): each replica holds the state of its range, updates that range and gathers the
 * weights of the others. The result is the same bits as unsharded. Threading: the step thread.
 */
#ifndef TRAIN_OPTIMIZER_H
#define TRAIN_OPTIMIZER_H

#include "comm/comm.h"
#include "job/job_spec.h"
#include "kernels/kernels.h"
#include "train/param_runs.h"
#include "train/state_shard.h"

typedef struct Optimizer {
    const OptimizerSpec *spec; /* borrowed, as all here */
    ParamSet *params;
    const Kernels *kernels;
    Comm *data; /* the replicas */
    StateShard shard;
    float *m; /* [elements of this rank's range]; NULL with SGD */
    float *v;
    ParamRuns decayed; /* inside the range */
    ParamRuns others;
} Optimizer;

typedef struct OptimizerStep {
    double learning_rate;
    double grad_scale; /* of clipping */
    int64_t number;    /* 1 for the first update */
} OptimizerStep;

Status optimizer_init(Optimizer *optimizer, const OptimizerSpec *spec, ParamSet *params,
                      const Kernels *kernels, Comm *data) STATUS_CHECKED;
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
