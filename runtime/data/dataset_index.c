#include "data/dataset_index.h"

#include "base/hash.h"
#include "base/memory.h"
#include "data/audio.h"
#include "data/image.h"
#include "data/prompt.h"
#include "data/sample.h"
#include "data/shard.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    HEADER_BYTES = 16 * 1024,     /* of an image, read to look at its header */
    MEMBER_BYTES_MAX = 256 << 20, /* of an image or a clip */
};

/* The index while it grows. */
typedef struct Builder {
    Dataset *dataset;
    int64_t *slots; /* hash table of keys: sample + 1, 0 when free; at most half full */
    size_t num_slots;
    Sample sample;   /* the one whose members are coming; info.key NULL: none */
    uint8_t *header; /* [HEADER_BYTES] */
    int file;        /* of the shard at hand */
} Builder;

static size_t find_slot(const Builder *builder, const char *key)
{
    size_t slot = (size_t)hash_text(key) & (builder->num_slots - 1);
    while (builder->slots[slot] != 0 &&
           strcmp(builder->dataset->samples[builder->slots[slot] - 1].info.key, key) != 0) {
        slot = (slot + 1) & (builder->num_slots - 1);
    }
    return slot;
}

static Status grow_slots(Builder *builder)
{
    const Dataset *dataset = builder->dataset;
    if ((dataset->num_samples + 1) * 2 <= builder->num_slots) {
        return STATUS_OK;
    }
    size_t num_slots = builder->num_slots ? builder->num_slots * 2 : 1024;
    int64_t *slots = NULL;
    TRY(MEMORY_NEW(&slots, num_slots));
    memory_free(builder->slots);
    builder->slots = slots;
    builder->num_slots = num_slots;
    for (size_t i = 0; i < dataset->num_samples; i++) {
        slots[find_slot(builder, dataset->samples[i].info.key)] = (int64_t)i + 1;
    }
    return STATUS_OK;
}

static bool comes_before(const Member *a, const Member *b)
{
    return a->media != b->media ? a->media < b->media : a->number < b->number;
}

static const char *media_name(SampleMedia media)
{
    return media == SAMPLE_MEDIA_IMAGE ? "image" : "clip";
}

/* `members` [count] are those of one media: a missing number would shift the rest. */
static Status check_numbers(const Member *members, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        const Member *member = &members[i];
        bool is_only = member->number < 0 && count == 1;
        if (member->number != i && !is_only) {
            const char *endings =
                member->media == SAMPLE_MEDIA_IMAGE ? ".png or .jpg" : ".wav or .flac";
            return fail(STATUS_INVALID,
                        "of its %d %ss, %s %d is .%s: expected one %s, or .0, .1, ... without gaps "
                        "or repeats",
                        count, media_name(member->media), media_name(member->media), i,
                        member->suffix, endings);
        }
    }
    return STATUS_OK;
}

/* Images, then clips, each in the order of their numbers, whatever their order in the tar. */
static Status order_members(const Dataset *dataset, const Sample *sample)
{
    int64_t count = (int64_t)dataset->num_members - sample->first_item;
    if (count == 0) {
        return STATUS_OK;
    }
    Member *members = dataset->members + sample->first_item;
    for (int64_t i = 1; i < count; i++) {
        Member member = members[i];
        int64_t at = i;
        while (at > 0 && comes_before(&member, &members[at - 1])) {
            members[at] = members[at - 1];
            at--;
        }
        members[at] = member;
    }
    for (int media = 0; media < SAMPLE_MEDIA_COUNT; media++) {
        TRY(check_numbers(members, sample->counts[media]));
        members += sample->counts[media];
    }
    return STATUS_OK;
}

/* Looks at the header; reads more of the file only where the header is longer than HEADER_BYTES
 * (large profiles). */
