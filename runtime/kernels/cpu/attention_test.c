#include "base/range.h"
#include "kernels/testing.h"

typedef struct Reference {
    AttentionShape shape;
    double *q, *k, *v;
    double *out_grad;
    double *out;         /* [N, H, W] */
    double *log_sum_exp; /* [N, H] */
    double *scores;      /* [N], of one query */
} Reference;

static int64_t kv_head_of(const AttentionShape *s, int head)
{
    return (s->first_head + head) / s->group - s->first_kv_head;
}

/* Query `query` of a run sees keys [run->key_begin, end). */
static void attend(const Reference *r, const AttentionRun *run, int64_t query, int head)
{
    const AttentionShape *s = &r->shape;
    int64_t width = s->head_width;
    int64_t first = run->key_begin;
    int64_t end = s->causal ? first + run->diagonal + query - run->q_begin + 1 : run->key_end;
    const double *q = r->q + (query * s->heads + head) * width;
    double sum = 0.0;
    for (int64_t key = first; key < end; key++) {
        const double *k = r->k + (key * s->kv_heads + kv_head_of(s, head)) * width;
        double dot = 0.0;
        for (int64_t i = 0; i < width; i++) {
            dot += q[i] * k[i];
        }
        r->scores[key] = exp((double)s->scale * dot); /* small enough without a maximum */
        sum += r->scores[key];
    }
    r->log_sum_exp[query * s->heads + head] = log(sum);
    for (int64_t i = 0; i < width; i++) {
        double out = 0.0;
        for (int64_t key = first; key < end; key++) {
            out +=
                r->scores[key] / sum * r->v[(key * s->kv_heads + kv_head_of(s, head)) * width + i];
        }
        r->out[(query * s->heads + head) * width + i] = out;
    }
}

static double loss(const void *context)
{
    const Reference *r = context;
    const AttentionShape *s = &r->shape;
    for (int run = 0; run < s->num_runs; run++) {
        const AttentionRun *own = &s->runs[run];
        for (int64_t i = (int64_t)own->q_begin * s->heads; i < (int64_t)own->q_end * s->heads;
             i++) {
            attend(r, own, i / s->heads, (int)(i % s->heads));
        }
    }
    double sum = 0.0;
    for (int64_t i = 0; i < s->num_tokens * s->heads * s->head_width; i++) {
        sum += r->out_grad[i] * r->out[i];
    }
    return sum;
}

typedef struct Result {
    float *out, *log_sum_exp;
    float *q_grad, *k_grad, *v_grad;
} Result;

/* Segments one after another: begins [num_segments + 1]. */
typedef struct Segments {
    const int32_t *begins;
    int num_segments;
} Segments;

enum {
    RUNS_MAX = 32
};

/* Chunks `part` and 2 parts - 1 - part of 2 parts of each segment, as context parallelism cuts
 * them; parts 1: whole segments. */
static void make_runs(const Segments *segments, int64_t parts, int64_t part, AttentionRun *runs,
                      AttentionShape *shape)
{
    int32_t query = 0;
    shape->runs = runs;
    shape->num_runs = 0;
    shape->num_keys = segments->begins[segments->num_segments];
    for (int s = 0; s < segments->num_segments; s++) {
        int32_t first = segments->begins[s];
        int32_t length = segments->begins[s + 1] - first;
        for (int c = 0; c < (parts > 1 ? 2 : 1); c++) {
            Range chunk = parts > 1 ? range_part(length, 2 * parts, c ? 2 * parts - 1 - part : part)
                                    : (Range){0, length};
            int32_t count = (int32_t)range_count(chunk);
            if (count > 0) {
                runs[shape->num_runs++] = (AttentionRun){query, query + count, first,
                                                         first + length, (int32_t)chunk.begin};
                query += count;
            }
        }
    }
    shape->num_tokens = query;
}

static bool is_named(const AttentionShape *shape, int64_t key)
{
    for (int r = 0; r < shape->num_runs; r++) {
        if (key >= shape->runs[r].key_begin && key < shape->runs[r].key_end) {
            return true;
        }
    }
    return false;
}

