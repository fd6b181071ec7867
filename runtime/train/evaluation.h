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

/* Opens the held-out data. `spec` and `place` are borrowed. Owned: evaluation_close. */
Status evaluation_open(const JobSpec *spec, const Place *place,
                       Evaluation **evaluation_out) STATUS_CHECKED;
void evaluation_close(Evaluation *evaluation);

/* Makes the schedules of its passes; the graph is copied. */
Status evaluation_schedule(Evaluation *evaluation, const ScheduleGraph *graph,
                           int window) STATUS_CHECKED;

/* What its passes need at most; and the rows of a replica that generation needs at once. */
Status evaluation_bounds(const Evaluation *evaluation, StepBounds *bounds_out,
                         int64_t *whole_rows_out) STATUS_CHECKED;
/* Raises slots [modules] to what its passes need. */
void evaluation_widen_slots(const Evaluation *evaluation, ScheduleSlots *slots);
uint64_t evaluation_data_hash(const Evaluation *evaluation);

/* Collective over the world. *result_out is owned by the caller (evaluation_result_done); captions
 * are on the first rank of the llm only. */
Status evaluation_run(Evaluation *evaluation, Executor *executor, int64_t step,
                      TrainerEvaluation *result_out) STATUS_CHECKED;
void evaluation_result_done(TrainerEvaluation *result);

#endif
