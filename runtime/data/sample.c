#include "data/sample.h"

#include "base/file.h"
#include "base/hash.h"
#include "base/memory.h"
#include "data/shard.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <string.h>
#include <unistd.h>

enum {
    JSON_BYTES_MAX = 4 << 20
};

Status sample_fail(const Dataset *dataset, const Sample *sample, const Member *member,
                   Status status)
{
    const char *shard = dataset->shards[sample->shard].path;
    const char *key = sample->info.key;
    if (member) {
        return fail(status, "shard %s, sample %s, member %s.%s: %s", shard, key, key,
                    member->suffix, status_message());
    }
    return fail(status, "shard %s, sample %s: %s", shard, key, status_message());
}

Status sample_read_member(const Dataset *dataset, const Sample *sample, const Member *member,
                          void *bytes_out, size_t size_bytes)
{
    CHECK((int64_t)size_bytes <= member->size_bytes);
    const ShardFile *shard = &dataset->shards[sample->shard];
    int file = shard->file >= 0 ? shard->file : open(shard->path, O_RDONLY | O_CLOEXEC);
    Status status = STATUS_OK;
    if (file < 0) {
        status = fail(STATUS_IO, "cannot open: %s", strerror(errno));
    } else {
        status = file_read(file, member->offset, bytes_out, size_bytes);
    }
    if (file >= 0 && file != shard->file) {
        close(file);
    }
    TRY(status);
    return STATUS_OK;
}

/* A text member with a zero byte after it. Owned by the caller in every case. */
static Status read_text(const Dataset *dataset, const Sample *sample, const Member *member,
                        char **text_out)
{
    TRY(memory_alloc((size_t)member->size_bytes + 1, 1, (void **)text_out));
    Status status =
        sample_read_member(dataset, sample, member, *text_out, (size_t)member->size_bytes);
    return status == STATUS_OK ? STATUS_OK : sample_fail(dataset, sample, member, status);
}

/* The caption is the file's text; one line end at its end, which editors add, is not part of it. */
static Status read_caption_member(const Dataset *dataset, const Sample *sample, SampleText *text)
{
    const Member *member = &sample->caption;
    if (member->size_bytes > (int64_t)dataset->options.max_tokens + 2) {
        return sample_fail(
            dataset, sample, member,
            fail(STATUS_INVALID,
                 "the caption has %lld bytes, one token each; at most %d tokens fit in a sample",
                 (long long)member->size_bytes, dataset->options.max_tokens));
    }
    TRY(read_text(dataset, sample, member, &text->own_caption));
    char *caption = text->own_caption;
    size_t length = strlen(caption);
    if ((int64_t)length != member->size_bytes) {
        return sample_fail(dataset, sample, member,
                           fail(STATUS_CORRUPT, "a zero byte at byte %zu of a text", length));
    }
    if (length > 0 && caption[length - 1] == '\n') {
        caption[--length] = '\0';
        if (length > 0 && caption[length - 1] == '\r') {
            caption[--length] = '\0';
        }
    }
    return STATUS_OK;
}

/* Copies the text at `key` if it is there. jansson refuses texts with zero bytes. */
static Status copy_json_text(const json_t *root, const char *key, char **text_out)
{
    const json_t *value = json_object_get(root, key);
    if (!value) {
        return STATUS_OK;
    }
    if (!json_is_string(value)) {
        return fail(STATUS_INVALID, "\"%s\" is not a text", key);
    }
    TRY(memory_copy_text(json_string_value(value), text_out));
    return STATUS_OK;
}

static Status parse_json_text(const Sample *sample, const char *json, size_t size_bytes,
                              SampleText *text)
{
    json_error_t error;
    json_t *root = json_loadb(json, size_bytes, JSON_REJECT_DUPLICATES, &error);
    if (!root) {
        return fail(STATUS_CORRUPT, "line %d, column %d: %s", error.line, error.column, error.text);
    }
    Status status = STATUS_OK;
    if (!json_is_object(root)) {
        status = fail(STATUS_INVALID, "expected an object {\"caption\": ...}");
    }
    if (status == STATUS_OK) {
        status = copy_json_text(root, "prompt", &text->own_prompt);
    }
    if (status == STATUS_OK && !sample->caption.suffix[0]) {
        status = copy_json_text(root, "caption", &text->own_caption);
    }
    json_decref(root);
    TRY(status);
    return STATUS_OK;
}

static Status read_json_member(const Dataset *dataset, const Sample *sample, SampleText *text)
{
    const Member *member = &sample->json;
    if (member->size_bytes > JSON_BYTES_MAX) {
        return sample_fail(dataset, sample, member,
                           fail(STATUS_INVALID, "%lld bytes of JSON; at most %d are read",
                                (long long)member->size_bytes, JSON_BYTES_MAX));
    }
    char *json = NULL;
    Status status = read_text(dataset, sample, member, &json);
    if (status == STATUS_OK) {
        status = parse_json_text(sample, json, (size_t)member->size_bytes, text);
        status = status == STATUS_OK ? status : sample_fail(dataset, sample, member, status);
    }
    memory_free(json);
    TRY(status);
    return STATUS_OK;
}

Status sample_text_read(const Dataset *dataset, const Sample *sample, SampleText *text_out)
{
    *text_out = (SampleText){0};
    if (sample->caption.suffix[0]) {
        TRY(read_caption_member(dataset, sample, text_out));
    }
    if (sample->json.suffix[0]) {
        TRY(read_json_member(dataset, sample, text_out));
    }
    if (!text_out->own_caption || !text_out->own_caption[0]) {
        return sample_fail(dataset, sample, NULL,
                           fail(STATUS_INVALID,
                                "no caption: expected a member .txt, or .json with \"caption\", "
                                "that is not empty"));
    }
    text_out->caption = text_out->own_caption;
    text_out->caption_bytes = (int64_t)strlen(text_out->caption);
    text_out->prompt = text_out->own_prompt ? text_out->own_prompt : dataset->prompt;
    return STATUS_OK;
}

void sample_text_done(SampleText *text)
{
    memory_free(text->own_prompt);
    memory_free(text->own_caption);
    *text = (SampleText){0};
}

uint64_t sample_text_hash(const SampleText *text)
{
    uint64_t hash = hash_bytes(HASH_SEED, text->prompt, strlen(text->prompt) + 1);
    return hash_bytes(hash, text->caption, (size_t)text->caption_bytes);
}

Status sample_text_get(const Dataset *dataset, const Sample *sample, SampleText *text_out)
{
    *text_out = (SampleText){0};
    if (sample->caption_at >= 0) {
        text_out->caption = dataset->texts + sample->caption_at;
        text_out->caption_bytes =
            sample->info.num_labels - 1; /* its bytes and eos are the labels */
        text_out->prompt =
            sample->prompt_at >= 0 ? dataset->texts + sample->prompt_at : dataset->prompt;
        return STATUS_OK;
    }
    TRY(sample_text_read(dataset, sample, text_out));
    if (sample_text_hash(text_out) != sample->text_hash) {
        return sample_fail(dataset, sample, NULL,
                           fail(STATUS_CORRUPT, "its text changed after the data set was opened"));
    }
    return STATUS_OK;
}
