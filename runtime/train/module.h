/* Module: what the trainer needs of a part of the model: an encoder that turns images into rows, or
 * the decoder that turns tokens and rows into a loss. Forward keeps what backward needs in one of
 * `slots` activation arenas, one per microbatch in flight.
 *
 * A rank's module holds its tensor-parallel part; its collectives over tp run inside forward and
 * backward. Row activations [R, D] and their gradients are equal on all tp ranks of a replica.
 * Threading: the step thread.
 */
#ifndef TRAIN_MODULE_H
#define TRAIN_MODULE_H

#include "comm/comm.h"
#include "job/job_spec.h"
#include "kernels/kernels.h"
#include "nn/param.h"

typedef struct Module Module;

typedef struct ModuleContext {
    Device *device;
    const Kernels *kernels;
    Stream *stream;
    Comm *tp; /* this replica's tensor-parallel group; size 1 is fine, NULL means size 1 */
} ModuleContext;

/* The largest microbatch a module will see, on this rank: sizes its arenas. */
typedef struct ModuleLimits {
    int slots;
    int64_t images;   /* encoder */
    int64_t tokens;   /* decoder */
    int64_t segments; /* decoder: samples */
    int64_t rows;     /* decoder: rows received */
} ModuleLimits;

/* Input of one microbatch; pointers are device memory unless said otherwise, borrowed until
 * backward of the slot (or the next forward into it). */
typedef struct ModuleBatch {
    /* encoder */
    int64_t num_images;
    const uint8_t *pixels; /* [images, S, S, 3] */
    /* decoder: samples packed one after another */
    int64_t num_tokens;
    int32_t num_segments;
    const int32_t *segment_begins; /* [segments + 1], host memory */
    const int32_t *ids;            /* [tokens]; TOKEN_IMAGE where a row goes */
    const int32_t *positions;      /* [tokens]: within the sample */
    const int32_t *labels;         /* [tokens]: the id that must come next, or -1 */
    int64_t num_rows;
    const int32_t *row_tokens; /* [rows]: the token where row i goes; distinct */
    const float *rows;         /* [rows, D] */
    float loss_scale;          /* gradient of each counted label's loss: 1 / N of the whole step */
} ModuleBatch;

typedef struct ModuleOps {
    const char *name; /* "vision", "llm" */
    /* Declares and allocates the parameters of this rank (not filled) and the arenas. */
    Status (*create)(const ModelSpec *model, const ModuleContext *context,
                     const ModuleLimits *limits, Module **module_out);
    void (*destroy)(Module *module);
    /* Encoder: rows_out [images * rows_per_image, D]. Decoder: *loss_sum_out += sum of the losses
     * of counted labels (nats), host memory, valid after stream_wait; the other output is ignored
     * and may be NULL. With loss_sum_out NULL a decoder needs no labels and computes no loss:
     * predict may follow, backward may not. */
    Status (*forward)(Module *module, int slot, const ModuleBatch *batch, float *rows_out,
                      double *loss_sum_out);
    /* Adds to the gradients. Encoder: rows_grad [R, D] is read. Decoder: rows_grad [R, D] = the
     * gradient of its rows. */
    Status (*backward)(Module *module, int slot, const ModuleBatch *batch, float *rows_grad);
    /* Decoder, after forward into the slot: the likeliest next id after each of tokens[num] (host
     * memory), the same on all tp ranks. */
    Status (*predict)(Module *module, int slot, const int32_t *tokens, int32_t num,
                      int32_t *ids_out);
} ModuleOps;

struct Module {
    const ModuleOps *ops;
    ParamSet params;
};

/* Rows that one image yields: (image_size / patch_size)^2. */
static inline int module_rows_per_image(const ModelSpec *model)
{
    int side = model->vision->image_size / model->vision->patch_size;
    return side * side;
}

#endif
