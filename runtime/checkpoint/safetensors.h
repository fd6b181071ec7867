/* Safetensors: the header of a file of named arrays: which tensor is where. The format is Hugging
 * Face's: 8 bytes, the length of the header (little-endian); the header, JSON {"name": {"dtype":
 * "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {...}}, filled up
 * with spaces; then the data, row-major and little-endian, without gaps.
 *
 * Nothing of a file is believed: lengths, shapes and offsets are checked against each other and
 * against the file's size.
 * Threading: pure functions.
 */
#ifndef CHECKPOINT_SAFETENSORS_H
#define CHECKPOINT_SAFETENSORS_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

enum {
    SAFETENSORS_DIMS_MAX = 8,
    SAFETENSORS_HEADER_MAX = 32 << 20, /* bytes */
    SAFETENSORS_PREFIX_BYTES = 8,
};

typedef struct SafetensorsTensor {
    char *name;
    char dtype[12]; /* as in the file: "F32", "BF16", ... */
    int num_dims;
    int64_t dims[SAFETENSORS_DIMS_MAX];
    int64_t begin; /* bytes from the start of the data */
    int64_t end;
} SafetensorsTensor;

typedef struct Safetensors {
    SafetensorsTensor *tensors; /* in the order of their data; owned, with their names */
    int num_tensors;
    int64_t data_begin; /* bytes from the start of the file */
    int64_t file_bytes;
} Safetensors;

void safetensors_done(Safetensors *safetensors);

/* Parses the beginning of a file of `file_bytes` bytes: `bytes` holds all of it up to the data, or
 * STATUS_CORRUPT. safetensors_done in every case. */
Status safetensors_parse(const uint8_t *bytes, size_t size_bytes, int64_t file_bytes,
                         Safetensors *safetensors_out) STATUS_CHECKED;

/* The same from an open file. STATUS_CORRUPT, STATUS_IO; the message does not name the file. */
Status safetensors_read(int file, Safetensors *safetensors_out) STATUS_CHECKED;

/* Adds an F32 tensor after those there. */
Status safetensors_add(Safetensors *safetensors, const char *name, int num_dims,
                       const int64_t *dims) STATUS_CHECKED;

/* The file's bytes up to the data, a pure function of the tensors added; sets data_begin and
 * file_bytes. Owned by the caller (memory_free). */
Status safetensors_make_header(Safetensors *safetensors, char **bytes_out,
                               size_t *size_bytes_out) STATUS_CHECKED;

/* NULL when there is none of that name. */
const SafetensorsTensor *safetensors_find(const Safetensors *safetensors, const char *name);

#endif
