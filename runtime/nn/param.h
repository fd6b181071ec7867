/* Param: the weights of a module on one rank: declared one by one, then laid in two flat buffers
 * (values, gradients), so that reductions, norms and the optimizer run over one array.
 *
 * Parameters whose name matches a pattern of the set are frozen: they have a value and no
 * gradient.
 *
 * Names and shapes are those of Hugging Face's LLaVA: weights [out, in]. A tensor-parallel rank
 * holds one box of the global array: all of it, or a range of one dim.
 *
 * Order: the trained parameters stand first, then the frozen ones, each in the order declared,
 * without gaps; the gradients' buffer has the trained ones only, at the same offsets.
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
    int64_t dims[TENSOR_DIMS_MAX]; /* global */
    Range shard;                   /* of shard_dim, this rank */
    int num_dims;
    int shard_dim; /* -1: every tp rank holds all of it */
    ParamInit init;
    float init_std;
    /* Held by every tp rank, each with a part of the gradient: summed over tp before use. */
    bool grad_is_partial;
    /* Held by the first and the last pipeline stage, each with a part of the gradient (a tied
     * head on another stage than its table): summed over the two before use. */
    bool is_tied;
    bool decay; /* weight decay applies (matrices) */
} ParamSpec;

typedef struct Param {
    ParamSpec spec;
    Tensor value;   /* local part */
    Tensor grad;    /* of a frozen one: data NULL */
    int64_t offset; /* elements from the start of the flat buffers */
    bool is_trained;
    /* This rank's part counts in global sums over tp and pp (norm, checkpoint): sharded, or tp
     * rank 0 of a replicated one; of a tied one the first stage's. */
    bool counts;
} Param;

typedef struct ParamSet {
    Device *device;
    int num_params;
    Param *params; /* stable after param_set_allocate */
    size_t capacity;
    int64_t count;         /* elements of values */
    int64_t trained_count; /* elements of grads: the first of values */
    float *values;
    float *grads;        /* NULL when nothing is trained */
    char *const *frozen; /* glob patterns of names, as fnmatch(3); borrowed until allocation */
    size_t num_frozen;
} ParamSet;

void param_set_init(ParamSet *set, Device *device);
/* Before the first declaration. */
void param_set_freeze(ParamSet *set, char *const *patterns, size_t num_patterns);
void param_set_done(ParamSet *set);

/* Declares a parameter; *index_out names it until and after allocation. */
Status param_set_add(ParamSet *set, const ParamSpec *spec, bool counts,
                     int *index_out) STATUS_CHECKED;
/* Allocates the flat buffers (zeroed) and sets every value and grad view. */
Status param_set_allocate(ParamSet *set) STATUS_CHECKED;
/* The index in the global array of element `local` of a rank's part. */
int64_t param_global_index(const ParamSpec *spec, int64_t local);
/* Fills values: element i of the global array is a pure function of (seed, name, i), so every
 * layout starts the same. */
Status param_set_fill(ParamSet *set, uint64_t seed, Stream *stream) STATUS_CHECKED;

#endif
