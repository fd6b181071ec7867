/* Tensor: a view of contiguous, row-major elements in device memory. It never owns.
 * Threading: plain data.
 */
#ifndef TENSOR_TENSOR_H
#define TENSOR_TENSOR_H

#include "base/arena.h"
#include "base/status.h"

#include <stdint.h>

typedef enum DType {
    DTYPE_F32,
    DTYPE_F64,
    DTYPE_BF16,
    DTYPE_I32,
    DTYPE_I64,
    DTYPE_U8,
} DType;

enum {
    TENSOR_DIMS_MAX = 4
};

typedef struct Tensor {
    void *data;
    DType dtype;
    int num_dims;
    int64_t dims[TENSOR_DIMS_MAX];
} Tensor;

int64_t dtype_bytes(DType dtype);
const char *dtype_name(DType dtype); /* "F32", ...: the names of safetensors */

/* Product of dims; 1 for a scalar. */
int64_t tensor_count(const Tensor *tensor);
int64_t tensor_bytes(const Tensor *tensor);

/* Float32 tensors over existing memory. */
Tensor tensor_1d(void *data, int64_t dim0);
Tensor tensor_2d(void *data, int64_t dim0, int64_t dim1);

/* A float32 tensor [dim0, dim1] carved from the arena. */
Tensor tensor_take_2d(Arena *arena, int64_t dim0, int64_t dim1);
Tensor tensor_take_1d(Arena *arena, int64_t dim0);

/* Rows [begin, end) of dim 0, same memory. */
Tensor tensor_rows(const Tensor *tensor, int64_t begin, int64_t end);

static inline float *tensor_f32(const Tensor *tensor)
{
    DCHECK(tensor->dtype == DTYPE_F32);
    return (float *)tensor->data;
}

#endif
