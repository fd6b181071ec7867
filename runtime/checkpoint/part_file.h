/* PartFile: one safetensors file of a module: weights, or the optimizer's two arrays. A rank writes and
 * reads the boxes of it that it holds.
 *
 * A box is a range of one dim, so of a tensor seen as [outer, dim, inner] it is `outer` runs of
 * neighbours in the file. Of a box a rank may hold a range of elements only (a part of the state).
 * Threading: the step thread.
 */
#ifndef CHECKPOINT_PART_FILE_H
#define CHECKPOINT_PART_FILE_H

#include "checkpoint/catalog.h"
#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"

typedef enum PartFileKind {
    PART_FILE_KIND_MODEL,
    PART_FILE_KIND_OPTIMIZER,
    PART_FILE_KIND_COUNT,
} PartFileKind;

typedef struct PartFile {
    PartFileKind kind;
    char name[64]; /* "model-vision.safetensors" */
    Safetensors layout;
    char *header; /* the file's bytes up to the data */
    size_t header_bytes;
} PartFile;

/* Host memory for data on its way. */
typedef struct PartBuffers {
    Device *device;
    float *chunk;  /* of the file */
    float *packed; /* this rank's part of a chunk */
} PartBuffers;

/* part_buffers_done in every case. */
Status part_buffers_init(PartBuffers *buffers, Device *device) STATUS_CHECKED;
void part_buffers_done(PartBuffers *buffers);

/* "model-vision.safetensors". */
void part_file_name(PartFileKind kind, const char *module, char *name_out, size_t name_bytes);

/* A file to write, of a module of the catalog. part_file_done in every case. */
Status part_file_init(PartFile *file, const CatalogModule *module,
                      PartFileKind kind) STATUS_CHECKED;
void part_file_done(PartFile *file);

/* Creates the file in `folder` with its header and its full length. Synced. */
Status part_file_create(const PartFile *file, const char *folder) STATUS_CHECKED;

/* Writes this rank's boxes of the parameters that count. Synced. *written_out: bytes. */
Status part_file_write(const PartFile *file, const char *folder, const CheckpointPart *part,
                       const PartBuffers *buffers, Stream *stream,
                       int64_t *written_out) STATUS_CHECKED;

/* Reads this rank's boxes from a file of the manifest, and checks every tensor that it reads against the
 * manifest's checksums. When it fails the arrays are undefined. */
Status part_file_load(const char *folder, const ManifestFile *expected, PartFileKind kind,
                      const CheckpointPart *part, const PartBuffers *buffers,
                      Stream *stream) STATUS_CHECKED;

#endif
