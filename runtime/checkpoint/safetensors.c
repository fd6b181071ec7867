#include "checkpoint/safetensors.h"

#include "base/file.h"
#include "base/memory.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct DTypeBytes {
    const char *name;
    int64_t bytes;
} DTypeBytes;

static const DTypeBytes dtypes[] = {{"F64", 8},     {"F32", 4},     {"F16", 2}, {"BF16", 2},
                                    {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"I64", 8}, {"I32", 4},
                                    {"I16", 2},     {"I8", 1},      {"U64", 8}, {"U32", 4},
                                    {"U16", 2},     {"U8", 1},      {"BOOL", 1}};

void safetensors_done(Safetensors *safetensors)
{
    for (int i = 0; i < safetensors->num_tensors; i++) {
        memory_free(safetensors->tensors[i].name);
    }
    memory_free(safetensors->tensors);
    *safetensors = (Safetensors){0};
}

static int64_t dtype_size(const char *name)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        if (strcmp(dtypes[i].name, name) == 0) {
            return dtypes[i].bytes;
        }
    }
    return 0;
}

/* A whole number of at least 0 in element `index` of an array. */
static bool read_number(const json_t *array, size_t index, int64_t *number_out)
{
    const json_t *value = json_array_get(array, index);
    *number_out = json_integer_value(value);
    return json_is_integer(value) && *number_out >= 0;
}

static Status parse_shape(const json_t *shape, SafetensorsTensor *tensor, int64_t *count_out)
{
    if (!json_is_array(shape) || json_array_size(shape) > SAFETENSORS_DIMS_MAX) {
        return fail(STATUS_CORRUPT, "shape is not a list of at most %d numbers",
                    SAFETENSORS_DIMS_MAX);
    }
    tensor->num_dims = (int)json_array_size(shape);
    *count_out = 1;
    for (int i = 0; i < tensor->num_dims; i++) {
        if (!read_number(shape, (size_t)i, &tensor->dims[i]) ||
            __builtin_mul_overflow(*count_out, tensor->dims[i], count_out)) {
            return fail(STATUS_CORRUPT,
                        "number %d of its shape is negative, not whole, or too "
                        "large",
                        i);
        }
    }
    return STATUS_OK;
}

static Status parse_tensor(const json_t *entry, int64_t data_bytes, SafetensorsTensor *tensor)
{
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    int64_t element_bytes = dtype ? dtype_size(dtype) : 0;
    if (element_bytes == 0) {
        return fail(STATUS_CORRUPT, "dtype \"%.20s\" is not known", dtype ? dtype : "");
    }
    memcpy(tensor->dtype, dtype, strlen(dtype) + 1);
    int64_t count = 0;
    TRY(parse_shape(json_object_get(entry, "shape"), tensor, &count));
    const json_t *offsets = json_object_get(entry, "data_offsets");
    bool is_pair = json_is_array(offsets) && json_array_size(offsets) == 2 &&
                   read_number(offsets, 0, &tensor->begin) && read_number(offsets, 1, &tensor->end);
    if (!is_pair || tensor->begin > tensor->end || tensor->end > data_bytes) {
        return fail(STATUS_CORRUPT, "data_offsets are not two places within the %lld bytes of data",
                    (long long)data_bytes);
    }
    int64_t size_bytes = 0;
    if (__builtin_mul_overflow(count, element_bytes, &size_bytes) ||
        size_bytes != tensor->end - tensor->begin) {
        return fail(STATUS_CORRUPT, "its shape and dtype do not make its %lld bytes of data",
                    (long long)(tensor->end - tensor->begin));
    }
    return STATUS_OK;
}

static int compare_begins(const void *a, const void *b)
{
    const SafetensorsTensor *left = a;
    const SafetensorsTensor *right = b;
    if (left->begin != right->begin) {
        return left->begin < right->begin ? -1 : 1;
    }
    return left->end < right->end ? -1 : left->end > right->end; /* empty ones first */
}

/* Bytes that belong to no tensor or to two are refused, as by Hugging Face's reader. */
static Status check_cover(const Safetensors *safetensors, int64_t data_bytes)
{
    int64_t at = 0;
    for (int i = 0; i < safetensors->num_tensors; i++) {
        const SafetensorsTensor *tensor = &safetensors->tensors[i];
        if (tensor->begin != at) {
            return fail(STATUS_CORRUPT, "tensor %s begins at byte %lld of the data, expected %lld",
                        tensor->name, (long long)tensor->begin, (long long)at);
        }
        at = tensor->end;
    }
    if (at != data_bytes) {
        return fail(STATUS_CORRUPT,
                    "the tensors end at byte %lld of the data, which has %lld: "
                    "truncated, or not of this header",
                    (long long)at, (long long)data_bytes);
    }
    return STATUS_OK;
}

