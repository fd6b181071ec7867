/* Dataset: samples in WebDataset tar shards, found once by an index, read at random afterwards.
 *
 * A sample is the run of members with one key: the name up to the first dot after the last slash.
 * Members by extension:
 *   .txt               the caption
 *   .json              {"prompt": "...", "caption": "...", ...}: instead of .txt, or beside it for
 *                      the prompt; other keys are ignored
 *   .png .jpg .jpeg    an image; with several images ".0.png", ".1.png", ... give their order
 * Other extensions belong to the sample and are not read; members without key or extension belong
 * to none. Captions are bytes: they must not be empty or hold zero bytes; one line end at the end
 * of a .txt is not part of it.
 *
 * Text of a sample = bos, prompt, caption, eos. In the prompt "<image>" marks where rows go: one
 * mark stands for all images of the sample in order (and for nothing when there are none), several
 * marks must be as many as images. The literal text "<image>" in a caption is text. Labels are on
 * the caption and eos only. Nothing in the masks looks at token values.
 *
 * Every violation (truncated shard, key apart or twice, no caption, too long, an image whose header
 * cannot be read or claims more than the pixel limit) is STATUS_CORRUPT, STATUS_INVALID or
 * STATUS_UNSUPPORTED and names shard, member and sample.
 * Threading: open once, then read-only: any thread.
 */
#ifndef DATA_DATASET_H
#define DATA_DATASET_H

#include "base/status.h"
#include "job/job_spec.h"

#include <stdint.h>

enum {
    TOKEN_BOS = 256,
    TOKEN_EOS = 257,
    TOKEN_IMAGE = 258, /* stands where a visual row goes */
    TOKEN_BYTES_VOCABULARY = 259,
};

typedef struct Dataset Dataset;

typedef struct SampleInfo {
    const char *key; /* valid until close */
    int32_t num_images;
    int32_t num_tokens; /* whole sample in the decoder, visual rows included */
    int32_t num_labels; /* positions whose next token counts in the loss */
} SampleInfo;

typedef struct DatasetOptions {
    char *const *patterns; /* paths or glob patterns; matches are sorted by name within a pattern */
    int num_patterns;
    const char *prompt;
    int rows_per_image;
    int image_size; /* pixels are resized to image_size x image_size */
    int max_tokens; /* longer samples are STATUS_INVALID */
} DatasetOptions;

/* Owned: dataset_close. STATUS_NOT_FOUND when a pattern matches nothing. */
Status dataset_open(const DatasetOptions *options, Dataset **dataset_out) STATUS_CHECKED;
void dataset_close(Dataset *dataset);

int64_t dataset_count(const Dataset *dataset);
const SampleInfo *dataset_sample(const Dataset *dataset, int64_t sample);
/* Of keys, sizes and options: ranks must agree on it. */
uint64_t dataset_hash(const Dataset *dataset);
int dataset_image_size(const Dataset *dataset);

/* ids, labels [num_tokens]: labels[t] is the id that must follow token t, or -1 where nothing
 * counts. Image positions hold TOKEN_IMAGE, rows_per_image for each image. */
Status dataset_read_tokens(const Dataset *dataset, int64_t sample, int32_t *ids_out,
                           int32_t *labels_out) STATUS_CHECKED;
/* The tokens of the prompt only (bos, prompt with rows): what generation starts from. ids_out
 * [num_tokens of the sample]; *count_out of them are written. */
Status dataset_read_prompt(const Dataset *dataset, int64_t sample, int32_t *ids_out,
                           int32_t *count_out) STATUS_CHECKED;
/* The caption as text. Owned by the caller (memory_free). */
Status dataset_read_caption(const Dataset *dataset, int64_t sample,
                            char **caption_out) STATUS_CHECKED;
/* pixels_out u8 [image_size, image_size, 3] RGB: transparency over white, EXIF orientation applied,
 * resized with an antialiasing filter. */
Status dataset_read_image(const Dataset *dataset, int64_t sample, int image,
                          uint8_t *pixels_out) STATUS_CHECKED;

#endif
