/* CheckpointFolder: which checkpoints a job's folder holds, and their removal.
 * Threading: pure functions of the file system.
 */
#ifndef CHECKPOINT_CHECKPOINT_FOLDER_H
#define CHECKPOINT_CHECKPOINT_FOLDER_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

#define CHECKPOINT_MANIFEST "viaduct.json"
#define CHECKPOINT_INDEX    "model.safetensors.index.json"

/* "`directory`/step-00001500". STATUS_INVALID when it does not fit. */
Status checkpoint_folder_path(const char *directory, int64_t step, char *path_out,
                              size_t path_bytes) STATUS_CHECKED;

/* The newest step whose checkpoint is complete. STATUS_NOT_FOUND. */
Status checkpoint_folder_newest(const char *directory, int64_t *step_out) STATUS_CHECKED;

/* Takes the manifest away, so that the folder is no checkpoint while it is written anew. */
Status checkpoint_folder_invalidate(const char *path) STATUS_CHECKED;

/* Removes the oldest complete checkpoints beyond `keep`, and what older saves that never ended
 * left. Files that no checkpoint has stay, and their folder with them. */
Status checkpoint_folder_prune(const char *directory, int keep, int64_t newest_step) STATUS_CHECKED;

#endif
