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
 * The header of a safetensors file is a pure function of the tensors that all ranks declare together
 * (the stages of a pipeline have different ones: ranks tell each other theirs), so every rank knows at
 * which byte its box begins and writes its own part. Tensors stand in the order of their names, numbers
 * in them by their value: the files are the same bytes whatever the layout. Files in another order are
 * read too. Frozen parameters have weights and no state. All ranks must see the same directory (one
 * host, or a shared file system).
 * Threading: the step thread.
 */
#ifndef CHECKPOINT_CHECKPOINT_H
#define CHECKPOINT_CHECKPOINT_H

#include "comm/comm.h"
#include "nn/param.h"

enum {
    CHECKPOINT_PARTS_MAX = 8, /* modules of a job */
};

/* What one rank brings of one module: its parameters, and state arrays of the same flat form for a range
 * of the trained ones (train/state_shard.h). */
typedef struct CheckpointPart {
    const char *module; /* "vision" */
    const ParamSet *params;
    Range state; /* elements of the flat buffer, of the trained parameters */
    float *m;    /* [elements of state]; NULL with SGD and where nothing is trained */
    float *v;
    bool writes_weights; /* of the replicas of a module one writes: the first */
    bool writes_state;   /* the same, or every one where each has its own range */
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
Status checkpoint_save(const char *directory, int keep, const CheckpointPart *parts, int num_parts,
                       const CheckpointState *state, Comm *world, Stream *stream, char *path_out,
                       size_t path_bytes) STATUS_CHECKED;

/* Each rank reads its own boxes, whatever layout wrote them: weights of all its parameters, state of its
 * range. Checks names, shapes and checksums; STATUS_CORRUPT or STATUS_INVALID name file and tensor. */
Status checkpoint_load(const char *path, const CheckpointPart *parts, int num_parts,
                       CheckpointState *state_out, Stream *stream) STATUS_CHECKED;

/* Collective over `world`, for before a load: STATUS_INVALID when the checkpoint has tensors of
 * these modules that no rank declares, as of a model with more layers. A rank alone cannot know. */
Status checkpoint_check(const char *path, const CheckpointPart *parts, int num_parts, Comm *world,
                        Stream *stream) STATUS_CHECKED;

/* The newest complete checkpoint below `directory`; STATUS_NOT_FOUND if there is none. */
Status checkpoint_newest(const char *directory, char *path_out, size_t path_bytes) STATUS_CHECKED;

#endif
