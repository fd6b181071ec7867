/* Schedule: what each rank does in a step, in order. A pure function of the modules' graph; the
 * executor obeys it.
 *
 * An encoder runs at most `window` microbatches ahead of the gradients that come back, so that
 * memory does not grow with the number of microbatches. A module whose weights are frozen gets no
 * gradient. All ranks of a module have the same list.
 * Threading: pure. A schedule owns its actions: schedule_done.
 */
#ifndef TRAIN_SCHEDULE_H
#define TRAIN_SCHEDULE_H

#include "base/status.h"

#include <stdbool.h>

typedef enum ActionKind {
    ACTION_ENCODE,          /* images become rows */
    ACTION_SEND,            /* rows leave the encoder */
    ACTION_RECV,            /* rows of an encoder reach the decoder */
    ACTION_FORWARD,         /* tokens and rows become a loss */
    ACTION_BACKWARD,        /* gradients of weights and rows */
    ACTION_SEND_GRAD,       /* rows' gradients leave the decoder */
    ACTION_RECV_GRAD,       /* and reach their encoder */
    ACTION_ENCODE_BACKWARD, /* gradients of the encoder's weights */
    ACTION_REDUCE,          /* gradients are summed inside the module */
    ACTION_VOTE,            /* all ranks learn whether the step counts */
    ACTION_UPDATE,          /* weights change, or the step is dropped */
    ACTION_COUNT,
} ActionKind;

typedef struct Action {
    ActionKind kind;
    int module;     /* whose rows, for what concerns a boundary; else the rank's own */
    int microbatch; /* -1 for what concerns the step */
} Action;

enum {
    SCHEDULE_MODULES_MAX = 8
};

typedef struct ScheduleModule {
    int feeds;       /* index of the module that takes its rows; -1: it computes the loss */
    bool is_trained; /* false: frozen */
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

typedef struct Schedule {
    int num_actions;
    Action *actions;
} Schedule;

/* The list of the ranks of module `module`. */
Status schedule_make(const ScheduleOptions *options, int module,
                     Schedule *schedule_out) STATUS_CHECKED;
void schedule_done(Schedule *schedule);

/* "FORWARD" */
const char *schedule_action_name(ActionKind kind);

#endif
