/* Prompt: the text before a caption, with "<image>" marks where the rows of images go.
 * Threading: pure functions.
 */
#ifndef DATA_PROMPT_H
#define DATA_PROMPT_H

#include "base/status.h"

#include <stdint.h>

/* How many tokens the prompt makes. One mark stands for all images, several must be as many as
 * images; none only goes with no image. STATUS_INVALID. */
Status prompt_count_tokens(const char *prompt, int64_t num_images, int64_t rows_per_image,
                           int64_t *count_out) STATUS_CHECKED;

/* Writes as many ids as prompt_count_tokens says: bytes, and TOKEN_IMAGE rows_per_image times for
 * each image. Returns the end. */
int32_t *prompt_write_tokens(const char *prompt, int64_t num_images, int64_t rows_per_image,
                             int32_t *ids_out);

#endif
