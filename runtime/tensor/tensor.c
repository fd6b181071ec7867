#include "tensor/tensor.h"

static const struct {
    const char *name;
    int64_t size_bytes;
} dtypes[] = {
    [DTYPE_F32] = {"F32", 4}, [DTYPE_F64] = {"F64", 8}, [DTYPE_BF16] = {"BF16", 2},
    [DTYPE_I32] = {"I32", 4}, [DTYPE_I64] = {"I64", 8}, [DTYPE_U8] = {"U8", 1},
};

int64_t dtype_bytes(DType dtype)
{
    return dtypes[dtype].size_bytes;
}

const char *dtype_name(DType dtype)
{
    return dtypes[dtype].name;
}

int64_t tensor_count(const Tensor *tensor)
{
    int64_t count = 1;
    for (int i = 0; i < tensor->num_dims; i++) {
        count *= tensor->dims[i];
    }
    return count;
}

int64_t tensor_bytes(const Tensor *tensor)
{
    return tensor_count(tensor) * dtype_bytes(tensor->dtype);
}

Tensor tensor_1d(void *data, int64_t dim0)
{
    return (Tensor){.data = data, .dtype = DTYPE_F32, .num_dims = 1, .dims = {dim0}};
}

Tensor tensor_2d(void *data, int64_t dim0, int64_t dim1)
{
    return (Tensor){.data = data, .dtype = DTYPE_F32, .num_dims = 2, .dims = {dim0, dim1}};
}

Tensor tensor_take_2d(Arena *arena, int64_t dim0, int64_t dim1)
{
    return tensor_2d(arena_take(arena, dim0 * dim1 * (int64_t)sizeof(float)), dim0, dim1);
}

Tensor tensor_take_1d(Arena *arena, int64_t dim0)
{
    return tensor_1d(arena_take(arena, dim0 * (int64_t)sizeof(float)), dim0);
}

Tensor tensor_rows(const Tensor *tensor, int64_t begin, int64_t end)
{
    CHECK(tensor->num_dims >= 1 && begin >= 0 && begin <= end && end <= tensor->dims[0]);
    Tensor rows = *tensor;
    rows.dims[0] = end - begin;
    int64_t row_bytes = dtype_bytes(tensor->dtype);
    for (int i = 1; i < tensor->num_dims; i++) {
        row_bytes *= tensor->dims[i];
    }
    if (rows.data) {
        rows.data = (char *)rows.data + begin * row_bytes;
    }
    return rows;
}
