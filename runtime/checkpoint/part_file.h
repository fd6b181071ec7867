/* PartFile: one safetensors file of a module, seen from a rank that holds a box of each tensor:
 * weights, or the optimizer's two arrays.
 *
 * A box is a range of one dim, so of a tensor seen as [outer, dim, inner] it is `outer` runs of
 * neighbours in the file.
 * Threading: the step thread.
 */
#ifndef CHECKPOINT_PART_FILE_H
#define CHECKPOINT_PART_FILE_H

#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"

typedef enum PartFileKind {
    PART_FILE_KIND_MODEL,
    PART_FILE_KIND_OPTIMIZER,
} PartFileKind;

typedef struct PartFile {
    char name[64]; /* "model-vision.safetensors" */
    const ParamSet *params;
    float *arrays[2];   /* flat, [params->count]: values; or m, v */
    Safetensors layout; /* tensor t: params->params[t % num_params] in arrays[t / num_params] */
    char *header;       /* the file's bytes up to the data */
    size_t header_bytes;
    float *chunk;  /* host memory, one of the file */
    float *packed; /* host memory, this rank's part of a chunk */
} PartFile;

/* "model-vision.safetensors". */
void part_file_name(PartFileKind kind, const char *module, char *name_out, size_t name_bytes);

/* part_file_done in every case. */
Status part_file_init(PartFile *file, const CheckpointPart *part, PartFileKind kind) STATUS_CHECKED;
void part_file_done(PartFile *file);

/* Creates the file in `folder` with its header and its full length. Synced. */
Status part_file_create(const PartFile *file, const char *folder) STATUS_CHECKED;

/* Writes this rank's boxes of the parameters that count. Synced. *written_out: bytes. */
Status part_file_write(const PartFile *file, const char *folder, Stream *stream,
                       int64_t *written_out) STATUS_CHECKED;

/* Reads this rank's boxes, checks every tensor against the manifest's checksums. When it fails the
 * arrays are undefined. */
Status part_file_load(const PartFile *file, const char *folder, const ManifestFile *expected,
                      Stream *stream) STATUS_CHECKED;

#endif
