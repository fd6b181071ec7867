/* Trainer: one rank of a job, from the first step to the last: plans, runs its schedule, votes,
 * updates, evaluates, saves.
 *
 * It knows nothing of coordinator or RPC: a worker process and a test thread run the same trainer.
 * Threading: create, run and destroy on one thread (the step thread); trainer_stop from any.
 */
#ifndef TRAIN_TRAINER_H
#define TRAIN_TRAINER_H

#include "comm/comm.h"
#include "job/job_spec.h"
#include "train/module.h"
#include "train/place.h"

#include <stdbool.h>

typedef struct Trainer Trainer;

/* What one step was; whole-job values, equal on all ranks. */
typedef struct TrainerStep {
    int64_t step;   /* 1 for the first */
    bool committed; /* false: discarded (a value was not finite); then `module` says where */
    char module[32];
    double loss;      /* nats per label over the whole step */
    double grad_norm; /* before clipping, over all modules */
    double learning_rate;
    int64_t samples, tokens, labels;
    double step_seconds;
    /* For rows' gradients, and for other stages; mean over the encoders' ranks. */
    double encoder_wait_seconds;
    double llm_wait_seconds;    /* for rows, and for other stages; mean over the decoder's ranks */
    int64_t boundary_bytes;     /* payload between the pools, both directions, this step */
    int64_t boundary_bytes_min; /* the lower bound */
} TrainerStep;

typedef struct TrainerCaption {
    char *sample;
    char *truth;
    char *generated;
} TrainerCaption;

typedef struct TrainerEvaluation {
    int64_t step;
    double heldout_loss;          /* nats per label */
    double heldout_loss_shuffled; /* every sample with another sample's images */
    int64_t labels;
    int num_captions;
    TrainerCaption *captions;
} TrainerEvaluation;

/* Called on the step thread; arguments are borrowed for the call. Any may be NULL. */
typedef struct TrainerEvents {
    void *context;
    void (*progress)(void *context, const char *operation, int64_t step,
                     int microbatch); /* before each action: for stall and failure reports */
    void (*step)(void *context, const TrainerStep *step); /* on every rank */
    void (*evaluation)(void *context,
                       const TrainerEvaluation *evaluation); /* on the first rank of the llm */
    void (*checkpoint)(
        void *context, int64_t step,
        const char *directory); /* on the first rank of the llm, once it is complete */
} TrainerEvents;

typedef struct TrainerOptions {
    const JobSpec *spec;             /* resolved and checked; borrowed */
    Comm *world;                     /* ranks as job/job_layout.h says; borrowed */
    Device *device;                  /* borrowed */
    const ModuleOps *const *modules; /* those this program links */
    int num_modules;
    const char *resume_from; /* checkpoint directory, or NULL */
    TrainerEvents events;
} TrainerOptions;

Status trainer_create(const TrainerOptions *options, Trainer **trainer_out) STATUS_CHECKED;
void trainer_destroy(Trainer *trainer);

/* What one rank allocates on its device for a job's life. */
typedef struct TrainerAccount {
    int64_t bytes;                     /* all of the rank's memory */
    int64_t weights, grads, optimizer; /* bytes, of it */
    int window;                        /* microbatches in flight in an encoder */
} TrainerAccount;

/* Allocates as trainer_create does, and frees it again; nothing of it is touched. `world` may be on
 * paper (comm/comm_paper.h) where the program has all of the job's modules; the device is used for
 * nothing else. bubble_out: share of all ranks' time in a step without work, transfers not counted;
 * the same whatever the rank. NULL: not wanted, since it takes a simulation of all ranks. */
Status trainer_account(const TrainerOptions *options, TrainerAccount *account_out,
                       double *bubble_out) STATUS_CHECKED;

/* Runs all steps that are left. STATUS_ABORTED after trainer_stop. The failure message names step,
 * microbatch and operation. */
Status trainer_run(Trainer *trainer) STATUS_CHECKED;

/* Ends the run soon, on all ranks of the world (it aborts the comm). Any thread, idempotent. */
void trainer_stop(Trainer *trainer, const char *reason);

/* For tests and verify: where the rank stands, and its module of that index with its weights and,
 * after a step, its gradients; NULL where it serves it not. */
const Place *trainer_place(const Trainer *trainer);
Module *trainer_module(Trainer *trainer, int module);
/* For tests and verify: which of the trained elements of that module have the step's whole gradient
 * on this rank: all, or with ZeRO-1 its range. */
Range trainer_summed_grads(const Trainer *trainer, int module);
/* For tests and verify: one step more; STATUS_NOT_FOUND when none is left. step_out may be NULL. */
Status trainer_step(Trainer *trainer, TrainerStep *step_out) STATUS_CHECKED;

#endif
