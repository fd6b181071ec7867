/* Golden file: the tensors and numbers that generate.py wrote, by name.
 * Threading: read-only after open.
 */
#ifndef TESTS_GOLDEN_GOLDEN_FILE_H
#define TESTS_GOLDEN_GOLDEN_FILE_H

#include "tensor/tensor.h"

typedef struct GoldenTensor {
    char name[160];
    Tensor tensor; /* host memory; F32, I32 or U8 */
} GoldenTensor;

typedef struct GoldenConfig {
    char name[64];
    double value;
} GoldenConfig;

typedef struct GoldenFile {
    GoldenTensor *tensors;
    int num_tensors;
    size_t tensors_capacity;
    GoldenConfig *configs;
    int num_configs;
    size_t configs_capacity;
    char *data;
    int64_t data_bytes;
} GoldenFile;

/* Reads <name>.txt and <name>.bin of the working directory. golden_close in every case. */
Status golden_open(const char *name, GoldenFile *file) STATUS_CHECKED;
void golden_close(GoldenFile *file);

/* CHECKs that it is there. */
const Tensor *golden_tensor(const GoldenFile *file, const char *group, const char *name);
double golden_config(const GoldenFile *file, const char *name);

#endif
