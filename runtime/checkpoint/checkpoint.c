#include "checkpoint/checkpoint.h"

#include "base/clock.h"
#include "base/file.h"
#include "base/memory.h"
#include "checkpoint/catalog.h"
#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/manifest.h"
#include "checkpoint/part_file.h"

#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

enum {
    MODULES_BYTES = 64,
    COPY_TIMEOUT_MS = 60 * 1000,
};

/* What ranks tell each other after each phase of a save. Fixed size: it is gathered. */
typedef struct SaveRecord {
    int32_t status;
    int32_t unused; /* 0 */
    int64_t step;
    int64_t written[CHECKPOINT_PARTS_MAX]
                   [PART_FILE_KIND_COUNT]; /* bytes by this rank, of each of the
                                                                  * catalog's modules */
    char modules[MODULES_BYTES];           /* of this rank: "vision, llm" */
    char message[192];
} SaveRecord;

_Static_assert(sizeof(SaveRecord) == 400, "the record's form is the same in every build");

typedef struct Saver {
    const CheckpointPart *parts;
    int num_parts;
    const CheckpointState *state;
    Comm *world;
    Stream *stream;
    const char *directory;
    int keep;
    char path[PATH_MAX]; /* of this checkpoint */
    Catalog catalog;
    PartFile files[CHECKPOINT_PARTS_MAX][PART_FILE_KIND_COUNT]; /* of this rank's parts */
    PartBuffers buffers;
    SaveRecord own;
    SaveRecord *records; /* [world->size], of the last phase */
    int64_t *begins;     /* [world->size + 1] */
    void *gathered;      /* device memory for the records */
} Saver;

static int64_t records_bytes(const Saver *saver)
{
    return saver->world->size * (int64_t)sizeof(SaveRecord);
}

static Status gather_records(Saver *saver)
{
    Comm *world = saver->world;
    char *place = (char *)saver->gathered + world->rank * sizeof(SaveRecord);
    TRY(stream_copy(saver->stream, place, &saver->own, sizeof saver->own));
    TRY(comm_all_gather(world, saver->gathered, saver->begins, saver->stream));
    TRY(stream_copy(saver->stream, saver->records, saver->gathered, records_bytes(saver)));
    TRY(stream_wait(saver->stream, clock_deadline_in_ms(COPY_TIMEOUT_MS)));
    return STATUS_OK;
}

/* Ends a phase: all ranks learn how it went for all, and go on or fail together, none left waiting.
 * */
static Status end_phase(Saver *saver, Status status, const char *phase)
{
    saver->own.status = (int32_t)status;
    snprintf(saver->own.message, sizeof saver->own.message, "%s",
             status == STATUS_OK ? "" : status_message());
    TRY(gather_records(saver));
    for (int r = 0; r < saver->world->size; r++) {
        SaveRecord *record = &saver->records[r];
        record->message[sizeof record->message - 1] = '\0';
        record->modules[sizeof record->modules - 1] = '\0';
        if (record->status != STATUS_OK) {
            return fail((Status)record->status, "checkpoint not saved: %s on rank %d (%s): %s",
                        phase, r, record->modules, record->message);
        }
    }
    return STATUS_OK;
}

/* Phase 1: rank 0 makes the folder; a checkpoint of this step that is there stops being one before
 * it is written over. */
static Status prepare(Saver *saver)
{
    TRY(part_buffers_init(&saver->buffers, saver->stream->device));
    if (saver->world->rank == 0) {
        TRY(file_make_folder(saver->path));
        TRY(checkpoint_folder_invalidate(saver->path));
    }
    return STATUS_OK;
}

/* What all ranks said about themselves must fit together. The same on all ranks. */
static Status check_steps(const Saver *saver)
{
    for (int r = 0; r < saver->world->size; r++) {
        const SaveRecord *record = &saver->records[r];
        if (record->step != saver->records[0].step) {
            return fail(STATUS_INTERNAL, "rank %d saves step %lld, rank 0 step %lld", r,
                        (long long)record->step, (long long)saver->records[0].step);
        }
    }
    return STATUS_OK;
}

/* Phase 2: all ranks know all tensors, so each knows the headers of its files. */
static Status agree(Saver *saver)
{
    TRY(catalog_gather(saver->parts, saver->num_parts, saver->world, saver->stream,
                       &saver->catalog));
    for (int p = 0; p < saver->num_parts; p++) {
        const CheckpointPart *part = &saver->parts[p];
        TRY(catalog_check_part(&saver->catalog, part));
        const CatalogModule *module = catalog_find_module(&saver->catalog, part->module);
        for (int k = 0; module && k < PART_FILE_KIND_COUNT; k++) {
            TRY(part_file_init(&saver->files[p][k], module, (PartFileKind)k));
        }
    }
    return STATUS_OK;
}

