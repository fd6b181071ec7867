/* Checkpoint: a directory that holds a job's whole state at one step, written by all ranks, read
 * back into any layout.
 *
 *   step-00001500/
 *     model-vision.safetensors, model-llm.safetensors     weights under Hugging Face's names, F32
 *     model.safetensors.index.json                        which tensor is in which file, as Hugging
 *                                                         Face has it
 *     optimizer-vision.safetensors, ...                   AdamW's m and v: "m.<name>", "v.<name>"
 *     viaduct.json                                        manifest: step, seed, data hash, sizes
 *                                                         and crc32 of every file; written last, by
 *                                                         rename: a directory without it is not a
 *                                                         checkpoint
 * The header of a safetensors file is a pure function of the declared tensors, so every rank knows
 * at which byte its box begins and writes its own part. All ranks must see the same directory (one
 * host, or a shared file system).
 * Threading: the step thread.
 */
#ifndef CHECKPOINT_CHECKPOINT_H
#define CHECKPOINT_CHECKPOINT_H

#include "comm/comm.h"
#include "nn/param.h"

/* What one rank brings: its parameters and state arrays of the same flat form. */
typedef struct CheckpointPart {
    const char *module; /* "vision" */
    const ParamSet *params;
    float *m; /* [params->count]; NULL with SGD */
    float *v;
    bool writes; /* of the replicas of a module one writes: dp rank 0 */
} CheckpointPart;

typedef struct CheckpointState {
    int64_t step; /* steps committed */
    uint64_t seed;
    uint64_t data_hash;
    int64_t samples; /* committed so far */
} CheckpointState;

/* Collective over `world`: writes `directory`/step-XXXXXXXX and then removes the oldest beyond
 * `keep`. On return on every rank the checkpoint is complete and synced. path_out[path_bytes] gets
 * its path. */
Status checkpoint_save(const char *directory, int keep, const CheckpointPart *part,
                       const CheckpointState *state, Comm *world, Stream *stream, char *path_out,
                       size_t path_bytes) STATUS_CHECKED;

/* Each rank reads its own boxes, whatever layout wrote them. Checks names, shapes and checksums;
 * STATUS_CORRUPT or STATUS_INVALID name file and tensor. */
Status checkpoint_load(const char *path, const CheckpointPart *part, CheckpointState *state_out,
                       Stream *stream) STATUS_CHECKED;

/* The newest complete checkpoint below `directory`; STATUS_NOT_FOUND if there is none. */
Status checkpoint_newest(const char *directory, char *path_out, size_t path_bytes) STATUS_CHECKED;

#endif
