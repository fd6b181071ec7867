/* Attention in blocks of queries and keys: the products by gemm, the softmax between them in the
 * cache.
 *
 * Legend: W head width, Q queries and C keys of one block.
 */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/row.h"

enum {
    QUERIES_MAX = 64, /* of one block */
    KEYS_MAX = 256,
    SCORES_MAX = QUERIES_MAX * KEYS_MAX, /* 64 KB of stack */
    LANES = 16,                          /* floats of the widest vector */
    PARALLEL_MIN = 1 << 18,              /* multiply-adds: some 5 us of one core */
};

static int64_t count_blocks(int64_t tokens, int64_t block_max)
{
    return (tokens + block_max - 1) / block_max;
}

_Static_assert(QUERIES_MAX % LANES == 0 && KEYS_MAX % LANES == 0, "blocks of whole vectors");

/* Block `index` of [0, tokens) in `blocks`: alike but for the last, and whole vectors, which the
 * products are fastest with. Since block_max is whole vectors too, none is larger or empty. */
static Range block_range(int64_t tokens, int64_t blocks, int64_t index)
{
    int64_t size = count_blocks(count_blocks(tokens, blocks), LANES) * LANES;
    return range_intersect((Range){index * size, (index + 1) * size}, (Range){0, tokens});
}

static int kv_head_of(const AttentionShape *shape, int head)
{
    return (shape->first_head + head) / shape->group - shape->first_kv_head;
}

static int64_t run_queries(const AttentionRun *run)
{
    return run->q_end - run->q_begin;
}

static int64_t run_keys(const AttentionRun *run)
{
    return run->key_end - run->key_begin;
}

/* The same keys as the run before: the same segment. */
static bool continues_segment(const AttentionShape *shape, int64_t run)
{
    return run > 0 && shape->runs[run].key_begin == shape->runs[run - 1].key_begin;
}

/* Checks the shape and tells whether the work is worth several threads. */
static bool check_shape(const AttentionShape *shape)
{
    CHECK(shape->heads >= 0 && shape->kv_heads >= 0 && shape->head_width > 0 && shape->group > 0);
    if (shape->heads > 0) {
        CHECK(kv_head_of(shape, 0) >= 0);
        CHECK(kv_head_of(shape, shape->heads - 1) < shape->kv_heads);
    }
    int64_t pairs = 0;
    int64_t query = 0;
    int64_t key = 0;
    for (int64_t r = 0; r < shape->num_runs; r++) {
        const AttentionRun *run = &shape->runs[r];
        CHECK(run->q_begin == query && run->q_begin < run->q_end);
        CHECK(run->key_begin < run->key_end && run->key_end <= shape->num_keys);
        CHECK(continues_segment(shape, r) ? run->key_end == key : run->key_begin >= key);
        CHECK(run->diagonal >= 0 &&
              (!shape->causal || run->diagonal + run_queries(run) <= run_keys(run)));
        query = run->q_end;
        key = run->key_end;
        pairs += run_queries(run) * run_keys(run);
    }
    CHECK(query == shape->num_tokens);
    return pairs * shape->heads * shape->head_width >= PARALLEL_MIN;
}

/* Keys of a block that query `query` of the run may see; both count from the run's first. */
static int64_t count_visible(const AttentionShape *shape, const AttentionRun *run, int64_t query,
                             Range keys)
{
    if (!shape->causal) {
        return range_count(keys);
    }
    return range_count(range_intersect(keys, (Range){keys.begin, run->diagonal + query + 1}));
}

/* Keys of the run that its queries before `queries_end` see, from the run's first. */
static int64_t seen_keys(const AttentionShape *shape, const AttentionRun *run, int64_t queries_end)
{
    return shape->causal ? run->diagonal + queries_end : run_keys(run);
}

typedef struct Forward {
    float *out;         /* [N, H, W] */
    float *log_sum_exp; /* [N, H] */
    const float *q;     /* [N, H, W] */
    const float *k;     /* [K, G, W] */
    const float *v;     /* [K, G, W] */
    const AttentionShape *shape;
} Forward;