static void check_runs(Fixture *f, AttentionShape shape)
{
    shape.scale = 1.0f / sqrtf((float)shape.head_width);
    int64_t queries = shape.num_tokens * shape.heads * shape.head_width;
    int64_t keys = shape.num_keys * shape.kv_heads * shape.head_width;
    int64_t rows = shape.num_tokens * shape.heads;
    const float *q = test_floats(f, 1, queries);
    const float *k = test_floats(f, 2, keys);
    const float *v = test_floats(f, 3, keys);
    const float *out_grad = test_floats(f, 4, queries);
    Result results[2];
    for (int t = 0; t < 2; t++) {
        omp_set_num_threads(t + 1);
        Result *r = &results[t];
        /* What is there before must not matter. */
        *r = (Result){test_floats(f, 5, queries), test_floats(f, 6, rows),
                      test_floats(f, 7, queries), test_floats(f, 8, keys), test_floats(f, 9, keys)};
        assert_int_equal(
            f->kernels->attention_forward(r->out, r->log_sum_exp, q, k, v, &shape, f->stream),
            STATUS_OK);
        assert_int_equal(f->kernels->attention_backward(r->q_grad, r->k_grad, r->v_grad, out_grad,
                                                        r->out, r->log_sum_exp, q, k, v, &shape,
                                                        f->stream),
                         STATUS_OK);
    }
    const Result *got = &results[0];
    assert_same_bits(got->out, results[1].out, queries);
    assert_same_bits(got->q_grad, results[1].q_grad, queries);
    assert_same_bits(got->k_grad, results[1].k_grad, keys);
    assert_same_bits(got->v_grad, results[1].v_grad, keys);
    Reference reference = {shape,
                           test_doubles(f, q, queries),
                           test_doubles(f, k, keys),
                           test_doubles(f, v, keys),
                           test_doubles(f, out_grad, queries),
                           test_memory(f, queries, sizeof(double)),
                           test_memory(f, rows, sizeof(double)),
                           test_memory(f, shape.num_keys, sizeof(double))};
    (void)loss(&reference);
    assert_all_near(got->out, reference.out, queries, 2e-6, "out");
    assert_all_near(got->log_sum_exp, reference.log_sum_exp, rows, 2e-6, "log_sum_exp");
    assert_gradient(loss, &reference, reference.q, queries, got->q_grad, NULL, 1e-5, "q_grad");
    assert_gradient(loss, &reference, reference.k, keys, got->k_grad, NULL, 1e-5, "k_grad");
    assert_gradient(loss, &reference, reference.v, keys, got->v_grad, NULL, 1e-5, "v_grad");
    int64_t row = (int64_t)shape.kv_heads * shape.head_width;
    for (int64_t i = 0; i < keys; i++) {
        if (!is_named(&shape, i / row)) {
            assert_true(got->k_grad[i] == 0.0f && got->v_grad[i] == 0.0f);
        }
    }
}

static void check_part(Fixture *f, AttentionShape shape, const Segments *segments, int parts,
                       int part)
{
    AttentionRun runs[RUNS_MAX];
    make_runs(segments, parts, part, runs, &shape);
    check_runs(f, shape);
}

static void check_shape(Fixture *f, AttentionShape shape, const int32_t *begins, int num_segments)
{
    const Segments segments = {begins, num_segments};
    check_part(f, shape, &segments, 1, 0);
    check_part(f, shape, &segments, 2, 1);
}

/* Segments of all kinds: empty, one token, less and more than a block of queries and of keys. */
static const int32_t mixed[] = {0, 1, 1, 8, 73, 140, 141};
static const int32_t longer[] = {0, 3, 304};

static void test_plain_heads(void **state)
{
    for (int causal = 0; causal < 2; causal++) {
        check_shape(*state,
                    (AttentionShape){
                        .heads = 3, .kv_heads = 3, .head_width = 8, .group = 1, .causal = causal},
                    mixed, 6);
        check_shape(*state,
                    (AttentionShape){.heads = 2,
                                     .kv_heads = 2,
                                     .head_width = 10,
                                     .group = 1,
                                     .first_head = 4,
                                     .first_kv_head = 4,
                                     .causal = causal},
                    longer, 2);
    }
}

/* 9 query heads on 3 key/value heads, cut unevenly: heads 2..6 need key/value heads 0..2; and 4..5
 * only head 1. */
static void test_grouped_heads_in_uneven_shards(void **state)
{
    for (int causal = 0; causal < 2; causal++) {
        check_shape(*state,
                    (AttentionShape){.heads = 5,
                                     .kv_heads = 3,
                                     .head_width = 6,
                                     .group = 3,
                                     .first_head = 2,
                                     .first_kv_head = 0,
                                     .causal = causal},
                    mixed, 6);
        check_shape(*state,
                    (AttentionShape){.heads = 2,
                                     .kv_heads = 1,
                                     .head_width = 128,
                                     .group = 3,
                                     .first_head = 4,
                                     .first_kv_head = 1,
                                     .causal = causal},
                    mixed, 6);
    }
}

