/* Reshard: runs plans over a comm. The comm's ranks are the ranks of the layouts.
 *
 * reshard_start puts all receives and the first sends on their way and does not wait for peers;
 * reshard_finish completes all phases. Between them the source buffer must not change and the
 * destination buffer belongs to the reshard.
 * Every rank of the layouts starts the same jobs in the same order; a rank that a job does not
 * touch may start it too (it costs nothing) or leave it out. When finish is called may differ
 * between ranks. Two Reshards whose messages may go from one rank to the same other (a forward's
 * spread and a backward's reduce) need comms of their own (comm_split), or the same order of
 * calls on all ranks.
 *
 * Messages: their tags are digests of the job's tag, of both layouts and of the boxes. Comm compares
 * tags and sizes before it takes a byte, so a mispairing is STATUS_CORRUPT, with both ranks and both
 * tags, and never a wrong number. Runs that are contiguous at both ends and long go alone, from and into
 * the caller's buffers; shorter ones go together in one message, through the reshard's own
 * staging where they do not lie together. Staging grows only while new maxima appear.
 * Threading: the step thread of the rank.
 */
#ifndef RESHARD_RESHARD_H
#define RESHARD_RESHARD_H

#include "comm/comm.h"
#include "kernels/kernels.h"
#include "reshard/plan.h"

typedef struct Reshard Reshard;

enum {
    RESHARD_REQUESTS_PER_JOB = 6, /* of comm's, at most */
    RESHARD_WINDOW_MAX = COMM_REQUESTS_MAX / RESHARD_REQUESTS_PER_JOB
};

/* `label` stands in errors ("vision rows") and is copied. Borrows comm, kernels and device. Owned
 * by the caller: reshard_destroy. Several jobs may be under way on one Reshard, up to `window` (1
 * to RESHARD_WINDOW_MAX); they complete in the order started. */
Status reshard_create(Comm *comm, Device *device, const Kernels *kernels, const char *label,
                      int window, Reshard **reshard_out) STATUS_CHECKED;
/* NULL is fine. Before the comm. Ends what a failure has left under way. */
void reshard_destroy(Reshard *reshard);

/* All borrowed until finish. A buffer is NULL where the rank holds or needs nothing; the two must
 * not overlap. */
typedef struct ReshardJob {
    const Layout *source;
    const Layout *destination;
    const Plan *plan;         /* of the two layouts */
    const float *source_data; /* this rank's local buffer in `source`; device memory */
    float *destination_data;  /* this rank's local buffer in `destination`; device memory */
    uint64_t tag; /* the same on all ranks; identifies {epoch, step, microbatch, direction} */
} ReshardJob;

/* STATUS_EXHAUSTED when `window` jobs are under way: finish one first. */
Status reshard_start(Reshard *reshard, const ReshardJob *job, Stream *stream) STATUS_CHECKED;
/* Finishes the oldest job under way. STATUS_CONFLICT when there is none. After another failure
 * the comm's world is unusable (comm.h). */
Status reshard_finish(Reshard *reshard, Stream *stream) STATUS_CHECKED;

#endif