/* The running softmax of one block of queries. */
typedef struct Running {
    float max[QUERIES_MAX];
    float sum[QUERIES_MAX];
} Running;

static void scale_row(float *row, float factor, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        row[i] *= factor;
    }
}

/* Scores [Q, C] become e^(score - max), 0 where masked; out [Q, W], summed under the old maximum,
 * is brought to the new one. */
static void soften_block(const AttentionShape *shape, const AttentionRun *run, float *scores,
                         float *out, Range queries, Range keys, Running *running)
{
    int64_t cols = range_count(keys);
    int64_t out_stride = (int64_t)shape->heads * shape->head_width;
    for (int64_t i = 0; i < range_count(queries); i++) {
        float *row = scores + i * cols;
        int64_t visible = count_visible(shape, run, queries.begin + i, keys);
        float old_max = running->max[i];
        float row_largest = row_max(row, visible);
        float max = row_largest > old_max ? row_largest : old_max;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < visible; j++) {
            row[j] = vector_exp(row[j] - max);
            sum += row[j];
        }
        cpu_zero(row + visible, cols - visible);
        float correction = vector_exp(old_max - max);
        running->max[i] = max;
        running->sum[i] = running->sum[i] * correction + sum;
        if (keys.begin > 0) {
            scale_row(out + i * out_stride, correction, shape->head_width);
        }
    }
}

/* One block of queries of one run and head; ranges count from the run's first query and key. */
static bool forward_block(const Forward *f, const AttentionRun *run, int head, Range queries)
{
    const AttentionShape *shape = f->shape;
    int64_t width = shape->head_width;
    int64_t q_stride = shape->heads * width;
    int64_t kv_stride = shape->kv_heads * width;
    int64_t first = run->q_begin;
    int64_t kv_offset = run->key_begin * kv_stride + kv_head_of(shape, head) * width;
    int64_t q_offset = (first + queries.begin) * q_stride + head * width;
    int64_t seen = seen_keys(shape, run, queries.end);
    int64_t key_blocks = count_blocks(seen, KEYS_MAX);
    int64_t rows = range_count(queries);
    float scores[SCORES_MAX];
    Running running;
    for (int64_t i = 0; i < rows; i++) {
        running.max[i] = -INFINITY;
        running.sum[i] = 0.0f;
    }
    float *out = f->out + q_offset;
    bool ok = true;
    for (int64_t block = 0; block < key_blocks; block++) {
        Range keys = block_range(seen, key_blocks, block);
        int64_t cols = range_count(keys);
        int64_t keys_offset = kv_offset + keys.begin * kv_stride;
        const Gemm score = {.c = scores,
                            .a = f->q + q_offset,
                            .b = f->k + keys_offset,
                            .c_stride = cols,
                            .a_stride = q_stride,
                            .b_stride = kv_stride,
                            .m = rows,
                            .n = cols,
                            .k = width,
                            .alpha = shape->scale,
                            .transpose_b = true};
        ok = gemm_compute(&score) && ok;
        soften_block(shape, run, scores, out, queries, keys, &running);
        const Gemm mix = {.c = out,
                          .a = scores,
                          .b = f->v + keys_offset,
                          .c_stride = q_stride,
                          .a_stride = cols,
                          .b_stride = kv_stride,
                          .m = rows,
                          .n = width,
                          .k = cols,
                          .alpha = 1.0f,
                          .beta = block > 0 ? 1.0f : 0.0f};
        ok = gemm_compute(&mix) && ok;
    }
    for (int64_t i = 0; i < rows; i++) {
        float inverse = 1.0f / running.sum[i];
        scale_row(out + i * q_stride, inverse, width);
        f->log_sum_exp[(first + queries.begin + i) * shape->heads + head] =
            running.max[i] + logf(running.sum[i]);
    }
    return ok;
}

