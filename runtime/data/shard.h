/* Shard: the members of one tar file, in order, with the bytes at which their contents lie, so that
 * they can be read at random later.
 *
 * Plain tar only (ustar, pax, GNU): what is compressed has no such bytes. A shard must be whole: it
 * ends with the end-of-archive mark, and nothing follows.
 * Threading: one owner.
 */
#ifndef DATA_SHARD_H
#define DATA_SHARD_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct Shard Shard;

typedef struct ShardMember {
    const char *name; /* without a leading "./"; valid until the next call */
    int64_t offset;   /* of its content, bytes from the start of the file */
    int64_t size_bytes;
} ShardMember;

/* Owned: shard_close. STATUS_NOT_FOUND, STATUS_IO, STATUS_CORRUPT. */
Status shard_open(const char *path, Shard **shard_out) STATUS_CHECKED;
void shard_close(Shard *shard);

/* The next regular file; directories are passed over. *found_out: false at the end. STATUS_CORRUPT:
 * truncated, damaged. STATUS_UNSUPPORTED: compressed, sparse members, links. Errors name shard and
 * member. */
Status shard_next(Shard *shard, ShardMember *member_out, bool *found_out) STATUS_CHECKED;

/* For file_read while the shard is open. */
int shard_file(const Shard *shard);

#endif
