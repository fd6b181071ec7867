/* Loader: decodes images or clips ahead of their use, on threads of its own, into buffers handed
 * out in the order asked for. One loader serves one media.
 *
 * Use: loader_request for the batches to come (up to `depth`), loader_take for the oldest, use its
 * data, loader_release, request the next.
 * Threading: one owner thread makes all calls; its worker threads live inside.
 */
#ifndef DATA_LOADER_H
#define DATA_LOADER_H

#include "data/dataset.h"

typedef struct Loader Loader;

typedef struct LoaderItem {
    int64_t sample;
    int32_t index; /* among the sample's items of the media */
    int32_t rows;  /* that it must yield; a clip is cut or continued with silence to that length */
} LoaderItem;

/* Borrows the dataset. At most `items_max` items in one batch, with at most `rows_max` rows
 * together. Owned: loader_destroy (ends threads at once, whatever is under way). */
Status loader_create(const Dataset *dataset, SampleMedia media, int threads, int depth,
                     int64_t items_max, int64_t rows_max, Loader **loader_out) STATUS_CHECKED;
void loader_destroy(Loader *loader);

/* Does not block; items are copied. An empty batch is fine. STATUS_EXHAUSTED when `depth` batches
 * are under way or taken. */
Status loader_request(Loader *loader, const LoaderItem *items, int64_t num_items) STATUS_CHECKED;
/* Bytes of one item: of an image, or of a clip of so many rows. */
int64_t loader_item_bytes(const Loader *loader, int32_t rows);
/* Waits for the oldest batch, items one after another: u8 [size, size, 3] an image, f32 [frames,
 * mels] a clip; valid until release (NULL or not when empty). Passes on the first error of its
 * items, in their order; the batch is then released already. STATUS_TIMEOUT leaves it: take again.
 * One batch is taken at a time. */
Status loader_take(Loader *loader, int64_t deadline_ns, const uint8_t **data_out) STATUS_CHECKED;
void loader_release(Loader *loader);

#endif
