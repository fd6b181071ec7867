/* A block on one rank against finite differences, and on 2 to 5 ranks against one rank, with and
 * without sequence parallelism. The sequences are packed and of uneven lengths. */
#include "base/memory.h"
#include "nn/block.h"
#include "nn/testing.h"

/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    TOKENS = 9, /* N */
    SEGMENTS = 3,
    WIDTH = 10, /* D */
    SEED = 11
};

static const int32_t segment_begins[SEGMENTS + 1] = {0, 4, 5, TOKENS};

typedef struct Case {
    const char *name;
    NormKind norm;
    MlpKind mlp;
    int heads, kv_heads;
    int head_width;
    int inner;
    bool bias;
    bool causal;
    float rope_theta;
} Case;

static const Case cases[] = {
    {"encoder", NORM_KIND_LAYER, MLP_KIND_GELU, 3, 3, 4, 14, true, false, 0},
    {"quick gelu, one head", NORM_KIND_LAYER, MLP_KIND_QUICK_GELU, 1, 1, 6, 5, true, false, 0},
    {"decoder", NORM_KIND_RMS, MLP_KIND_SWIGLU, 4, 2, 4, 13, false, true, 100},
    {"groups of three", NORM_KIND_RMS, MLP_KIND_SWIGLU, 6, 2, 2, 3, false, true, 10000},
    {"one key head, biases", NORM_KIND_RMS, MLP_KIND_SWIGLU, 3, 1, 4, 9, true, true, 50},
};

enum {
    NUM_CASES = sizeof cases / sizeof cases[0]
};

static BlockSpec make_spec(const Case *c)
{
    return (BlockSpec){.norm1 = "norm1",
                       .norm2 = "norm2",
                       .norm = c->norm,
                       .norm_epsilon = 1e-5f,
                       .attention = {.q = "q",
                                     .k = "k",
                                     .v = "v",
                                     .o = "o",
                                     .width = WIDTH,
                                     .heads = c->heads,
                                     .kv_heads = c->kv_heads,
                                     .head_width = c->head_width,
                                     .bias = c->bias,
                                     .rope_theta = c->rope_theta,
                                     .causal = c->causal},
                       .mlp = {.gate = "gate",
                               .up = "up",
                               .down = "down",
                               .kind = c->mlp,
                               .in = WIDTH,
                               .inner = c->inner,
                               .out = WIDTH,
                               .bias = c->bias}};
}

/* A block of one rank with its memory. */
typedef struct Fixture {
    ParamSet params;
    Block block;
    BlockActs acts;
    BlockScratch scratch;
    void *memory;
    int64_t memory_bytes;
    SequencesBuffer *buffer;
    Sequences sequences;
    /* [n, D] each */
    float x[TOKENS * WIDTH];
    float out[TOKENS * WIDTH];
    float grad[TOKENS * WIDTH];
} Fixture;

/* Number of values [n, D] on this rank, and the first of them in the whole [N, D]. */
static int64_t local_count(const Fixture *f)
{
    return range_count(f->sequences.rows.part) * WIDTH;
}

static int64_t local_first(const Fixture *f)
{
    return f->sequences.rows.part.begin * WIDTH;
}

/* Matrices around 0, norms around 1; element i of the whole array is the same in every sharding. */
static void set_values(ParamSet *set)
{
    for (int p = 0; p < set->num_params; p++) {
        Param *param = &set->params[p];
        float middle = param->spec.init == PARAM_INIT_ONES ? 1.0f : 0.0f;
        for (int64_t i = 0; i < tensor_count(&param->value); i++) {
            tensor_f32(&param->value)[i] =
                middle + 0.4f * testing_value((uint64_t)p + SEED, testing_global_index(param, i));
        }
    }
}

static void carve(const LayerContext *context, Arena *arena, Fixture *f)
{
    LayerLimits limits = {.tokens = TOKENS, .local = TOKENS, .keys = TOKENS};
    block_carve(&f->block, arena, &limits, NULL, &f->acts);
    block_carve_scratch(context, &f->block, arena, &limits, &f->scratch);
}

static Status open_fixture(LayerContext *context, Device *device, const Case *c, Fixture *f)
{
    param_set_init(&f->params, device);
    context->params = &f->params;
    BlockSpec spec = make_spec(c);
    TRY(block_declare(context, "block", &spec, &f->block));
    TRY(param_set_allocate(&f->params));
    set_values(&f->params);
    Arena arena;
    arena_init_measure(&arena);
    carve(context, &arena, f);
    f->memory_bytes = arena.used;
    TRY(device_alloc(device, f->memory_bytes, &f->memory));
    arena_init(&arena, f->memory, f->memory_bytes);
    carve(context, &arena, f);
    TRY(sequences_buffer_create(device, layer_shard_rank(context), TOKENS, SEGMENTS, true,
                                &f->buffer));
    TRY(sequences_make(f->buffer, segment_begins, SEGMENTS, context->stream, &f->sequences));
    for (int64_t i = 0; i < local_count(f); i++) {
        f->x[i] = testing_value(1000, local_first(f) + i);
    }
    return STATUS_OK;
}

