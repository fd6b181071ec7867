/* Schedule: what each rank does in a step, in order. A pure function of the modules' graph; the
 * executor obeys it, the simulator (simulator.h) checks it.
 *
 * How: all work of a step is put in one total order, by simulating the ranks with the parts' costs:
 * whenever a module's stage is free, its best ready piece of work begins (a backward before a
 * forward, so that 1F1B results; with several chunks in groups of `stages` microbatches, the
 * interleaved order of Narayanan et al. 2021). Where modules share ranks, the decoder's work goes
 * first and the rows it waits for. A rank's list is what concerns it, in that order. Work only
 * waits for what stands earlier in the total order, and all ranks that must work together have it
 * at the same place: so no lists can block each other, whatever ranks the modules share.
 *
 * Bounds: a stage of a plain pipeline has at most stages - stage microbatches in flight, an
 * interleaved one 2 (stages - stage - 1) + (chunks - 1) stages + 1 forwards over all its chunks; an
 * encoder at most `window` microbatches, from its first forward to its last backward (or, where it
 * has none, until the decoder has used the rows). A part without a backward runs at most 2 ahead of
 * the next one, from one chunk to the next at most max(2, stages). So memory does not grow with the
 * number of microbatches.
 * Threading: pure. A schedule owns its actions: schedule_done.
 */
#ifndef TRAIN_SCHEDULE_H
#define TRAIN_SCHEDULE_H

#include "base/status.h"
#include "comm/grid.h"

#include <stdbool.h>

typedef enum ActionKind {
    /* encoder */
    ACTION_ENCODE,          /* images or clips (or activations) become rows (or activations) */
    ACTION_SEND,            /* rows leave the encoder's last part */
    ACTION_RECV_GRAD,       /* and their gradients reach it */
    ACTION_ENCODE_BACKWARD, /* gradients of weights and input */
    /* decoder */
    ACTION_RECV,      /* rows of encoder `module` reach the decoder's first part */
    ACTION_FORWARD,   /* tokens and rows (or activations) become a loss (or activations) */
    ACTION_BACKWARD,  /* gradients of weights, input and rows */
    ACTION_SEND_GRAD, /* gradients of the rows of encoder `module` leave */
    /* both: between the parts of a pipeline on different ranks */
    ACTION_SEND_ACTIVATIONS,
    ACTION_RECV_ACTIVATIONS,
    ACTION_SEND_ACTIVATIONS_GRAD,
    ACTION_RECV_ACTIVATIONS_GRAD,
    /* once a step */
    ACTION_REDUCE, /* gradients of the module are summed */
    ACTION_VOTE,   /* all ranks learn whether the step counts */
    ACTION_UPDATE, /* weights of the module change, or the step is dropped */
    ACTION_COUNT,
} ActionKind;

typedef struct Action {
    ActionKind kind;
    int module;     /* whose rows, for what concerns a boundary; else whose work; -1: the world's */
    int chunk;      /* of this rank's stage; of a boundary and a step's end 0 */
    int microbatch; /* -1 for what concerns the step */
    int slot;       /* of the chunk's activations; of a boundary: of its rows; else 0 */
} Action;

enum {
    SCHEDULE_MODULES_MAX = 4,
    SCHEDULE_CHUNKS_MAX = 16,
};

typedef struct ScheduleModule {
    Grid grid;
    int chunks;      /* per stage; part p is chunk p / stages of stage p % stages */
    int feeds;       /* index of the module that takes its rows; -1: it computes the loss */
    bool is_trained; /* has a trained parameter: REDUCE and UPDATE on all its ranks */
    /* Parts below run no backward; stages * chunks: none does. Rows' gradients go to an encoder
     * unless none of its parts runs a backward. */
    int backward_begin;
    double forward_cost; /* of one part, any unit, more than 0; the same number on all ranks */
    double backward_cost;
} ScheduleModule;

typedef struct ScheduleGraph {
    int num_modules;
    ScheduleModule modules[SCHEDULE_MODULES_MAX];
} ScheduleGraph;

typedef struct ScheduleOptions {
    const ScheduleGraph *graph;
    int microbatches;
    int window;       /* microbatches in flight in an encoder, at least 1 */
    bool is_training; /* false: forward only, for evaluation */
} ScheduleOptions;

/* How many buffers a rank needs for a module; 0 where it has no part in it. Microbatch m uses
 * number m % slots. */
typedef struct ScheduleSlots {
    int chunks[SCHEDULE_CHUNKS_MAX]; /* activations: from forward to backward */
    int microbatches; /* of any chunk, from the first action to the last: the input's texts */
    int rows; /* of an encoder, at either end of its boundary: rows, and as many gradients */
} ScheduleSlots;

typedef struct Schedule {
    int num_actions;
    Action *actions;
    ScheduleSlots slots[SCHEDULE_MODULES_MAX];
} Schedule;

/* The list of a rank of the world. */
Status schedule_make(const ScheduleOptions *options, int rank,
                     Schedule *schedule_out) STATUS_CHECKED;
/* Those of all ranks, schedules_out [num_ranks], in the time of one and their lengths. */
Status schedule_make_all(const ScheduleOptions *options, int num_ranks,
                         Schedule *schedules_out) STATUS_CHECKED;
void schedule_done(Schedule *schedule);

/* "FORWARD" */
const char *schedule_action_name(ActionKind kind);

#endif