static Status probe_image(Builder *builder, const Member *image)
{
    const Dataset *dataset = builder->dataset;
    const Sample *sample = &builder->sample;
    size_t size_bytes = (size_t)image->size_bytes;
    size_t first = size_bytes < HEADER_BYTES ? size_bytes : HEADER_BYTES;
    TRY(sample_read_member(dataset, sample, image, builder->header, first));
    ImageInfo info;
    Status status = image_probe(builder->header, first, &info);
    if (status == STATUS_EXHAUSTED && first < size_bytes) {
        uint8_t *whole = NULL;
        TRY(memory_alloc(size_bytes, 1, (void **)&whole));
        status = sample_read_member(dataset, sample, image, whole, size_bytes);
        status = status == STATUS_OK ? image_probe(whole, size_bytes, &info) : status;
        memory_free(whole);
    }
    if (status == STATUS_EXHAUSTED) {
        return fail(STATUS_CORRUPT, "truncated: %s", status_message());
    }
    TRY(status);
    return STATUS_OK;
}

/* How many rows an image or a clip yields. */
static Status probe_member(Builder *builder, const Member *member, int32_t *rows_out)
{
    const DatasetOptions *options = &builder->dataset->options;
    if (member->size_bytes > MEMBER_BYTES_MAX) {
        return fail(STATUS_INVALID, "%lld bytes; at most %d are read",
                    (long long)member->size_bytes, MEMBER_BYTES_MAX);
    }
    if (member->media == SAMPLE_MEDIA_IMAGE) {
        if (options->rows_per_image == 0) {
            return fail(STATUS_INVALID, "an image, and the job has no module \"vision\" to read "
                                        "it: add one, or use data without images");
        }
        TRY(probe_image(builder, member));
        *rows_out = options->rows_per_image;
        return STATUS_OK;
    }
    if (options->mels == 0) {
        return fail(STATUS_INVALID, "an audio clip, and the job has no module \"audio\" to read "
                                    "it: add one, or use data without clips");
    }
    AudioInfo info;
    TRY(audio_probe(builder->file, member->offset, member->size_bytes, options->max_seconds,
                    &info));
    *rows_out = audio_rows(info.samples);
    return STATUS_OK;
}

/* The sample's items, in the order of its members. */
static Status add_items(Builder *builder)
{
    Dataset *dataset = builder->dataset;
    const Sample *sample = &builder->sample;
    TRY(memory_grow((void **)&dataset->items, &dataset->items_capacity, dataset->num_members + 1,
                    sizeof *dataset->items));
    int32_t num_images = sample->counts[SAMPLE_MEDIA_IMAGE];
    for (int32_t i = 0; i < sample->info.num_items; i++) {
        const Member *member = &dataset->members[sample->first_item + i];
        bool is_image = member->media == SAMPLE_MEDIA_IMAGE;
        SampleItem item = {.media = member->media, .index = is_image ? i : i - num_images};
        Status status = probe_member(builder, member, &item.rows);
        if (status != STATUS_OK) {
            return sample_fail(dataset, sample, member, status);
        }
        dataset->items[sample->first_item + i] = item;
    }
    return STATUS_OK;
}

/* Takes a copy with its zero byte; *at_out: where. */
static Status keep_text(Dataset *dataset, const char *text, size_t size_bytes, int64_t *at_out)
{
    TRY(memory_grow((void **)&dataset->texts, &dataset->texts_capacity,
                    dataset->texts_bytes + size_bytes + 1, 1));
    memcpy(dataset->texts + dataset->texts_bytes, text, size_bytes + 1);
    *at_out = (int64_t)dataset->texts_bytes;
    dataset->texts_bytes += size_bytes + 1;
    return STATUS_OK;
}

static Status keep_texts(Dataset *dataset, Sample *sample, const SampleText *text)
{
    size_t prompt_bytes = text->own_prompt ? strlen(text->prompt) : 0;
    size_t caption_bytes = (size_t)text->caption_bytes;
    size_t bytes = prompt_bytes + caption_bytes + 2;
    if (bytes > KEPT_TEXT_BYTES_MAX || dataset->texts_bytes + bytes > KEPT_TEXTS_BYTES_MAX) {
        return STATUS_OK;
    }
    if (text->own_prompt) {
        TRY(keep_text(dataset, text->prompt, prompt_bytes, &sample->prompt_at));
    }
    TRY(keep_text(dataset, text->caption, caption_bytes, &sample->caption_at));
    return STATUS_OK;
}

