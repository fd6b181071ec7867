/* StepPlan: which samples a step consumes and where each of them goes: microbatch, decoder replica,
 * and the encoder replica of each image or clip.
 *
 * A pure function of the source and the step's number: every rank makes the same plan and nothing
 * is exchanged. Nothing is allocated after init. Nothing has to divide anything: ranges may be
 * uneven or empty.
 *
 *   samples   0 1 2 | 3 4 5 6   positions of the step, cut into microbatches by number
 *   llm       0 0 1 | 0 0 1 1   each microbatch cut into decoder replicas, balanced by tokens
 *   items     a a b | c d d e   for each encoder, the images or clips in order of (decoder replica,
 *                               sample, item): item i has rows [first_row, first_row + rows) of the
 *                               microbatch's array [R, D]
 *   encoder   0 0 1 | 0 0 1 1   the items cut into that encoder's replicas, balanced by rows
 * Balanced: a run of neighbours is cut so that the largest part is as small as it can be, which is
 * less than one sample (item) above its share; where that leaves a choice, the cut nearest to equal
 * shares.
 * Threading: a plan belongs to one thread; sources are read-only.
 */
#ifndef TRAIN_STEP_PLAN_H
#define TRAIN_STEP_PLAN_H

#include "base/range.h"
#include "data/loader.h"
#include "job/job_layout.h"

enum {
    STEP_ENCODERS_MAX = JOB_MODULES_MAX - 1
};

/* What the plan must know of a sample. */
typedef struct StepSample {
    int32_t num_tokens;
    int32_t num_labels;
    int32_t num_items;
    /* [num_items] in the order of their tokens (data/dataset.h); borrowed */
    const SampleItem *items;
} StepSample;

typedef struct StepEncoder {
    SampleMedia media; /* which items it encodes */
    int dp;
} StepEncoder;

/* What all steps have in common. */
typedef struct StepSource {
    uint64_t seed;
    const StepSample *samples; /* [num_samples] the data set's index; borrowed */
    int64_t num_samples;
    /* [num_ordered] these samples once, in this order. NULL: all of them for ever, each epoch in a
     * random order of its own. Borrowed. */
    const int64_t *order;
    int64_t num_ordered;
    /* [num_samples] whose images and clips a sample shows. NULL: its own. Borrowed. */
    const int64_t *items_from;
    int batch; /* samples of a step */
    int microbatches;
    int num_encoders;
    StepEncoder encoders[STEP_ENCODERS_MAX];
    int llm_dp;
} StepSource;

typedef struct StepItem {
    LoaderItem load; /* what to decode */
    int32_t rows;
    int64_t first_row;   /* of the microbatch's array [R, D] */
    int64_t sample;      /* position in plan->samples of the sample that shows it */
    int32_t first_token; /* of that sample, where its rows go */
} StepItem;

/* One encoder's share of a microbatch. */
typedef struct StepCrossing {
    Range items;          /* of plan->items[encoder] */
    int64_t num_rows;     /* R */
    Range *llm_items;     /* [llm_dp], of plan->items[encoder] */
    Range *encoder_items; /* [dp of the encoder], of plan->items[encoder] */
    /* Of all that crosses: which item, where it is encoded, where it goes. */
    uint64_t identity;
} StepCrossing;

typedef struct StepMicrobatch {
    Range samples;      /* of plan->samples */
    Range *llm_samples; /* [llm_dp], of plan->samples */
    StepCrossing crossings[STEP_ENCODERS_MAX];
} StepMicrobatch;

typedef struct StepPlan {
    StepSource source;
    int64_t step; /* 1 for the first */
    int64_t num_samples;
    int64_t *samples; /* [batch] indices in the data set */
    int64_t num_items[STEP_ENCODERS_MAX];
    StepItem *items[STEP_ENCODERS_MAX];
    int64_t num_tokens;
    int64_t num_labels;           /* N: the loss of the step is the sum over labels divided by it */
    StepMicrobatch *microbatches; /* [source.microbatches] */
    int64_t items_max[STEP_ENCODERS_MAX];
    Range *ranges; /* the memory of all microbatches' ranges */
    int64_t *sums; /* running sums of what is being cut */
} StepPlan;

/* No replica meets more in one microbatch, whatever the step: what buffers are sized by. */
typedef struct StepBounds {
    int64_t encoder_items[STEP_ENCODERS_MAX];
    int64_t encoder_rows[STEP_ENCODERS_MAX]; /* that a replica makes */
    int64_t llm_segments;
    int64_t llm_tokens;
    int64_t llm_rows[STEP_ENCODERS_MAX]; /* that a replica gets from each encoder */
} StepBounds;

Status step_plan_init(StepPlan *plan, const StepSource *source) STATUS_CHECKED;
void step_plan_done(StepPlan *plan);

/* Plans step `step` (1 for the first). Steps past the end of an order have no samples. */
void step_plan_make(StepPlan *plan, int64_t step);

/* Rows of the crossing's array that stand for these items of plan->items[encoder]. */
Range step_plan_rows(const StepPlan *plan, int encoder, int microbatch, Range items);

/* Steps that an order fills, the last one perhaps in part. */
int64_t step_plan_count(const StepSource *source);

Status step_plan_bounds(const StepSource *source, StepBounds *bounds_out) STATUS_CHECKED;
/* The larger of each. */
void step_bounds_widen(StepBounds *bounds, const StepBounds *other);

#endif