/* Bytes of data in a file of the module. */
static int64_t file_data_bytes(const CatalogModule *module, PartFileKind kind)
{
    int64_t elements = kind == PART_FILE_KIND_MODEL ? module->num_values : 2 * module->num_states;
    return elements * (int64_t)sizeof(float);
}

static bool has_file(const CatalogModule *module, PartFileKind kind)
{
    return kind == PART_FILE_KIND_MODEL || module->has_states;
}

/* Phase 3: the first rank that writes weights of a module creates its files. */
static Status create_files(Saver *saver)
{
    for (int p = 0; p < saver->num_parts; p++) {
        const CatalogModule *module = catalog_find_module(&saver->catalog, saver->parts[p].module);
        bool is_creator = module && module->creator == saver->world->rank;
        for (int k = 0; is_creator && k < PART_FILE_KIND_COUNT; k++) {
            if (has_file(module, (PartFileKind)k)) {
                TRY(part_file_create(&saver->files[p][k], saver->path));
            }
        }
    }
    return STATUS_OK;
}

/* Phase 4. */
static Status write_boxes(Saver *saver)
{
    for (int p = 0; p < saver->num_parts; p++) {
        const CheckpointPart *part = &saver->parts[p];
        const CatalogModule *module = catalog_find_module(&saver->catalog, part->module);
        const bool writes[PART_FILE_KIND_COUNT] = {
            [PART_FILE_KIND_MODEL] = part->writes_weights,
            [PART_FILE_KIND_OPTIMIZER] = part->writes_state && part->m,
        };
        for (int k = 0; module && k < PART_FILE_KIND_COUNT; k++) {
            if (writes[k] && has_file(module, (PartFileKind)k)) {
                TRY(part_file_write(&saver->files[p][k], saver->path, part, &saver->buffers,
                                    saver->stream,
                                    &saver->own.written[module - saver->catalog.modules][k]));
            }
        }
    }
    return STATUS_OK;
}

/* Every byte of every file was written by someone, once: the boxes' sizes must add up. */
static Status check_written(const Saver *saver)
{
    for (int i = 0; i < saver->catalog.num_modules * PART_FILE_KIND_COUNT; i++) {
        int m = i / PART_FILE_KIND_COUNT;
        int k = i % PART_FILE_KIND_COUNT;
        const CatalogModule *module = &saver->catalog.modules[m];
        int64_t expected = file_data_bytes(module, (PartFileKind)k);
        int64_t written = 0;
        for (int r = 0; r < saver->world->size; r++) {
            written += saver->records[r].written[m][k];
        }
        if (written != expected) {
            return fail(STATUS_INTERNAL,
                        "ranks of module %s wrote %lld bytes of %lld of its %s: wrong boxes or "
                        "replicas",
                        module->name, (long long)written, (long long)expected,
                        k == PART_FILE_KIND_MODEL ? "weights" : "state");
        }
    }
    return STATUS_OK;
}

/* Hugging Face's index: which file has which tensor. */
static Status write_index(const Saver *saver)
{
    const Catalog *catalog = &saver->catalog;
    json_t *map = json_object();
    json_int_t total_bytes = 0;
    int result = map ? 0 : -1;
    for (int m = 0; m < catalog->num_modules; m++) {
        const CatalogModule *module = &catalog->modules[m];
        char name[sizeof saver->files[0][0].name];
        part_file_name(PART_FILE_KIND_MODEL, module->name, name, sizeof name);
        total_bytes += file_data_bytes(module, PART_FILE_KIND_MODEL);
        for (int t = 0; t < module->num_tensors; t++) {
            result |= json_object_set_new(map, module->tensors[t].name, json_string(name));
        }
    }
    json_t *root =
        json_pack("{s:{s:I}, s:o}", "metadata", "total_size", total_bytes, "weight_map", map);
    char *text = result == 0 && root ? json_dumps(root, JSON_INDENT(1) | JSON_SORT_KEYS) : NULL;
    json_decref(root);
    if (!text) {
        return fail(STATUS_NO_MEMORY, "no memory for %s", CHECKPOINT_INDEX);
    }
    Status status = file_write_whole(saver->path, CHECKPOINT_INDEX, text, strlen(text));
    memory_free(text);
    TRY(status);
    return STATUS_OK;
}

