/* TextBatch: the decoder's samples of one microbatch, packed one after another without padding, on
 * the host and on the device.
 *
 * Use: begin, add samples, then upload; the ModuleBatch it fills points into the text batch until
 * the next begin.
 * Threading: the step thread.
 */
#ifndef TRAIN_TEXT_BATCH_H
#define TRAIN_TEXT_BATCH_H

#include "data/dataset.h"
#include "train/module.h"

typedef struct TextBatch {
    Device *device;
    int64_t tokens_max;
    int32_t segments_max;
    int64_t rows_max;
    int64_t num_tokens;
    int32_t num_segments;
    int64_t num_rows;
    int32_t *host;   /* ids, positions, labels [tokens_max] each, then row_tokens [rows_max] */
    int32_t *memory; /* the same on the device */
    int32_t *segment_begins; /* [segments_max + 1], host */
} TextBatch;

Status text_batch_init(TextBatch *batch, Device *device, int64_t tokens_max, int32_t segments_max,
                       int64_t rows_max) STATUS_CHECKED;
void text_batch_done(TextBatch *batch);

void text_batch_begin(TextBatch *batch);

/* One sample with its labels, as the data set has it. `num_rows`: how many rows the plan sends for
 * it. */
Status text_batch_add(TextBatch *batch, const Dataset *dataset, int64_t sample,
                      int64_t num_rows) STATUS_CHECKED;
/* These ids, without labels: what generation goes on from. */
Status text_batch_add_ids(TextBatch *batch, const int32_t *ids, int32_t num_ids) STATUS_CHECKED;

/* Copies to the device and fills the decoder's part of *batch_out, less rows and loss_scale. */
Status text_batch_upload(TextBatch *batch, Stream *stream, ModuleBatch *batch_out) STATUS_CHECKED;

#endif