/* bos, prompt with rows, caption, eos; each caption byte and eos is a label. */
static Status place_tokens(const Dataset *dataset, Sample *sample, const SampleText *text)
{
    SampleItem *items = dataset->items + sample->first_item;
    int64_t prompt_tokens = 0;
    TRY(prompt_place_items(text->prompt, items, sample->info.num_items, &prompt_tokens));
    int64_t tokens = prompt_tokens + text->caption_bytes + 1;
    if (tokens > dataset->options.max_tokens) {
        int64_t rows[SAMPLE_MEDIA_COUNT] = {0};
        for (int32_t i = 0; i < sample->info.num_items; i++) {
            rows[items[i].media] += items[i].rows;
        }
        return fail(STATUS_INVALID,
                    "%lld tokens (%lld of them rows of images, %lld of audio clips); "
                    "model.llm.max_tokens is %d and nothing is cut off",
                    (long long)tokens, (long long)rows[SAMPLE_MEDIA_IMAGE],
                    (long long)rows[SAMPLE_MEDIA_AUDIO], dataset->options.max_tokens);
    }
    sample->info.num_tokens = (int32_t)tokens;
    sample->info.num_labels = (int32_t)text->caption_bytes + 1;
    return STATUS_OK;
}

static Status count_tokens(Builder *builder)
{
    Dataset *dataset = builder->dataset;
    Sample *sample = &builder->sample;
    SampleText text;
    Status status = sample_text_read(dataset, sample, &text);
    if (status == STATUS_OK) {
        status = place_tokens(dataset, sample, &text);
        status = status == STATUS_OK ? status : sample_fail(dataset, sample, NULL, status);
    }
    if (status == STATUS_OK) {
        sample->text_hash = sample_text_hash(&text);
        status = keep_texts(dataset, sample, &text);
    }
    sample_text_done(&text);
    TRY(status);
    return STATUS_OK;
}

static uint64_t hash_sample(const Dataset *dataset, const Sample *sample, uint64_t hash)
{
    hash = hash_bytes(hash, sample->info.key, strlen(sample->info.key) + 1);
    hash = hash_u64(hash, (uint64_t)sample->info.num_tokens);
    hash = hash_u64(hash, (uint64_t)sample->info.num_labels);
    hash = hash_u64(hash, (uint64_t)sample->caption.size_bytes);
    hash = hash_u64(hash, (uint64_t)sample->json.size_bytes);
    hash = hash_u64(hash, sample->text_hash);
    for (int32_t i = 0; i < sample->info.num_items; i++) {
        const SampleItem *item = &dataset->items[sample->first_item + i];
        const Member *member = &dataset->members[sample->first_item + i];
        hash = hash_u64(hash, (uint64_t)member->size_bytes);
        hash = hash_u64(hash, (uint64_t)item->media << 32 | (uint32_t)item->rows);
        hash = hash_u64(hash, (uint64_t)item->index << 32 | (uint32_t)item->first_token);
    }
    return hash;
}

/* All members of the current sample are there: checks it and adds it. */
static Status finish_sample(Builder *builder)
{
    Dataset *dataset = builder->dataset;
    Sample *sample = &builder->sample;
    if (!sample->info.key) {
        return STATUS_OK;
    }
    sample->info.num_items = (int32_t)((int64_t)dataset->num_members - sample->first_item);
    Status status = order_members(dataset, sample);
    if (status != STATUS_OK) {
        return sample_fail(dataset, sample, NULL, status);
    }
    TRY(add_items(builder));
    TRY(count_tokens(builder));
    TRY(memory_grow((void **)&dataset->samples, &dataset->samples_capacity,
                    dataset->num_samples + 1, sizeof *dataset->samples));
    TRY(grow_slots(builder));
    builder->slots[find_slot(builder, sample->info.key)] = (int64_t)dataset->num_samples + 1;
    dataset->hash = hash_sample(dataset, sample, dataset->hash);
    dataset->samples[dataset->num_samples++] = *sample;
    *sample = (Sample){0};
    return STATUS_OK;
}

