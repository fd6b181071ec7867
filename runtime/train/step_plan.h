/* StepPlan: which samples a step consumes and where each of them goes: microbatch, decoder replica,
 * and the encoder replica of each image.
 *
 * A pure function of the source and the step's number: every rank makes the same plan and nothing
 * is exchanged. Nothing is allocated after init. Nothing has to divide anything: ranges may be
 * uneven or empty.
 *
 *   samples   0 1 2 | 3 4 5 6   positions of the step, cut into microbatches
 *   llm       0 0 1 | 0 0 1 1   each microbatch cut into decoder replicas by position
 *   items     a a b | c d d e   its images in order of (decoder replica, sample, image): item i is
 *                               rows [i * rows_per_image, ...) of the microbatch's array [R, D]
 *   encoder   0 0 1 | 0 0 1 1   the items cut into encoder replicas, balanced by rows
 * Threading: a plan belongs to one thread; sources are read-only.
 */
#ifndef TRAIN_STEP_PLAN_H
#define TRAIN_STEP_PLAN_H

#include "base/range.h"
#include "data/loader.h"

/* What the plan must know of a sample. */
typedef struct StepSample {
    int32_t num_images;
    int32_t num_tokens;
    int32_t num_labels;
} StepSample;

/* What all steps have in common. */
typedef struct StepSource {
    uint64_t seed;
    const StepSample *samples; /* [num_samples] the data set's index; borrowed */
    int64_t num_samples;
    /* [num_ordered] these samples once, in this order. NULL: all of them for ever, each epoch in a
     * random order of its own. Borrowed. */
    const int64_t *order;
    int64_t num_ordered;
    /* [num_samples] whose images a sample shows. NULL: its own. Borrowed. */
    const int64_t *image_from;
    int batch; /* samples of a step */
    int microbatches;
    int encoder_dp;
    int llm_dp;
    int rows_per_image;
} StepSource;

typedef struct StepMicrobatch {
    Range samples;        /* of plan->samples */
    Range items;          /* of plan->items */
    Range *llm_samples;   /* [llm_dp], of plan->samples */
    Range *llm_items;     /* [llm_dp], of plan->items */
    Range *encoder_items; /* [encoder_dp], of plan->items */
    /* Of all that crosses the boundary: which image, where it is encoded, where it goes. */
    uint64_t identity;
} StepMicrobatch;

typedef struct StepPlan {
    StepSource source;
    int64_t step; /* 1 for the first */
    int64_t num_samples;
    int64_t *samples; /* [batch] indices in the data set */
    int64_t num_items;
    LoaderItem *items; /* the images to decode */
    int64_t num_tokens;
    int64_t num_labels;           /* N: the loss of the step is the sum over labels divided by it */
    StepMicrobatch *microbatches; /* [source.microbatches] */
    int64_t items_max;
    Range *ranges; /* the memory of all microbatches' ranges */
} StepPlan;

/* The most that one rank meets in one microbatch, whatever the step: what buffers are sized by. */
typedef struct StepBounds {
    int64_t encoder_images;
    int64_t llm_segments;
    int64_t llm_tokens;
    int64_t llm_rows;
} StepBounds;

Status step_plan_init(StepPlan *plan, const StepSource *source) STATUS_CHECKED;
void step_plan_done(StepPlan *plan);

/* Plans step `step` (1 for the first). Steps past the end of an order have no samples. */
void step_plan_make(StepPlan *plan, int64_t step);

/* Rows of the microbatch's boundary array that stand for these items. */
Range step_plan_rows(const StepPlan *plan, int microbatch, Range items);

/* Steps that an order fills, the last one perhaps in part. */
int64_t step_plan_count(const StepSource *source);

Status step_plan_bounds(const StepSource *source, StepBounds *bounds_out) STATUS_CHECKED;

#endif
