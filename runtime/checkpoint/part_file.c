#include "checkpoint/part_file.h"

#include "base/clock.h"
#include "base/file.h"
#include "base/memory.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

enum {
    CHUNK_ELEMENTS = 1 << 18,    /* 1 MiB on its way between device and file */
    COPY_TIMEOUT_MS = 60 * 1000, /* of one chunk */
};

/* A rank's box of a tensor, in elements: run r of `runs` holds [r * stride + begin, r * stride +
 * begin + length) of the whole. */
typedef struct Runs {
    int64_t length;
    int64_t stride;
    int64_t begin;
    int64_t runs;
} Runs;

static Runs box_runs(const ParamSpec *spec)
{
    int64_t outer = 1;
    int64_t inner = 1;
    for (int i = 0; i < spec->num_dims; i++) {
        if (i < spec->shard_dim) {
            outer *= spec->dims[i];
        } else if (i > spec->shard_dim) {
            inner *= spec->dims[i];
        }
    }
    if (spec->shard_dim < 0) {
        return (Runs){.length = inner, .stride = inner, .runs = 1};
    }
    return (Runs){.length = range_count(spec->shard) * inner,
                  .stride = spec->dims[spec->shard_dim] * inner,
                  .begin = spec->shard.begin * inner,
                  .runs = outer};
}

void part_file_name(PartFileKind kind, const char *module, char *name_out, size_t name_bytes)
{
    const char *what = kind == PART_FILE_KIND_MODEL ? "model" : "optimizer";
    int length = snprintf(name_out, name_bytes, "%s-%s.safetensors", what, module);
    CHECK(length > 0 && (size_t)length < name_bytes);
}

Status part_buffers_init(PartBuffers *buffers, Device *device)
{
    *buffers = (PartBuffers){.device = device};
    int64_t size_bytes = CHUNK_ELEMENTS * (int64_t)sizeof(float);
    TRY(device_alloc_host(device, size_bytes, (void **)&buffers->chunk));
    TRY(device_alloc_host(device, size_bytes, (void **)&buffers->packed));
    return STATUS_OK;
}

void part_buffers_done(PartBuffers *buffers)
{
    if (buffers->chunk) {
        device_free_host(buffers->device, buffers->chunk, CHUNK_ELEMENTS * sizeof(float));
    }
    if (buffers->packed) {
        device_free_host(buffers->device, buffers->packed, CHUNK_ELEMENTS * sizeof(float));
    }
    *buffers = (PartBuffers){0};
}

/* What a file holds of a part: arrays in the form of the flat buffer, each under names with its prefix. */
typedef struct PartArray {
    const char *prefix;
    float *elements; /* of `range` */
    Range range;     /* of the flat buffer */
} PartArray;

enum {
    ARRAYS_MAX = 2,
};

static const char *const state_prefixes[ARRAYS_MAX] = {"m.", "v."};

/* Returns the number of arrays. */
static int list_arrays(const CheckpointPart *part, PartFileKind kind, PartArray *arrays_out)
{
    if (kind == PART_FILE_KIND_MODEL) {
        arrays_out[0] = (PartArray){"", part->params->values, {0, part->params->count}};
        return 1;
    }
    CHECK(part->state.begin >= 0 && part->state.begin <= part->state.end &&
          part->state.end <= part->params->trained_count);
    arrays_out[0] = (PartArray){state_prefixes[0], part->m, part->state};
    arrays_out[1] = (PartArray){state_prefixes[1], part->v, part->state};
    return part->m ? ARRAYS_MAX : 0;
}

/* Elements of the parameter's box that the array holds, counted from the box's first. */
static Range held_range(const PartArray *array, const Param *param)
{
    int64_t count = tensor_count(&param->value);
    Range held = range_intersect(array->range, (Range){param->offset, param->offset + count});
    return (Range){held.begin - param->offset, held.end - param->offset};
}

/* Element `at` of a parameter's box. */
static float *array_at(const PartArray *array, const Param *param, int64_t at)
{
    return array->elements + (param->offset + at - array->range.begin);
}

typedef struct TensorName {
    char text[CATALOG_NAME_BYTES + 4];
} TensorName;

static TensorName tensor_name(const char *prefix, const char *name)
{
    TensorName made;
    int length = snprintf(made.text, sizeof made.text, "%s%s", prefix, name);
    CHECK(length > 0 && (size_t)length < sizeof made.text);
    return made;
}

