/* DatasetIndex: what dataset_open finds out: where each sample's members lie in the shards. Inside
 * data/ only.
 * Threading: built by one thread, then read-only.
 */
#ifndef DATA_DATASET_INDEX_H
#define DATA_DATASET_INDEX_H

#include "data/dataset.h"
#include "data/member_name.h"

#include <stddef.h>

enum {
    SHARDS_OPEN_MAX = 512, /* shards kept open; those beyond are opened for each read */
    /* Texts kept in memory, so that a step need not read the shards for them: all of a set of some
     * hundred thousand captions. Longer ones cost little beside the step they are in. */
    KEPT_TEXT_BYTES_MAX = 16 << 10,
    KEPT_TEXTS_BYTES_MAX = 64 << 20,
};

/* One member: its name is the sample's key, a dot, and the suffix. */
typedef struct Member {
    int64_t offset; /* in the shard, bytes */
    int64_t size_bytes;
    char suffix[MEMBER_SUFFIX_BYTES];
    SampleMedia media; /* of an image or a clip */
    int32_t number;    /* of it; -1 for the only one */
} Member;

typedef struct Sample {
    SampleInfo info; /* info.key is owned */
    int32_t shard;
    int32_t counts[SAMPLE_MEDIA_COUNT]; /* items of each media */
    int64_t first_item; /* in Dataset.items and Dataset.members, where they are ordered by media */
    int64_t prompt_at;  /* in Dataset.texts; -1: the job's prompt, or not kept */
    int64_t caption_at; /* -1: not kept */
    uint64_t text_hash;
    Member caption; /* suffix "" when absent */
    Member json;
} Sample;

typedef struct ShardFile {
    char *path;
    int file; /* -1: opened for each read */
} ShardFile;

struct Dataset {
    DatasetOptions options; /* without patterns and prompt */
    char *prompt;
    ShardFile *shards;
    size_t num_shards;
    size_t shards_capacity;
    Sample *samples;
    size_t num_samples;
    size_t samples_capacity;
    Member *members; /* images and clips of all samples */
    size_t num_members;
    size_t members_capacity;
    SampleItem *items; /* [num_members], in the order of their tokens within a sample */
    size_t items_capacity;
    char *texts; /* prompts and captions, each with a zero byte after it */
    size_t texts_bytes;
    size_t texts_capacity;
    uint64_t hash;
};

/* Fills shards, samples, members, items, texts and hash from the patterns. */
Status dataset_index_build(Dataset *dataset, char *const *patterns,
                           int num_patterns) STATUS_CHECKED;

#endif