static Status start_sample(Builder *builder, const char *name, size_t key_bytes, int32_t shard)
{
    const Dataset *dataset = builder->dataset;
    TRY(grow_slots(builder));
    char *key = NULL;
    TRY(memory_format(&key, "%.*s", (int)key_bytes, name));
    builder->sample = (Sample){.info.key = key,
                               .shard = shard,
                               .first_item = (int64_t)dataset->num_members,
                               .prompt_at = -1,
                               .caption_at = -1};
    int64_t other = builder->slots[find_slot(builder, key)] - 1;
    if (other < 0) {
        return STATUS_OK;
    }
    int32_t other_shard = dataset->samples[other].shard;
    if (other_shard == shard) {
        return fail(STATUS_INVALID,
                    "shard %s, member %s: members of sample %s stand apart, or two samples have "
                    "this key; write the members of a sample one after the other",
                    dataset->shards[shard].path, name, key);
    }
    return fail(STATUS_INVALID, "shard %s, member %s: sample %s is in shard %s already",
                dataset->shards[shard].path, name, key, dataset->shards[other_shard].path);
}

static Status set_text_member(Builder *builder, Member *place, const Member *member)
{
    if (place->suffix[0]) {
        return sample_fail(builder->dataset, &builder->sample, member,
                           fail(STATUS_INVALID, "twice in its sample"));
    }
    *place = *member;
    return STATUS_OK;
}

static Status add_item_member(Builder *builder, const Member *member, MemberKind kind)
{
    Dataset *dataset = builder->dataset;
    SampleMedia media = kind == MEMBER_KIND_IMAGE ? SAMPLE_MEDIA_IMAGE : SAMPLE_MEDIA_AUDIO;
    if (builder->sample.counts[media] >= MEMBER_ITEMS_MAX) {
        return sample_fail(
            dataset, &builder->sample, member,
            fail(STATUS_INVALID, "more than %d %ss", MEMBER_ITEMS_MAX, media_name(media)));
    }
    TRY(memory_grow((void **)&dataset->members, &dataset->members_capacity,
                    dataset->num_members + 1, sizeof *dataset->members));
    dataset->members[dataset->num_members] = *member;
    dataset->members[dataset->num_members++].media = media;
    builder->sample.counts[media]++;
    return STATUS_OK;
}

static Status add_member(Builder *builder, const ShardMember *found, int32_t shard)
{
    Dataset *dataset = builder->dataset;
    MemberName name;
    Status status = member_name_parse(found->name, &name);
    if (status != STATUS_OK) {
        return fail(status, "shard %s, member %s: %s", dataset->shards[shard].path, found->name,
                    status_message());
    }
    if (name.kind == MEMBER_KIND_NONE) {
        return STATUS_OK;
    }
    const char *key = builder->sample.info.key;
    if (!key || strncmp(key, found->name, name.key_bytes) != 0 || key[name.key_bytes] != '\0') {
        TRY(finish_sample(builder));
        TRY(start_sample(builder, found->name, name.key_bytes, shard));
    }
    if (name.kind == MEMBER_KIND_OTHER) {
        return STATUS_OK;
    }
    Member member = {
        .offset = found->offset, .size_bytes = found->size_bytes, .number = name.number};
    CHECK(strlen(name.suffix) < sizeof member.suffix);
    memcpy(member.suffix, name.suffix, strlen(name.suffix));
    if (name.kind == MEMBER_KIND_CAPTION) {
        TRY(set_text_member(builder, &builder->sample.caption, &member));
        return STATUS_OK;
    }
    if (name.kind == MEMBER_KIND_JSON) {
        TRY(set_text_member(builder, &builder->sample.json, &member));
        return STATUS_OK;
    }
    TRY(add_item_member(builder, &member, name.kind));
    return STATUS_OK;
}

static Status scan_shard(Builder *builder, Shard *shard, int32_t index)
{
    ShardMember member;
    bool found = true;
    while (found) {
        TRY(shard_next(shard, &member, &found));
        if (found) {
            TRY(add_member(builder, &member, index));
        }
    }
    TRY(finish_sample(builder));
    return STATUS_OK;
}