static Status add_tensors(PartFile *file, const CatalogModule *module, const char *prefix)
{
    for (int i = 0; i < module->num_tensors; i++) {
        const CatalogTensor *tensor = &module->tensors[i];
        if (file->kind == PART_FILE_KIND_OPTIMIZER && !tensor->has_state) {
            continue;
        }
        TensorName name = tensor_name(prefix, tensor->name);
        TRY(safetensors_add(&file->layout, name.text, tensor->num_dims, tensor->dims));
    }
    return STATUS_OK;
}

Status part_file_init(PartFile *file, const CatalogModule *module, PartFileKind kind)
{
    *file = (PartFile){.kind = kind};
    part_file_name(kind, module->name, file->name, sizeof file->name);
    if (kind == PART_FILE_KIND_MODEL) {
        TRY(add_tensors(file, module, ""));
    } else {
        for (int i = 0; i < ARRAYS_MAX; i++) {
            TRY(add_tensors(file, module, state_prefixes[i]));
        }
    }
    TRY(safetensors_make_header(&file->layout, &file->header, &file->header_bytes));
    return STATUS_OK;
}

void part_file_done(PartFile *file)
{
    memory_free(file->header);
    safetensors_done(&file->layout);
    *file = (PartFile){0};
}

/* The other way round `status` names the file. */
static Status close_named(int descriptor, const char *path, Status status)
{
    if (status == STATUS_OK) {
        status = file_sync_and_close(descriptor);
    } else {
        close(descriptor);
    }
    return status == STATUS_OK ? STATUS_OK : fail(status, "%s: %s", path, status_message());
}

Status part_file_create(const PartFile *file, const char *folder)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, file->name);
    int descriptor = -1;
    TRY(file_open(path, O_WRONLY | O_CREAT | O_TRUNC, &descriptor));
    Status status = file_write(descriptor, 0, file->header, file->header_bytes);
    if (status == STATUS_OK && ftruncate(descriptor, file->layout.file_bytes) != 0) {
        status =
            fail(STATUS_IO, "cannot make it %lld bytes long", (long long)file->layout.file_bytes);
    }
    TRY(close_named(descriptor, path, status));
    return STATUS_OK;
}

static Status copy_now(Stream *stream, void *to, const void *from, int64_t count)
{
    TRY(stream_copy(stream, to, from, count * (int64_t)sizeof(float)));
    TRY(stream_wait(stream, clock_deadline_in_ms(COPY_TIMEOUT_MS)));
    return STATUS_OK;
}

/* Writes elements `local` of a box, which are in `chunk`; `data` is where the tensor begins in the file. */
static Status write_chunk(int descriptor, const float *chunk, int64_t data, const Runs *runs,
                          Range local)
{
    int64_t at = local.begin;
    while (at < local.end) {
        int64_t run = at / runs->length;
        int64_t within = at % runs->length;
        int64_t left = runs->length - within;
        int64_t count = local.end - at < left ? local.end - at : left;
        int64_t global = run * runs->stride + runs->begin + within;
        TRY(file_write(descriptor, data + global * (int64_t)sizeof(float),
                       chunk + (at - local.begin), (size_t)count * sizeof(float)));
        at += count;
    }
    return STATUS_OK;
}

typedef struct Writer {
    const PartFile *file;
    int descriptor;
    const PartBuffers *buffers;
    Stream *stream;
    int64_t written; /* bytes */
} Writer;

static Status write_tensor(Writer *writer, const PartArray *array, const Param *param)
{
    Range held = held_range(array, param);
    if (range_count(held) == 0 || !param->counts) {
        return STATUS_OK;
    }
    const Safetensors *layout = &writer->file->layout;
    TensorName name = tensor_name(array->prefix, param->spec.name);
    const SafetensorsTensor *tensor = safetensors_find(layout, name.text);
    CHECK(tensor); /* catalog_check_part */
    int64_t data = layout->data_begin + tensor->begin;
    Runs runs = box_runs(&param->spec);
    CHECK(runs.runs * runs.length == tensor_count(&param->value));
    for (int64_t at = held.begin; at < held.end; at += CHUNK_ELEMENTS) {
        int64_t count = held.end - at < CHUNK_ELEMENTS ? held.end - at : CHUNK_ELEMENTS;
        TRY(copy_now(writer->stream, writer->buffers->chunk, array_at(array, param, at), count));
        TRY(write_chunk(writer->descriptor, writer->buffers->chunk, data, &runs,
                        (Range){at, at + count}));
    }
    writer->written += range_count(held) * (int64_t)sizeof(float);
    return STATUS_OK;
}

