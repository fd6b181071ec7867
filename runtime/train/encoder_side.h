/* EncoderSide: what an encoder's rank keeps for the microbatches in flight beside its module: the
 * input, the rows that leave and their gradients. Threading: the step thread.
 */
#ifndef TRAIN_ENCODER_SIDE_H
#define TRAIN_ENCODER_SIDE_H

#include "train/feed.h"
#include "train/module.h"

typedef struct EncoderSide EncoderSide;

typedef struct EncoderSideOptions {
    Device *device; /* borrowed, as all here */
    const PlaceModule *place;
    int encoder; /* index of the module */
    SampleMedia media;
    int slots;           /* microbatches in flight on this rank */
    int row_slots;       /* of rows, and of gradients */
    int64_t items_max;   /* of a replica in a microbatch */
    int64_t input_bytes; /* of a replica's items in a microbatch, at most */
    int64_t rows_bytes;  /* of a replica's rows in a microbatch, at most */
} EncoderSideOptions;

/* Owned: encoder_side_destroy. */
Status encoder_side_create(const EncoderSideOptions *options,
                           EncoderSide **side_out) STATUS_CHECKED;
void encoder_side_destroy(EncoderSide *side);

/* A pass begins: no microbatch is in flight. */
void encoder_side_begin(EncoderSide *side);
/* The microbatch's input, taken from the feed when it is first asked for, in the order of
 * microbatches. */
Status encoder_side_batch(EncoderSide *side, Feed *feed, int microbatch, Stream *stream,
                          const ModuleBatch **batch_out) STATUS_CHECKED;

/* On the last stage; NULL on others. [rows, D of the decoder] */
float *encoder_side_rows(const EncoderSide *side, int microbatch);
float *encoder_side_rows_grad(const EncoderSide *side, int microbatch);

#endif
