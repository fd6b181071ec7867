/* CachedEncoder: the forward pass of a frozen encoder, of which only those items are computed whose
 * rows the row cache does not have. For encoders without cp, pp and sequence parallelism: each rank
 * has its items' whole rows. Of the tp ranks the first reads and writes; the others are told and
 * get what it read. Threading: the step thread.
 */
#ifndef TRAIN_CACHED_ENCODER_H
#define TRAIN_CACHED_ENCODER_H

#include "train/module.h"
#include "train/row_cache.h"

typedef struct CachedEncoder CachedEncoder;

typedef struct CachedEncoderOptions {
    Module *module; /* weights as they stay; borrowed, as all here */
    Comm *tp;
    Stream *stream;
    const RowCacheSpec *spec;
    uint64_t model;      /* hash of what rows depend on besides weights and input: heads, norms */
    int64_t width;       /* of the rows */
    int64_t items_max;   /* of a microbatch */
    int64_t input_bytes; /* of a microbatch's items, at most */
    int64_t rows_bytes;  /* of a microbatch's rows, at most */
    int64_t item_bytes;  /* of an image; 0: of clips, frame_begins says */
    int64_t frame_bytes; /* of a clip's frame */
    int64_t timeout_ms;
} CachedEncoderOptions;

/* Collective over tp. Owned: cached_encoder_destroy. */
Status cached_encoder_create(const CachedEncoderOptions *options,
                             CachedEncoder **cached_out) STATUS_CHECKED;
void cached_encoder_destroy(CachedEncoder *cached);

/* As ModuleOps.forward of the only part. Collective over tp. */
Status cached_encoder_forward(CachedEncoder *cached, int slot, const ModuleBatch *batch,
                              float *rows_out) STATUS_CHECKED;

#endif
