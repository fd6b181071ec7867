/* WorkerMain: what the mains of all worker programs share: flags, logging, endpoint, loop.
 * Threading: main thread.
 */
#ifndef TRAIN_WORKER_MAIN_H
#define TRAIN_WORKER_MAIN_H

#include "train/worker_loop.h"

typedef struct WorkerProgram {
    const char *name; /* "viaduct-encoder-worker" */
    const char *role; /* "encoder" or "llm" */
    const char *about;
    const ModuleOps *const *modules;
    int num_modules;
} WorkerProgram;

/* Returns the exit status: 0 told to stop, 1 failed, 2 wrong use. */
int worker_main(const WorkerProgram *program, int argc, char **argv);

#endif
