#include "train/vote.h"

#include "base/clock.h"

#include <math.h>

static Status reduce(Comm *world, double *device_values, double *values, int count, CommReduce kind,
                     Stream *stream, int64_t timeout_ms)
{
    int64_t size_bytes = count * (int64_t)sizeof(double);
    TRY(stream_copy(stream, device_values, values, size_bytes));
    TRY(comm_all_reduce(world, device_values, count, DTYPE_F64, kind, stream));
    TRY(stream_copy(stream, values, device_values, size_bytes));
    return stream_wait(stream, clock_deadline_in_ms(timeout_ms));
}

Status vote_sum(Comm *world, double *device_values, double *values, int count, Stream *stream,
                int64_t timeout_ms)
{
    CHECK(count <= BALLOT_VALUES);
    return reduce(world, device_values, values, count, COMM_REDUCE_SUM, stream, timeout_ms);
}

Status vote_run(Comm *world, double *device_values, Ballot *ballot, Stream *stream,
                int64_t timeout_ms)
{
    Ballot sums;
    TRY(stream_copy(stream, &sums, device_values, (int64_t)sizeof sums));
    TRY(stream_wait(stream, clock_deadline_in_ms(timeout_ms)));
    ballot->encoder_square += sums.encoder_square;
    ballot->llm_square += sums.llm_square;
    ballot->rows_square += sums.rows_square;
    return vote_sum(world, device_values, &ballot->encoder_square, BALLOT_VALUES, stream,
                    timeout_ms);
}

const char *vote_culprit(const Ballot *sum)
{
    if (!isfinite(sum->rows_square)) {
        return "vision"; /* what follows from its rows is not the decoder's doing */
    }
    if (!isfinite(sum->loss_sum) || !isfinite(sum->llm_square)) {
        return "llm";
    }
    return isfinite(sum->encoder_square) ? NULL : "vision";
}

/* The largest and the smallest of both halves: all alike means largest == smallest. A half fits a
 * double exactly. */
Status vote_agree(Comm *world, double *device_values, uint64_t value, const char *what,
                  Stream *stream, int64_t timeout_ms)
{
    double high = (double)(value >> 32);
    double low = (double)(value & UINT32_MAX);
    double values[4] = {high, low, -high, -low};
    TRY(reduce(world, device_values, values, 4, COMM_REDUCE_MAX, stream, timeout_ms));
    if (values[0] != -values[2] || values[1] != -values[3]) {
        return fail(STATUS_INVALID, "the ranks do not have the same %s (rank %d: %016llx)", what,
                    world->rank, (unsigned long long)value);
    }
    return STATUS_OK;
}