/* Segments with gaps of keys before, between and behind them, each seen by one to three runs at
 * random places; so small that their gradients are checked at much of what they hold. */
static void make_random_runs(int64_t seed, AttentionRun *runs, AttentionShape *shape)
{
    uint64_t stream = 100 + (uint64_t)seed;
    int64_t draw = 0;
    int32_t query = 0;
    int32_t key = 0;
    shape->runs = runs;
    shape->num_runs = 0;
    for (int64_t segments = 1 + test_below(stream, draw++, 3); segments > 0; segments--) {
        int32_t first = key + (int32_t)test_below(stream, draw++, 3);
        int32_t length = 1 + (int32_t)test_below(stream, draw++, 40);
        int32_t place = 0;
        int first_run = shape->num_runs;
        for (int64_t r = 1 + test_below(stream, draw++, 3); r > 0 && place < length; r--) {
            int32_t begin = place + (int32_t)test_below(stream, draw++, length - place);
            int32_t count = 1 + (int32_t)test_below(stream, draw++, length - begin);
            runs[shape->num_runs++] =
                (AttentionRun){query, query + count, first, first + length, begin};
            query += count;
            place = begin + count;
        }
        assert_true(shape->num_runs > first_run && shape->num_runs <= RUNS_MAX);
        key = first + length;
    }
    shape->num_tokens = query;
    shape->num_keys = key + test_below(stream, draw, 3);
}

static void test_random_runs(void **state)
{
    for (int64_t seed = 0; seed < 40; seed++) {
        AttentionRun runs[RUNS_MAX];
        AttentionShape shape = {
            .heads = 2, .kv_heads = 1, .head_width = 4, .group = 2, .causal = seed % 2 == 0};
        make_random_runs(seed, runs, &shape);
        check_runs(*state, shape);
    }
}

/* A key/value head that no local query head uses gets gradients of zero; no heads and no tokens do
 * nothing. */
static void test_nothing_to_do(void **state)
{
    static const int32_t none[] = {0, 0};
    check_shape(
        *state,
        (AttentionShape){.heads = 1, .kv_heads = 2, .head_width = 8, .group = 2, .causal = true},
        mixed, 6);
    check_shape(*state, (AttentionShape){.kv_heads = 1, .head_width = 8, .group = 2}, mixed, 6);
    check_shape(*state, (AttentionShape){.heads = 1, .kv_heads = 1, .head_width = 8, .group = 1},
                none, 1);
    check_shape(*state, (AttentionShape){.heads = 1, .kv_heads = 1, .head_width = 8, .group = 1},
                none, 0);
}

/* Scores in the hundreds: e^score alone would overflow, and most keys underflow to nothing. */
static void test_large_scores(void **state)
{
    Fixture *f = *state;
    const int64_t count = (int64_t)200 * 4;
    float *q = test_floats(f, 1, count);
    const float *k = test_floats(f, 2, count);
    const float *v = test_floats(f, 3, count);
    for (int64_t i = 0; i < count; i++) {
        q[i] *= 100.0f;
    }
    float *out = test_memory(f, count, sizeof(float));
    float *lse = test_memory(f, 200, sizeof(float));
    static const AttentionRun run = {0, 200, 0, 200, 0};
    const AttentionShape shape = {.runs = &run,
                                  .num_runs = 1,
                                  .num_tokens = 200,
                                  .num_keys = 200,
                                  .heads = 1,
                                  .kv_heads = 1,
                                  .head_width = 4,
                                  .group = 1,
                                  .scale = 1.0f};
    assert_int_equal(f->kernels->attention_forward(out, lse, q, k, v, &shape, f->stream),
                     STATUS_OK);
    for (int64_t i = 0; i < 200; i++) {
        double scores[200];
        double largest = -INFINITY;
        for (int64_t j = 0; j < 200; j++) {
            scores[j] = 0.0;
            for (int64_t w = 0; w < 4; w++) {
                scores[j] += (double)q[i * 4 + w] * (double)k[j * 4 + w];
            }
            largest = fmax(largest, scores[j]);
        }
        double sum = 0.0;
        double mixed_v = 0.0;
        for (int64_t j = 0; j < 200; j++) {
            sum += exp(scores[j] - largest);
            mixed_v += exp(scores[j] - largest) * (double)v[j * 4];
        }
        /* Scores of some 500 are rounded by 3e-5. */
        assert_near((double)out[i * 4], mixed_v / sum, 5e-4, "out", i);
        assert_near((double)lse[i], largest + log(sum), 1e-6, "log_sum_exp", i);
    }
}

