/* Sample: reading one sample's members through the index. Inside data/ only.
 * Threading: pure functions of a dataset that is open.
 */
#ifndef DATA_SAMPLE_H
#define DATA_SAMPLE_H

#include "data/dataset_index.h"

/* Prompt and caption of a sample as its members say. */
typedef struct SampleText {
    const char *prompt;  /* the job's where the sample has none */
    const char *caption; /* not empty, without zero bytes */
    int64_t caption_bytes;
    char *own_prompt; /* owned, as far as they were read from members */
    char *own_caption;
} SampleText;

/* Reads the text members. sample_text_done in every case. */
Status sample_text_read(const Dataset *dataset, const Sample *sample,
                        SampleText *text_out) STATUS_CHECKED;
void sample_text_done(SampleText *text);

/* The text as it was when the dataset was opened: kept ones cost nothing, others are read again, and
 * STATUS_CORRUPT when they changed since. sample_text_done in every case. */
Status sample_text_get(const Dataset *dataset, const Sample *sample,
                       SampleText *text_out) STATUS_CHECKED;
uint64_t sample_text_hash(const SampleText *text);

/* Reads the first `size_bytes` of a member. The message names neither shard nor sample:
 * sample_fail. */
Status sample_read_member(const Dataset *dataset, const Sample *sample, const Member *member,
                          void *bytes_out, size_t size_bytes) STATUS_CHECKED;

/* This thread's last message again, with shard, sample and member (NULL: none) named before it. */
Status sample_fail(const Dataset *dataset, const Sample *sample, const Member *member,
                   Status status) STATUS_CHECKED;

#endif
