/* Executor: obeys a schedule: one rank's actions of a pass over one step's plan, in order. What
 * comes next is decided in schedule.c, what an action does in encoder_side.c, llm_side.c,
 * gradients.c, vote.c and optimizer.c.
 * Threading: the step thread.
 */
#ifndef TRAIN_EXECUTOR_H
#define TRAIN_EXECUTOR_H

#include "train/encoder_side.h"
#include "train/gradients.h"
#include "train/llm_side.h"
#include "train/optimizer.h"
#include "train/schedule.h"
#include "train/trainer.h"
#include "train/vote.h"

/* All parts are borrowed; the trainer owns them. */
typedef struct Executor {
    const Place *place;
    Comm *world;
    Stream *stream;
    const Kernels *kernels;
    Module *module;
    Boundary *boundary;
    EncoderSide *encoder_side; /* one of the two */
    LlmSide *llm_side;
    Gradients *gradients;
    Optimizer *optimizer;
    const JobSpec *spec;
    const TrainerEvents *events;
    const atomic_bool *stop;
    Ballot *ballot_device; /* device memory: sums of squares gather here during a step */
    int64_t timeout_ms;
    int64_t updates; /* that changed the weights */
    int64_t mark_ns; /* since when the next step's time counts */
    /* of the pass under way */
    double loss_sum;   /* of this rank's replica */
    float loss_scale;  /* 1 / N */
    TrainerStep *step; /* filled by the vote */
} Executor;

typedef struct ExecutorPass {
    const Schedule *schedule;
    Feed *feed;
    int64_t step;      /* of training, for reports */
    const char *label; /* "" in training, "evaluation " else */
} ExecutorPass;

/* Runs the feed's present step. A failure names step, microbatch and operation. */
Status executor_run(Executor *executor, const ExecutorPass *pass) STATUS_CHECKED;

/* Puts the place of a failure before this thread's message. */
Status executor_fail(Status status, const char *label, const char *operation, int64_t step,
                     int microbatch) STATUS_CHECKED;

/* Waits until all that was sent has arrived. */
Status executor_drain(Executor *executor) STATUS_CHECKED;

#endif
