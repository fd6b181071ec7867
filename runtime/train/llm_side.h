/* LlmSide: what a decoder's rank keeps for the microbatches in flight beside its module: the texts,
 * the rows that come and their gradients. Threading: the step thread.
 */
#ifndef TRAIN_LLM_SIDE_H
#define TRAIN_LLM_SIDE_H

#include "train/feed.h"
#include "train/text_batch.h"

typedef struct LlmSide LlmSide;

typedef struct LlmSideOptions {
    TextBatchOptions text;
    const PlaceModule *place; /* borrowed */
    int slots;                /* microbatches in flight on this rank */
    int row_slots;            /* of rows, and of gradients */
    int64_t width;            /* D */
    int64_t whole_rows;       /* of a replica, for generation; 0: none */
} LlmSideOptions;

/* Owned: llm_side_destroy. */
Status llm_side_create(const LlmSideOptions *options, LlmSide **side_out) STATUS_CHECKED;
void llm_side_destroy(LlmSide *side);

/* A pass begins: no microbatch is in flight. */
void llm_side_begin(LlmSide *side);
/* The microbatch's text with its rows' buffer, packed when it is first asked for. */
Status llm_side_batch(LlmSide *side, Feed *feed, int microbatch, float loss_scale, Stream *stream,
                      const ModuleBatch **batch_out) STATUS_CHECKED;
/* After llm_side_batch: rows of an encoder in the microbatch's text. */
int64_t llm_side_count_rows(const LlmSide *side, int microbatch, int encoder);

/* On the first stage; NULL on others. [rows, D]: the rows of the first encoder, then of the next.
 */
float *llm_side_rows(const LlmSide *side, int microbatch);
float *llm_side_rows_grad(const LlmSide *side, int microbatch);
/* [whole_rows, D] on the first stage: for generation. */
float *llm_side_whole_rows(const LlmSide *side);
/* Where samples are packed by whoever generates. */
TextBatch *llm_side_text(LlmSide *side);

#endif
