/* Loader: decodes images ahead of their use, on threads of its own, into buffers handed out in the
 * order asked for.
 *
 * Use: loader_request for the batches to come (up to `depth`), loader_take for the oldest, use its
 * pixels, loader_release, request the next.
 * Threading: one owner thread makes all calls; its worker threads live inside.
 */
#ifndef DATA_LOADER_H
#define DATA_LOADER_H

#include "data/dataset.h"

typedef struct Loader Loader;

typedef struct LoaderItem {
    int64_t sample;
    int image;
} LoaderItem;

/* Borrows the dataset. `images_max` images in one batch at most. Owned: loader_destroy (ends
 * threads at once, whatever is under way). */
Status loader_create(const Dataset *dataset, int threads, int depth, int64_t images_max,
                     Loader **loader_out) STATUS_CHECKED;
void loader_destroy(Loader *loader);

/* Does not block; items are copied. An empty batch is fine. STATUS_EXHAUSTED when `depth` batches
 * are under way or taken. */
Status loader_request(Loader *loader, const LoaderItem *items, int64_t num_items) STATUS_CHECKED;
/* Waits for the oldest batch: u8 [num_items, size, size, 3], valid until release (NULL or not when
 * empty). Passes on the first error of its items, in their order; the batch is then released
 * already. STATUS_TIMEOUT leaves it: take again. One batch is taken at a time. */
Status loader_take(Loader *loader, int64_t deadline_ns, const uint8_t **pixels_out) STATUS_CHECKED;
void loader_release(Loader *loader);

#endif
