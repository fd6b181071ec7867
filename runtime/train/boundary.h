/* Boundary: where rows [R, D] leave one encoder and enter the decoder, and their gradients come
 * back, one microbatch at a time. A job has one for each encoder.
 *
 * Rows stand on the encoder's last pipeline stage as its tokens do (each cp rank, and with sequence
 * parallelism each tp rank, has those of its own tokens), and they go to exactly those ranks of the
 * decoder's first stage whose tokens they replace. A rank's buffer holds its rows in the order of
 * its tokens (nn/sequences.h). Ranks that hold a row hold the same values, gradients too: each of
 * them has the whole gradient of its tokens' rows, so nothing is summed on the way. Layouts come
 * from the step plan and nn/shard.h, so nothing about shapes is exchanged. A message's tag is a
 * hash of {kind, step, microbatch, direction} and of the crossing's identity (which items, in which
 * order, from and to which replica): a sender and a receiver that do not mean the same rows fail
 * with STATUS_CORRUPT instead of training on a mispair. A microbatch without rows sends nothing and
 * nobody waits.
 *
 * Use, per direction and microbatch, in the order of microbatches: boundary_start once on every
 * rank that sends or receives, then boundary_finish: receivers before they read, senders before
 * they write the source again. A rank that does both (colocated) starts once with both buffers, as
 * soon as it can send. A rank of neither end may start or leave it out.
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
    int encoder;        /* index of its module */
    int extra_tokens;   /* of the encoder's, before each item's rows: 1 with a class token */
    int64_t width;      /* D */
    int window;         /* microbatches under way, 1 to RESHARD_WINDOW_MAX */
} BoundaryOptions;

/* Payload that leaves the ranks of one end for those of the other. A rank that has rows at both
 * ends (colocated) counts as one of the receiving end: what it passes on there is no crossing. */
typedef struct BoundaryCounts {
    int64_t bytes; /* sent by this rank */
    /* By all ranks together; no layout can do with less. Ranks of neither end are not told. */
    int64_t bytes_minimum;
} BoundaryCounts;

/* What one rank's call is about. */
typedef struct BoundaryCrossing {
    BoundaryDirection direction;
    const StepPlan *plan; /* borrowed for the call */
    int microbatch;
    uint64_t kind; /* what the pass is for, so that training and evaluation never mix */
    /* Every rank of the decoder's replica gets all of the replica's rows, in order: for generation,
     * whose tokens are not the plan's. */
    bool is_whole;
    const float *source; /* this rank's rows if it sends, unchanged until finished */
    float *destination;  /* this rank's rows if it receives */
} BoundaryCrossing;

/* Collective over the world. Owned: boundary_destroy, before the world. */
Status boundary_create(const BoundaryOptions *options, Boundary **boundary_out) STATUS_CHECKED;
void boundary_destroy(Boundary *boundary);

/* This rank has rows at that end of the boundary. */
bool boundary_is_encoder(const Boundary *boundary);
bool boundary_is_decoder(const Boundary *boundary);

/* Rows of a microbatch on this rank at the decoder's end, in the order of its tokens. Pure. */
int64_t boundary_count_rows(const Boundary *boundary, const StepPlan *plan, int microbatch);
/* No rank of the decoder's end gets more rows of the encoder in a microbatch, unless it gets those
 * of its whole replica. Pure. */
int64_t boundary_rows_max(const Place *place, const StepBounds *bounds, int encoder);

/* Does not wait for peers, unless `window` microbatches are under way already. */
Status boundary_start(Boundary *boundary, const BoundaryCrossing *crossing,
                      Stream *stream) STATUS_CHECKED;
/* Finishes what is under way in this direction of microbatches before `microbatch_end`. */
Status boundary_finish(Boundary *boundary, BoundaryDirection direction, int microbatch_end,
                       Stream *stream) STATUS_CHECKED;

/* What was started since the last call. */
BoundaryCounts boundary_take_counts(Boundary *boundary);

#endif
