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
};

/* One member: its name is the sample's key, a dot, and the suffix. */
typedef struct Member {
    int64_t offset; /* in the shard, bytes */
    int64_t size_bytes;
    char suffix[MEMBER_SUFFIX_BYTES];
    int32_t number; /* of an image; -1 for the only one */
} Member;

typedef struct Sample {
    SampleInfo info; /* info.key is owned */
    int32_t shard;
    int64_t first_image; /* in Dataset.images */
    Member caption;      /* suffix "" when absent */
    Member json;
} Sample;

typedef struct ShardFile {
    char *path;
    int file; /* -1: opened for each read */
} ShardFile;

struct Dataset {
    char *prompt;
    int rows_per_image;
    int image_size;
    int max_tokens;
    ShardFile *shards;
    size_t num_shards;
    size_t shards_capacity;
    Sample *samples;
    size_t num_samples;
    size_t samples_capacity;
    Member *images;
    size_t num_images;
    size_t images_capacity;
    uint64_t hash;
};

/* Fills shards, samples, images and hash from the patterns. */
Status dataset_index_build(Dataset *dataset, char *const *patterns,
                           int num_patterns) STATUS_CHECKED;

#endif
