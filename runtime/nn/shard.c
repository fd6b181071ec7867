#include "nn/shard.h"

#include "base/status.h"

int shard_chunks(int64_t length, int cp_size, int cp_rank, Range chunks_out[SHARD_CHUNKS])
{
    CHECK(length >= 0 && cp_size > 0 && cp_rank >= 0 && cp_rank < cp_size);
    int64_t parts = 2 * (int64_t)cp_size;
    Range lower = range_part(length, parts, cp_rank);
    Range upper = range_part(length, parts, parts - 1 - cp_rank);
    int count = 0;
    if (range_count(lower) > 0) {
        chunks_out[count++] = lower;
    }
    if (range_count(upper) == 0) {
        return count;
    }
    if (count > 0 && upper.begin == lower.end) {
        chunks_out[0].end = upper.end;
        return count;
    }
    chunks_out[count++] = upper;
    return count;
}

int64_t shard_chunks_count(int64_t length, int cp_size, int cp_rank)
{
    Range chunks[SHARD_CHUNKS];
    int num = shard_chunks(length, cp_size, cp_rank, chunks);
    int64_t count = 0;
    for (int i = 0; i < num; i++) {
        count += range_count(chunks[i]);
    }
    return count;
}

int64_t shard_count(const int32_t *segment_begins, int32_t num_segments, int cp_size, int cp_rank)
{
    int64_t count = 0;
    for (int32_t s = 0; s < num_segments; s++) {
        count += shard_chunks_count((int64_t)segment_begins[s + 1] - segment_begins[s], cp_size,
                                    cp_rank);
    }
    return count;
}

/* Of L tokens in 2 cp chunks a rank has at most (L + cp - 1) / cp: with m = L mod 2 cp, one of its
 * chunks is larger when m >= 1 and both only when m > cp, so it is at most 1 - 1 / cp above L / cp.
 * Segments of one token each, all on rank 0, come up to it. */
int64_t shard_count_max(int64_t tokens_max, int64_t segments_max, int cp_size)
{
    CHECK(tokens_max >= 0 && segments_max >= 0 && cp_size > 0);
    int64_t segments = segments_max < tokens_max ? segments_max : tokens_max; /* that have tokens */
    return (tokens_max + segments * (cp_size - 1)) / cp_size;
}
