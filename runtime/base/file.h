/* File: whole reads and writes at places of a file, and names that are on the disk when the call
 * returns. Messages of calls that take a descriptor do not name the file.
 * Threading: any thread.
 */
#ifndef BASE_FILE_H
#define BASE_FILE_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

/* STATUS_NOT_FOUND, STATUS_IO; the message names the file. `flags` as open(2) takes them. */
Status file_open(const char *path, int flags, int *file_out) STATUS_CHECKED;

/* Closes; writes that fail late are told here. */
Status file_sync_and_close(int file) STATUS_CHECKED;

Status file_size(int file, int64_t *size_bytes_out) STATUS_CHECKED;

/* STATUS_CORRUPT when the file ends before. */
Status file_read(int file, int64_t offset, void *bytes_out, size_t size_bytes) STATUS_CHECKED;
Status file_write(int file, int64_t offset, const void *bytes, size_t size_bytes) STATUS_CHECKED;

/* Writes `folder`/`name` whole: under another name first, then by rename, synced. */
Status file_write_whole(const char *folder, const char *name, const void *bytes,
                        size_t size_bytes) STATUS_CHECKED;

/* Makes names created, renamed or removed in a folder last. */
Status file_sync_folder(const char *folder) STATUS_CHECKED;

/* Creates a folder and those above it. */
Status file_make_folder(const char *path) STATUS_CHECKED;

#endif
