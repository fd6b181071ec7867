/* Feed: the steps' plans of one data set, and on the ranks of encoders' first stages their images
 * or clips, decoded ahead of use by loader threads.
 *
 * Use: feed_begin plans a step (steps follow one another); on those ranks each microbatch's items
 * are taken once, in order. Threading: the step thread; loader threads live inside.
 */
#ifndef TRAIN_FEED_H
#define TRAIN_FEED_H

#include "train/place.h"
#include "train/step_plan.h"

#include <stdatomic.h>

typedef struct Feed Feed;

typedef struct FeedOptions {
    const Dataset *dataset;   /* borrowed */
    const StepSource *source; /* copied; its arrays are borrowed */
    const Place *place;       /* borrowed */
    int loader_threads;
    int64_t
        cache_bytes; /* decoded items may be kept up to this, of each media; 0: each is used once */
    int64_t first_step; /* 1: from the beginning */
    int64_t last_step;
    uint64_t kind;           /* tells the boundaries' messages apart */
    int64_t timeout_ms;      /* for one microbatch's items */
    const atomic_bool *stop; /* ends waits; borrowed */
} FeedOptions;

/* Owned: feed_destroy. */
Status feed_create(const FeedOptions *options, Feed **feed_out) STATUS_CHECKED;
void feed_destroy(Feed *feed);

/* Plans the next step. */
void feed_begin(Feed *feed, int64_t step);

const StepPlan *feed_plan(const Feed *feed);
const Dataset *feed_dataset(const Feed *feed);
uint64_t feed_kind(const Feed *feed);

/* This rank's items of a microbatch for one encoder, on its first stage: copied to `data`, one
 * after another (loader.h). Waits for the decoder threads. */
Status feed_take_items(Feed *feed, int encoder, int microbatch, uint8_t *data,
                       Stream *stream) STATUS_CHECKED;

/* Opens shards as the job's modules want them. Owned by the caller (dataset_close). */
Status feed_open_dataset(const JobSpec *spec, char *const *patterns, size_t num_patterns,
                         Dataset **dataset_out) STATUS_CHECKED;
/* What all steps over these samples have in common. */
StepSource feed_source(const JobSpec *spec, const Place *place, const StepSample *samples,
                       int64_t num_samples);
/* The sizes of all samples of a data set, which must stay open. Owned by the caller (memory_free).
 */
Status feed_read_sizes(const Dataset *dataset, StepSample **samples_out) STATUS_CHECKED;

#endif
