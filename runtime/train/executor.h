/* Executor: obeys a schedule: one rank's actions of a pass over one step's plan, in order. What
 * comes next is decided in schedule.c; what an action works on stands in rank_module.h.
 * Threading: the step thread.
 */
#ifndef TRAIN_EXECUTOR_H
#define TRAIN_EXECUTOR_H

#include "train/boundary.h"
#include "train/rank_module.h"
#include "train/trainer.h"
#include "train/vote.h"

/* All parts are borrowed; the trainer owns them. */
typedef struct Executor {
    const Place *place;
    Comm *world;
    Stream *stream;
    const Kernels *kernels;
    RankModule *modules;   /* [place->num_modules] */
    Boundary **boundaries; /* [encoders] */
    bool wants_rows_grad;  /* an encoder does */
    const JobSpec *spec;
    const TrainerEvents *events;
    const atomic_bool *stop;
    Ballot *ballot_device; /* device memory: sums of squares gather here during a step */
    int64_t timeout_ms;
    int64_t updates; /* that changed the weights */
    int64_t mark_ns; /* since when the next step's time counts */
    /* of the pass under way */
    double loss_sum;  /* of this rank's tokens */
    float loss_scale; /* 1 / N */
    int64_t encoder_wait_ns;
    int64_t llm_wait_ns;
    TrainerStep *step; /* filled by the vote */
} Executor;

typedef struct ExecutorPass {
    const Schedule *schedule;
    Feed *feed;
    int64_t step;      /* of training, for reports */
    const char *label; /* "" in training, "evaluation " else */
    /* The decoder does nothing but receive rows, all of its replica's on every rank of its first
     * stage (llm_side_whole_rows): for generation, whose texts are not the plan's. */
    bool is_generation;
} ExecutorPass;

/* Runs the feed's present step. A failure names step, microbatch and operation. */
Status executor_run(Executor *executor, const ExecutorPass *pass) STATUS_CHECKED;

/* The decoder of this rank; NULL where it serves none. */
RankModule *executor_decoder(const Executor *executor);

/* This rank's losses count in the sum over the world: it serves the decoder's last stage, and of
 * the tp ranks, which all have the same, it is the first. */
bool executor_counts_loss(const Executor *executor);

/* Puts the place of a failure before this thread's message. */
Status executor_fail(Status status, const char *label, const char *operation, int64_t step,
                     int microbatch) STATUS_CHECKED;

/* Waits until all that was sent has arrived. */
Status executor_drain(Executor *executor) STATUS_CHECKED;

#endif