static Status write_tensors(Writer *writer, const CheckpointPart *part)
{
    PartArray arrays[ARRAYS_MAX];
    int num_arrays = list_arrays(part, writer->file->kind, arrays);
    for (int a = 0; a < num_arrays; a++) {
        for (int i = 0; i < part->params->num_params; i++) {
            TRY(write_tensor(writer, &arrays[a], &part->params->params[i]));
        }
    }
    return STATUS_OK;
}

Status part_file_write(const PartFile *file, const char *folder, const CheckpointPart *part,
                       const PartBuffers *buffers, Stream *stream, int64_t *written_out)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, file->name);
    Writer writer = {.file = file, .buffers = buffers, .stream = stream};
    TRY(file_open(path, O_WRONLY, &writer.descriptor));
    TRY(close_named(writer.descriptor, path, write_tensors(&writer, part)));
    *written_out = writer.written;
    return STATUS_OK;
}

typedef struct Reader {
    int descriptor;
    Safetensors layout; /* as the file has it */
    const ManifestFile *expected;
    const PartBuffers *buffers;
    Stream *stream;
} Reader;

/* Of the whole tensor's elements `global`, which are in `chunk`, packs those of this rank's box.
 * They are neighbours in the box too: which, is returned. */
static Range pack_chunk(const PartBuffers *buffers, const Runs *runs, Range global)
{
    Range local = {0, 0};
    if (runs->length == 0) {
        return local;
    }
    for (int64_t run = global.begin / runs->stride; run * runs->stride < global.end; run++) {
        int64_t begin = run * runs->stride + runs->begin;
        Range part = range_intersect(global, (Range){begin, begin + runs->length});
        if (range_count(part) == 0) {
            continue;
        }
        if (range_count(local) == 0) {
            local.begin = run * runs->length + part.begin - begin;
            local.end = local.begin;
        }
        memcpy(buffers->packed + range_count(local), buffers->chunk + (part.begin - global.begin),
               (size_t)range_count(part) * sizeof(float));
        local.end += range_count(part);
    }
    return local;
}

/* Reads all of a tensor, since its checksum is of the whole, and keeps what the array holds of it. */
static Status load_tensor(const Reader *reader, const PartArray *array, const Param *param,
                          const SafetensorsTensor *found, uint32_t expected_crc)
{
    const PartBuffers *buffers = reader->buffers;
    Range held = held_range(array, param);
    Runs runs = box_runs(&param->spec);
    int64_t total = (found->end - found->begin) / (int64_t)sizeof(float);
    int64_t data = reader->layout.data_begin + found->begin;
    uLong crc = crc32(0, NULL, 0);
    for (int64_t at = 0; at < total; at += CHUNK_ELEMENTS) {
        int64_t count = total - at < CHUNK_ELEMENTS ? total - at : CHUNK_ELEMENTS;
        size_t size_bytes = (size_t)count * sizeof(float);
        TRY(file_read(reader->descriptor, data + at * (int64_t)sizeof(float), buffers->chunk,
                      size_bytes));
        crc = crc32(crc, (const Bytef *)buffers->chunk, (uInt)size_bytes);
        Range local = pack_chunk(buffers, &runs, (Range){at, at + count});
        Range wanted = range_intersect(local, held);
        if (range_count(wanted) > 0) {
            TRY(copy_now(reader->stream, array_at(array, param, wanted.begin),
                         buffers->packed + (wanted.begin - local.begin), range_count(wanted)));
        }
    }
    if ((uint32_t)crc != expected_crc) {
        return fail(STATUS_CORRUPT, "its checksum is %08lx, the manifest says %08x", crc,
                    expected_crc);
    }
    return STATUS_OK;
}

static void tell_shape(int num_dims, const int64_t *dims, char *text, size_t text_bytes)
{
    size_t used = 0;
    for (int i = 0; i < num_dims; i++) {
        int length = snprintf(text + used, text_bytes - used, "%s%lld", i > 0 ? ", " : "",
                              (long long)dims[i]);
        used += (size_t)length < text_bytes - used ? (size_t)length : 0;
    }
}

