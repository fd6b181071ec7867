/* Gradients: makes each rank's gradients those of the whole step: sums over tp (where each rank has
 * a part only), then over dp. Sums only: the loss is scaled once, by the step's label count, so a
 * mean anywhere would be wrong.
 * Threading: the step thread.
 */
#ifndef TRAIN_GRADIENTS_H
#define TRAIN_GRADIENTS_H

#include "kernels/kernels.h"
#include "train/param_runs.h"
#include "train/place.h"

typedef struct Gradients {
    ParamSet *params; /* borrowed, as all here */
    Comm *tp;
    Comm *dp;
    ParamRuns partial; /* a part on every tp rank */
    ParamRuns counted; /* counted by this rank in sums over tp */
    float *staging;    /* [partial.count]: one sum instead of many */
} Gradients;

Status gradients_init(Gradients *gradients, ParamSet *params, Comm *tp, Comm *dp) STATUS_CHECKED;
void gradients_done(Gradients *gradients);

Status gradients_zero(Gradients *gradients, Stream *stream) STATUS_CHECKED;
Status gradients_reduce(Gradients *gradients, Stream *stream) STATUS_CHECKED;
/* After reduce: *square += this rank's share of the squared norm; over the world every element of
 * the module counts once. Device memory. */
Status gradients_add_square(const Gradients *gradients, const Kernels *kernels, double *square,
                            Stream *stream) STATUS_CHECKED;

#endif
