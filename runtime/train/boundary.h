/* Boundary: where rows [R, D] leave the encoder and enter the decoder, and their gradients come
 * back, one microbatch at a time.
 *
 * Layouts come from the step plan, so nothing about shapes is exchanged. A message's tag is a hash
 * of {kind, step, microbatch, direction} and of the microbatch's identity (which images, in which
 * order, from and to which replica): a sender and a receiver that do not mean the same rows fail
 * with STATUS_CORRUPT instead of training on a mispair. A microbatch without images sends nothing
 * and nobody waits.
 * Use, per direction: boundary_start on all ranks; the receivers boundary_finish at once, the
 * senders before they touch the source again.
 * Threading: the step thread.
 */
#ifndef TRAIN_BOUNDARY_H
#define TRAIN_BOUNDARY_H

#include "kernels/kernels.h"
#include "train/place.h"
#include "train/step_plan.h"

typedef struct Boundary Boundary;

typedef enum BoundaryDirection {
    BOUNDARY_ROWS,  /* encoder to decoder */
    BOUNDARY_GRADS, /* decoder to encoder */
    BOUNDARY_DIRECTION_COUNT,
} BoundaryDirection;

typedef struct BoundaryOptions {
    Comm *world;
    Device *device;
    const Kernels *kernels;
    const Place *place; /* borrowed */
    int64_t width;      /* D */
    int window;         /* microbatches in flight */
} BoundaryOptions;

/* Payload between the pools in one microbatch. */
typedef struct BoundaryCounts {
    int64_t bytes;         /* sent by this rank */
    int64_t bytes_minimum; /* by all ranks together; no layout can do with less */
} BoundaryCounts;

/* What one rank's call is about. */
typedef struct BoundaryCrossing {
    BoundaryDirection direction;
    const StepPlan *plan; /* borrowed for the call */
    int microbatch;
    uint64_t kind;       /* what the pass is for, so that training and evaluation never mix */
    const float *source; /* this rank's rows if it sends, unchanged until finished */
    float *destination;  /* this rank's rows if it receives */
} BoundaryCrossing;

/* Collective over the world. Owned: boundary_destroy, before the world. */
Status boundary_create(const BoundaryOptions *options, Boundary **boundary_out) STATUS_CHECKED;
void boundary_destroy(Boundary *boundary);

/* Does not wait for peers, unless `window` microbatches are in flight already. */
Status boundary_start(Boundary *boundary, const BoundaryCrossing *crossing,
                      Stream *stream) STATUS_CHECKED;
/* Finishes what is under way in this direction of microbatches before `microbatch_end`. */
Status boundary_finish(Boundary *boundary, BoundaryDirection direction, int microbatch_end,
                       Stream *stream) STATUS_CHECKED;

/* What was started since the last call. */
BoundaryCounts boundary_take_counts(Boundary *boundary);

#endif
