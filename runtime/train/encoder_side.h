/* EncoderSide: the encoder's actions of a pass: images become rows, rows leave, their gradients
 * come back.
 *
 * Buffers are kept for `window` microbatches in flight, whatever their number; microbatch m uses
 * slot m % window.
 * Threading: the step thread.
 */
#ifndef TRAIN_ENCODER_SIDE_H
#define TRAIN_ENCODER_SIDE_H

#include "train/side.h"

typedef struct EncoderSide EncoderSide;

/* Borrows all of the context. Owned: encoder_side_destroy. */
Status encoder_side_create(const SideContext *context, EncoderSide **side_out) STATUS_CHECKED;
void encoder_side_destroy(EncoderSide *side);

/* `rows_square`: device memory; the rows' squares are added, which tells whether all are finite. */
Status encoder_side_encode(EncoderSide *side, Feed *feed, int microbatch,
                           double *rows_square) STATUS_CHECKED;
Status encoder_side_send(EncoderSide *side, Feed *feed, int microbatch) STATUS_CHECKED;
Status encoder_side_recv_grad(EncoderSide *side, Feed *feed, int microbatch) STATUS_CHECKED;
Status encoder_side_backward(EncoderSide *side, int microbatch) STATUS_CHECKED;

/* Seconds spent waiting for gradients since the last call. */
double encoder_side_take_wait(EncoderSide *side);

#endif
