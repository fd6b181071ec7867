/* TextBatch: the decoder's samples of one microbatch: those of the replica, packed one after
 * another without padding, of which this rank's tokens (nn/sequences.h) are put on the device.
 *
 * Use: begin, add samples, then upload; the ModuleBatch it fills points into the text batch until
 * the next begin.
 * Threading: the step thread.
 */
#ifndef TRAIN_TEXT_BATCH_H
#define TRAIN_TEXT_BATCH_H

#include "data/dataset.h"
#include "train/module.h"
#include "train/step_plan.h"

typedef struct TextBatch TextBatch;

typedef struct TextBatchOptions {
    Device *device;
    ShardRank shard;
    int64_t tokens_max;   /* of a replica */
    int64_t segments_max; /* of a replica */
    int64_t rows_max;     /* on this rank, of all encoders */
    int num_encoders;
    SampleMedia media[STEP_ENCODERS_MAX]; /* of each encoder's rows */
    int64_t timeout_ms;                   /* of a wait for the stream */
} TextBatchOptions;

/* Owned: text_batch_destroy. */
Status text_batch_create(const TextBatchOptions *options, TextBatch **batch_out) STATUS_CHECKED;
void text_batch_destroy(TextBatch *batch);

void text_batch_begin(TextBatch *batch);

/* One sample with its labels, as the data set has it. */
Status text_batch_add(TextBatch *batch, const Dataset *dataset, int64_t sample) STATUS_CHECKED;
/* These ids, without labels: what generation goes on from. */
Status text_batch_add_ids(TextBatch *batch, const int32_t *ids, int32_t num_ids) STATUS_CHECKED;

/* Copies to the device and fills the decoder's part of *batch_out, less rows and loss_scale. Waits
 * until the stream has passed the upload before, whose copies read the same memory. Rows
 * are those of the first encoder, then those of the next, each in the order of tokens. */
Status text_batch_upload(TextBatch *batch, Stream *stream, ModuleBatch *batch_out) STATUS_CHECKED;

/* After upload: this rank's rows of an encoder. */
int64_t text_batch_count_rows(const TextBatch *batch, int encoder);
/* After upload: device [rows of this rank]: which of the replica's rows each is, those of the first
 * encoder counted first. */
const int32_t *text_batch_row_sources(const TextBatch *batch);
/* After upload: where this cp rank has token `token` of the replica; -1: another one has it. */
int32_t text_batch_find(const TextBatch *batch, int64_t token);

#endif
