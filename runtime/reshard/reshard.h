/* Reshard: runs a plan over a comm. The comm's ranks are the ranks of the layouts.
 *
 * reshard_start puts the receives and the sends of the first phase on their way and does not wait for peers; reshard_finish completes all phases.
 * Between them the source buffer must not change. Each message carries a header {tag, box}, checked at arrival: a mispairing is STATUS_CORRUPT.
 * Contiguous boxes are sent from and received into the caller's buffers; others go through the reshard's own staging, which grows only while new
 * shapes appear.
 * Threading: the step thread of the rank.
 */
#ifndef RESHARD_RESHARD_H
#define RESHARD_RESHARD_H

#include "comm/comm.h"
#include "kernels/kernels.h"
#include "reshard/plan.h"

typedef struct Reshard Reshard;

/* `label` stands in errors ("vision rows"). Borrows comm, kernels and device. Owned by the caller: reshard_destroy.
 * Several operations may be under way on one Reshard up to `window`; they complete in the order started. */
Status reshard_create(Comm *comm, Device *device, const Kernels *kernels, const char *label, int window, Reshard **reshard_out) STATUS_CHECKED;
void reshard_destroy(Reshard *reshard);

typedef struct ReshardJob {
    const Layout *source;      /* borrowed until finish, as all here */
    const Layout *destination;
    const Plan *plan;          /* of the two layouts */
    const float *source_data;  /* this rank's local buffer in `source`; NULL if it holds nothing */
    float *destination_data;   /* this rank's local buffer in `destination`; NULL if it needs nothing */
    uint64_t tag;              /* the same on all ranks; identifies {epoch, step, microbatch, direction} */
} ReshardJob;

/* STATUS_EXHAUSTED when `window` jobs are under way. */
Status reshard_start(Reshard *reshard, const ReshardJob *job, Stream *stream) STATUS_CHECKED;
/* Finishes the oldest job under way. */
Status reshard_finish(Reshard *reshard, Stream *stream) STATUS_CHECKED;

#endif
