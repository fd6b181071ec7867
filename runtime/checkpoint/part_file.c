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

static Status add_tensors(PartFile *file, const char *prefix)
{
    for (int i = 0; i < file->params->num_params; i++) {
        const ParamSpec *spec = &file->params->params[i].spec;
        char name[sizeof spec->name + 4];
        snprintf(name, sizeof name, "%s%s", prefix, spec->name);
        TRY(safetensors_add(&file->layout, name, spec->num_dims, spec->dims));
    }
    return STATUS_OK;
}

Status part_file_init(PartFile *file, const CheckpointPart *part, PartFileKind kind)
{
    *file = (PartFile){.params = part->params};
    part_file_name(kind, part->module, file->name, sizeof file->name);
    if (kind == PART_FILE_KIND_MODEL) {
        file->arrays[0] = part->params->values;
        TRY(add_tensors(file, ""));
    } else {
        file->arrays[0] = part->m;
        file->arrays[1] = part->v;
        TRY(add_tensors(file, "m."));
        TRY(add_tensors(file, "v."));
    }
    TRY(safetensors_make_header(&file->layout, &file->header, &file->header_bytes));
    Device *device = part->params->device;
    TRY(device_alloc_host(device, CHUNK_ELEMENTS * sizeof(float), (void **)&file->chunk));
    TRY(device_alloc_host(device, CHUNK_ELEMENTS * sizeof(float), (void **)&file->packed));
    return STATUS_OK;
}

void part_file_done(PartFile *file)
{
    if (file->chunk) {
        device_free_host(file->params->device, file->chunk, CHUNK_ELEMENTS * sizeof(float));
    }
    if (file->packed) {
        device_free_host(file->params->device, file->packed, CHUNK_ELEMENTS * sizeof(float));
    }
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

/* Writes local elements [at, at + count), which are in `chunk`; `data` is where the tensor begins
 * in the file. */
static Status write_chunk(const PartFile *file, int descriptor, int64_t data, const Runs *runs,
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
                       file->chunk + (at - local.begin), (size_t)count * sizeof(float)));
        at += count;
    }
    return STATUS_OK;
}

static Status write_tensor(const PartFile *file, int descriptor, int index, Stream *stream,
                           int64_t *written)
{
    const Param *param = &file->params->params[index % file->params->num_params];
    const float *local = file->arrays[index / file->params->num_params] + param->offset;
    int64_t data = file->layout.data_begin + file->layout.tensors[index].begin;
    Runs runs = box_runs(&param->spec);
    int64_t total = runs.runs * runs.length;
    CHECK(total == tensor_count(&param->value));
    for (int64_t at = 0; at < total; at += CHUNK_ELEMENTS) {
        int64_t count = total - at < CHUNK_ELEMENTS ? total - at : CHUNK_ELEMENTS;
        TRY(copy_now(stream, file->chunk, local + at, count));
        TRY(write_chunk(file, descriptor, data, &runs, (Range){at, at + count}));
    }
    *written += total * (int64_t)sizeof(float);
    return STATUS_OK;
}

Status part_file_write(const PartFile *file, const char *folder, Stream *stream,
                       int64_t *written_out)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, file->name);
    int descriptor = -1;
    TRY(file_open(path, O_WRONLY, &descriptor));
    Status status = STATUS_OK;
    int64_t written = 0;
    for (int i = 0; i < file->layout.num_tensors && status == STATUS_OK; i++) {
        if (file->params->params[i % file->params->num_params].counts) {
            status = write_tensor(file, descriptor, i, stream, &written);
        }
    }
    TRY(close_named(descriptor, path, status));
    *written_out = written;
    return STATUS_OK;
}

/* Of the whole tensor's elements `global`, which are in `chunk`, packs those of this rank's box.
 * They are neighbours in the rank's array too, from *local_out on. Returns how many. */
static int64_t pack_chunk(const PartFile *file, const Runs *runs, Range global, int64_t *local_out)
{
    int64_t packed = 0;
    *local_out = 0;
    if (runs->length == 0) {
        return 0;
    }
    for (int64_t run = global.begin / runs->stride; run * runs->stride < global.end; run++) {
        int64_t begin = run * runs->stride + runs->begin;
        Range part = range_intersect(global, (Range){begin, begin + runs->length});
        if (range_count(part) == 0) {
            continue;
        }
        if (packed == 0) {
            *local_out = run * runs->length + part.begin - begin;
        }
        memcpy(file->packed + packed, file->chunk + (part.begin - global.begin),
               (size_t)range_count(part) * sizeof(float));
        packed += range_count(part);
    }
    return packed;
}

