#include "comm/reduce.h"

#include <string.h>

enum {
    BLOCK_F32 = REDUCE_BLOCK_BYTES / 4,
    BLOCK_F64 = REDUCE_BLOCK_BYTES / 8,
};

/* acc[count] += b[count]. The accumulator is a block of its own, so loops run on vectors. */
static void sum_f32(float *restrict acc, const float *restrict b, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        acc[i] += b[i];
    }
}

static void sum_f64(double *restrict acc, const double *restrict b, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        acc[i] += b[i];
    }
}

/* A NaN stays: a norm that is not finite must not be hidden by a larger one. */
static void max_f32(float *restrict acc, const float *restrict b, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        acc[i] = b[i] > acc[i] || b[i] != b[i] ? b[i] : acc[i];
    }
}

static void max_f64(double *restrict acc, const double *restrict b, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        acc[i] = b[i] > acc[i] || b[i] != b[i] ? b[i] : acc[i];
    }
}

static void reduce_f32(float *out, const void *const *sources, int num_sources, int64_t count,
                       CommReduce reduce)
{
    float block[BLOCK_F32];
    memcpy(block, sources[0], (size_t)count * sizeof *block);
    for (int i = 1; i < num_sources; i++) {
        if (reduce == COMM_REDUCE_SUM) {
            sum_f32(block, sources[i], count);
        } else {
            max_f32(block, sources[i], count);
        }
    }
    memcpy(out, block, (size_t)count * sizeof *block);
}

static void reduce_f64(double *out, const void *const *sources, int num_sources, int64_t count,
                       CommReduce reduce)
{
    double block[BLOCK_F64];
    memcpy(block, sources[0], (size_t)count * sizeof *block);
    for (int i = 1; i < num_sources; i++) {
        if (reduce == COMM_REDUCE_SUM) {
            sum_f64(block, sources[i], count);
        } else {
            max_f64(block, sources[i], count);
        }
    }
    memcpy(out, block, (size_t)count * sizeof *block);
}

void reduce_block(void *out, const void *const *sources, int num_sources, int64_t count,
                  DType dtype, CommReduce reduce)
{
    CHECK(num_sources >= 1 && count * dtype_bytes(dtype) <= REDUCE_BLOCK_BYTES);
    if (dtype == DTYPE_F32) {
        reduce_f32(out, sources, num_sources, count, reduce);
    } else {
        CHECK(dtype == DTYPE_F64);
        reduce_f64(out, sources, num_sources, count, reduce);
    }
}
