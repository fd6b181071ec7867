/* Module: what the trainer needs of a part of the model: an encoder that turns images or clips into
 * rows, or the decoder that turns tokens and rows into a loss.
 *
 * A module is cut into `stages * chunks` parts, runs of its layers: part p is chunk p / stages of
 * stage p % stages (with one chunk a plain pipeline, with more an interleaved one). The first part
 * has the embedding, the last one the head or the projector. A rank holds the parts of its stage,
 * each of them cut over tp and cp (nn/layer.h), and all collectives over tp and cp run inside
 * forward and backward.
 *
 * Between parts stand activations [n, D] (Module.width): input() says where those of a microbatch
 * must be put before forward, output() where forward leaves them. Forward keeps what backward needs
 * in one of the part's slots, one for each microbatch in flight. Threading: the step thread.
 */
#ifndef TRAIN_MODULE_H
#define TRAIN_MODULE_H

#include "comm/comm.h"
#include "job/job_spec.h"
#include "kernels/kernels.h"
#include "nn/param.h"
#include "nn/sequences.h"
#include "nn/stack.h"

enum {
    MODULE_CHUNKS_MAX = 16
};

typedef struct Module Module;

typedef struct ModuleContext {
    Device *device;
    const Kernels *kernels;
    Stream *stream;
    Comm *tp; /* this replica's groups; size 1 is fine, NULL means size 1 */
    Comm *cp;
    bool is_sequence_parallel;
    int stage;  /* of the pipeline, this rank's */
    int stages; /* 0 means 1 */
    int chunks; /* per stage; 0 means 1 */
    Recompute recompute;
    char *const *frozen; /* glob patterns of parameters' names; borrowed for create */
    size_t num_frozen;
    /* Parts below this one run no backward: nothing in them is trained and nobody wants their
     * input's gradient. The parts above it give the gradient of their input. */
    int backward_begin;
} ModuleContext;

/* The largest microbatch a module will see, on this rank: sizes its arenas. */
typedef struct ModuleLimits {
    int slots[MODULE_CHUNKS_MAX]; /* microbatches in flight in each chunk */
    int64_t items;                /* encoder: images or clips of a replica */
    int64_t frames;               /* audio: of all of them */
    int64_t keys;                 /* decoder: K, tokens of a replica */
    int64_t segments;             /* decoder: samples of a replica */
    int64_t rows;                 /* decoder: rows on this rank */
} ModuleLimits;

/* Input of one microbatch; pointers are device memory unless said otherwise, borrowed until the
 * slot's backward (or the next forward into it). */
typedef struct ModuleBatch {
    /* encoder: the items of the replica, the same on all its ranks */
    int64_t num_items;
    const int32_t *frame_begins; /* audio: [items + 1] host: first frame of each clip */
    const uint8_t *pixels;       /* vision, first part: [items, S, S, 3] */
    const float *frames;         /* audio, first part: [frames, mels] */
    /* decoder: samples packed one after another */
    const Sequences *sequences; /* of the replica's samples on this rank */
    const int32_t *ids;         /* [N]; TOKEN_IMAGE and the like where a row goes; first part */
    const int32_t *labels;      /* [N]: the id that must come next, or -1; last part */
    int64_t num_rows;           /* of this rank; first part */
    const int32_t *row_tokens;  /* [rows]: which of this rank's n tokens row i replaces; distinct */
    const float *rows;          /* [rows, D] */
    float loss_scale;           /* gradient of each counted label's loss: 1 / N of the whole step */
} ModuleBatch;

typedef struct ModuleOps {
    const char *name; /* "vision", "audio", "llm" */
    /* The first part that has a trained parameter; stages * chunks when none has. Looks at
     * `stages`, `chunks` and `frozen` only. Pure. */
    Status (*first_trained)(const ModelSpec *model, const ModuleContext *context, int *part_out);
    /* Declares and allocates the parameters of this rank (not filled) and the arenas. */
    Status (*create)(const ModelSpec *model, const ModuleContext *context,
                     const ModuleLimits *limits, Module **module_out);
    void (*destroy)(Module *module);
    /* n: rows of the activations between parts on this rank. Encoder: the batch's num_items (and
     * frame_begins); decoder: its sequences. Pure. */
    int64_t (*count_local)(const Module *module, const ModuleBatch *batch);
    /* Encoder: the rows that leave on this rank, in the order of its tokens. Decoder: 0. Pure. */
    int64_t (*count_rows)(const Module *module, const ModuleBatch *batch);
    /* [n, D], device memory, of a chunk that is not the first part / the last part. */
    float *(*input)(Module *module, int chunk, int slot);
    const float *(*output)(Module *module, int chunk, int slot);
    /* Encoder's last part: rows_out [count_rows, D of the decoder]. Decoder's last part:
     * *loss_sum_out
     * += sum of the losses of this rank's counted labels (nats; equal on all tp ranks), host
     * memory, valid after stream_wait. Other outputs are ignored and may be NULL. With loss_sum_out
     * NULL a decoder needs no labels and computes no loss: predict may follow, backward may not. */
    Status (*forward)(Module *module, int chunk, int slot, const ModuleBatch *batch,
                      float *rows_out, double *loss_sum_out);
    /* Adds to the gradients. grad [n, D]: on entry the gradient of this part's output (not read by
     * the decoder's last part, nor by an encoder's), on return that of its input, for parts above
     * backward_begin. rows_grad: an encoder's last part reads the gradient of its rows; a decoder's
     * first part writes that of its rows [rows, D] (NULL: not wanted). */
    Status (*backward)(Module *module, int chunk, int slot, const ModuleBatch *batch, float *grad,
                       float *rows_grad);
    /* Decoder's last part, after forward into the slot: the likeliest next id after each of
     * tokens[num] (of this rank's N, host memory), the same on all tp ranks. */
    Status (*predict)(Module *module, int slot, const int32_t *tokens, int32_t num,
                      int32_t *ids_out);
} ModuleOps;

struct Module {
    const ModuleOps *ops;
    ParamSet params;
    int64_t width;     /* D of the activations between parts */
    int64_t local_max; /* the most of them */
};

/* The layers that a part runs, of `layers`. */
static inline Range module_part_layers(int layers, int parts, int part)
{
    return range_part(layers, parts, part);
}

/* Rows that one image yields: (image_size / patch_size)^2. */
static inline int module_rows_per_image(const ModelSpec *model)
{
    int side = model->vision->image_size / model->vision->patch_size;
    return side * side;
}

#endif
