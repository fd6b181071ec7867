/* Dataset: samples in WebDataset tar shards, found once by an index, read at random afterwards.
 *
 * A sample is the run of members with one key: the name up to the first dot after the last slash.
 * Members by extension:
 *   .txt               the caption
 *   .json              {"prompt": "...", "caption": "...", ...}: instead of .txt, or beside it for
 *                      the prompt; other keys are ignored
 *   .png .jpg .jpeg    an image; with several images ".0.png", ".1.png", ... give their order
 *   .wav .flac         an audio clip; several as with images
 * Other extensions belong to the sample and are not read; members without key or extension belong
 * to none. Captions are bytes: they must not be empty or hold zero bytes; one line end at the end
 * of a .txt is not part of it.
 *
 * Text of a sample = bos, prompt, caption, eos. In the prompt "<image>" and "<audio>" mark where rows go:
 * one mark stands for all images (clips) of the sample in order (and for nothing when there are none),
 * several marks must be as many as there are. The literal text "<image>" in a caption is text. Labels are
 * on the caption and eos only. Nothing in the masks looks at token values.
 *
 * Every violation (truncated shard, key apart or twice, no caption, too long, an image or a clip
 * whose header cannot be read or claims more than the limits) is STATUS_CORRUPT, STATUS_INVALID or
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
    /* Stands where a row of sound goes. Not an id of the vocabulary: its size stays what it was. */
    TOKEN_AUDIO = -2,
    TOKEN_BYTES_VOCABULARY = 259,
};

typedef struct Dataset Dataset;

typedef enum SampleMedia {
    SAMPLE_MEDIA_IMAGE,
    SAMPLE_MEDIA_AUDIO,
    SAMPLE_MEDIA_COUNT,
} SampleMedia;

/* An image or a clip of a sample, and where its rows go. */
typedef struct SampleItem {
    SampleMedia media;
    int32_t index; /* among the sample's items of its media */
    int32_t rows;  /* an image: rows_per_image; a clip: audio_rows (data/audio.h) of its length */
    int32_t first_token; /* of the sample: its rows stand there one after another */
} SampleItem;

typedef struct SampleInfo {
    const char *key; /* valid until close */
    int32_t num_items;
    const SampleItem *items; /* [num_items] in the order of their tokens; valid until close */
    int32_t num_tokens;      /* whole sample in the decoder, rows included */
    int32_t num_labels;      /* positions whose next token counts in the loss */
} SampleInfo;

typedef struct DatasetOptions {
    char *const *patterns; /* paths or glob patterns; matches are sorted by name within a pattern */
    int num_patterns;
    const char *prompt;
    int rows_per_image; /* 0: the job has no vision encoder, and samples with images are STATUS_INVALID */
    int image_size; /* pixels are resized to image_size x image_size */
    int mels;       /* 0: the job has no audio encoder, and samples with clips are STATUS_INVALID */
    double max_seconds; /* longer clips are STATUS_INVALID */
    int max_tokens;     /* longer samples are STATUS_INVALID */
} DatasetOptions;

/* Owned: dataset_close. STATUS_NOT_FOUND when a pattern matches nothing. */
Status dataset_open(const DatasetOptions *options, Dataset **dataset_out) STATUS_CHECKED;
void dataset_close(Dataset *dataset);

int64_t dataset_count(const Dataset *dataset);
const SampleInfo *dataset_sample(const Dataset *dataset, int64_t sample);
/* Of keys, sizes and options: ranks must agree on it. */
uint64_t dataset_hash(const Dataset *dataset);
int dataset_image_size(const Dataset *dataset);
int dataset_mels(const Dataset *dataset);

/* ids, labels [num_tokens]: labels[t] is the id that must follow token t, or -1 where nothing
 * counts. The places of rows hold TOKEN_IMAGE, or TOKEN_AUDIO, which is never a label. */
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
/* frames_out f32 [frames, mels], as many frames as `rows` rows need (audio_frames): the log-mel
 * spectrogram of the clip (data/audio.h), cut or continued with silence where it is not as long. */
Status dataset_read_audio(const Dataset *dataset, int64_t sample, int clip, int32_t rows,
                          float *frames_out) STATUS_CHECKED;

#endif