/* NOLINTNEXTLINE(readability-non-const-parameter): written through the struct. */
Status attention_forward_cpu(float *out, float *log_sum_exp, const float *q, const float *k,
                             const float *v, const AttentionShape *shape, Stream *stream)
{
    (void)stream;
    bool parallel = check_shape(shape);
    const Forward forward = {out, log_sum_exp, q, k, v, shape};
    int64_t units = (int64_t)shape->num_runs * shape->heads;
    int failed = 0;
#pragma omp parallel for if (parallel) schedule(dynamic, 1) reduction(+ : failed)
    for (int64_t unit = 0; unit < units; unit++) {
        const AttentionRun *run = &shape->runs[unit / shape->heads];
        int64_t blocks = count_blocks(run_queries(run), QUERIES_MAX);
        for (int64_t block = 0; block < blocks; block++) {
            Range queries = block_range(run_queries(run), blocks, block);
            failed += !forward_block(&forward, run, (int)(unit % shape->heads), queries);
        }
    }
    if (failed > 0) {
        return fail(STATUS_NO_MEMORY, "attention: matrix products failed in %d blocks", failed);
    }
    return STATUS_OK;
}

typedef struct Backward {
    float *q_grad;            /* [N, H, W] */
    float *k_grad;            /* [K, G, W] */
    float *v_grad;            /* [K, G, W] */
    const float *out_grad;    /* [N, H, W] */
    const float *out;         /* [N, H, W] */
    const float *log_sum_exp; /* [N, H] */
    const float *q;           /* [N, H, W] */
    const float *k;           /* [K, G, W] */
    const float *v;           /* [K, G, W] */
    const AttentionShape *shape;
} Backward;

/* One block of queries of one head against one block of keys. */
typedef struct Block {
    const AttentionRun *run;
    int head;
    Range queries;                /* from the run's first */
    Range keys;                   /* from the run's first */
    float mean_grad[QUERIES_MAX]; /* out_grad . out of each query */
} Block;

/* scores [Q, C] become the probabilities, and grads [Q, C], which come as out_grad v^T, the
 * gradients of the scores: p = e^(score - log_sum_exp), grad = scale p (grad - out_grad . out). */
static void unsoften_block(const Backward *b, const Block *block, float *scores, float *grads)
{
    const AttentionShape *shape = b->shape;
    int64_t cols = range_count(block->keys);
    for (int64_t i = 0; i < range_count(block->queries); i++) {
        float *row = scores + i * cols;
        float *grad = grads + i * cols;
        int64_t query = block->queries.begin + i;
        int64_t visible = count_visible(shape, block->run, query, block->keys);
        float lse = b->log_sum_exp[(block->run->q_begin + query) * shape->heads + block->head];
        float mean_grad = block->mean_grad[i];
        float scale = shape->scale;
#pragma omp simd
        for (int64_t j = 0; j < visible; j++) {
            float p = vector_exp(row[j] - lse);
            row[j] = p;
            grad[j] = scale * p * (grad[j] - mean_grad);
        }
        cpu_zero(row + visible, cols - visible);
        cpu_zero(grad + visible, cols - visible);
    }
}

static bool backward_block(const Backward *b, const Block *block)
{
    const AttentionShape *shape = b->shape;
    int64_t width = shape->head_width;
    int64_t q_stride = shape->heads * width;
    int64_t kv_stride = shape->kv_heads * width;
    int64_t q_at = (block->run->q_begin + block->queries.begin) * q_stride + block->head * width;
    int64_t kv_at = (block->run->key_begin + block->keys.begin) * kv_stride +
                    kv_head_of(shape, block->head) * width;
    int64_t rows = range_count(block->queries);
    int64_t cols = range_count(block->keys);
    float scores[SCORES_MAX];
    float grads[SCORES_MAX];
    /* scores = scale q k^T, grads = out_grad v^T */
    Gemm inner = {.c = scores,
                  .a = b->q + q_at,
                  .b = b->k + kv_at,
                  .c_stride = cols,
                  .a_stride = q_stride,
                  .b_stride = kv_stride,
                  .m = rows,
                  .n = cols,
                  .k = width,
                  .alpha = shape->scale,
                  .transpose_b = true};
    bool ok = gemm_compute(&inner);
    inner.c = grads;
    inner.a = b->out_grad + q_at;
    inner.b = b->v + kv_at;
    inner.alpha = 1.0f;
    ok = gemm_compute(&inner) && ok;
    unsoften_block(b, block, scores, grads);
    /* v_grad += p^T out_grad, k_grad += grads^T q */
    Gemm outer = {.c = b->v_grad + kv_at,
                  .a = scores,
                  .b = b->out_grad + q_at,
                  .c_stride = kv_stride,
                  .a_stride = cols,
                  .b_stride = q_stride,
                  .m = cols,
                  .n = width,
                  .k = rows,
                  .alpha = 1.0f,
                  .beta = 1.0f,
                  .transpose_a = true};
    ok = gemm_compute(&outer) && ok;
    outer.c = b->k_grad + kv_at;
    outer.a = grads;
    outer.b = b->q + q_at;
    ok = gemm_compute(&outer) && ok;
    /* q_grad (+)= grads k */
    const Gemm mix = {.c = b->q_grad + q_at,
                      .a = grads,
                      .b = b->k + kv_at,
                      .c_stride = q_stride,
                      .a_stride = cols,
                      .b_stride = kv_stride,
                      .m = rows,
                      .n = width,
                      .k = cols,
                      .alpha = 1.0f,
                      .beta = block->keys.begin > 0 ? 1.0f : 0.0f};
    return gemm_compute(&mix) && ok;
}

