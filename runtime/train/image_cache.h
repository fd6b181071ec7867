/* ImageCache: decoded images of a data set that is small enough, so that epochs after the first
 * need no decoding. All or nothing: a set that does not fit is not cached at all.
 * Threading: one owner thread.
 */
#ifndef TRAIN_IMAGE_CACHE_H
#define TRAIN_IMAGE_CACHE_H

#include "train/step_plan.h"

typedef struct ImageCache {
    int64_t image_bytes;
    int64_t num_images; /* 0: nothing is cached */
    int64_t num_samples;
    int64_t *first;    /* [num_samples] number of each sample's first image */
    uint8_t *is_there; /* [num_images] */
    uint8_t *pixels;   /* [num_images, image_bytes]; pages are touched as images come in */
} ImageCache;

/* Images with more than `size_bytes_max` bytes in all are not cached. */
Status image_cache_init(ImageCache *cache, const StepSample *samples, int64_t num_samples,
                        int64_t image_bytes, int64_t size_bytes_max) STATUS_CHECKED;
void image_cache_done(ImageCache *cache);

/* NULL when it is not there. Valid until done. */
const uint8_t *image_cache_find(const ImageCache *cache, const LoaderItem *item);
void image_cache_put(ImageCache *cache, const LoaderItem *item, const uint8_t *pixels);

#endif
