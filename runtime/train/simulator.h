/* Simulator: runs all ranks' lists of a schedule against each other on paper, with the semantics of
 * the executor and nothing of how the lists were made: a receive waits for its send, work of a
 * group waits until all its ranks have come to it, a buffer may not be used before it is free.
 * Threading: pure.
 */
#ifndef TRAIN_SIMULATOR_H
#define TRAIN_SIMULATOR_H

#include "train/schedule.h"

typedef struct SimulatorModule {
    double busy;   /* time that its ranks computed for it, over all of them */
    int in_flight; /* the most microbatches that one of its chunks held */
} SimulatorModule;

typedef struct SimulatorResult {
    double makespan; /* in the units of the parts' costs; transfers cost nothing */
    /* Share of the ranks' time without work: 1 - sum of busy / (ranks * makespan). */
    double bubble;
    SimulatorModule modules[SCHEDULE_MODULES_MAX];
} SimulatorResult;

/* Makes the lists of all `num_ranks` ranks and runs them. STATUS_CONFLICT where they block each
 * other or a buffer is used too early; the message names rank and action. */
Status simulator_run(const ScheduleOptions *options, int num_ranks,
                     SimulatorResult *result_out) STATUS_CHECKED;

/* The same with lists given, schedules [num_ranks]. */
Status simulator_run_lists(const ScheduleOptions *options, const Schedule *schedules, int num_ranks,
                           SimulatorResult *result_out) STATUS_CHECKED;

#endif