static void close_fixture(Device *device, Fixture *f)
{
    sequences_buffer_destroy(f->buffer);
    device_free(device, f->memory, f->memory_bytes);
    param_set_done(&f->params);
}

static Status forward(const LayerContext *context, Fixture *f)
{
    return block_forward(context, &f->block, &f->acts, &f->scratch, &f->sequences, f->out, f->x);
}

static Status backward(const LayerContext *context, Fixture *f)
{
    for (int64_t i = 0; i < local_count(f); i++) {
        f->grad[i] = testing_value(2000, local_first(f) + i);
    }
    return block_backward(context, &f->block, &f->acts, &f->scratch, &f->sequences, f->grad, f->x,
                          true);
}

/* ---- finite differences ---- */

/* loss = sum of out * testing_value(2000, i), so that the output's gradient is what backward()
 * sets. */
static Status loss_of(const LayerContext *context, Fixture *f, double *loss_out)
{
    TRY(forward(context, f));
    double loss = 0;
    for (int i = 0; i < TOKENS * WIDTH; i++) {
        loss += (double)f->out[i] * testing_value(2000, i);
    }
    *loss_out = loss;
    return STATUS_OK;
}

/* The slope of the loss along a random direction in `values` [count] against grad . direction.
 * Float32 leaves a few digits: eps^2 of curvature and 1e-7 / eps of rounding; a wrong formula is
 * off by tens of percent. */
static Status check_slope(const LayerContext *context, Fixture *f, const char *name, float *values,
                          const float *grad, int64_t count, TestingReport *report)
{
    const float eps = 4e-3f;
    double plus = 0;
    double minus = 0;
    double expected = 0;
    double length = 0;
    for (int64_t i = 0; i < count; i++) {
        float kept = values[i];
        values[i] = kept + eps * testing_value(77, i);
        expected += (double)grad[i] * testing_value(77, i);
        length += (double)grad[i] * grad[i];
    }
    TRY(loss_of(context, f, &plus));
    for (int64_t i = 0; i < count; i++) {
        values[i] -= 2 * eps * testing_value(77, i);
    }
    TRY(loss_of(context, f, &minus));
    for (int64_t i = 0; i < count; i++) {
        values[i] += eps * testing_value(77, i);
    }
    testing_near(report, name, 0, (plus - minus) / (2.0 * eps), expected, 2e-3,
                 1e-3 + 2e-3 * sqrt(length));
    return STATUS_OK;
}

static Status check_gradients(LayerContext *context, Device *device, void *argument,
                              TestingReport *report)
{
    Fixture f = {0};
    TRY(open_fixture(context, device, argument, &f));
    TRY(forward(context, &f));
    TRY(backward(context, &f));
    TRY(check_slope(context, &f, "x", f.x, f.grad, (int64_t)TOKENS * WIDTH, report));
    for (int i = 0; i < f.params.num_params; i++) {
        const Param *param = &f.params.params[i];
        TRY(check_slope(context, &f, param->spec.name, tensor_f32(&param->value),
                        tensor_f32(&param->grad), tensor_count(&param->grad), report));
    }
    close_fixture(device, &f);
    return STATUS_OK;
}

static void test_gradients_match_finite_differences(void **state)
{
    (void)state;
    for (int i = 0; i < NUM_CASES; i++) {
        Case c = cases[i];
        if (testing_run_ranks(1, check_gradients, &c) > 0) {
            fail_msg("case %s", c.name);
        }
    }
}

/* ---- tensor parallelism ---- */

/* What one rank computes, whole arrays, by parameter in order of declaration. */
typedef struct Whole {
    Case c;
    float out[TOKENS * WIDTH];
    float x_grad[TOKENS * WIDTH];
    float *grads[32];
} Whole;

/* Twice without clearing, as microbatches do: gradients add. */
static Status run_twice(LayerContext *context, Fixture *f)
{
    for (int pass = 0; pass < 2; pass++) {
        TRY(forward(context, f));
        TRY(backward(context, f));
    }
    return testing_sum_partial_grads(context);
}

