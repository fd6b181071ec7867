#include "data/shard.h"

#include "base/file.h"
#include "base/memory.h"

#include <archive.h>
#include <archive_entry.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    TAR_BLOCK_BYTES = 512,
    READ_BLOCK_BYTES = 64 * 1024,
};

struct Shard {
    char *path;
    int file;
    int64_t size_bytes;
    int64_t members_end; /* where the next header or the end mark must stand */
    struct archive *archive;
};

static Status open_file(Shard *shard)
{
    shard->file = open(shard->path, O_RDONLY | O_CLOEXEC);
    if (shard->file < 0) {
        Status code = errno == ENOENT ? STATUS_NOT_FOUND : STATUS_IO;
        return fail(code, "shard %s: cannot open: %s", shard->path, strerror(errno));
    }
    struct stat info;
    if (fstat(shard->file, &info) != 0) {
        return fail(STATUS_IO, "shard %s: %s", shard->path, strerror(errno));
    }
    if (!S_ISREG(info.st_mode)) {
        return fail(STATUS_INVALID, "shard %s: not a regular file", shard->path);
    }
    if (info.st_size == 0) {
        return fail(STATUS_CORRUPT,
                    "shard %s: empty (0 bytes); a tar without members has an end mark",
                    shard->path);
    }
    shard->size_bytes = info.st_size;
    return STATUS_OK;
}

/* libarchive would read it, but members could not be found again by offset. */
static Status check_magic(const Shard *shard)
{
    uint8_t magic[4] = {0};
    if (shard->size_bytes < TAR_BLOCK_BYTES) {
        return fail(STATUS_CORRUPT, "shard %s: %lld bytes are too few for a tar", shard->path,
                    (long long)shard->size_bytes);
    }
    TRY(file_read(shard->file, 0, magic, sizeof magic));
    bool is_compressed = memcmp(magic, "\x1f\x8b", 2) == 0 || memcmp(magic, "BZh", 3) == 0 ||
                         memcmp(magic,
                                "\xfd"
                                "7zX",
                                4) == 0 ||
                         memcmp(magic, "\x28\xb5\x2f\xfd", 4) == 0;
    if (is_compressed) {
        return fail(STATUS_UNSUPPORTED,
                    "shard %s: compressed; samples are read at random, so unpack it to a plain "
                    "tar first",
                    shard->path);
    }
    return STATUS_OK;
}

static Status open_archive(Shard *shard)
{
    shard->archive = archive_read_new();
    if (!shard->archive) {
        return fail(STATUS_NO_MEMORY, "shard %s: no memory for a tar reader", shard->path);
    }
    if (archive_read_support_format_tar(shard->archive) != ARCHIVE_OK ||
        archive_read_open_fd(shard->archive, shard->file, READ_BLOCK_BYTES) != ARCHIVE_OK) {
        return fail(STATUS_CORRUPT, "shard %s: not a tar: %s", shard->path,
                    archive_error_string(shard->archive));
    }
    return STATUS_OK;
}

static Status open_parts(Shard *shard, const char *path)
{
    TRY(memory_copy_text(path, &shard->path));
    TRY(open_file(shard));
    TRY(check_magic(shard));
    TRY(open_archive(shard));
    return STATUS_OK;
}

Status shard_open(const char *path, Shard **shard_out)
{
    Shard *shard = NULL;
    TRY(MEMORY_NEW(&shard, 1));
    shard->file = -1;
    Status status = open_parts(shard, path);
    if (status != STATUS_OK) {
        shard_close(shard);
        return status_trace(status, __FILE__, __LINE__);
    }
    *shard_out = shard;
    return STATUS_OK;
}

void shard_close(Shard *shard)
{
    if (!shard) {
        return;
    }
    archive_read_free(shard->archive); /* NULL is fine */
    if (shard->file >= 0) {
        close(shard->file);
    }
    memory_free(shard->path);
    memory_free(shard);
}

int shard_file(const Shard *shard)
{
    return shard->file;
}

