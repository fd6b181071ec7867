/* Sequences: the tokens of one microbatch on one rank: sequences (segments) packed one after
 * another without padding, cut over cp and, between layers, over tp (shard.h).
 *
 *   K tokens of the replica    segment 0 | segment 1 | ...          "keys": what attention can see
 *   N tokens of this cp rank   its chunks of them
 *   n tokens of this tp rank   N, or its part with sequence parallelism: between layers
 *
 * Threading: plain data; a SequencesBuffer belongs to one thread.
 */
#ifndef NN_SEQUENCES_H
#define NN_SEQUENCES_H

#include "device/device.h"
#include "kernels/kernels.h"
#include "nn/shard.h"

typedef struct Sequences {
    int64_t num_keys; /* K */
    ShardRows rows;   /* N and n */
    /* [N] host: which of the K each is; ascending */
    const int32_t *tokens;
    int32_t num_runs;
    const AttentionRun *runs; /* [num_runs] host: chunks, and the keys they see (causal or not) */
    /* With cp > 1, else NULL: the ranks' tokens, one rank after another, are the keys in another
     * order: which of them are whose, and where each of them stands among the keys. */
    const int64_t *cp_begins;  /* [cp + 1] host */
    const int32_t *key_places; /* [K] device */
    const int32_t *positions;  /* [N] device: within the segment; NULL when nothing rotates */
} Sequences;

/* The memory behind a Sequences. */
typedef struct SequencesBuffer SequencesBuffer;

/* For at most `tokens_max` tokens of a replica in at most `segments_max` segments. `has_positions`:
 * they are made (with rotation). Owned: sequences_buffer_destroy. */
Status sequences_buffer_create(Device *device, ShardRank rank, int64_t tokens_max,
                               int64_t segments_max, bool has_positions,
                               SequencesBuffer **buffer_out) STATUS_CHECKED;
void sequences_buffer_destroy(SequencesBuffer *buffer);

/* The sequences of these segments, segment_begins [num_segments + 1] of the replica, on this rank;
 * valid until the next make, before which the stream must have passed this one's copies. Allocates
 * nothing. */
Status sequences_make(SequencesBuffer *buffer, const int32_t *segment_begins, int32_t num_segments,
                      Stream *stream, Sequences *sequences_out) STATUS_CHECKED;

#endif
