/* Vote: one small sum over the world at the end of a step, after which all ranks know the same:
 * whether the step counts, its norm, its loss, its waits.
 * Threading: the step thread.
 */
#ifndef TRAIN_VOTE_H
#define TRAIN_VOTE_H

#include "comm/comm.h"

/* What each rank puts in; the sum over the world comes out. Not finite means that the step is
 * dropped. */
typedef struct Ballot {
    double encoder_square; /* of the encoder's gradients, each element once */
    double llm_square;
    double rows_square;  /* of the rows as they leave the encoder: whether they are finite */
    double loss_sum;     /* nats */
    double encoder_wait; /* seconds, over the encoder's ranks */
    double llm_wait;
    double seconds; /* since the last vote */
    double bytes;   /* between the pools */
} Ballot;

enum {
    BALLOT_VALUES = 8
};
_Static_assert(sizeof(Ballot) == BALLOT_VALUES * sizeof(double), "a ballot is summed as an array");

/* `device_values` [BALLOT_VALUES] in device memory; its sums of squares, made by kernels, are added
 * to those of *ballot. */
Status vote_run(Comm *world, double *device_values, Ballot *ballot, Stream *stream,
                int64_t timeout_ms) STATUS_CHECKED;

/* Sums `count` values over the world, at most BALLOT_VALUES. */
Status vote_sum(Comm *world, double *device_values, double *values, int count, Stream *stream,
                int64_t timeout_ms) STATUS_CHECKED;

/* The module where a value that is not finite comes from; NULL when all are finite. Pure. */
const char *vote_culprit(const Ballot *sum);

/* STATUS_INVALID unless all ranks bring the same value; `what` says of what. `device_values` as
 * above. */
Status vote_agree(Comm *world, double *device_values, uint64_t value, const char *what,
                  Stream *stream, int64_t timeout_ms) STATUS_CHECKED;

#endif
