/* StateShard: how the trained part of a module's flat buffer is cut over the replicas that hold the
 * same parameters, so that each keeps the optimizer's state of one range (ZeRO-1). Cuts fall
 * between rows (dim 0 of the local tensors) as near as can be to equal parts: so a range is boxes
 * of parameters, which a checkpoint can store. Ranges may be empty. Threading: pure; a StateShard
 * owns its cuts: state_shard_done.
 */
#ifndef TRAIN_STATE_SHARD_H
#define TRAIN_STATE_SHARD_H

#include "base/range.h"
#include "nn/param.h"

typedef struct StateShard {
    int num_parts;   /* 1: not cut */
    int part;        /* this rank's */
    int64_t *begins; /* [num_parts + 1] elements, from 0 to params->trained_count */
    int64_t *bytes;  /* [num_parts + 1] the same in bytes of float32, as comm's collectives want */
} StateShard;

Status state_shard_init(const ParamSet *params, int num_parts, int part,
                        StateShard *shard_out) STATUS_CHECKED;
void state_shard_done(StateShard *shard);

static inline Range state_shard_range(const StateShard *shard)
{
    return (Range){shard->begins[shard->part], shard->begins[shard->part + 1]};
}

#endif