static Status add_shard(Builder *builder, const char *path)
{
    Dataset *dataset = builder->dataset;
    Shard *shard = NULL;
    TRY(shard_open(path, &shard));
    size_t index = dataset->num_shards;
    Status status = memory_grow((void **)&dataset->shards, &dataset->shards_capacity, index + 1,
                                sizeof *dataset->shards);
    if (status == STATUS_OK) {
        dataset->shards[index] = (ShardFile){.file = -1};
        status = memory_copy_text(path, &dataset->shards[index].path);
    }
    if (status == STATUS_OK) {
        dataset->num_shards++;
        dataset->shards[index].file = fcntl(shard_file(shard), F_DUPFD_CLOEXEC, 0);
        builder->file = shard_file(shard);
        status = scan_shard(builder, shard, (int32_t)index);
    }
    if (status == STATUS_OK && dataset->num_shards > SHARDS_OPEN_MAX) {
        close(dataset->shards[index].file);
        dataset->shards[index].file = -1;
    }
    shard_close(shard);
    TRY(status);
    return STATUS_OK;
}

static int compare_paths(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static Status add_pattern(Builder *builder, const char *pattern)
{
    glob_t matches = {0};
    int result = glob(pattern, GLOB_NOSORT, NULL, &matches);
    Status status = STATUS_OK;
    if (result == GLOB_NOMATCH || (result == 0 && matches.gl_pathc == 0)) {
        status = fail(STATUS_NOT_FOUND, "no file matches \"%s\"", pattern);
    } else if (result == GLOB_NOSPACE) {
        status = fail(STATUS_NO_MEMORY, "no memory for the files that match \"%s\"", pattern);
    } else if (result != 0) {
        status = fail(STATUS_IO, "cannot read the folders of \"%s\"", pattern);
    } else {
        qsort(matches.gl_pathv, matches.gl_pathc, sizeof *matches.gl_pathv, compare_paths);
    }
    for (size_t i = 0; i < matches.gl_pathc && status == STATUS_OK; i++) {
        status = add_shard(builder, matches.gl_pathv[i]);
    }
    globfree(&matches);
    TRY(status);
    return STATUS_OK;
}

static uint64_t hash_options(const DatasetOptions *options, uint64_t hash)
{
    hash = hash_u64(hash, (uint64_t)options->rows_per_image);
    hash = hash_u64(hash, (uint64_t)options->image_size);
    hash = hash_u64(hash, (uint64_t)options->mels);
    hash = hash_bytes(hash, &options->max_seconds, sizeof options->max_seconds);
    return hash_u64(hash, (uint64_t)options->max_tokens);
}

static Status build(Builder *builder, char *const *patterns, int num_patterns)
{
    Dataset *dataset = builder->dataset;
    TRY(MEMORY_NEW(&builder->header, HEADER_BYTES));
    dataset->hash = hash_bytes(HASH_SEED, dataset->prompt, strlen(dataset->prompt) + 1);
    dataset->hash = hash_options(&dataset->options, dataset->hash);
    for (int i = 0; i < num_patterns; i++) {
        TRY(add_pattern(builder, patterns[i]));
    }
    if (dataset->num_samples == 0) {
        return fail(STATUS_INVALID, "no sample in the %zu shards of \"%s\"%s", dataset->num_shards,
                    num_patterns > 0 ? patterns[0] : "", num_patterns > 1 ? ", ..." : "");
    }
    for (size_t i = 0; i < dataset->num_samples; i++) { /* the array no longer moves */
        Sample *sample = &dataset->samples[i];
        sample->info.items = dataset->items + sample->first_item;
    }
    return STATUS_OK;
}

Status dataset_index_build(Dataset *dataset, char *const *patterns, int num_patterns)
{
    Builder builder = {.dataset = dataset};
    Status status = build(&builder, patterns, num_patterns);
    memory_free((void *)builder.sample.info.key);
    memory_free(builder.slots);
    memory_free(builder.header);
    TRY(status);
    return STATUS_OK;
}
