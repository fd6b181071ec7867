#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

Status file_open(const char *path, int flags, int *file_out)
{
    int file = open(path, flags | O_CLOEXEC, 0666);
    if (file < 0) {
        return fail(errno == ENOENT ? STATUS_NOT_FOUND : STATUS_IO, "cannot open %s: %s", path,
                    strerror(errno));
    }
    *file_out = file;
    return STATUS_OK;
}

Status file_sync_and_close(int file)
{
    int result = fsync(file);
    int code = errno;
    if (close(file) != 0 && result == 0) {
        result = -1;
        code = errno;
    }
    if (result != 0) {
        return fail(STATUS_IO, "cannot sync: %s", strerror(code));
    }
    return STATUS_OK;
}

Status file_size(int file, int64_t *size_bytes_out)
{
    struct stat info;
    if (fstat(file, &info) != 0) {
        return fail(STATUS_IO, "cannot read its size: %s", strerror(errno));
    }
    *size_bytes_out = info.st_size;
    return STATUS_OK;
}

Status file_read(int file, int64_t offset, void *bytes_out, size_t size_bytes)
{
    char *to = bytes_out;
    while (size_bytes > 0) {
        ssize_t got = pread(file, to, size_bytes, offset);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return fail(STATUS_IO, "cannot read %zu bytes at %lld: %s", size_bytes,
                        (long long)offset, strerror(errno));
        }
        if (got == 0) {
            return fail(STATUS_CORRUPT, "it ends at byte %lld, %zu bytes early", (long long)offset,
                        size_bytes);
        }
        to += got;
        offset += got;
        size_bytes -= (size_t)got;
    }
    return STATUS_OK;
}

Status file_write(int file, int64_t offset, const void *bytes, size_t size_bytes)
{
    const char *from = bytes;
    while (size_bytes > 0) {
        ssize_t put = pwrite(file, from, size_bytes, offset);
        if (put < 0 && errno == EINTR) {
            continue;
        }
        if (put <= 0) {
            return fail(STATUS_IO, "cannot write %zu bytes at %lld: %s", size_bytes,
                        (long long)offset, strerror(put < 0 ? errno : ENOSPC));
        }
        from += put;
        offset += put;
        size_bytes -= (size_t)put;
    }
    return STATUS_OK;
}

Status file_write_whole(const char *folder, const char *name, const void *bytes, size_t size_bytes)
{
    char path[PATH_MAX];
    char partial[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    snprintf(partial, sizeof partial, "%s/%s.partial", folder, name);
    int file = -1;
    TRY(file_open(partial, O_WRONLY | O_CREAT | O_TRUNC, &file));
    Status status = file_write(file, 0, bytes, size_bytes);
    if (status != STATUS_OK) {
        close(file);
    } else {
        status = file_sync_and_close(file);
    }
    if (status != STATUS_OK) {
        return fail(status, "%s: %s", partial, status_message());
    }
    if (rename(partial, path) != 0) {
        return fail(STATUS_IO, "cannot rename %s to %s: %s", partial, name, strerror(errno));
    }
    TRY(file_sync_folder(folder));
    return STATUS_OK;
}

Status file_sync_folder(const char *folder)
{
    int file = -1;
    TRY(file_open(folder, O_RDONLY | O_DIRECTORY, &file));
    Status status = file_sync_and_close(file);
    return status == STATUS_OK ? STATUS_OK : fail(status, "%s: %s", folder, status_message());
}

Status file_make_folder(const char *path)
{
    char part[PATH_MAX];
    size_t length = strlen(path);
    if (length == 0 || length >= sizeof part) {
        return fail(STATUS_INVALID, "a folder's path has %zu bytes; 1 to %zu are fine", length,
                    sizeof part - 1);
    }
    for (size_t i = 1; i <= length; i++) {
        if (path[i] != '/' && path[i] != '\0') {
            continue;
        }
        snprintf(part, sizeof part, "%.*s", (int)i, path);
        if (mkdir(part, 0777) != 0 && errno != EEXIST) {
            return fail(STATUS_IO, "cannot create the folder %s: %s", part, strerror(errno));
        }
    }
    return STATUS_OK;
}
