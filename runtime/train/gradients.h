/* Gradients: makes each rank's gradients those of the whole step: sums over tp (where each rank has
 * a part only), over the two ends of the pipeline (tied parameters), then over the replicas (cp and
 * dp). Sums only: the loss is scaled once, by the step's label count, so a mean anywhere would be
 * wrong.
 *
 * Whole: after the reduction every replica has all sums. Sharded (ZeRO-1): each has those of its
 * own range of the flat buffer (state_shard.h), the rest is undefined. Threading: the step thread.
 */
#ifndef TRAIN_GRADIENTS_H
#define TRAIN_GRADIENTS_H

#include "comm/comm.h"
#include "kernels/kernels.h"
#include "train/param_runs.h"
#include "train/state_shard.h"

typedef struct GradientGroups {
    Comm *tp;
    Comm *tied; /* first and last stage; NULL on the others and where there is one stage */
    Comm *data; /* cp and dp */
} GradientGroups;

typedef struct Gradients {
    ParamSet *params; /* borrowed, as all here */
    GradientGroups groups;
    StateShard shard;
    ParamRuns partial; /* trained parameters with a part on every tp rank */
    ParamRuns tied;
    ParamRuns counted; /* trained, counted by this rank in sums over tp and pp */
    float *staging;    /* [larger of partial.count, tied.count]: one sum instead of many */
} Gradients;

Status gradients_init(Gradients *gradients, ParamSet *params, const GradientGroups *groups,
                      bool is_sharded) STATUS_CHECKED;
void gradients_done(Gradients *gradients);

Status gradients_zero(Gradients *gradients, Stream *stream) STATUS_CHECKED;
Status gradients_reduce(Gradients *gradients, Stream *stream) STATUS_CHECKED;
/* After reduce: *square += this rank's share of the squared norm; over the world every element of
 * the module counts once. Device memory. */
Status gradients_add_square(const Gradients *gradients, const Kernels *kernels, double *square,
                            Stream *stream) STATUS_CHECKED;

#endif