static Status fill_manifest(const Saver *saver, Manifest *manifest)
{
    manifest->state = *saver->state;
    for (int m = 0; m < saver->catalog.num_modules; m++) {
        const CatalogModule *module = &saver->catalog.modules[m];
        for (int k = 0; k < PART_FILE_KIND_COUNT; k++) {
            char name[sizeof saver->files[0][0].name];
            part_file_name((PartFileKind)k, module->name, name, sizeof name);
            if (has_file(module, (PartFileKind)k)) {
                TRY(manifest_add_tensors(manifest, saver->path, name));
            }
        }
    }
    TRY(write_index(saver));
    TRY(manifest_add_file(manifest, saver->path, CHECKPOINT_INDEX));
    return STATUS_OK;
}

/* Phase 5, on rank 0: it reads the files again for their checksums, which also proves that they can
 * be read. */
static Status complete(const Saver *saver)
{
    if (saver->world->rank != 0) {
        return STATUS_OK;
    }
    Manifest manifest = {0};
    Status status = fill_manifest(saver, &manifest);
    if (status == STATUS_OK) {
        status = manifest_write(&manifest, saver->path);
    }
    manifest_done(&manifest);
    TRY(status);
    TRY(file_sync_folder(saver->directory));
    TRY(checkpoint_folder_prune(saver->directory, saver->keep, saver->state->step));
    return STATUS_OK;
}

static Status save_in_phases(Saver *saver)
{
    TRY(end_phase(saver, prepare(saver), "preparing"));
    TRY(check_steps(saver));
    TRY(end_phase(saver, agree(saver), "agreeing on its tensors"));
    TRY(end_phase(saver, create_files(saver), "creating its files"));
    TRY(end_phase(saver, write_boxes(saver), "writing"));
    TRY(check_written(saver));
    TRY(end_phase(saver, complete(saver), "completing it"));
    return STATUS_OK;
}

static Status saver_init(Saver *saver)
{
    Comm *world = saver->world;
    CHECK(saver->num_parts >= 0 && saver->num_parts <= CHECKPOINT_PARTS_MAX);
    TRY(checkpoint_folder_path(saver->directory, saver->state->step, saver->path,
                               sizeof saver->path - NAME_MAX));
    TRY(MEMORY_NEW(&saver->records, world->size));
    TRY(MEMORY_NEW(&saver->begins, world->size + 1));
    for (int r = 0; r <= world->size; r++) {
        saver->begins[r] = r * (int64_t)sizeof(SaveRecord);
    }
    TRY(device_alloc(saver->stream->device, records_bytes(saver), &saver->gathered));
    saver->own.step = saver->state->step;
    size_t used = 0;
    for (int p = 0; p < saver->num_parts; p++) {
        CHECK((saver->parts[p].m == NULL) == (saver->parts[p].v == NULL));
        int length = snprintf(saver->own.modules + used, sizeof saver->own.modules - used, "%s%s",
                              p > 0 ? ", " : "", saver->parts[p].module);
        used += (size_t)length < sizeof saver->own.modules - used ? (size_t)length : 0;
    }
    return STATUS_OK;
}

static void saver_done(Saver *saver)
{
    for (int i = 0; i < saver->num_parts * PART_FILE_KIND_COUNT; i++) {
        part_file_done(&saver->files[i / PART_FILE_KIND_COUNT][i % PART_FILE_KIND_COUNT]);
    }
    part_buffers_done(&saver->buffers);
    catalog_done(&saver->catalog);
    if (saver->gathered) {
        device_free(saver->stream->device, saver->gathered, records_bytes(saver));
    }
    memory_free(saver->records);
    memory_free(saver->begins);
}

/* NOLINTNEXTLINE(readability-function-size): what to write, where, with whom, and the answer. */
Status checkpoint_save(const char *directory, int keep, const CheckpointPart *parts, int num_parts,
                       const CheckpointState *state, Comm *world, Stream *stream, char *path_out,
                       size_t path_bytes)
{
    Saver *saver = NULL; /* on the heap: it holds paths and messages */
    TRY(MEMORY_NEW(&saver, 1));
    saver->parts = parts;
    saver->num_parts = num_parts;
    saver->state = state;
    saver->world = world;
    saver->stream = stream;
    saver->directory = directory;
    saver->keep = keep < 1 ? 1 : keep;
    Status status = saver_init(saver);
    if (status == STATUS_OK) {
        status = save_in_phases(saver);
    }
    if (status == STATUS_OK) {
        status = checkpoint_folder_path(directory, state->step, path_out, path_bytes);
    }
    saver_done(saver);
    memory_free(saver);
    TRY(status);
    return STATUS_OK;
}

