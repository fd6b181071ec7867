/* WorkerLoop: a worker process: registers with the coordinator and stays registered, serves the
 * assignments it gets, one after another.
 *
 * Two threads: the loop thread (libuv, gRPC: register with retry for ever, heartbeats, the
 * assignment stream, batched step reports) and for each epoch a step thread (worker_step.h). A
 * coordinator that is away stops neither the training nor this program. SIGTERM and SIGINT end it
 * cleanly: the epoch is aborted, the worker deregisters.
 * Threading: worker_loop_run owns the calling thread until it returns.
 */
#ifndef TRAIN_WORKER_LOOP_H
#define TRAIN_WORKER_LOOP_H

#include "base/config.h"
#include "train/worker_step.h"

enum {
    WORKER_EXIT_STUCK = 75 /* an aborted epoch did not end within the watchdog's time */
};

typedef struct WorkerOptions {
    const char *role;        /* "encoder" or "llm" */
    const char *name;        /* stable: the pod's */
    const char *coordinator; /* host:port */
    const char *data_address;
    const char *device;
    ConfigList labels; /* "key=value" */
    const WorkerEngine *engine;
    CommEndpoint *endpoint; /* borrowed */
    const ModuleOps *const *modules;
    int num_modules;
} WorkerOptions;

/* Returns when told to stop. STATUS_DENIED: refused for good (another process took the name, wrong
 * release, wrong flags). */
Status worker_loop_run(const WorkerOptions *options) STATUS_CHECKED;

#endif