static Status load_tensor(const PartFile *file, int descriptor, int index,
                          const SafetensorsTensor *found, int64_t data_begin, uint32_t expected_crc,
                          Stream *stream)
{
    const Param *param = &file->params->params[index % file->params->num_params];
    float *local = file->arrays[index / file->params->num_params] + param->offset;
    Runs runs = box_runs(&param->spec);
    int64_t total = (found->end - found->begin) / (int64_t)sizeof(float);
    uLong crc = crc32(0, NULL, 0);
    for (int64_t at = 0; at < total; at += CHUNK_ELEMENTS) {
        int64_t count = total - at < CHUNK_ELEMENTS ? total - at : CHUNK_ELEMENTS;
        size_t size_bytes = (size_t)count * sizeof(float);
        TRY(file_read(descriptor, data_begin + found->begin + at * (int64_t)sizeof(float),
                      file->chunk, size_bytes));
        crc = crc32(crc, (const Bytef *)file->chunk, (uInt)size_bytes);
        int64_t place = 0;
        int64_t packed = pack_chunk(file, &runs, (Range){at, at + count}, &place);
        if (packed > 0) {
            TRY(copy_now(stream, local + place, file->packed, packed));
        }
    }
    if ((uint32_t)crc != expected_crc) {
        return fail(STATUS_CORRUPT, "its checksum is %08lx, the manifest says %08x", crc,
                    expected_crc);
    }
    return STATUS_OK;
}

static Status check_shape(const SafetensorsTensor *expected, const SafetensorsTensor *found)
{
    if (strcmp(found->dtype, "F32") != 0) {
        return fail(STATUS_INVALID, "dtype %s, expected F32", found->dtype);
    }
    bool is_same = found->num_dims == expected->num_dims;
    char told[2][128] = {"", ""};
    const SafetensorsTensor *both[2] = {expected, found};
    for (int side = 0; side < 2; side++) {
        size_t used = 0;
        for (int i = 0; i < both[side]->num_dims; i++) {
            int length = snprintf(told[side] + used, sizeof told[side] - used, "%s%lld",
                                  i > 0 ? ", " : "", (long long)both[side]->dims[i]);
            used += (size_t)length < sizeof told[side] - used ? (size_t)length : 0;
        }
    }
    for (int i = 0; is_same && i < found->num_dims; i++) {
        is_same = found->dims[i] == expected->dims[i];
    }
    if (!is_same) {
        return fail(STATUS_INVALID, "shape [%s], the model has [%s]", told[1], told[0]);
    }
    return STATUS_OK;
}

/* The checksum of a file's header, which is small. */
static Status check_header(int descriptor, const Safetensors *found, const ManifestFile *expected)
{
    uint8_t *header = NULL;
    TRY(MEMORY_NEW(&header, found->data_begin));
    Status status = file_read(descriptor, 0, header, (size_t)found->data_begin);
    if (status == STATUS_OK) {
        uint32_t crc = (uint32_t)crc32(0, header, (uInt)found->data_begin);
        if (crc != expected->header_crc || expected->num_tensors != found->num_tensors) {
            status = fail(STATUS_CORRUPT, "its header is not the one that the manifest tells of");
        }
    }
    memory_free(header);
    TRY(status);
    return STATUS_OK;
}

static Status load_tensors(const PartFile *file, int descriptor, const Safetensors *found,
                           const ManifestFile *expected, Stream *stream)
{
    TRY(check_header(descriptor, found, expected));
    if (found->num_tensors != file->layout.num_tensors) {
        return fail(STATUS_INVALID, "it has %d tensors, the model has %d", found->num_tensors,
                    file->layout.num_tensors);
    }
    for (int i = 0; i < file->layout.num_tensors; i++) {
        const SafetensorsTensor *wanted = &file->layout.tensors[i];
        const SafetensorsTensor *tensor = safetensors_find(found, wanted->name);
        if (!tensor) {
            return fail(STATUS_INVALID, "tensor %s of the model is not in it", wanted->name);
        }
        const ManifestTensor *sum = &expected->tensors[tensor - found->tensors];
        Status status = check_shape(wanted, tensor);
        if (status == STATUS_OK && strcmp(sum->name, tensor->name) != 0) {
            status = fail(STATUS_CORRUPT, "the manifest has %s in its place", sum->name);
        }
        if (status == STATUS_OK) {
            status = load_tensor(file, descriptor, i, tensor, found->data_begin, sum->crc, stream);
        }
        if (status != STATUS_OK) {
            return fail(status, "tensor %s: %s", wanted->name, status_message());
        }
    }
    return STATUS_OK;
}

Status part_file_load(const PartFile *file, const char *folder, const ManifestFile *expected,
                      Stream *stream)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, file->name);
    int descriptor = -1;
    TRY(file_open(path, O_RDONLY, &descriptor));
    Safetensors found = {0};
    int64_t size_bytes = 0;
    Status status = file_size(descriptor, &size_bytes);
    if (status == STATUS_OK && size_bytes != expected->size_bytes) {
        status = fail(STATUS_CORRUPT, "it has %lld bytes, the manifest says %lld",
                      (long long)size_bytes, (long long)expected->size_bytes);
    }
    if (status == STATUS_OK) {
        status = safetensors_read(descriptor, &found);
    }
    if (status == STATUS_OK) {
        status = load_tensors(file, descriptor, &found, expected, stream);
    }
    safetensors_done(&found);
    close(descriptor);
    return status == STATUS_OK ? STATUS_OK : fail(status, "%s: %s", path, status_message());
}
