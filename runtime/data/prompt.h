/* Prompt: the text before a caption, with "<image>" and "<audio>" marks where rows go.
 *
 * One mark of a media stands for all items of the sample of that media (and for nothing when there are
 * none); several must be as many as items; none only goes with no item.
 * Threading: pure functions.
 */
#ifndef DATA_PROMPT_H
#define DATA_PROMPT_H

#include "data/dataset.h"

#include <stdint.h>

/* items [num_items] come with media, index and rows (at least 1), ordered by media, then index; they
 * leave with first_token and in its order. *tokens_out: what bos and the prompt with its rows make.
 * STATUS_INVALID. */
Status prompt_place_items(const char *prompt, SampleItem *items, int32_t num_items,
                          int64_t *tokens_out) STATUS_CHECKED;

/* Writes as many ids as prompt_place_items said: bos, bytes, and TOKEN_IMAGE or TOKEN_AUDIO for each
 * row of items that were placed. Returns the end. */
int32_t *prompt_write_tokens(const char *prompt, const SampleItem *items, int32_t num_items,
                             int32_t *ids_out);

#endif
