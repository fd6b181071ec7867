#include "checkpoint/manifest.h"

#include "base/file.h"
#include "base/memory.h"
#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/safetensors.h"

#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

#define MANIFEST_FORMAT "viaduct checkpoint 1"

enum {
    READ_BYTES = 1 << 20,
    MANIFEST_BYTES_MAX = 64 << 20,
};

void manifest_done(Manifest *manifest)
{
    for (size_t i = 0; i < manifest->num_files; i++) {
        ManifestFile *file = &manifest->files[i];
        for (int t = 0; t < file->num_tensors; t++) {
            memory_free(file->tensors[t].name);
        }
        memory_free(file->tensors);
        memory_free(file->name);
    }
    memory_free(manifest->files);
    *manifest = (Manifest){0};
}

const ManifestFile *manifest_find(const Manifest *manifest, const char *name)
{
    for (size_t i = 0; i < manifest->num_files; i++) {
        if (strcmp(manifest->files[i].name, name) == 0) {
            return &manifest->files[i];
        }
    }
    return NULL;
}

/* A new file at the end of the list: last_file. */
static Status append_file(Manifest *manifest, const char *name)
{
    TRY(memory_grow((void **)&manifest->files, &manifest->capacity, manifest->num_files + 1,
                    sizeof *manifest->files));
    ManifestFile *file = &manifest->files[manifest->num_files];
    *file = (ManifestFile){0};
    TRY(memory_copy_text(name, &file->name));
    manifest->num_files++;
    return STATUS_OK;
}

static ManifestFile *last_file(const Manifest *manifest)
{
    CHECK(manifest->num_files > 0);
    return &manifest->files[manifest->num_files - 1];
}

/* Checksum of the bytes [begin, end) of an open file. */
static Status sum_range(int file, int64_t begin, int64_t end, uint8_t *buffer, uint32_t *crc_out)
{
    uLong crc = crc32(0, NULL, 0);
    while (begin < end) {
        size_t count = end - begin < READ_BYTES ? (size_t)(end - begin) : READ_BYTES;
        TRY(file_read(file, begin, buffer, count));
        crc = crc32(crc, buffer, (uInt)count);
        begin += (int64_t)count;
    }
    *crc_out = (uint32_t)crc;
    return STATUS_OK;
}

static Status sum_tensors(ManifestFile *entry, int file, uint8_t *buffer)
{
    Safetensors layout;
    Status status = safetensors_read(file, &layout);
    if (status == STATUS_OK) {
        status = MEMORY_NEW(&entry->tensors, layout.num_tensors);
    }
    if (status == STATUS_OK) {
        status = sum_range(file, 0, layout.data_begin, buffer, &entry->header_crc);
        entry->crc = entry->header_crc;
        entry->size_bytes = layout.file_bytes;
    }
    for (int i = 0; i < layout.num_tensors && status == STATUS_OK; i++) {
        const SafetensorsTensor *tensor = &layout.tensors[i];
        ManifestTensor *sum = &entry->tensors[i];
        status = memory_copy_text(tensor->name, &sum->name);
        entry->num_tensors = i + (status == STATUS_OK);
        if (status == STATUS_OK) {
            status = sum_range(file, layout.data_begin + tensor->begin,
                               layout.data_begin + tensor->end, buffer, &sum->crc);
            entry->crc = (uint32_t)crc32_combine(entry->crc, sum->crc, tensor->end - tensor->begin);
        }
    }
    safetensors_done(&layout);
    TRY(status);
    return STATUS_OK;
}

static Status add_file(Manifest *manifest, const char *folder, const char *name, bool has_tensors)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int file = -1;
    uint8_t *buffer = NULL;
    TRY(append_file(manifest, name));
    ManifestFile *entry = last_file(manifest);
    TRY(file_open(path, O_RDONLY, &file));
    Status status = MEMORY_NEW(&buffer, READ_BYTES);
    if (status == STATUS_OK && has_tensors) {
        status = sum_tensors(entry, file, buffer);
    } else if (status == STATUS_OK) {
        status = file_size(file, &entry->size_bytes);
        status = status == STATUS_OK ? sum_range(file, 0, entry->size_bytes, buffer, &entry->crc)
                                     : status;
    }
    memory_free(buffer);
    close(file);
    return status == STATUS_OK ? STATUS_OK : fail(status, "%s: %s", path, status_message());
}

