#include "data/dataset.h"

#include "base/memory.h"
#include "data/audio.h"
#include "data/dataset_index.h"
#include "data/image.h"
#include "data/prompt.h"
#include "data/sample.h"

#include <string.h>
#include <unistd.h>

Status dataset_open(const DatasetOptions *options, Dataset **dataset_out)
{
    CHECK(options->rows_per_image >= 0 && options->mels >= 0 && options->max_tokens > 0);
    CHECK(options->rows_per_image == 0 ||
          (options->image_size > 0 && options->image_size <= IMAGE_SQUARE_MAX));
    CHECK(options->mels <= AUDIO_MELS_MAX && (options->mels == 0 || options->max_seconds > 0));
    Dataset *dataset = NULL;
    TRY(MEMORY_NEW(&dataset, 1));
    dataset->options = *options;
    dataset->options.patterns = NULL;
    dataset->options.prompt = NULL;
    Status status = memory_copy_text(options->prompt ? options->prompt : "", &dataset->prompt);
    if (status == STATUS_OK) {
        status = dataset_index_build(dataset, options->patterns, options->num_patterns);
    }
    if (status != STATUS_OK) {
        dataset_close(dataset);
        return status_trace(status, __FILE__, __LINE__);
    }
    *dataset_out = dataset;
    return STATUS_OK;
}

void dataset_close(Dataset *dataset)
{
    if (!dataset) {
        return;
    }
    for (size_t i = 0; i < dataset->num_samples; i++) {
        memory_free((void *)dataset->samples[i].info.key);
    }
    for (size_t i = 0; i < dataset->num_shards; i++) {
        memory_free(dataset->shards[i].path);
        if (dataset->shards[i].file >= 0) {
            close(dataset->shards[i].file);
        }
    }
    memory_free(dataset->samples);
    memory_free(dataset->members);
    memory_free(dataset->items);
    memory_free(dataset->texts);
    memory_free(dataset->shards);
    memory_free(dataset->prompt);
    memory_free(dataset);
}

int64_t dataset_count(const Dataset *dataset)
{
    return (int64_t)dataset->num_samples;
}

static const Sample *get_sample(const Dataset *dataset, int64_t sample)
{
    CHECK(sample >= 0 && sample < (int64_t)dataset->num_samples);
    return &dataset->samples[sample];
}

const SampleInfo *dataset_sample(const Dataset *dataset, int64_t sample)
{
    return &get_sample(dataset, sample)->info;
}

int dataset_image_size(const Dataset *dataset)
{
    return dataset->options.image_size;
}

int dataset_mels(const Dataset *dataset)
{
    return dataset->options.mels;
}

uint64_t dataset_hash(const Dataset *dataset)
{
    return dataset->hash;
}

static void write_tokens(const Sample *sample, const SampleText *text, int32_t *ids_out,
                         int32_t *labels_out)
{
    int32_t *end =
        prompt_write_tokens(text->prompt, sample->info.items, sample->info.num_items, ids_out);
    int64_t caption_begin = end - ids_out;
    for (int64_t i = 0; i < text->caption_bytes; i++) {
        *end++ = (uint8_t)text->caption[i];
    }
    *end++ = TOKEN_EOS;
    int64_t count = end - ids_out;
    CHECK(count == sample->info.num_tokens);
    for (int64_t t = 0; t < count; t++) {
        labels_out[t] = t + 1 >= caption_begin && t + 1 < count ? ids_out[t + 1] : -1;
    }
}

Status dataset_read_tokens(const Dataset *dataset, int64_t sample, int32_t *ids_out,
                           int32_t *labels_out)
{
    const Sample *found = get_sample(dataset, sample);
    SampleText text;
    Status status = sample_text_get(dataset, found, &text);
    if (status == STATUS_OK) {
        write_tokens(found, &text, ids_out, labels_out);
    }
    sample_text_done(&text);
    TRY(status);
    return STATUS_OK;
}

Status dataset_read_prompt(const Dataset *dataset, int64_t sample, int32_t *ids_out,
                           int32_t *count_out)
{
    const Sample *found = get_sample(dataset, sample);
    SampleText text;
    Status status = sample_text_get(dataset, found, &text);
    if (status == STATUS_OK) {
        const int32_t *end =
            prompt_write_tokens(text.prompt, found->info.items, found->info.num_items, ids_out);
        *count_out = (int32_t)(end - ids_out);
    }
    sample_text_done(&text);
    TRY(status);
    return STATUS_OK;
}

Status dataset_read_caption(const Dataset *dataset, int64_t sample, char **caption_out)
{
    SampleText text;
    Status status = sample_text_get(dataset, get_sample(dataset, sample), &text);
    if (status == STATUS_OK) {
        status = memory_copy_text(text.caption, caption_out);
    }
    sample_text_done(&text);
    TRY(status);
    return STATUS_OK;
}

static const Member *get_member(const Dataset *dataset, const Sample *sample, SampleMedia media,
                                int index)
{
    CHECK(index >= 0 && index < sample->counts[media]);
    int32_t before = media == SAMPLE_MEDIA_AUDIO ? sample->counts[SAMPLE_MEDIA_IMAGE] : 0;
    return &dataset->members[sample->first_item + before + index];
}

/* A whole member. Owned by the caller (memory_free). */
static Status read_member(const Dataset *dataset, const Sample *sample, const Member *member,
                          uint8_t **bytes_out)
{
    uint8_t *bytes = NULL;
    TRY(memory_alloc((size_t)member->size_bytes, 1, (void **)&bytes));
    Status status = sample_read_member(dataset, sample, member, bytes, (size_t)member->size_bytes);
    if (status != STATUS_OK) {
        memory_free(bytes);
        return sample_fail(dataset, sample, member, status);
    }
    *bytes_out = bytes;
    return STATUS_OK;
}

Status dataset_read_image(const Dataset *dataset, int64_t sample, int image, uint8_t *pixels_out)
{
    const Sample *found = get_sample(dataset, sample);
    const Member *member = get_member(dataset, found, SAMPLE_MEDIA_IMAGE, image);
    uint8_t *bytes = NULL;
    TRY(read_member(dataset, found, member, &bytes));
    Status status = image_read_square(bytes, (size_t)member->size_bytes,
                                      dataset->options.image_size, pixels_out);
    if (status != STATUS_OK) {
        status = sample_fail(dataset, found, member, status);
    }
    memory_free(bytes);
    TRY(status);
    return STATUS_OK;
}

Status dataset_read_audio(const Dataset *dataset, int64_t sample, int clip, int32_t rows,
                          float *frames_out)
{
    const Sample *found = get_sample(dataset, sample);
    const Member *member = get_member(dataset, found, SAMPLE_MEDIA_AUDIO, clip);
    uint8_t *bytes = NULL;
    TRY(read_member(dataset, found, member, &bytes));
    Status status =
        audio_decode(bytes, (size_t)member->size_bytes, dataset->options.mels, rows, frames_out);
    if (status != STATUS_OK) {
        status = sample_fail(dataset, found, member, status);
    }
    memory_free(bytes);
    TRY(status);
    return STATUS_OK;
}
