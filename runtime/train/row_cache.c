#include "train/row_cache.h"

#include "base/clock.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/memory.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

enum {
    PATH_BYTES = 4096,
    NAME_BYTES = 64
};

static const char entry_suffix[] = ".rows";
static const uint64_t entry_magic = UINT64_C(0x313073776f726476); /* "vdrows01", little-endian */

typedef struct EntryHeader {
    uint64_t magic;
    RowKey key;
    int64_t rows;
    int64_t width;
    uint64_t crc; /* of the values */
} EntryHeader;

struct RowCache {
    char *directory;
    int64_t size_bytes_max;
    int64_t size_bytes; /* of the entries, as far as this process knows */
    uint64_t weights;
    uint64_t writer;   /* in the names of entries being written: no two caches have the same */
    bool is_read_only; /* a write has failed */
    RowCacheCounts counts;
};

/* ---------------------------------------------------------------- open */

static bool is_entry(const char *name)
{
    size_t length = strlen(name);
    size_t suffix = sizeof entry_suffix - 1;
    return length > suffix && strcmp(name + length - suffix, entry_suffix) == 0;
}

static Status count_entries(RowCache *cache)
{
    DIR *folder = opendir(cache->directory);
    if (!folder) {
        return fail(STATUS_IO, "row cache %s: %s", cache->directory, strerror(errno));
    }
    struct dirent *entry;
    while ((entry = readdir(folder)) != NULL) {
        struct stat about;
        if (is_entry(entry->d_name) &&
            fstatat(dirfd(folder), entry->d_name, &about, AT_SYMLINK_NOFOLLOW) == 0) {
            cache->size_bytes += about.st_size;
        }
    }
    closedir(folder);
    return STATUS_OK;
}

static Status prepare(RowCache *cache, const char *directory)
{
    if (strlen(directory) > PATH_BYTES - NAME_BYTES - 2) {
        return fail(STATUS_INVALID, "row_cache.directory: a path of %zu bytes, at most %d",
                    strlen(directory), PATH_BYTES - NAME_BYTES - 2);
    }
    TRY(memory_copy_text(directory, &cache->directory));
    TRY(file_make_folder(directory));
    return count_entries(cache);
}

Status row_cache_open(const char *directory, int64_t size_bytes_max, uint64_t weights,
                      RowCache **cache_out)
{
    RowCache *cache = NULL;
    TRY(MEMORY_NEW(&cache, 1));
    cache->size_bytes_max = size_bytes_max;
    cache->weights = weights;
    cache->writer = hash_u64(HASH_SEED, (uint64_t)clock_now_ns());
    cache->writer = hash_u64(cache->writer, (uint64_t)getpid());
    cache->writer = hash_u64(cache->writer, (uint64_t)(uintptr_t)cache);
    Status status = prepare(cache, directory);
    if (status != STATUS_OK) {
        row_cache_close(cache);
        return status_trace(status, __FILE__, __LINE__);
    }
    *cache_out = cache;
    return STATUS_OK;
}

void row_cache_close(RowCache *cache)
{
    if (cache) {
        const RowCacheCounts *counts = &cache->counts;
        if (counts->found + counts->missing > 0) {
            log_info("row cache %s: %" PRId64 " items found, %" PRId64 " not (%" PRId64
                     " corrupt), %" PRId64 " written",
                     cache->directory, counts->found, counts->missing, counts->corrupt,
                     counts->written);
        }
        memory_free(cache->directory);
        memory_free(cache);
    }
}

/* ---------------------------------------------------------------- entries */

RowKey row_cache_key(const RowCache *cache, const void *input, int64_t input_bytes, int64_t rows,
                     int64_t width)
{
    RowKey key;
    for (int i = 0; i < 2; i++) { /* two hashes that begin differently: 128 bits */
        uint64_t hash = hash_u64(HASH_SEED, (uint64_t)i);
        hash = hash_u64(hash, cache->weights);
        hash = hash_u64(hash, (uint64_t)rows);
        hash = hash_u64(hash, (uint64_t)width);
        key.words[i] = hash_bytes(hash, input, (size_t)input_bytes);
    }
    return key;
}

