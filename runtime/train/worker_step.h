/* WorkerStep: one epoch of a worker: the step thread that opens the links, waits for the commit,
 * trains, and keeps its links until it is released.
 *
 * What happens arrives as WorkerEvents in the queue that the loop thread owns, followed by a call
 * of `wake`; ENDED is always the last one, after which worker_step_join returns at once.
 * Threading: start, commit, abort, progress and join on the loop thread; the trainer runs on the
 * step thread.
 */
#ifndef TRAIN_WORKER_STEP_H
#define TRAIN_WORKER_STEP_H

#include "base/queue.h"
#include "comm/comm_host.h"
#include "train/trainer.h"
#include "viaduct/v1/viaduct.pb-c.h"

typedef struct WorkerStep WorkerStep;

/* What the step thread calls; the real ones, or a test's. */
typedef struct WorkerEngine {
    Status (*open_world)(CommEndpoint *endpoint, const CommHostWorld *world, Comm **comm_out);
    Status (*create)(const TrainerOptions *options, Trainer **trainer_out);
    Status (*run)(Trainer *trainer);
    void (*stop)(Trainer *trainer, const char *reason);
    void (*destroy)(Trainer *trainer);
} WorkerEngine;

typedef enum WorkerEventKind {
    WORKER_EVENT_LINKED,      /* ready for the commit */
    WORKER_EVENT_LINK_FAILED, /* text: why */
    WORKER_EVENT_STEP,
    WORKER_EVENT_EVALUATION,
    WORKER_EVENT_CHECKPOINT, /* text: its directory */
    WORKER_EVENT_FINISHED,
    WORKER_EVENT_FAILED, /* code, text, step and operation */
    WORKER_EVENT_ENDED,
} WorkerEventKind;

typedef struct WorkerEvent {
    WorkerEventKind kind;
    Status code;
    TrainerStep step;
    Viaduct__V1__EvaluationReport *evaluation; /* goes to the receiver */
    char *text;                                /* goes to the receiver */
} WorkerEvent;

typedef struct WorkerProgress {
    int64_t step;
    int64_t counter; /* actions begun: stands still when the step thread does */
    char operation[96];
} WorkerProgress;

typedef struct WorkerStepOptions {
    const WorkerEngine *engine;
    CommEndpoint *endpoint;
    const char *device;
    const ModuleOps *const *modules;
    int num_modules;
    const Viaduct__V1__WatchAssignmentResponse *assignment; /* PREPARE; borrowed until join */
    Queue *events;                                          /* of WorkerEvent */
    void (*wake)(void *context);                            /* any thread */
    void *wake_context;
} WorkerStepOptions;

/* STATUS_INVALID: an assignment that cannot be right. */
Status worker_step_start(const WorkerStepOptions *options, WorkerStep **step_out) STATUS_CHECKED;

void worker_step_commit(WorkerStep *step);

/* Ends it soon: stops what runs, releases what waits. Idempotent. */
void worker_step_abort(WorkerStep *step, const char *reason);

void worker_step_progress(WorkerStep *step, WorkerProgress *progress_out);

/* After ENDED; frees the step. */
void worker_step_join(WorkerStep *step);

/* "PEER_LOST": a status as failure_code of the contract. */
const char *worker_step_code(Status status);

/* What an event owns. */
void worker_event_free(WorkerEvent *event);

#endif
