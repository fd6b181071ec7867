#include "checkpoint/checkpoint.h"

#include "base/clock.h"
#include "base/file.h"
#include "base/memory.h"
#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/manifest.h"
#include "checkpoint/part_file.h"

#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <zlib.h>

enum {
    FILES_MAX = 2, /* of one module: weights, optimizer */
    MODULE_BYTES = 32,
    COPY_TIMEOUT_MS = 60 * 1000,
};

/* What ranks tell each other after each phase of a save. Fixed size: it is gathered. */
typedef struct SaveRecord {
    int32_t status;
    int32_t writes;
    int32_t num_files;
    uint32_t header_crc; /* of all headers: ranks of a module must have declared the same tensors */
    int64_t step;
    int64_t written_bytes;  /* by this rank, so far */
    int64_t expected_bytes; /* of data in all files of the module */
    char module[MODULE_BYTES];
    char message[192];
} SaveRecord;

_Static_assert(sizeof(SaveRecord) == 264, "the record's form is the same in every build");

typedef struct Saver {
    const CheckpointPart *part;
    const CheckpointState *state;
    Comm *world;
    Stream *stream;
    const char *directory;
    int keep;
    char path[PATH_MAX]; /* of this checkpoint */
    PartFile files[FILES_MAX];
    int num_files;
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
        record->module[sizeof record->module - 1] = '\0';
        if (record->status != STATUS_OK) {
            return fail((Status)record->status, "checkpoint not saved: %s on rank %d (%s): %s",
                        phase, r, record->module, record->message);
        }
    }
    return STATUS_OK;
}

/* The first rank that writes a module creates its files. -1: none does. */
static int find_creator(const Saver *saver, const char *module)
{
    for (int r = 0; r < saver->world->size; r++) {
        if (saver->records[r].writes && strcmp(saver->records[r].module, module) == 0) {
            return r;
        }
    }
    return -1;
}

static Status init_files(Saver *saver)
{
    const CheckpointPart *part = saver->part;
    CHECK((part->m == NULL) == (part->v == NULL));
    int wanted = part->m ? 2 : 1;
    for (int i = 0; i < wanted; i++) {
        PartFile *file = &saver->files[saver->num_files++];
        TRY(part_file_init(file, part, i == 0 ? PART_FILE_KIND_MODEL : PART_FILE_KIND_OPTIMIZER));
        saver->own.header_crc = (uint32_t)crc32(saver->own.header_crc, (const Bytef *)file->header,
                                                (uInt)file->header_bytes);
        saver->own.expected_bytes += file->layout.file_bytes - file->layout.data_begin;
    }
    saver->own.num_files = wanted;
    return STATUS_OK;
}

/* Phase 1: rank 0 makes the folder; a checkpoint of this step that is there stops being one before
 * it is written over. */
static Status prepare(Saver *saver)
{
    TRY(init_files(saver));
    if (saver->world->rank == 0) {
        TRY(file_make_folder(saver->path));
        TRY(checkpoint_folder_invalidate(saver->path));
    }
    return STATUS_OK;
}

/* What all ranks said about themselves must fit together. The same on all ranks. */
static Status check_records(const Saver *saver)
{
    for (int r = 0; r < saver->world->size; r++) {
        const SaveRecord *record = &saver->records[r];
        int creator = find_creator(saver, record->module);
        if (creator < 0) {
            return fail(STATUS_INTERNAL, "no rank writes module %s", record->module);
        }
        if (record->step != saver->records[0].step) {
            return fail(STATUS_INTERNAL, "rank %d saves step %lld, rank 0 step %lld", r,
                        (long long)record->step, (long long)saver->records[0].step);
        }
        if (record->header_crc != saver->records[creator].header_crc) {
            return fail(STATUS_INTERNAL,
                        "ranks %d and %d have declared different tensors for module %s", r, creator,
                        record->module);
        }
    }
    return STATUS_OK;
}

/* Phase 2. */
static Status create_files(Saver *saver)
{
    if (find_creator(saver, saver->own.module) != saver->world->rank) {
        return STATUS_OK;
    }
    for (int i = 0; i < saver->num_files; i++) {
        TRY(part_file_create(&saver->files[i], saver->path));
    }
    return STATUS_OK;
}

/* Phase 3. */
static Status write_boxes(Saver *saver)
{
    for (int i = 0; i < saver->num_files && saver->part->writes; i++) {
        int64_t written = 0;
        TRY(part_file_write(&saver->files[i], saver->path, saver->stream, &written));
        saver->own.written_bytes += written;
    }
    return STATUS_OK;
}

/* Every byte of every file was written by someone, once: the boxes' sizes must add up. */
static Status check_written(const Saver *saver)
{
    for (int r = 0; r < saver->world->size; r++) {
        const char *module = saver->records[r].module;
        int64_t written = 0;
        for (int other = 0; other < saver->world->size; other++) {
            bool is_same = strcmp(saver->records[other].module, module) == 0;
            written += is_same ? saver->records[other].written_bytes : 0;
        }
        if (written != saver->records[r].expected_bytes) {
            return fail(STATUS_INTERNAL,
                        "ranks of module %s wrote %lld bytes of %lld: wrong boxes or replicas",
                        module, (long long)written, (long long)saver->records[r].expected_bytes);
        }
    }
    return STATUS_OK;
}

