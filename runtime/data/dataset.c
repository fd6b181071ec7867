#include "data/dataset.h"

#include "base/memory.h"
#include "data/dataset_index.h"
#include "data/image.h"
#include "data/prompt.h"
#include "data/sample.h"

#include <string.h>
#include <unistd.h>

Status dataset_open(const DatasetOptions *options, Dataset **dataset_out)
{
    CHECK(options->rows_per_image > 0 && options->max_tokens > 0);
    CHECK(options->image_size > 0 && options->image_size <= IMAGE_SQUARE_MAX);
    Dataset *dataset = NULL;
    TRY(MEMORY_NEW(&dataset, 1));
    dataset->rows_per_image = options->rows_per_image;
    dataset->image_size = options->image_size;
    dataset->max_tokens = options->max_tokens;
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
    memory_free(dataset->images);
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
    return dataset->image_size;
}

uint64_t dataset_hash(const Dataset *dataset)
{
    return dataset->hash;
}

/* The text again, and how many tokens the prompt makes; a shard that was written over since it was
 * opened is found out here, before an array of the old length is overrun. sample_text_done in every
 * case. */
static Status read_same_text(const Dataset *dataset, const Sample *sample, SampleText *text_out,
                             int64_t *prompt_tokens_out)
{
    TRY(sample_text_read(dataset, sample, text_out));
    Status status = prompt_count_tokens(text_out->prompt, sample->info.num_images,
                                        dataset->rows_per_image, prompt_tokens_out);
    if (status == STATUS_OK &&
        (*prompt_tokens_out + text_out->caption_bytes + 2 != sample->info.num_tokens ||
         text_out->caption_bytes + 1 != sample->info.num_labels)) {
        status = fail(STATUS_CORRUPT, "its text changed after the data set was opened");
    }
    return status == STATUS_OK ? STATUS_OK : sample_fail(dataset, sample, NULL, status);
}

static void write_tokens(const Dataset *dataset, const Sample *sample, const SampleText *text,
                         int32_t *ids_out, int32_t *labels_out)
{
    int32_t *end = ids_out;
    *end++ = TOKEN_BOS;
    end = prompt_write_tokens(text->prompt, sample->info.num_images, dataset->rows_per_image, end);
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
    int64_t prompt_tokens = 0;
    Status status = read_same_text(dataset, found, &text, &prompt_tokens);
    if (status == STATUS_OK) {
        write_tokens(dataset, found, &text, ids_out, labels_out);
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
    int64_t prompt_tokens = 0;
    Status status = read_same_text(dataset, found, &text, &prompt_tokens);
    if (status == STATUS_OK) {
        ids_out[0] = TOKEN_BOS;
        const int32_t *end = prompt_write_tokens(text.prompt, found->info.num_images,
                                                 dataset->rows_per_image, ids_out + 1);
        CHECK(end == ids_out + 1 + prompt_tokens);
        *count_out = (int32_t)(1 + prompt_tokens);
    }
    sample_text_done(&text);
    TRY(status);
    return STATUS_OK;
}

Status dataset_read_caption(const Dataset *dataset, int64_t sample, char **caption_out)
{
    SampleText text;
    Status status = sample_text_read(dataset, get_sample(dataset, sample), &text);
    if (status == STATUS_OK) {
        *caption_out = text.caption;
        text.caption = NULL;
    }
    sample_text_done(&text);
    TRY(status);
    return STATUS_OK;
}

Status dataset_read_image(const Dataset *dataset, int64_t sample, int image, uint8_t *pixels_out)
{
    const Sample *found = get_sample(dataset, sample);
    CHECK(image >= 0 && image < found->info.num_images);
    const Member *member = &dataset->images[found->first_image + image];
    uint8_t *bytes = NULL;
    TRY(memory_alloc((size_t)member->size_bytes, 1, (void **)&bytes));
    Status status = sample_read_member(dataset, found, member, bytes, (size_t)member->size_bytes);
    if (status == STATUS_OK) {
        status =
            image_read_square(bytes, (size_t)member->size_bytes, dataset->image_size, pixels_out);
    }
    if (status != STATUS_OK) {
        status = sample_fail(dataset, found, member, status);
    }
    memory_free(bytes);
    TRY(status);
    return STATUS_OK;
}