static Status parse_object(json_t *root, Safetensors *safetensors)
{
    if (!json_is_object(root)) {
        return fail(STATUS_CORRUPT, "the header is not an object of tensors");
    }
    int64_t data_bytes = safetensors->file_bytes - safetensors->data_begin;
    TRY(MEMORY_NEW(&safetensors->tensors, json_object_size(root)));
    const char *name = NULL;
    json_t *entry = NULL;
    json_object_foreach(root, name, entry)
    {
        if (strcmp(name, "__metadata__") == 0) {
            continue;
        }
        SafetensorsTensor *tensor = &safetensors->tensors[safetensors->num_tensors];
        TRY(memory_copy_text(name, &tensor->name));
        safetensors->num_tensors++;
        Status status = parse_tensor(entry, data_bytes, tensor);
        if (status != STATUS_OK) {
            return fail(status, "tensor %s: %s", name, status_message());
        }
    }
    if (safetensors->num_tensors > 0) {
        qsort(safetensors->tensors, (size_t)safetensors->num_tensors, sizeof *safetensors->tensors,
              compare_begins);
    }
    TRY(check_cover(safetensors, data_bytes));
    return STATUS_OK;
}

/* The header's length from the first 8 bytes. */
static Status parse_length(const uint8_t *bytes, int64_t file_bytes, size_t *length_out)
{
    uint64_t length = 0;
    for (int i = SAFETENSORS_PREFIX_BYTES - 1; i >= 0; i--) {
        length = length << 8 | bytes[i];
    }
    if (length > SAFETENSORS_HEADER_MAX ||
        (int64_t)length > file_bytes - SAFETENSORS_PREFIX_BYTES) {
        return fail(STATUS_CORRUPT,
                    "the header claims %llu bytes of a file of %lld (at most %d are read): not a "
                    "safetensors file, or truncated",
                    (unsigned long long)length, (long long)file_bytes, SAFETENSORS_HEADER_MAX);
    }
    *length_out = (size_t)length;
    return STATUS_OK;
}

Status safetensors_parse(const uint8_t *bytes, size_t size_bytes, int64_t file_bytes,
                         Safetensors *safetensors_out)
{
    *safetensors_out = (Safetensors){.file_bytes = file_bytes};
    if (size_bytes < SAFETENSORS_PREFIX_BYTES || file_bytes < SAFETENSORS_PREFIX_BYTES) {
        return fail(STATUS_CORRUPT, "%zu bytes are too few for a header", size_bytes);
    }
    size_t length = 0;
    TRY(parse_length(bytes, file_bytes, &length));
    if (length > size_bytes - SAFETENSORS_PREFIX_BYTES) {
        return fail(STATUS_CORRUPT, "the header of %zu bytes is truncated", length);
    }
    safetensors_out->data_begin = (int64_t)(SAFETENSORS_PREFIX_BYTES + length);
    json_error_t error;
    json_t *root = json_loadb((const char *)bytes + SAFETENSORS_PREFIX_BYTES, length,
                              JSON_REJECT_DUPLICATES, &error);
    if (!root) {
        return fail(STATUS_CORRUPT, "the header is not JSON: byte %d: %s", error.position,
                    error.text);
    }
    Status status = parse_object(root, safetensors_out);
    json_decref(root);
    TRY(status);
    return STATUS_OK;
}

Status safetensors_read(int file, Safetensors *safetensors_out)
{
    *safetensors_out = (Safetensors){0};
    int64_t file_bytes = 0;
    TRY(file_size(file, &file_bytes));
    if (file_bytes < SAFETENSORS_PREFIX_BYTES) {
        return fail(STATUS_CORRUPT, "%lld bytes are too few for a header", (long long)file_bytes);
    }
    uint8_t prefix[SAFETENSORS_PREFIX_BYTES];
    size_t length = 0;
    TRY(file_read(file, 0, prefix, sizeof prefix));
    TRY(parse_length(prefix, file_bytes, &length));
    uint8_t *bytes = NULL;
    TRY(MEMORY_NEW(&bytes, SAFETENSORS_PREFIX_BYTES + length));
    Status status = file_read(file, 0, bytes, SAFETENSORS_PREFIX_BYTES + length);
    if (status == STATUS_OK) {
        status = safetensors_parse(bytes, SAFETENSORS_PREFIX_BYTES + length, file_bytes,
                                   safetensors_out);
    }
    memory_free(bytes);
    TRY(status);
    return STATUS_OK;
}

