#include "train/vote.h"

#include "base/clock.h"

#include <math.h>

Status vote_reduce(Comm *group, double *device_values, double *values, int count, CommReduce kind,
                   Stream *stream, int64_t timeout_ms)
{
    CHECK(count <= BALLOT_VALUES);
    int64_t size_bytes = count * (int64_t)sizeof(double);
    TRY(stream_copy(stream, device_values, values, size_bytes));
    TRY(comm_all_reduce(group, device_values, count, DTYPE_F64, kind, stream));
    TRY(stream_copy(stream, values, device_values, size_bytes));
    return stream_wait(stream, clock_deadline_in_ms(timeout_ms));
}

Status vote_run(Comm *world, double *device_values, Ballot *ballot, Stream *stream,
                int64_t timeout_ms)
{
    Ballot sums;
    TRY(stream_copy(stream, &sums, device_values, (int64_t)sizeof sums));
    TRY(stream_wait(stream, clock_deadline_in_ms(timeout_ms)));
    for (int i = 0; i < JOB_MODULES_MAX; i++) {
        ballot->squares[i] += sums.squares[i];
        ballot->rows_squares[i] += sums.rows_squares[i];
    }
    return vote_reduce(world, device_values, ballot->squares, BALLOT_VALUES, COMM_REDUCE_SUM,
                       stream, timeout_ms);
}

int vote_culprit(const Ballot *sum, int num_modules)
{
    int decoder = num_modules - 1;
    for (int e = 0; e < decoder; e++) {
        if (!isfinite(sum->rows_squares[e])) {
            return e; /* what follows from its rows is not the decoder's doing */
        }
    }
    if (!isfinite(sum->loss_sum) || !isfinite(sum->squares[decoder])) {
        return decoder;
    }
    for (int e = 0; e < decoder; e++) {
        if (!isfinite(sum->squares[e])) {
            return e;
        }
    }
    return -1;
}

/* The largest and the smallest of both halves: all alike means largest == smallest. A half fits a
 * double exactly. */
Status vote_agree(Comm *world, double *device_values, uint64_t value, const char *what,
                  Stream *stream, int64_t timeout_ms)
{
    double high = (double)(value >> 32);
    double low = (double)(value & UINT32_MAX);
    double values[4] = {high, low, -high, -low};
    TRY(vote_reduce(world, device_values, values, 4, COMM_REDUCE_MAX, stream, timeout_ms));
    if (values[0] != -values[2] || values[1] != -values[3]) {
        return fail(STATUS_INVALID, "the ranks do not have the same %s (rank %d: %016llx)", what,
                    world->rank, (unsigned long long)value);
    }
    return STATUS_OK;
}
