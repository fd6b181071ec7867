/* RowCache: rows of items on disk, for encoders whose weights do not change: an item is encoded
 * once in the life of the cache, not once an epoch.
 *
 * An entry is a file named by its key: a hash of the item's decoded input (so of its content and
 * preprocessing), of the encoder's weights and of its rows' shape. Entries are written beside and
 * renamed, and carry a checksum: one that is torn or corrupt is removed, counted, and computed
 * again. When size_bytes_max is reached nothing more is written: with epochs over more than fits,
 * dropping the oldest would drop each entry just before its use. A disk that refuses a write turns
 * writing off, with a warning; training goes on. Several ranks and jobs may use one directory; each
 * counts what was there when it was opened and what it wrote itself.
 * Threading: one owner thread.
 */
#ifndef TRAIN_ROW_CACHE_H
#define TRAIN_ROW_CACHE_H

#include "base/status.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct RowCache RowCache;

typedef struct RowKey {
    uint64_t words[2];
} RowKey;

typedef struct RowCacheCounts {
    int64_t found;
    int64_t missing;
    int64_t corrupt; /* of the missing: entries that were there and no good */
    int64_t written;
} RowCacheCounts;

/* Makes the directory if need be and counts what it holds. `weights`: a hash of all that the rows
 * depend on besides the input. Owned: row_cache_close. */
Status row_cache_open(const char *directory, int64_t size_bytes_max, uint64_t weights,
                      RowCache **cache_out) STATUS_CHECKED;
void row_cache_close(RowCache *cache);

RowKey row_cache_key(const RowCache *cache, const void *input, int64_t input_bytes, int64_t rows,
                     int64_t width);

/* rows_out [rows, width], host memory; whether it was found and good. */
bool row_cache_read(RowCache *cache, const RowKey *key, int64_t rows, int64_t width,
                    float *rows_out);
void row_cache_write(RowCache *cache, const RowKey *key, int64_t rows, int64_t width,
                     const float *values);

RowCacheCounts row_cache_counts(const RowCache *cache);

#endif