/* A shard that was cut between two members looks complete but for the end mark: at least one block
 * of zeros, and zeros up to the end. What follows it would be lost in silence: two tars in one
 * file. */
static Status check_end(const Shard *shard)
{
    if (shard->size_bytes - shard->members_end < TAR_BLOCK_BYTES) {
        return fail(STATUS_CORRUPT,
                    "shard %s: truncated: the end-of-archive mark is missing at byte %lld",
                    shard->path, (long long)shard->members_end);
    }
    uint8_t block[8 * TAR_BLOCK_BYTES];
    int64_t at = shard->members_end;
    while (at < shard->size_bytes) {
        int64_t left = shard->size_bytes - at;
        size_t count = left < (int64_t)sizeof block ? (size_t)left : sizeof block;
        TRY(file_read(shard->file, at, block, count));
        for (size_t i = 0; i < count; i++) {
            if (block[i] != 0) {
                return fail(STATUS_CORRUPT,
                            "shard %s: more data at byte %lld after the end-of-archive mark: is it "
                            "two tars in one file?",
                            shard->path, (long long)at + (long long)i);
            }
        }
        at += (int64_t)count;
    }
    return STATUS_OK;
}

/* Fills *member_out from a header that was just read. *use_out: it is a regular file. */
static Status read_member(Shard *shard, struct archive_entry *entry, ShardMember *member_out,
                          bool *use_out)
{
    const char *name = archive_entry_pathname_utf8(entry);
    name = name ? name : archive_entry_pathname(entry);
    if (!name || !archive_entry_size_is_set(entry)) {
        return fail(STATUS_CORRUPT, "shard %s: a header without name or size at byte %lld",
                    shard->path, (long long)archive_read_header_position(shard->archive));
    }
    while (strncmp(name, "./", 2) == 0) {
        name += 2;
    }
    /* After a header the position in the stream is where the content begins. */
    int64_t offset = archive_filter_bytes(shard->archive, 0);
    int64_t size_bytes = archive_entry_size(entry);
    if (size_bytes < 0 || size_bytes > shard->size_bytes - offset) {
        return fail(STATUS_CORRUPT,
                    "shard %s, member %s: truncated: %lld bytes at %lld do not fit in the file's "
                    "%lld",
                    shard->path, name, (long long)size_bytes, (long long)offset,
                    (long long)shard->size_bytes);
    }
    bool is_directory = archive_entry_filetype(entry) == AE_IFDIR;
    if (!is_directory && (archive_entry_filetype(entry) != AE_IFREG ||
                          archive_entry_hardlink(entry) || archive_entry_sparse_count(entry) > 0)) {
        return fail(STATUS_UNSUPPORTED,
                    "shard %s, member %s: a link, a sparse or a special file; only regular files "
                    "are read",
                    shard->path, name);
    }
    int64_t blocks = (size_bytes + TAR_BLOCK_BYTES - 1) / TAR_BLOCK_BYTES;
    shard->members_end = offset + blocks * TAR_BLOCK_BYTES;
    *member_out = (ShardMember){.name = name, .offset = offset, .size_bytes = size_bytes};
    *use_out = !is_directory;
    return STATUS_OK;
}

Status shard_next(Shard *shard, ShardMember *member_out, bool *found_out)
{
    *found_out = false;
    while (!*found_out) {
        struct archive_entry *entry = NULL;
        int result = archive_read_next_header(shard->archive, &entry);
        if (result == ARCHIVE_EOF) {
            TRY(check_end(shard));
            return STATUS_OK;
        }
        /* A warning is about names or attributes that this machine cannot express; they are not
         * used. */
        if (result != ARCHIVE_OK && result != ARCHIVE_WARN) {
            return fail(STATUS_CORRUPT, "shard %s: damaged or truncated after byte %lld: %s",
                        shard->path, (long long)shard->members_end,
                        archive_error_string(shard->archive));
        }
        TRY(read_member(shard, entry, member_out, found_out));
    }
    return STATUS_OK;
}
