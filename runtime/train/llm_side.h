/* LlmSide: the decoder's actions of a pass: rows arrive, tokens and rows become a loss, the rows'
 * gradients leave.
 *
 * The decoder works on one microbatch at a time; rows and their gradients have `window` buffers
 * each, so that sending gradients never holds the next microbatch up.
 * Threading: the step thread.
 */
#ifndef TRAIN_LLM_SIDE_H
#define TRAIN_LLM_SIDE_H

#include "train/side.h"
#include "train/text_batch.h"

typedef struct LlmSide LlmSide;

/* Borrows all of the context. Owned: llm_side_destroy. */
Status llm_side_create(const SideContext *context, LlmSide **side_out) STATUS_CHECKED;
void llm_side_destroy(LlmSide *side);

/* Rows alone; the text is somebody else's. */
Status llm_side_recv_rows(LlmSide *side, Feed *feed, int microbatch) STATUS_CHECKED;
/* Rows and text: the text is packed while the rows are on their way. */
Status llm_side_recv(LlmSide *side, Feed *feed, int microbatch) STATUS_CHECKED;
/* `loss_scale` 0: no backward follows. Adds to *loss_sum (host, valid after stream_wait). */
Status llm_side_forward(LlmSide *side, int microbatch, float loss_scale,
                        double *loss_sum) STATUS_CHECKED;
Status llm_side_backward(LlmSide *side, int microbatch) STATUS_CHECKED;
Status llm_side_send_grad(LlmSide *side, Feed *feed, int microbatch) STATUS_CHECKED;

/* Where samples are packed, and the rows that came with a microbatch: for generation, which packs
 * its own. */
TextBatch *llm_side_text(LlmSide *side);
const float *llm_side_rows(const LlmSide *side, int microbatch);

/* Seconds spent waiting for rows since the last call. */
double llm_side_take_wait(LlmSide *side);

#endif