static int backward_head(const Backward *b, const AttentionRun *run, int head)
{
    const AttentionShape *shape = b->shape;
    int64_t width = shape->head_width;
    int64_t query_blocks = count_blocks(run_queries(run), QUERIES_MAX);
    Block block = {.run = run, .head = head};
    int failed = 0;
    for (int64_t i = 0; i < query_blocks; i++) {
        block.queries = block_range(run_queries(run), query_blocks, i);
        for (int64_t r = block.queries.begin; r < block.queries.end; r++) {
            int64_t at = ((run->q_begin + r) * shape->heads + head) * width;
            block.mean_grad[r - block.queries.begin] =
                row_dot(b->out_grad + at, b->out + at, width);
        }
        int64_t seen = seen_keys(shape, run, block.queries.end);
        int64_t key_blocks = count_blocks(seen, KEYS_MAX);
        for (int64_t j = 0; j < key_blocks; j++) {
            block.keys = block_range(seen, key_blocks, j);
            failed += !backward_block(b, &block);
        }
    }
    return failed;
}

/* One key/value head of the segment that begins with run `first`, with all its runs and all query
 * heads that use it: their sums meet in one thread. */
static int backward_kv_head(const Backward *b, int64_t first, int kv_head)
{
    const AttentionShape *shape = b->shape;
    int failed = 0;
    int64_t run = first;
    do {
        for (int head = 0; head < shape->heads; head++) {
            if (kv_head_of(shape, head) == kv_head) {
                failed += backward_head(b, &shape->runs[run], head);
            }
        }
        run++;
    } while (run < shape->num_runs && continues_segment(shape, run));
    return failed;
}

/* The parameters of the op, some written through the struct. */
/* NOLINTNEXTLINE(readability-function-size,readability-non-const-parameter) */
Status attention_backward_cpu(float *q_grad, float *k_grad, float *v_grad, const float *out_grad,
                              const float *out, const float *log_sum_exp, const float *q,
                              const float *k, const float *v, const AttentionShape *shape,
                              Stream *stream)
{
    (void)stream;
    bool parallel = check_shape(shape);
    const Backward backward = {q_grad, k_grad, v_grad, out_grad, out, log_sum_exp, q, k, v, shape};
    int64_t units = (int64_t)shape->num_runs * shape->kv_heads;
    int64_t keys_count = shape->num_keys * shape->kv_heads * shape->head_width;
    int failed = 0;
    cpu_zero(k_grad, keys_count);
    cpu_zero(v_grad, keys_count);
#pragma omp parallel for if (parallel) schedule(dynamic, 1) reduction(+ : failed)
    for (int64_t unit = 0; unit < units; unit++) {
        int64_t run = unit / shape->kv_heads;
        if (!continues_segment(shape, run)) {
            failed += backward_kv_head(&backward, run, (int)(unit % shape->kv_heads));
        }
    }
    if (failed > 0) {
        return fail(STATUS_NO_MEMORY, "attention: matrix products failed in %d blocks", failed);
    }
    return STATUS_OK;
}