Status safetensors_add(Safetensors *safetensors, const char *name, int num_dims,
                       const int64_t *dims)
{
    CHECK(num_dims <= SAFETENSORS_DIMS_MAX);
    /* Powers of two, so that a number of adds costs a number of copies. */
    int count = safetensors->num_tensors;
    if ((count & (count - 1)) == 0) {
        SafetensorsTensor *grown = NULL;
        TRY(MEMORY_NEW(&grown, count == 0 ? 1 : 2 * count));
        if (count > 0) {
            memcpy(grown, safetensors->tensors, (size_t)count * sizeof *grown);
        }
        memory_free(safetensors->tensors);
        safetensors->tensors = grown;
    }
    SafetensorsTensor *tensor = &safetensors->tensors[count];
    *tensor = (SafetensorsTensor){.dtype = "F32", .num_dims = num_dims};
    int64_t size_bytes = 4;
    for (int i = 0; i < num_dims; i++) {
        tensor->dims[i] = dims[i];
        size_bytes *= dims[i];
    }
    tensor->begin = count > 0 ? tensor[-1].end : 0;
    tensor->end = tensor->begin + size_bytes;
    TRY(memory_copy_text(name, &tensor->name));
    safetensors->num_tensors++;
    return STATUS_OK;
}

/* 0 when all went well, as jansson's setters return it. */
static int add_entry(json_t *root, const SafetensorsTensor *tensor)
{
    json_t *shape = json_array();
    int result = 0;
    for (int i = 0; i < tensor->num_dims; i++) {
        result |= json_array_append_new(shape, json_integer(tensor->dims[i]));
    }
    json_t *entry = json_pack("{s:s, s:o, s:[I, I]}", "dtype", tensor->dtype, "shape", shape,
                              "data_offsets", (json_int_t)tensor->begin, (json_int_t)tensor->end);
    return result | json_object_set_new(root, tensor->name, entry);
}

Status safetensors_make_header(Safetensors *safetensors, char **bytes_out, size_t *size_bytes_out)
{
    /* Hugging Face's loaders ask for "format". */
    json_t *root = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    int result = root ? 0 : -1;
    for (int i = 0; i < safetensors->num_tensors; i++) {
        result |= add_entry(root, &safetensors->tensors[i]);
    }
    size_t length = result == 0 ? json_dumpb(root, NULL, 0, JSON_COMPACT) : 0;
    if (length == 0) {
        json_decref(root);
        return fail(STATUS_INVALID,
                    "cannot make the header of %d tensors: a name is not UTF-8, or "
                    "memory is short",
                    safetensors->num_tensors);
    }
    size_t padded = (length + 7) / 8 * 8;
    Status status = memory_alloc(SAFETENSORS_PREFIX_BYTES + padded, 1, (void **)bytes_out);
    if (status == STATUS_OK) {
        char *text = *bytes_out + SAFETENSORS_PREFIX_BYTES;
        for (int i = 0; i < SAFETENSORS_PREFIX_BYTES; i++) {
            (*bytes_out)[i] = (char)(padded >> (8 * i));
        }
        memset(text, ' ', padded);
        CHECK(json_dumpb(root, text, padded, JSON_COMPACT) == length);
        *size_bytes_out = SAFETENSORS_PREFIX_BYTES + padded;
        safetensors->data_begin = (int64_t)*size_bytes_out;
        int last = safetensors->num_tensors - 1;
        safetensors->file_bytes =
            safetensors->data_begin + (last >= 0 ? safetensors->tensors[last].end : 0);
    }
    json_decref(root);
    TRY(status);
    return STATUS_OK;
}

const SafetensorsTensor *safetensors_find(const Safetensors *safetensors, const char *name)
{
    for (int i = 0; i < safetensors->num_tensors; i++) {
        if (strcmp(safetensors->tensors[i].name, name) == 0) {
            return &safetensors->tensors[i];
        }
    }
    return NULL;
}