Status manifest_add_file(Manifest *manifest, const char *folder, const char *name)
{
    TRY(add_file(manifest, folder, name, false));
    return STATUS_OK;
}

Status manifest_add_tensors(Manifest *manifest, const char *folder, const char *name)
{
    TRY(add_file(manifest, folder, name, true));
    return STATUS_OK;
}

/* JSON numbers are read as doubles by many, so 64 bits are written as text. */
static json_t *hex_text(uint64_t value, int digits)
{
    char text[24];
    snprintf(text, sizeof text, "%0*" PRIx64, digits, value);
    return json_string(text);
}

/* 0 when all went well, as jansson's setters return it. */
static int set_file(json_t *files, const ManifestFile *file)
{
    json_t *entry = json_object();
    int result = json_object_set_new(entry, "size_bytes", json_integer(file->size_bytes));
    result |= json_object_set_new(entry, "crc32", hex_text(file->crc, 8));
    if (file->num_tensors > 0) {
        json_t *tensors = json_object();
        result |= json_object_set_new(entry, "header_crc32", hex_text(file->header_crc, 8));
        for (int i = 0; i < file->num_tensors; i++) {
            result |= json_object_set_new(tensors, file->tensors[i].name,
                                          hex_text(file->tensors[i].crc, 8));
        }
        result |= json_object_set_new(entry, "tensors_crc32", tensors);
    }
    return result | json_object_set_new(files, file->name, entry);
}

Status manifest_write(const Manifest *manifest, const char *folder)
{
    const CheckpointState *state = &manifest->state;
    json_t *root = json_object();
    json_t *files = json_object();
    int result = json_object_set_new(root, "format", json_string(MANIFEST_FORMAT));
    result |= json_object_set_new(root, "step", json_integer(state->step));
    result |= json_object_set_new(root, "samples", json_integer(state->samples));
    result |= json_object_set_new(root, "seed", hex_text(state->seed, 16));
    result |= json_object_set_new(root, "data_hash", hex_text(state->data_hash, 16));
    for (size_t i = 0; i < manifest->num_files; i++) {
        result |= set_file(files, &manifest->files[i]);
    }
    result |= json_object_set_new(root, "files", files);
    char *text = result == 0 ? json_dumps(root, JSON_INDENT(1)) : NULL;
    json_decref(root);
    if (!text) {
        return fail(STATUS_NO_MEMORY, "no memory for the manifest of %s", folder);
    }
    Status status = file_write_whole(folder, CHECKPOINT_MANIFEST, text, strlen(text));
    memory_free(text);
    TRY(status);
    return STATUS_OK;
}

static Status read_integer(const json_t *object, const char *key, int64_t *value_out)
{
    const json_t *value = json_object_get(object, key);
    if (!json_is_integer(value) || json_integer_value(value) < 0) {
        return fail(STATUS_CORRUPT, "\"%s\" is missing or not a whole number", key);
    }
    *value_out = json_integer_value(value);
    return STATUS_OK;
}

static Status read_hex(const json_t *value, const char *key, size_t digits, uint64_t *value_out)
{
    const char *text = json_string_value(value);
    if (!text || strlen(text) != digits || strspn(text, "0123456789abcdef") != digits) {
        return fail(STATUS_CORRUPT, "\"%s\" is missing or not %zu hexadecimal digits", key, digits);
    }
    *value_out = strtoull(text, NULL, 16);
    return STATUS_OK;
}

static Status read_crc(const json_t *value, const char *key, uint32_t *crc_out)
{
    uint64_t number = 0;
    TRY(read_hex(value, key, 8, &number));
    *crc_out = (uint32_t)number;
    return STATUS_OK;
}

