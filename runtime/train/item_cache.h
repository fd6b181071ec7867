/* ItemCache: decoded images or clips of a data set that is small enough, so that epochs after the
 * first need no decoding. All or nothing: a set that does not fit is not cached at all. Threading:
 * one owner thread.
 */
#ifndef TRAIN_ITEM_CACHE_H
#define TRAIN_ITEM_CACHE_H

#include "train/step_plan.h"

typedef struct ItemCache {
    int64_t num_items; /* 0: nothing is cached */
    int64_t num_samples;
    int64_t *first;    /* [num_samples] number of each sample's first item of the media */
    int64_t *begins;   /* [num_items + 1] bytes */
    uint8_t *is_there; /* [num_items] */
    uint8_t *data;     /* pages are touched as items come in */
} ItemCache;

/* Items of one media: `item_bytes` each, and `row_bytes` more for each of its rows. Sets with more
 * than `size_bytes_max` bytes in all are not cached. */
Status item_cache_init(ItemCache *cache, const StepSample *samples, int64_t num_samples,
                       SampleMedia media, int64_t item_bytes, int64_t row_bytes,
                       int64_t size_bytes_max) STATUS_CHECKED;
void item_cache_done(ItemCache *cache);

/* NULL when it is not there. Valid until done. */
const uint8_t *item_cache_find(const ItemCache *cache, const LoaderItem *item);
void item_cache_put(ItemCache *cache, const LoaderItem *item, const uint8_t *data);

#endif