static Status load_weights(const char *path, const CheckpointPart *part, const Manifest *manifest,
                           const PartBuffers *buffers, Stream *stream)
{
    char name[sizeof((PartFile *)NULL)->name];
    part_file_name(PART_FILE_KIND_MODEL, part->module, name, sizeof name);
    const ManifestFile *file = manifest_find(manifest, name);
    if (!file) {
        return fail(STATUS_INVALID, "%s has no %s: it was written by a job without module %s", path,
                    name, part->module);
    }
    return part_file_load(path, file, PART_FILE_KIND_MODEL, part, buffers, stream);
}

/* The first parameter of which this rank holds state. */
static const char *first_with_state(const CheckpointPart *part)
{
    for (int i = 0; i < part->params->num_params; i++) {
        const Param *param = &part->params->params[i];
        Range all = {param->offset, param->offset + tensor_count(&param->value)};
        if (range_count(range_intersect(all, part->state)) > 0) {
            return param->spec.name;
        }
    }
    return "";
}

static Status load_state(const char *path, const CheckpointPart *part, const Manifest *manifest,
                         const PartBuffers *buffers, Stream *stream)
{
    char name[sizeof((PartFile *)NULL)->name];
    part_file_name(PART_FILE_KIND_OPTIMIZER, part->module, name, sizeof name);
    const ManifestFile *file = manifest_find(manifest, name);
    if (!file) {
        return fail(STATUS_INVALID,
                    "%s has no %s, so no state of tensor %s: it was written by a job without this "
                    "optimizer, or with all of module %s frozen",
                    path, name, first_with_state(part), part->module);
    }
    return part_file_load(path, file, PART_FILE_KIND_OPTIMIZER, part, buffers, stream);
}

static Status load_part(const char *path, const CheckpointPart *part, const Manifest *manifest,
                        const PartBuffers *buffers, Stream *stream)
{
    CHECK((part->m == NULL) == (part->v == NULL));
    if (part->params->num_params == 0) {
        return STATUS_OK;
    }
    TRY(load_weights(path, part, manifest, buffers, stream));
    if (part->m && range_count(part->state) > 0) {
        TRY(load_state(path, part, manifest, buffers, stream));
    }
    return STATUS_OK;
}

Status checkpoint_load(const char *path, const CheckpointPart *parts, int num_parts,
                       CheckpointState *state_out, Stream *stream)
{
    CHECK(num_parts >= 0 && num_parts <= CHECKPOINT_PARTS_MAX);
    Manifest manifest;
    PartBuffers buffers = {0};
    Status status = manifest_read(path, &manifest);
    if (status == STATUS_OK) {
        status = part_buffers_init(&buffers, stream->device);
    }
    for (int p = 0; p < num_parts && status == STATUS_OK; p++) {
        status = load_part(path, &parts[p], &manifest, &buffers, stream);
    }
    if (status == STATUS_OK) {
        *state_out = manifest.state;
    }
    part_buffers_done(&buffers);
    manifest_done(&manifest);
    TRY(status);
    return STATUS_OK;
}

/* What the checkpoint has of a module must be in the job's. */
static Status check_module(const char *path, const Manifest *manifest, const Catalog *catalog,
                           const CatalogModule *module)
{
    char name[sizeof((PartFile *)NULL)->name];
    part_file_name(PART_FILE_KIND_MODEL, module->name, name, sizeof name);
    const ManifestFile *file = manifest_find(manifest, name);
    for (int t = 0; file && t < file->num_tensors; t++) {
        if (!catalog_find(catalog, module->name, file->tensors[t].name)) {
            return fail(STATUS_INVALID, "%s/%s: tensor %s: the file has it, the model has not",
                        path, name, file->tensors[t].name);
        }
    }
    return STATUS_OK;
}

Status checkpoint_check(const char *path, const CheckpointPart *parts, int num_parts, Comm *world,
                        Stream *stream)
{
    Catalog catalog;
    Manifest manifest = {0};
    Status status = catalog_gather(parts, num_parts, world, stream, &catalog);
    if (status == STATUS_OK) {
        status = manifest_read(path, &manifest);
    }
    for (int m = 0; m < catalog.num_modules && status == STATUS_OK; m++) {
        status = check_module(path, &manifest, &catalog, &catalog.modules[m]);
    }
    manifest_done(&manifest);
    catalog_done(&catalog);
    TRY(status);
    return STATUS_OK;
}

Status checkpoint_newest(const char *directory, char *path_out, size_t path_bytes)
{
    int64_t step = 0;
    TRY(checkpoint_folder_newest(directory, &step));
    TRY(checkpoint_folder_path(directory, step, path_out, path_bytes));
    return STATUS_OK;
}