static Status record_whole(LayerContext *context, Device *device, void *argument,
                           TestingReport *report)
{
    (void)report;
    Whole *whole = argument;
    Fixture f = {0};
    TRY(open_fixture(context, device, &whole->c, &f));
    TRY(run_twice(context, &f));
    for (int i = 0; i < TOKENS * WIDTH; i++) {
        whole->out[i] = f.out[i];
        whole->x_grad[i] = f.grad[i];
    }
    for (int p = 0; p < f.params.num_params; p++) {
        const Tensor *grad = &f.params.params[p].grad;
        TRY(MEMORY_NEW(&whole->grads[p], tensor_count(grad)));
        for (int64_t i = 0; i < tensor_count(grad); i++) {
            whole->grads[p][i] = tensor_f32(grad)[i];
        }
    }
    close_fixture(device, &f);
    return STATUS_OK;
}

static Status compare_with_whole(LayerContext *context, Device *device, void *argument,
                                 TestingReport *report)
{
    const Whole *whole = argument;
    Fixture f = {0};
    TRY(open_fixture(context, device, &whole->c, &f));
    TRY(run_twice(context, &f));
    int64_t first = local_first(&f);
    for (int64_t i = 0; i < local_count(&f); i++) {
        testing_near(report, "out", first + i, f.out[i], whole->out[first + i], 1e-5, 1e-5);
        testing_near(report, "x_grad", first + i, f.grad[i], whole->x_grad[first + i], 1e-5, 1e-5);
    }
    for (int p = 0; p < f.params.num_params; p++) {
        const Param *param = &f.params.params[p];
        for (int64_t i = 0; i < tensor_count(&param->grad); i++) {
            testing_near(report, param->spec.name, i, tensor_f32(&param->grad)[i],
                         whole->grads[p][testing_global_index(param, i)], 1e-5, 2e-5);
        }
    }
    close_fixture(device, &f);
    return STATUS_OK;
}

static void test_every_tp_gives_the_same(void **state)
{
    (void)state;
    for (int i = 0; i < NUM_CASES; i++) {
        Whole whole = {.c = cases[i]};
        assert_int_equal(testing_run_ranks(1, record_whole, &whole), 0);
        for (int tp = 2; tp <= 5; tp++) { /* with few heads some ranks have none */
            if (testing_run_ranks(tp, compare_with_whole, &whole) > 0 ||
                testing_run_grid(tp, 1, true, compare_with_whole, &whole) > 0) {
                fail_msg("case %s, tp %d", whole.c.name, tp);
            }
        }
        for (int p = 0; p < 32; p++) {
            memory_free(whole.grads[p]);
        }
    }
}

/* ---- key/value heads ---- */

typedef struct KvExpectation {
    int heads, kv_heads;
    bool cut; /* else every rank has all and a partial gradient */
} KvExpectation;

static Status check_kv(LayerContext *context, Device *device, void *argument, TestingReport *report)
{
    const KvExpectation *expected = argument;
    Case c = cases[2];
    c.heads = expected->heads;
    c.kv_heads = expected->kv_heads;
    Fixture f = {0};
    TRY(open_fixture(context, device, &c, &f));
    const Param *k = &f.params.params[f.block.attention.k.weight];
    int64_t global = (int64_t)c.kv_heads * c.head_width;
    int64_t local = (int64_t)f.block.attention.kv_heads * c.head_width;
    if (k->value.dims[0] != (expected->cut ? local : global) ||
        k->spec.grad_is_partial == expected->cut || (k->spec.shard_dim == 0) != expected->cut) {
        testing_failed(report, "%d heads, %d kv: holds %lld rows of k, partial %d", c.heads,
                       c.kv_heads, (long long)k->value.dims[0], k->spec.grad_is_partial);
    }
    close_fixture(device, &f);
    return STATUS_OK;
}

static void test_kv_heads_are_cut_with_the_query_heads(void **state)
{
    (void)state;
    assert_int_equal(testing_run_ranks(2, check_kv, &(KvExpectation){4, 2, true}), 0);
    assert_int_equal(testing_run_ranks(3, check_kv, &(KvExpectation){6, 3, true}), 0);
    assert_int_equal(testing_run_ranks(2, check_kv, &(KvExpectation){6, 3, false}), 0);
    assert_int_equal(testing_run_ranks(4, check_kv, &(KvExpectation){4, 2, false}), 0);
    assert_int_equal(testing_run_ranks(4, check_kv, &(KvExpectation){3, 3, true}), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradients_match_finite_differences),
        cmocka_unit_test(test_every_tp_gives_the_same),
        cmocka_unit_test(test_kv_heads_are_cut_with_the_query_heads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