enum {
    PARTS = 3,
    HEADS = 2,
    WIDTH = 8,
    ROW = HEADS * WIDTH
};

/* Attention of what one rank has, or of all. */
typedef struct Part {
    AttentionRun runs[RUNS_MAX];
    AttentionShape shape;
    const float *q, *out_grad;
    Result result;
} Part;

static void compute_part(Fixture *f, Part *p, const float *k, const float *v)
{
    int64_t queries = p->shape.num_tokens * ROW;
    int64_t keys = p->shape.num_keys * WIDTH;
    Result *r = &p->result;
    *r = (Result){test_floats(f, 5, queries), test_floats(f, 6, p->shape.num_tokens * HEADS),
                  test_floats(f, 7, queries), test_floats(f, 8, keys), test_floats(f, 9, keys)};
    assert_int_equal(
        f->kernels->attention_forward(r->out, r->log_sum_exp, p->q, k, v, &p->shape, f->stream),
        STATUS_OK);
    assert_int_equal(f->kernels->attention_backward(r->q_grad, r->k_grad, r->v_grad, p->out_grad,
                                                    r->out, r->log_sum_exp, p->q, k, v, &p->shape,
                                                    f->stream),
                     STATUS_OK);
}

/* The rows of `whole` [K, H, W] that the part's queries are. */
static float *take_rows(Fixture *f, const Part *part, const float *whole)
{
    float *rows = test_memory(f, part->shape.num_tokens * ROW, sizeof *rows);
    for (int r = 0; r < part->shape.num_runs; r++) {
        const AttentionRun *run = &part->runs[r];
        memcpy(rows + (int64_t)run->q_begin * ROW,
               whole + (int64_t)(run->key_begin + run->diagonal) * ROW,
               (size_t)(run->q_end - run->q_begin) * ROW * sizeof *rows);
    }
    return rows;
}

/* The ranks' parts together are the whole: outputs side by side, gradients of keys added up. */
static void test_parts_make_the_whole(void **state)
{
    Fixture *f = *state;
    const Segments segments = {mixed, 6};
    const AttentionShape shape = {.heads = HEADS,
                                  .kv_heads = 1,
                                  .head_width = WIDTH,
                                  .group = 2,
                                  .causal = true,
                                  .scale = 0.3f};
    Part whole = {.shape = shape};
    make_runs(&segments, 1, 0, whole.runs, &whole.shape);
    int64_t tokens = whole.shape.num_keys;
    const float *k = test_floats(f, 2, tokens * WIDTH);
    const float *v = test_floats(f, 3, tokens * WIDTH);
    whole.q = test_floats(f, 1, tokens * ROW);
    whole.out_grad = test_floats(f, 4, tokens * ROW);
    compute_part(f, &whole, k, v);
    double *k_sums = test_memory(f, tokens * WIDTH, sizeof(double));
    double *v_sums = test_memory(f, tokens * WIDTH, sizeof(double));
    int64_t rows_seen = 0;
    for (int p = 0; p < PARTS; p++) {
        Part part = {.shape = shape};
        make_runs(&segments, PARTS, p, part.runs, &part.shape);
        part.q = take_rows(f, &part, whole.q);
        part.out_grad = take_rows(f, &part, whole.out_grad);
        compute_part(f, &part, k, v);
        int64_t count = part.shape.num_tokens * ROW;
        const float *out = take_rows(f, &part, whole.result.out);
        const float *q_grad = take_rows(f, &part, whole.result.q_grad);
        assert_all_near(part.result.out, test_doubles(f, out, count), count, 2e-6, "out");
        assert_all_near(part.result.q_grad, test_doubles(f, q_grad, count), count, 1e-5, "q_grad");
        for (int64_t i = 0; i < tokens * WIDTH; i++) {
            k_sums[i] += (double)part.result.k_grad[i];
            v_sums[i] += (double)part.result.v_grad[i];
        }
        rows_seen += part.shape.num_tokens;
    }
    assert_int_equal(rows_seen, tokens);
    assert_all_near(whole.result.k_grad, k_sums, tokens * WIDTH, 1e-5, "k_grad");
    assert_all_near(whole.result.v_grad, v_sums, tokens * WIDTH, 1e-5, "v_grad");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_plain_heads),          TEST(test_grouped_heads_in_uneven_shards),
        TEST(test_nothing_to_do),        TEST(test_large_scores),
        TEST(test_parts_make_the_whole), TEST(test_random_runs),
    };
    return cmocka_run_group_tests(tests, test_setup, test_teardown);
}
