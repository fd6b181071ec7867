/* Shard: which of a replica's packed tokens stand on which of its ranks. Modules, boundary and
 * text packing ask the same functions, so that all mean the same token.
 *
 * Over cp each segment (a sample, an image, a clip) is cut into 2 cp chunks by range_part; cp
 * rank r holds chunks r and 2 cp - 1 - r (zigzag), so that causal attention costs all ranks
 * alike. A rank's tokens stand segment after segment, the lower chunk first. Nothing has to
 * divide anything: chunks may be empty. Between layers, with sequence parallelism, a cp rank's
 * list of tokens is cut over tp by range_part; without it every tp rank has the whole list.
 * Threading: pure.
 */
#ifndef NN_SHARD_H
#define NN_SHARD_H

#include "base/range.h"

#include <stdint.h>

enum {
    SHARD_CHUNKS = 2, /* of one segment on one cp rank, at most */
};

/* A rank among those of its replica. tp_size is 1 where tokens are not cut over tp. */
typedef struct ShardRank {
    int cp_size, cp_rank;
    int tp_size, tp_rank;
} ShardRank;

/* The rows of a matrix on a cp rank, and where they stand between layers. */
typedef struct ShardRows {
    int64_t count;         /* N: rows of this cp rank: what a layer works on */
    Range part;            /* of the N, this tp rank's between layers; all when they are not cut */
    const int64_t *begins; /* [tp + 1] host: all tp ranks' parts; NULL when they are not cut */
} ShardRows;

/* The chunks of a segment of `length` tokens that a cp rank holds, ascending, in tokens of the
 * segment; neighbours are one chunk. Returns their number; empty ones are left out. */
int shard_chunks(int64_t length, int cp_size, int cp_rank, Range chunks_out[SHARD_CHUNKS]);

/* Tokens of a segment on a cp rank. */
int64_t shard_chunks_count(int64_t length, int cp_size, int cp_rank);

/* segment_begins [num_segments + 1]. Tokens of all segments on a cp rank. */
int64_t shard_count(const int32_t *segment_begins, int32_t num_segments, int cp_size, int cp_rank);

/* No cp rank has more, whatever the lengths of at most `segments_max` segments with at most
 * `tokens_max` tokens together. */
int64_t shard_count_max(int64_t tokens_max, int64_t segments_max, int cp_size);

#endif
