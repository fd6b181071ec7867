/* Vote: one small sum over the world at the end of a step, after which all ranks know the same:
 * whether the step counts, its norm, its loss, its waits.
 * Threading: the step thread.
 */
#ifndef TRAIN_VOTE_H
#define TRAIN_VOTE_H

#include "comm/comm.h"
#include "job/job_layout.h"

/* What each rank puts in; the sum over the world comes out. Not finite means that the step is
 * dropped. Modules in the order of the job's layout, the decoder last. */
typedef struct Ballot {
    double squares[JOB_MODULES_MAX];      /* of each module's gradients, each element once */
    double rows_squares[JOB_MODULES_MAX]; /* of an encoder's rows as they leave: whether they are
                                             finite */
    double loss_sum;                      /* nats */
    double encoder_wait;                  /* seconds, over the encoders' ranks */
    double llm_wait;
    double seconds;       /* since the last vote */
    double bytes;         /* between the pools */
    double bytes_minimum; /* from the decoder's first rank only */
} Ballot;

enum {
    BALLOT_VALUES = 2 * JOB_MODULES_MAX + 6
};
_Static_assert(sizeof(Ballot) == BALLOT_VALUES * sizeof(double), "a ballot is summed as an array");

/* `device_values` [BALLOT_VALUES] in device memory; its sums of squares, made by kernels, are added
 * to those of *ballot. */
Status vote_run(Comm *world, double *device_values, Ballot *ballot, Stream *stream,
                int64_t timeout_ms) STATUS_CHECKED;

/* Reduces `count` values over a group, at most BALLOT_VALUES. */
Status vote_reduce(Comm *group, double *device_values, double *values, int count, CommReduce kind,
                   Stream *stream, int64_t timeout_ms) STATUS_CHECKED;

/* The module where a value that is not finite comes from; -1 when all are finite. Pure. */
int vote_culprit(const Ballot *sum, int num_modules);

/* STATUS_INVALID unless all ranks bring the same value; `what` says of what. `device_values` as
 * above. */
Status vote_agree(Comm *world, double *device_values, uint64_t value, const char *what,
                  Stream *stream, int64_t timeout_ms) STATUS_CHECKED;

#endif
