/* Manifest: viaduct.json, what a checkpoint is made of: the state, and sizes and checksums (crc32
 * as zlib and gzip have it) of its files, of each safetensors file also by tensor, so that damage
 * is told by name and a rank checks what it reads while it reads.
 * Threading: pure functions.
 */
#ifndef CHECKPOINT_MANIFEST_H
#define CHECKPOINT_MANIFEST_H

#include "checkpoint/checkpoint.h"

typedef struct ManifestTensor {
    char *name;
    uint32_t crc;
} ManifestTensor;

typedef struct ManifestFile {
    char *name;
    int64_t size_bytes;
    uint32_t crc;
    uint32_t header_crc; /* of the bytes before the data; 0 for files that are not safetensors */
    ManifestTensor *tensors; /* in the order of their data */
    int num_tensors;
} ManifestFile;

typedef struct Manifest {
    CheckpointState state;
    ManifestFile *files;
    size_t num_files;
    size_t capacity;
} Manifest;

void manifest_done(Manifest *manifest);

/* Reads a file of the folder whole and adds it. */
Status manifest_add_file(Manifest *manifest, const char *folder, const char *name) STATUS_CHECKED;
/* The same for a safetensors file, with its tensors. */
Status manifest_add_tensors(Manifest *manifest, const char *folder,
                            const char *name) STATUS_CHECKED;

/* Writes the manifest into the folder, whole, by rename, synced. */
Status manifest_write(const Manifest *manifest, const char *folder) STATUS_CHECKED;

/* manifest_done in every case. STATUS_NOT_FOUND: the folder is no complete checkpoint.
 * STATUS_CORRUPT. */
Status manifest_read(const char *folder, Manifest *manifest_out) STATUS_CHECKED;

/* NULL when there is none of that name. */
const ManifestFile *manifest_find(const Manifest *manifest, const char *name);

#endif
