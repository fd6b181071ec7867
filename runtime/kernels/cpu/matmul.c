/* Matrix products: tiles of c, each by one thread.
 *
 * oneDNN would use all threads by itself, but may then cut k between them, and the order of the
 * sums would depend on their number. Tiles cut by the sizes alone keep the order and cost a few
 * percent at most.
 */
#include "base/range.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/gemm.h"

enum {
    TILE_ROWS_MAX = 400, /* larger ones gain nothing more */
    TILE_COLS_MAX = 384,
    TILE_ROWS_MIN = 64, /* smaller ones lose a quarter of the speed and more */
    TILE_COLS_MIN = 128,
    TILES_WANTED = 8,       /* enough for the threads of one rank */
    PARALLEL_MIN = 1 << 18, /* multiply-adds: some 5 us of one core */
};

typedef struct Tiling {
    int64_t down;   /* tiles over the rows of c */
    int64_t across; /* tiles over its columns */
} Tiling;

static Tiling choose_tiling(const MatMul *p)
{
    int64_t rows = TILE_ROWS_MAX;
    int64_t cols = TILE_COLS_MAX;
    Tiling tiling = {0};
    for (;;) {
        tiling.down = (p->m + rows - 1) / rows;
        tiling.across = (p->n + cols - 1) / cols;
        bool smallest = rows == TILE_ROWS_MIN && cols == TILE_COLS_MIN;
        if (smallest || tiling.down * tiling.across >= TILES_WANTED ||
            p->m * p->n * p->k < PARALLEL_MIN) {
            return tiling;
        }
        bool cut_cols = cols > TILE_COLS_MIN && (cols >= rows || rows == TILE_ROWS_MIN);
        if (cut_cols) {
            cols = cols / 2 > TILE_COLS_MIN ? cols / 2 : TILE_COLS_MIN;
        } else {
            rows = rows / 2 > TILE_ROWS_MIN ? rows / 2 : TILE_ROWS_MIN;
        }
    }
}

/* c (+)= bias, or 0, in one tile: what the product is then added to. Returns whether c has a value
 * to add to. */
static bool begin_tile(const MatMul *p, Range rows, Range cols)
{
    if (!p->bias && p->accumulate) {
        return true;
    }
    if (!p->bias && p->k > 0) {
        return false;
    }
    int64_t count = range_count(cols);
    for (int64_t i = rows.begin; i < rows.end; i++) {
        float *c = p->c + i * p->n;
        if (!p->bias) {
            cpu_zero(c + cols.begin, count);
        } else if (!p->accumulate) {
            cpu_copy(c + cols.begin, p->bias + cols.begin, count);
        } else {
            for (int64_t j = cols.begin; j < cols.end; j++) {
                c[j] += p->bias[j];
            }
        }
    }
    return true;
}

static bool compute_tile(const MatMul *p, Range rows, Range cols)
{
    float beta = begin_tile(p, rows, cols) ? 1.0f : 0.0f;
    if (p->k == 0) {
        return true;
    }
    const Gemm gemm = {
        .c = p->c + rows.begin * p->n + cols.begin,
        .a = p->a + (p->transpose_a ? rows.begin : rows.begin * p->k),
        .b = p->b + (p->transpose_b ? cols.begin * p->k : cols.begin),
        .c_stride = p->n,
        .a_stride = p->transpose_a ? p->m : p->k,
        .b_stride = p->transpose_b ? p->k : p->n,
        .m = range_count(rows),
        .n = range_count(cols),
        .k = p->k,
        .alpha = 1.0f,
        .beta = beta,
        .transpose_a = p->transpose_a,
        .transpose_b = p->transpose_b,
    };
    return gemm_compute(&gemm);
}

Status matmul_cpu(const MatMul *p, Stream *stream)
{
    (void)stream;
    CHECK(p->m >= 0 && p->n >= 0 && p->k >= 0);
    Tiling tiling = choose_tiling(p);
    int64_t tiles = tiling.down * tiling.across;
    bool parallel = tiles > 1 && p->m * p->n * p->k >= PARALLEL_MIN;
    int failed = 0;
#pragma omp parallel for if (parallel) schedule(static) reduction(+ : failed)
    for (int64_t i = 0; i < tiles; i++) {
        Range rows = range_part(p->m, tiling.down, i / tiling.across);
        Range cols = range_part(p->n, tiling.across, i % tiling.across);
        failed += !compute_tile(p, rows, cols);
    }
    if (failed > 0) {
        return fail(STATUS_NO_MEMORY,
                    "matrix product %lld x %lld x %lld: the library failed in %d of %lld tiles",
                    (long long)p->m, (long long)p->n, (long long)p->k, failed, (long long)tiles);
    }
    return STATUS_OK;
}
