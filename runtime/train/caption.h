/* Caption: greedy generation for held-out samples. Each decoder replica generates its share, all of
 * them as one packed batch that is run forward again, through all its stages, for each new token.
 * Threading: the step thread.
 */
#ifndef TRAIN_CAPTION_H
#define TRAIN_CAPTION_H

#include "train/executor.h"

typedef struct CaptionRun {
    Executor *executor;
    Feed *feed;             /* one step with one microbatch: the samples to caption */
    const Schedule *encode; /* what brings the rows */
    int64_t step;           /* of training, for reports */
    int max_new_tokens;
    int max_tokens; /* the longest that a sample may get */
} CaptionRun;

/* Collective over the world. On the first rank of the llm *captions_out [*num_out] is owned by the
 * caller (caption_free); elsewhere NULL, 0. */
Status caption_generate(const CaptionRun *run, TrainerCaption **captions_out,
                        int *num_out) STATUS_CHECKED;
void caption_free(TrainerCaption *captions, int num);

/* What `num` ids say as text: bytes, with those that are no UTF-8 replaced by U+FFFD; other ids are
 * left out. Owned by the caller. */
Status caption_text(const int32_t *ids, int num, char **text_out) STATUS_CHECKED;

#endif
