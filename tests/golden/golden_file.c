#include "tests/golden/golden_file.h"

#include "base/memory.h"

#include <stdio.h>
#include <string.h>

static Status read_data(const char *path, GoldenFile *file)
{
    FILE *stream = fopen(path, "rb");
    if (!stream) {
        return fail(STATUS_NOT_FOUND, "%s: cannot be opened; run generate.py", path);
    }
    bool good = fseek(stream, 0, SEEK_END) == 0;
    file->data_bytes = ftell(stream);
    good = good && file->data_bytes > 0 && fseek(stream, 0, SEEK_SET) == 0;
    Status status = good ? MEMORY_NEW(&file->data, file->data_bytes) : STATUS_OK;
    good = good && status == STATUS_OK &&
           fread(file->data, 1, (size_t)file->data_bytes, stream) == (size_t)file->data_bytes;
    fclose(stream);
    return good ? STATUS_OK : fail(STATUS_IO, "%s: cannot be read", path);
}

static Status read_config(GoldenFile *file, const char *line)
{
    TRY(memory_grow((void **)&file->configs, &file->configs_capacity, (size_t)file->num_configs + 1,
                    sizeof *file->configs));
    GoldenConfig *config = &file->configs[file->num_configs++];
    if (sscanf(line, "config %63s %lf", config->name, &config->value) != 2) {
        return fail(STATUS_CORRUPT, "golden: \"%s\"", line);
    }
    return STATUS_OK;
}

static Status read_tensor(GoldenFile *file, const char *line)
{
    TRY(memory_grow((void **)&file->tensors, &file->tensors_capacity, (size_t)file->num_tensors + 1,
                    sizeof *file->tensors));
    GoldenTensor *entry = &file->tensors[file->num_tensors++];
    Tensor *tensor = &entry->tensor;
    *tensor = (Tensor){0};
    char dtype[4];
    int used = 0;
    if (sscanf(line, "tensor %159s %3s %d%n", entry->name, dtype, &tensor->num_dims, &used) != 3 ||
        tensor->num_dims < 0 || tensor->num_dims > TENSOR_DIMS_MAX) {
        return fail(STATUS_CORRUPT, "golden: \"%s\"", line);
    }
    tensor->dtype = strcmp(dtype, "F32") == 0   ? DTYPE_F32
                    : strcmp(dtype, "I32") == 0 ? DTYPE_I32
                                                : DTYPE_U8;
    char *at = NULL;
    const char *rest = line + used;
    for (int i = 0; i < tensor->num_dims; i++) {
        tensor->dims[i] = strtoll(rest, &at, 10);
        rest = at;
    }
    int64_t offset = strtoll(rest, &at, 10);
    if (at == rest || offset < 0 || offset > file->data_bytes - tensor_bytes(tensor)) {
        return fail(STATUS_CORRUPT, "golden: \"%s\" lies outside the data", line);
    }
    tensor->data = file->data + offset;
    return STATUS_OK;
}

static Status read_index(FILE *stream, GoldenFile *file)
{
    char line[512];
    while (fgets(line, sizeof line, stream)) {
        if (strncmp(line, "config ", 7) == 0) {
            TRY(read_config(file, line));
        } else {
            TRY(read_tensor(file, line));
        }
    }
    return STATUS_OK;
}

Status golden_open(const char *name, GoldenFile *file)
{
    *file = (GoldenFile){0};
    char path[128];
    snprintf(path, sizeof path, "%s.bin", name);
    TRY(read_data(path, file));
    snprintf(path, sizeof path, "%s.txt", name);
    FILE *stream = fopen(path, "r");
    if (!stream) {
        return fail(STATUS_NOT_FOUND, "%s: cannot be opened; run generate.py", path);
    }
    Status status = read_index(stream, file);
    fclose(stream);
    return status;
}

void golden_close(GoldenFile *file)
{
    memory_free(file->tensors);
    memory_free(file->configs);
    memory_free(file->data);
    *file = (GoldenFile){0};
}

const Tensor *golden_tensor(const GoldenFile *file, const char *group, const char *name)
{
    char full[160];
    snprintf(full, sizeof full, "%s%s", group, name);
    for (int i = 0; i < file->num_tensors; i++) {
        if (strcmp(file->tensors[i].name, full) == 0) {
            return &file->tensors[i].tensor;
        }
    }
    fprintf(stderr, "golden: no tensor %s\n", full);
    CHECK(false);
    return NULL;
}

double golden_config(const GoldenFile *file, const char *name)
{
    for (int i = 0; i < file->num_configs; i++) {
        if (strcmp(file->configs[i].name, name) == 0) {
            return file->configs[i].value;
        }
    }
    fprintf(stderr, "golden: no config %s\n", name);
    CHECK(false);
    return 0;
}