static Status check_shape(const ParamSpec *expected, const SafetensorsTensor *found)
{
    if (strcmp(found->dtype, "F32") != 0) {
        return fail(STATUS_INVALID, "dtype %s, expected F32", found->dtype);
    }
    bool is_same = found->num_dims == expected->num_dims;
    char told[2][128] = {"", ""};
    tell_shape(expected->num_dims, expected->dims, told[0], sizeof told[0]);
    tell_shape(found->num_dims, found->dims, told[1], sizeof told[1]);
    for (int i = 0; is_same && i < found->num_dims; i++) {
        is_same = found->dims[i] == expected->dims[i];
    }
    if (!is_same) {
        return fail(STATUS_INVALID, "shape [%s], the model has [%s]", told[1], told[0]);
    }
    return STATUS_OK;
}

/* The checksum of a file's header, which is small. */
static Status check_header(const Reader *reader)
{
    const Safetensors *layout = &reader->layout;
    uint8_t *header = NULL;
    TRY(MEMORY_NEW(&header, layout->data_begin));
    Status status = file_read(reader->descriptor, 0, header, (size_t)layout->data_begin);
    if (status == STATUS_OK) {
        uint32_t crc = (uint32_t)crc32(0, header, (uInt)layout->data_begin);
        if (crc != reader->expected->header_crc ||
            reader->expected->num_tensors != layout->num_tensors) {
            status = fail(STATUS_CORRUPT, "its header is not the one that the manifest tells of");
        }
    }
    memory_free(header);
    TRY(status);
    return STATUS_OK;
}

/* What of an array is in the parameter's tensor. */
static Status load_param(const Reader *reader, PartFileKind kind, const PartArray *array,
                         const Param *param, const char *name)
{
    const SafetensorsTensor *tensor = safetensors_find(&reader->layout, name);
    if (!tensor && kind == PART_FILE_KIND_OPTIMIZER) {
        return fail(STATUS_INVALID,
                    "it is not in it: the parameter was frozen when this was written; a resumed "
                    "job must train no other parameters");
    }
    if (!tensor) {
        return fail(STATUS_INVALID, "the model has it, the file has not");
    }
    const ManifestTensor *sum = &reader->expected->tensors[tensor - reader->layout.tensors];
    if (strcmp(sum->name, tensor->name) != 0) {
        return fail(STATUS_CORRUPT, "the manifest has %s in its place", sum->name);
    }
    TRY(check_shape(&param->spec, tensor));
    if (range_count(held_range(array, param)) == 0) {
        return STATUS_OK; /* other ranks have it */
    }
    return load_tensor(reader, array, param, tensor, sum->crc);
}

static Status load_array(const Reader *reader, PartFileKind kind, const PartArray *array,
                         const ParamSet *params)
{
    for (int i = 0; i < params->num_params; i++) {
        const Param *param = &params->params[i];
        bool is_held = range_count(held_range(array, param)) > 0;
        if (kind == PART_FILE_KIND_OPTIMIZER && !is_held) {
            continue;
        }
        TensorName name = tensor_name(array->prefix, param->spec.name);
        Status status = load_param(reader, kind, array, param, name.text);
        if (status != STATUS_OK) {
            return fail(status, "tensor %s: %s", name.text, status_message());
        }
    }
    return STATUS_OK;
}

static Status load_open(Reader *reader, PartFileKind kind, const CheckpointPart *part)
{
    int64_t size_bytes = 0;
    TRY(file_size(reader->descriptor, &size_bytes));
    if (size_bytes != reader->expected->size_bytes) {
        return fail(STATUS_CORRUPT, "it has %lld bytes, the manifest says %lld",
                    (long long)size_bytes, (long long)reader->expected->size_bytes);
    }
    TRY(safetensors_read(reader->descriptor, &reader->layout));
    TRY(check_header(reader));
    PartArray arrays[ARRAYS_MAX];
    int num_arrays = list_arrays(part, kind, arrays);
    for (int a = 0; a < num_arrays; a++) {
        TRY(load_array(reader, kind, &arrays[a], part->params));
    }
    return STATUS_OK;
}

Status part_file_load(const char *folder, const ManifestFile *expected, PartFileKind kind,
                      const CheckpointPart *part, const PartBuffers *buffers, Stream *stream)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, expected->name);
    Reader reader = {.expected = expected, .buffers = buffers, .stream = stream};
    TRY(file_open(path, O_RDONLY, &reader.descriptor));
    Status status = load_open(&reader, kind, part);
    safetensors_done(&reader.layout);
    close(reader.descriptor);
    return status == STATUS_OK ? STATUS_OK : fail(status, "%s: %s", path, status_message());
}