/* Hugging Face's index: which file has which tensor. */
static Status write_index(const Saver *saver, const Manifest *manifest)
{
    json_t *map = json_object();
    json_int_t total_bytes = 0;
    int result = map ? 0 : -1;
    for (size_t i = 0; i < manifest->num_files; i++) {
        const ManifestFile *file = &manifest->files[i];
        bool is_model = strncmp(file->name, "model-", 6) == 0;
        for (int t = 0; is_model && t < file->num_tensors; t++) {
            result |= json_object_set_new(map, file->tensors[t].name, json_string(file->name));
        }
    }
    for (int r = 0; r < saver->world->size; r++) {
        const SaveRecord *record = &saver->records[r];
        if (find_creator(saver, record->module) == r) {
            /* Weights are a third of weights, m and v. */
            total_bytes += record->expected_bytes / (record->num_files == 2 ? 3 : 1);
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
    for (int r = 0; r < saver->world->size; r++) {
        const SaveRecord *record = &saver->records[r];
        if (find_creator(saver, record->module) != r) {
            continue;
        }
        char name[sizeof saver->files[0].name];
        part_file_name(PART_FILE_KIND_MODEL, record->module, name, sizeof name);
        TRY(manifest_add_tensors(manifest, saver->path, name));
        if (record->num_files == 2) {
            part_file_name(PART_FILE_KIND_OPTIMIZER, record->module, name, sizeof name);
            TRY(manifest_add_tensors(manifest, saver->path, name));
        }
    }
    TRY(write_index(saver, manifest));
    TRY(manifest_add_file(manifest, saver->path, CHECKPOINT_INDEX));
    return STATUS_OK;
}

/* Phase 4, on rank 0: it reads the files again for their checksums, which also proves that they can
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
    TRY(check_records(saver));
    TRY(end_phase(saver, create_files(saver), "creating its files"));
    TRY(end_phase(saver, write_boxes(saver), "writing"));
    TRY(check_written(saver));
    TRY(end_phase(saver, complete(saver), "completing it"));
    return STATUS_OK;
}

static Status saver_init(Saver *saver)
{
    Comm *world = saver->world;
    TRY(checkpoint_folder_path(saver->directory, saver->state->step, saver->path,
                               sizeof saver->path - NAME_MAX));
    TRY(MEMORY_NEW(&saver->records, world->size));
    TRY(MEMORY_NEW(&saver->begins, world->size + 1));
    for (int r = 0; r <= world->size; r++) {
        saver->begins[r] = r * (int64_t)sizeof(SaveRecord);
    }
    TRY(device_alloc(saver->part->params->device, records_bytes(saver), &saver->gathered));
    saver->own.writes = saver->part->writes;
    saver->own.step = saver->state->step;
    CHECK(strlen(saver->part->module) < sizeof saver->own.module);
    memcpy(saver->own.module, saver->part->module, strlen(saver->part->module));
    return STATUS_OK;
}

static void saver_done(Saver *saver)
{
    for (int i = 0; i < saver->num_files; i++) {
        part_file_done(&saver->files[i]);
    }
    if (saver->gathered) {
        device_free(saver->part->params->device, saver->gathered, records_bytes(saver));
    }
    memory_free(saver->records);
    memory_free(saver->begins);
}

Status checkpoint_save(const char *directory, int keep, const CheckpointPart *part,
                       const CheckpointState *state, Comm *world, Stream *stream, char *path_out,
                       size_t path_bytes)
{
    Saver *saver = NULL; /* on the heap: it holds paths and messages */
    TRY(MEMORY_NEW(&saver, 1));
    saver->part = part;
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

static Status load_file(const char *path, const CheckpointPart *part, PartFileKind kind,
                        const Manifest *manifest, Stream *stream)
{
    PartFile file;
    Status status = part_file_init(&file, part, kind);
    const ManifestFile *expected = manifest_find(manifest, file.name);
    if (status == STATUS_OK && !expected) {
        status = fail(STATUS_INVALID,
                      "%s has no %s: it was written by a job without this module, or without this "
                      "optimizer",
                      path, file.name);
    }
    if (status == STATUS_OK) {
        status = part_file_load(&file, path, expected, stream);
    }
    part_file_done(&file);
    TRY(status);
    return STATUS_OK;
}

Status checkpoint_load(const char *path, const CheckpointPart *part, CheckpointState *state_out,
                       Stream *stream)
{
    CHECK((part->m == NULL) == (part->v == NULL));
    Manifest manifest;
    Status status = manifest_read(path, &manifest);
    if (status == STATUS_OK) {
        status = load_file(path, part, PART_FILE_KIND_MODEL, &manifest, stream);
    }
    if (status == STATUS_OK && part->m) {
        status = load_file(path, part, PART_FILE_KIND_OPTIMIZER, &manifest, stream);
    }
    if (status == STATUS_OK) {
        *state_out = manifest.state;
    }
    manifest_done(&manifest);
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
