#include "checkpoint/checkpoint_folder.h"

#include "base/file.h"
#include "base/memory.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct Found {
    int64_t step;
    bool is_complete;
} Found;

typedef struct FoundList {
    Found *items; /* by step, oldest first; owned */
    size_t count;
    size_t capacity;
} FoundList;

Status checkpoint_folder_path(const char *directory, int64_t step, char *path_out,
                              size_t path_bytes)
{
    int length = snprintf(path_out, path_bytes, "%s/step-%08lld", directory, (long long)step);
    if (length < 0 || (size_t)length >= path_bytes) {
        return fail(STATUS_INVALID, "the checkpoint folder's path is too long: %s", directory);
    }
    return STATUS_OK;
}

/* "step-" and 8 to 18 digits, as checkpoint_folder_path writes them. */
static bool parse_step(const char *name, int64_t *step_out)
{
    size_t digits = strspn(name + (strncmp(name, "step-", 5) == 0 ? 5 : 0), "0123456789");
    if (strncmp(name, "step-", 5) != 0 || digits < 8 || digits > 18 || name[5 + digits] != '\0') {
        return false;
    }
    *step_out = strtoll(name + 5, NULL, 10);
    char canonical[32];
    snprintf(canonical, sizeof canonical, "step-%08lld", (long long)*step_out);
    return strcmp(canonical, name) == 0;
}

static bool has_manifest(const char *directory, const char *name)
{
    char path[PATH_MAX];
    int length = snprintf(path, sizeof path, "%s/%s/%s", directory, name, CHECKPOINT_MANIFEST);
    return length > 0 && (size_t)length < sizeof path && access(path, F_OK) == 0;
}

static int compare_found(const void *a, const void *b)
{
    int64_t left = ((const Found *)a)->step;
    int64_t right = ((const Found *)b)->step;
    return left < right ? -1 : left > right;
}

/* Freed by the caller in every case. */
static Status list_folder(const char *directory, FoundList *list)
{
    DIR *folder = opendir(directory);
    if (!folder) {
        return fail(errno == ENOENT ? STATUS_NOT_FOUND : STATUS_IO,
                    "cannot open the checkpoint folder %s: %s", directory, strerror(errno));
    }
    Status status = STATUS_OK;
    struct dirent *entry = readdir(folder);
    while (entry && status == STATUS_OK) {
        Found found = {0};
        if (parse_step(entry->d_name, &found.step)) {
            found.is_complete = has_manifest(directory, entry->d_name);
            status = memory_grow((void **)&list->items, &list->capacity, list->count + 1,
                                 sizeof *list->items);
            if (status == STATUS_OK) {
                list->items[list->count++] = found;
            }
        }
        entry = readdir(folder);
    }
    closedir(folder);
    TRY(status);
    if (list->count > 0) {
        qsort(list->items, list->count, sizeof *list->items, compare_found);
    }
    return STATUS_OK;
}

Status checkpoint_folder_newest(const char *directory, int64_t *step_out)
{
    FoundList list = {0};
    Status status = list_folder(directory, &list);
    bool is_found = false;
    for (size_t i = 0; status == STATUS_OK && i < list.count; i++) {
        if (list.items[i].is_complete) {
            *step_out = list.items[i].step;
            is_found = true;
        }
    }
    memory_free(list.items);
    TRY(status);
    if (!is_found) {
        return fail(STATUS_NOT_FOUND, "no complete checkpoint (step-*/%s) in %s",
                    CHECKPOINT_MANIFEST, directory);
    }
    return STATUS_OK;
}

Status checkpoint_folder_invalidate(const char *path)
{
    char manifest[PATH_MAX];
    snprintf(manifest, sizeof manifest, "%s/%s", path, CHECKPOINT_MANIFEST);
    if (unlink(manifest) != 0 && errno != ENOENT) {
        return fail(STATUS_IO, "cannot remove %s: %s", manifest, strerror(errno));
    }
    TRY(file_sync_folder(path));
    return STATUS_OK;
}

static bool is_ours(const char *name)
{
    size_t length = strlen(name);
    bool is_tensors = length > 12 && strcmp(name + length - 12, ".safetensors") == 0 &&
                      (strncmp(name, "model-", 6) == 0 || strncmp(name, "optimizer-", 10) == 0);
    return is_tensors || strcmp(name, CHECKPOINT_INDEX) == 0 ||
           strcmp(name, CHECKPOINT_INDEX ".partial") == 0 ||
           strcmp(name, CHECKPOINT_MANIFEST ".partial") == 0;
}

/* The manifest goes first, so that at no time a checkpoint looks complete that is not. */
static Status remove_checkpoint(const char *directory, int64_t step)
{
    char path[PATH_MAX];
    TRY(checkpoint_folder_path(directory, step, path, sizeof path));
    TRY(checkpoint_folder_invalidate(path));
    DIR *folder = opendir(path);
    if (!folder) {
        return fail(STATUS_IO, "cannot open %s: %s", path, strerror(errno));
    }
    struct dirent *entry = readdir(folder);
    Status status = STATUS_OK;
    while (entry && status == STATUS_OK) {
        if (is_ours(entry->d_name) && unlinkat(dirfd(folder), entry->d_name, 0) != 0) {
            status =
                fail(STATUS_IO, "cannot remove %s/%s: %s", path, entry->d_name, strerror(errno));
        }
        entry = readdir(folder);
    }
    closedir(folder);
    TRY(status);
    if (rmdir(path) != 0 && errno != ENOTEMPTY && errno != EEXIST) {
        return fail(STATUS_IO, "cannot remove %s: %s", path, strerror(errno));
    }
    return STATUS_OK;
}

Status checkpoint_folder_prune(const char *directory, int keep, int64_t newest_step)
{
    FoundList list = {0};
    Status status = list_folder(directory, &list);
    int complete = 0;
    for (size_t i = list.count; status == STATUS_OK && i-- > 0;) {
        const Found *found = &list.items[i];
        bool is_old = found->step < newest_step;
        complete += found->is_complete;
        if (is_old && (!found->is_complete || complete > keep)) {
            status = remove_checkpoint(directory, found->step);
        }
    }
    memory_free(list.items);
    TRY(status);
    return STATUS_OK;
}