static void write_path(const RowCache *cache, const RowKey *key, char path[PATH_BYTES])
{
    snprintf(path, PATH_BYTES, "%s/%016" PRIx64 "%016" PRIx64 "%s", cache->directory, key->words[0],
             key->words[1], entry_suffix);
}

static uint64_t checksum(const float *values, int64_t size_bytes)
{
    uLong crc = crc32(0, NULL, 0);
    for (int64_t at = 0; at < size_bytes;) { /* zlib counts in 32 bits */
        int64_t some = size_bytes - at < (1 << 30) ? size_bytes - at : 1 << 30;
        crc = crc32(crc, (const Bytef *)values + at, (uInt)some);
        at += some;
    }
    return crc;
}

static EntryHeader header_of(const RowKey *key, int64_t rows, int64_t width, const float *values)
{
    return (EntryHeader){.magic = entry_magic,
                         .key = *key,
                         .rows = rows,
                         .width = width,
                         .crc = checksum(values, rows * width * (int64_t)sizeof(float))};
}

/* STATUS_CORRUPT when it is not what was written. */
static Status read_entry(int file, const RowKey *key, int64_t rows, int64_t width, float *rows_out)
{
    EntryHeader found;
    int64_t values_bytes = rows * width * (int64_t)sizeof(float);
    int64_t size_bytes = 0;
    TRY(file_size(file, &size_bytes));
    if (size_bytes != (int64_t)sizeof found + values_bytes) {
        return fail(STATUS_CORRUPT, "%" PRId64 " bytes", size_bytes);
    }
    TRY(file_read(file, 0, &found, sizeof found));
    TRY(file_read(file, (int64_t)sizeof found, rows_out, (size_t)values_bytes));
    const EntryHeader expected = header_of(key, rows, width, rows_out);
    if (memcmp(&found, &expected, sizeof found) != 0) {
        return fail(STATUS_CORRUPT, "another header or checksum");
    }
    return STATUS_OK;
}

bool row_cache_read(RowCache *cache, const RowKey *key, int64_t rows, int64_t width,
                    float *rows_out)
{
    char path[PATH_BYTES];
    write_path(cache, key, path);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        cache->counts.missing++;
        return false;
    }
    Status status = read_entry(file, key, rows, width, rows_out);
    close(file);
    if (status != STATUS_OK) {
        cache->counts.missing++;
        cache->counts.corrupt++;
        (void)unlink(path); /* where it cannot be removed it is found bad again */
        return false;
    }
    cache->counts.found++;
    return true;
}

static Status write_file(const char *path, const EntryHeader *header, const float *values)
{
    int file = -1;
    int64_t values_bytes = header->rows * header->width * (int64_t)sizeof(float);
    TRY(file_open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, &file));
    Status status = file_write(file, 0, header, sizeof *header);
    if (status == STATUS_OK) {
        status = file_write(file, (int64_t)sizeof *header, values, (size_t)values_bytes);
    }
    if (close(file) != 0 && status == STATUS_OK) {
        status = fail(STATUS_IO, "%s: %s", path, strerror(errno));
    }
    return status;
}

void row_cache_write(RowCache *cache, const RowKey *key, int64_t rows, int64_t width,
                     const float *values)
{
    char path[PATH_BYTES];
    char beside[PATH_BYTES + NAME_BYTES];
    int64_t size_bytes = (int64_t)sizeof(EntryHeader) + rows * width * (int64_t)sizeof(float);
    if (cache->is_read_only || cache->size_bytes + size_bytes > cache->size_bytes_max) {
        return;
    }
    const EntryHeader header = header_of(key, rows, width, values);
    write_path(cache, key, path);
    snprintf(beside, sizeof beside, "%s.%016" PRIx64, path, cache->writer);
    /* Not synced: an entry that a crash tears is found by its checksum. */
    Status status = write_file(beside, &header, values);
    if (status == STATUS_OK && rename(beside, path) != 0) {
        status = fail(STATUS_IO, "%s: %s", path, strerror(errno));
    }
    if (status != STATUS_OK) {
        log_warn("row cache %s: nothing more is written to it: %s", cache->directory,
                 status_message());
        (void)unlink(beside);
        cache->is_read_only = true;
        return;
    }
    cache->size_bytes += size_bytes;
    cache->counts.written++;
}

RowCacheCounts row_cache_counts(const RowCache *cache)
{
    return cache->counts;
}