static Status parse_tensors(json_t *tensors, ManifestFile *file)
{
    TRY(MEMORY_NEW(&file->tensors, json_object_size(tensors)));
    const char *name = NULL;
    json_t *value = NULL;
    json_object_foreach(tensors, name, value)
    {
        ManifestTensor *tensor = &file->tensors[file->num_tensors];
        TRY(read_crc(value, name, &tensor->crc));
        TRY(memory_copy_text(name, &tensor->name));
        file->num_tensors++;
    }
    return STATUS_OK;
}

static Status parse_file(Manifest *manifest, const char *name, const json_t *entry)
{
    TRY(append_file(manifest, name));
    ManifestFile *file = last_file(manifest);
    TRY(read_integer(entry, "size_bytes", &file->size_bytes));
    TRY(read_crc(json_object_get(entry, "crc32"), "crc32", &file->crc));
    json_t *tensors = json_object_get(entry, "tensors_crc32");
    if (json_is_object(tensors)) {
        TRY(read_crc(json_object_get(entry, "header_crc32"), "header_crc32", &file->header_crc));
        TRY(parse_tensors(tensors, file));
    }
    return STATUS_OK;
}

static Status parse_manifest(const json_t *root, Manifest *manifest)
{
    const char *format = json_string_value(json_object_get(root, "format"));
    if (!format || strcmp(format, MANIFEST_FORMAT) != 0) {
        return fail(STATUS_CORRUPT, "\"format\" is \"%.40s\", expected \"%s\"",
                    format ? format : "", MANIFEST_FORMAT);
    }
    CheckpointState *state = &manifest->state;
    TRY(read_integer(root, "step", &state->step));
    TRY(read_integer(root, "samples", &state->samples));
    TRY(read_hex(json_object_get(root, "seed"), "seed", 16, &state->seed));
    TRY(read_hex(json_object_get(root, "data_hash"), "data_hash", 16, &state->data_hash));
    json_t *files = json_object_get(root, "files");
    const char *name = NULL;
    json_t *entry = NULL;
    json_object_foreach(files, name, entry)
    {
        Status status = parse_file(manifest, name, entry);
        if (status != STATUS_OK) {
            return fail(status, "file %s: %s", name, status_message());
        }
    }
    return STATUS_OK;
}

static Status parse_open_manifest(int file, Manifest *manifest)
{
    int64_t size_bytes = 0;
    TRY(file_size(file, &size_bytes));
    if (size_bytes > MANIFEST_BYTES_MAX) {
        return fail(STATUS_CORRUPT, "%lld bytes; at most %d are read", (long long)size_bytes,
                    MANIFEST_BYTES_MAX);
    }
    char *text = NULL;
    TRY(MEMORY_NEW(&text, size_bytes + 1));
    Status status = file_read(file, 0, text, (size_t)size_bytes);
    json_error_t error;
    json_t *root = NULL;
    if (status == STATUS_OK) {
        root = json_loadb(text, (size_t)size_bytes, JSON_REJECT_DUPLICATES, &error);
        status = root ? parse_manifest(root, manifest)
                      : fail(STATUS_CORRUPT, "line %d, column %d: %s", error.line, error.column,
                             error.text);
    }
    json_decref(root);
    memory_free(text);
    TRY(status);
    return STATUS_OK;
}

Status manifest_read(const char *folder, Manifest *manifest_out)
{
    *manifest_out = (Manifest){0};
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, CHECKPOINT_MANIFEST);
    int file = -1;
    Status status = file_open(path, O_RDONLY, &file);
    if (status == STATUS_NOT_FOUND) {
        return fail(status, "%s is not a complete checkpoint: there is no %s in it", folder,
                    CHECKPOINT_MANIFEST);
    }
    TRY(status);
    status = parse_open_manifest(file, manifest_out);
    close(file);
    return status == STATUS_OK ? STATUS_OK : fail(status, "%s: %s", path, status_message());
}
