/* Feed: the steps' plans of one data set, and on encoder ranks their images, decoded ahead of use
 * by loader threads.
 *
 * Use: feed_begin plans a step (steps follow one another); on encoder ranks each microbatch's
 * images are taken once, in order.
 * Threading: the step thread; loader threads live inside.
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
    int64_t cache_bytes; /* decoded images may be kept up to this; 0: each is used once */
    int64_t first_step;  /* 1: from the beginning */
    int64_t last_step;
    uint64_t kind;           /* tells the boundary's messages apart */
    int64_t timeout_ms;      /* for one microbatch's images */
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

/* This encoder rank's images of a microbatch: copied to `pixels` u8 [items, S, S, 3]. Waits for the
 * decoder threads. */
Status feed_take_images(Feed *feed, int microbatch, uint8_t *pixels, Stream *stream) STATUS_CHECKED;

/* The sizes of all samples of a data set. Owned by the caller (memory_free). */
Status feed_read_sizes(const Dataset *dataset, StepSample **samples_out) STATUS_CHECKED;

#endif
