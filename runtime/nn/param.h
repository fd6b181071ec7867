/* Param: the weights of a module on one rank: declared one by one, then laid in two flat buffers
 * (values, gradients), so that reductions, norms and the optimizer run over one array.
 *
 * Names and shapes are those of Hugging Face's LLaVA: weights [out, in]. A tensor-parallel rank
 * holds one box of the global array: all of it, or a range of one dim.
 *
 * Order: parameters stand in the flat buffers in the order declared, without gaps.
 *
 * Threading: owner thread.
 */
#ifndef NN_PARAM_H
#define NN_PARAM_H

#include "base/range.h"
#include "device/device.h"
#include "tensor/tensor.h"

#include <stdbool.h>

typedef enum ParamInit {
    PARAM_INIT_ZEROS,
    PARAM_INIT_ONES,
    PARAM_INIT_NORMAL, /* mean 0, init_std */
} ParamInit;

typedef struct ParamSpec {
    char name[128];
    int num_dims;
    int64_t dims[TENSOR_DIMS_MAX]; /* global */
    int shard_dim;                 /* -1: every tp rank holds all of it */
    Range shard;                   /* of shard_dim, this rank */
    /* Held by every tp rank, each with a part of the gradient: summed over tp before use. */
    bool grad_is_partial;
    bool decay; /* weight decay applies (matrices) */
    ParamInit init;
    float init_std;
} ParamSpec;

typedef struct Param {
    ParamSpec spec;
    Tensor value; /* local part */
    Tensor grad;
    int64_t offset; /* elements from the start of the flat buffers */
    /* This rank's part counts in global sums over tp (norm, checkpoint): sharded, or tp rank 0 of a
     * replicated one. */
    bool counts;
} Param;

typedef struct ParamSet {
    Device *device;
    int num_params;
    Param *params; /* stable after param_set_allocate */
    size_t capacity;
    int64_t count; /* elements in each flat buffer */
    float *values;
    float *grads;
} ParamSet;

void param_set_init(ParamSet *set, Device *device);
void param_set_done(ParamSet *set);

/* Declares a parameter; *index_out names it until and after allocation. */
Status param_set_add(ParamSet *set, const ParamSpec *spec, bool counts,
                     int *index_out) STATUS_CHECKED;
/* Allocates the flat buffers (zeroed) and sets every value and grad view. */
Status param_set_allocate(ParamSet *set) STATUS_CHECKED;
/* Fills values: element i of the global array is a pure function of (seed, name, i), so every
 * layout starts the same. */
Status param_set_fill(ParamSet *set, uint64_t seed, Stream *stream) STATUS_CHECKED;

#endif
