/* Evaluation: held-out loss with the right images and with other samples' images, and captions
 * generated beside the true ones.
 *
 * All ranks take part: passes run forward only, through the same boundary as training.
 * Threading: the step thread.
 */
#ifndef TRAIN_EVALUATION_H
#define TRAIN_EVALUATION_H

#include "train/executor.h"

typedef struct Evaluation Evaluation;

typedef struct EvaluationOptions {
    const JobSpec *spec; /* borrowed, as all here */
    const ScheduleGraph *graph;
    const Place *place;
    Comm *dp; /* of this rank's module */
    int window;
} EvaluationOptions;

/* Opens the held-out data. Owned: evaluation_close. */
Status evaluation_open(const EvaluationOptions *options,
                       Evaluation **evaluation_out) STATUS_CHECKED;
void evaluation_close(Evaluation *evaluation);

/* What its passes need at most. */
Status evaluation_bounds(const Evaluation *evaluation, StepBounds *bounds_out) STATUS_CHECKED;
uint64_t evaluation_data_hash(const Evaluation *evaluation);

/* Collective over the world. *result_out is owned by the caller (evaluation_result_done); captions
 * are on the first rank of the llm only. */
Status evaluation_run(Evaluation *evaluation, Executor *executor, int64_t step,
                      TrainerEvaluation *result_out) STATUS_CHECKED;
void evaluation_result_done(TrainerEvaluation *result);

#endif
