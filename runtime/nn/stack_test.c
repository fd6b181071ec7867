/* A stack of two blocks, forward and backward, in every layout of a small grid (tp, cp, sequence
 * parallelism, recomputation, frozen parameters) against one rank that keeps everything. The one
 * rank's block is checked against finite differences in block_test.c. */
#include "base/memory.h"
#include "nn/stack.h"
#include "nn/testing.h"

/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

#include <string.h>

enum {
    BLOCKS = 2,
    TOKENS_MAX = 16, /* K */
    WIDTH = 8,       /* D */
    SLOTS = 2,       /* microbatches in flight at once */
    PARAMS_MAX = 40,
    SEED = 21
};

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

/* On 3 tp ranks the decoder's 4 heads do not fall between its groups, and one rank of the encoder's
 * has no head. */
static const Case cases[] = {
    {"decoder", NORM_KIND_RMS, MLP_KIND_SWIGLU, 4, 2, 4, 13, false, true, 100},
    {"encoder", NORM_KIND_LAYER, MLP_KIND_GELU, 2, 2, 4, 14, true, false, 0},
};

typedef struct Segments {
    int32_t num;
    int32_t begins[5];
} Segments;

static const Segments segments_of[] = {
    {3, {0, 7, 8, 13}},
    {2, {0, 1, 2}}, /* over cp all on rank 0 */
    {4, {0, 0, 5, 5, 16}},
    {0, {0}},
};

enum {
    NUM_CASES = sizeof cases / sizeof cases[0],
    NUM_SEGMENTS = sizeof segments_of / sizeof segments_of[0]
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

/* ---- a stack on one rank ---- */

typedef struct Setting {
    const Case *c;
    const Segments *segments;
    Recompute recompute;
    char *const *frozen;
    size_t num_frozen;
    bool wants_input_grad;
} Setting;

typedef struct Fixture {
    Setting setting;
    ParamSet params;
    Stack stack;
    StackActs acts[SLOTS];
    StackShared shared;
    void *memory;
    int64_t memory_bytes;
    int64_t slot_bytes; /* of one StackActs */
    SequencesBuffer *buffer;
    Sequences sequences;
    float grad[SLOTS][TOKENS_MAX * WIDTH]; /* [n, D] */
} Fixture;

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
    ShardRank rank = layer_shard_rank(context);
    const Segments *segments = f->setting.segments;
    int64_t keys = segments->begins[segments->num];
    LayerLimits limits = {.tokens = shard_count_max(keys, segments->num, rank.cp_size),
                          .keys = keys};
    limits.local = range_count(range_part(limits.tokens, rank.tp_size, 0));
    stack_carve_shared(context, &f->stack, arena, &limits, &f->shared);
    int64_t begin = arena->used;
    for (int slot = 0; slot < SLOTS; slot++) {
        stack_carve(context, &f->stack, arena, &limits, &f->shared, &f->acts[slot]);
    }
    f->slot_bytes = (arena->used - begin) / SLOTS;
}

static Status open_fixture(LayerContext *context, Device *device, Setting setting, Fixture *f)
{
    *f = (Fixture){.setting = setting};
    const Segments *segments = setting.segments;
    param_set_init(&f->params, device);
    param_set_freeze(&f->params, setting.frozen, setting.num_frozen);
    context->params = &f->params;
    BlockSpec spec = make_spec(setting.c);
    TRY(stack_init(context, "layers", &spec, (Range){5, 5 + BLOCKS}, setting.recompute, &f->stack));
    TRY(param_set_allocate(&f->params));
    set_values(&f->params);
    for (int slot = 0; slot < SLOTS; slot++) {
        TRY(stack_acts_init(&f->stack, &f->acts[slot]));
    }
    Arena arena;
    arena_init_measure(&arena);
    carve(context, &arena, f);
    f->memory_bytes = arena.peak + 1;
    TRY(device_alloc(device, f->memory_bytes, &f->memory));
    arena_init(&arena, f->memory, f->memory_bytes);
    carve(context, &arena, f);
    TRY(sequences_buffer_create(device, layer_shard_rank(context), TOKENS_MAX, 5, true,
                                &f->buffer));
    return sequences_make(f->buffer, segments->begins, segments->num, context->stream,
                          &f->sequences);
}

static void close_fixture(Device *device, Fixture *f)
{
    sequences_buffer_destroy(f->buffer);
    device_free(device, f->memory, f->memory_bytes);
    for (int slot = 0; slot < SLOTS; slot++) {
        stack_acts_done(&f->acts[slot]);
    }
    stack_done(&f->stack);
    param_set_done(&f->params);
}

/* Number of values [n, D] on this rank. */
static int64_t local_count(const Fixture *f)
{
    return range_count(f->sequences.rows.part) * WIDTH;
}

/* Where value i of this rank's [n, D] stands in the whole [K, D]. */
static int64_t whole_index(const Fixture *f, int64_t i)
{
    int64_t token = f->sequences.tokens[f->sequences.rows.part.begin + i / WIDTH];
    return token * WIDTH + i % WIDTH;
}

static Status backward(const LayerContext *context, Fixture *f)
{
    for (int slot = 0; slot < SLOTS; slot++) {
        for (int64_t i = 0; i < local_count(f); i++) {
            f->grad[slot][i] = testing_value(2000 + (uint64_t)slot, whole_index(f, i));
        }
        TRY(stack_backward(context, &f->stack, &f->acts[slot], &f->shared, &f->sequences,
                           f->grad[slot], f->setting.wants_input_grad));
    }
    return STATUS_OK;
}

/* All microbatches forward, then all backward. */
static Status run(const LayerContext *context, Fixture *f)
{
    for (int slot = 0; slot < SLOTS; slot++) {
        float *x = stack_input(&f->acts[slot]);
        for (int64_t i = 0; i < local_count(f); i++) {
            x[i] = testing_value(1000 + (uint64_t)slot, whole_index(f, i));
        }
        TRY(stack_forward(context, &f->stack, &f->acts[slot], &f->shared, &f->sequences));
    }
    return backward(context, f);
}

/* ---- every layout gives the same ---- */

typedef struct Whole {
    const Case *c;
    const Segments *segments;
    float out[SLOTS][TOKENS_MAX * WIDTH];    /* [K, D] */
    float x_grad[SLOTS][TOKENS_MAX * WIDTH]; /* [K, D] */
    float *grads[PARAMS_MAX];                /* whole arrays, in order of declaration */
} Whole;

static Status record_whole(LayerContext *context, Device *device, void *argument,
                           TestingReport *report)
{
    (void)report;
    Whole *whole = argument;
    Fixture f;
    TRY(open_fixture(
        context, device,
        (Setting){.c = whole->c, .segments = whole->segments, .wants_input_grad = true}, &f));
    TRY(run(context, &f));
    for (int slot = 0; slot < SLOTS; slot++) {
        const float *out = stack_output(&f.stack, &f.acts[slot]);
        for (int64_t i = 0; i < local_count(&f); i++) {
            whole->out[slot][i] = out[i];
            whole->x_grad[slot][i] = f.grad[slot][i];
        }
    }
    CHECK(f.params.num_params <= PARAMS_MAX);
    for (int p = 0; p < f.params.num_params; p++) {
        const Tensor *grad = &f.params.params[p].grad;
        TRY(MEMORY_NEW(&whole->grads[p], tensor_count(grad)));
        memcpy(whole->grads[p], grad->data, (size_t)tensor_bytes(grad));
    }
    close_fixture(device, &f);
    return STATUS_OK;
}

static double largest_of(const float *values, int64_t count)
{
    double largest = 0;
    for (int64_t i = 0; i < count; i++) {
        largest = fmax(largest, fabs((double)values[i]));
    }
    return largest;
}

static int64_t global_count(const ParamSpec *spec)
{
    int64_t count = 1;
    for (int i = 0; i < spec->num_dims; i++) {
        count *= spec->dims[i];
    }
    return count;
}

/* Sums in other orders: 1e-5 of the array's largest, where one lost or doubled addend shows as 0.01
 * or more. Gradients that are nought but for rounding (of the bias of keys, which softmax does not
 * see) are measured by the gradients at large: their largest / 20. */
static void compare_with_whole(const Fixture *f, const Whole *whole, TestingReport *report)
{
    const double relative = 1e-5;
    int64_t tokens = whole->segments->begins[whole->segments->num];
    for (int slot = 0; slot < SLOTS; slot++) {
        const float *out = stack_output(&f->stack, &f->acts[slot]);
        double out_allowed = relative * largest_of(whole->out[slot], tokens * WIDTH);
        double grad_allowed = relative * largest_of(whole->x_grad[slot], tokens * WIDTH);
        for (int64_t i = 0; i < local_count(f); i++) {
            int64_t at = whole_index(f, i);
            testing_near(report, "out", at, out[i], whole->out[slot][at], 0, out_allowed);
            testing_near(report, "x_grad", at, f->grad[slot][i], whole->x_grad[slot][at], 0,
                         grad_allowed);
        }
    }
    double largest = 0;
    for (int p = 0; p < f->params.num_params; p++) {
        const ParamSpec *spec = &f->params.params[p].spec;
        largest = fmax(largest, largest_of(whole->grads[p], global_count(spec)));
    }
    for (int p = 0; p < f->params.num_params; p++) {
        const Param *param = &f->params.params[p];
        double own = largest_of(whole->grads[p], global_count(&param->spec));
        for (int64_t i = 0; i < tensor_count(&param->grad); i++) {
            testing_near(report, param->spec.name, i, tensor_f32(&param->grad)[i],
                         whole->grads[p][testing_global_index(param, i)], 0,
                         relative * fmax(own, largest / 20));
        }
    }
}

static void expect_same_bits(TestingReport *report, const char *what, const void *found,
                             const void *expected, int64_t size_bytes)
{
    if (size_bytes > 0 && memcmp(found, expected, (size_t)size_bytes) != 0) {
        testing_failed(report, "%s differs", what);
    }
}

static void expect_same_results(TestingReport *report, const Fixture *found,
                                const Fixture *expected)
{
    int64_t bytes = local_count(found) * (int64_t)sizeof(float);
    for (int slot = 0; slot < SLOTS; slot++) {
        expect_same_bits(report, "out, recompute", stack_output(&found->stack, &found->acts[slot]),
                         stack_output(&expected->stack, &expected->acts[slot]), bytes);
        expect_same_bits(report, "x_grad, recompute", found->grad[slot], expected->grad[slot],
                         bytes);
    }
    expect_same_bits(report, "gradients, recompute", found->params.grads, expected->params.grads,
                     expected->params.trained_count * (int64_t)sizeof(float));
}

static Status check_layout(LayerContext *context, Device *device, void *argument,
                           TestingReport *report)
{
    const Whole *whole = argument;
    Setting setting = {.c = whole->c, .segments = whole->segments, .wants_input_grad = true};
    Fixture kept;
    TRY(open_fixture(context, device, setting, &kept));
    TRY(run(context, &kept));
    const Recompute policies[] = {RECOMPUTE_SELECTIVE, RECOMPUTE_FULL};
    for (int i = 0; i < 2; i++) {
        Fixture again;
        setting.recompute = policies[i];
        TRY(open_fixture(context, device, setting, &again));
        TRY(run(context, &again));
        expect_same_results(report, &again, &kept);
        close_fixture(device, &again);
    }
    context->params = &kept.params;
    TRY(testing_sum_partial_grads(context));
    compare_with_whole(&kept, whole, report);
    close_fixture(device, &kept);
    return STATUS_OK;
}

static void check_layouts(Whole *whole)
{
    for (int grid = 0; grid < 3 * 3 * 2; grid++) {
        int tp = 1 + grid % 3;
        int cp = 1 + grid / 3 % 3;
        bool is_sequence_parallel = grid / 9 > 0;
        if (testing_run_grid(tp, cp, is_sequence_parallel, check_layout, whole) > 0) {
            fail_msg("case %s, tp %d, cp %d, sequence parallelism %d, %d segments", whole->c->name,
                     tp, cp, is_sequence_parallel, whole->segments->num);
        }
    }
}

static void test_every_layout_gives_the_same(void **state)
{
    (void)state;
    for (int i = 0; i < NUM_CASES * NUM_SEGMENTS; i++) {
        Whole whole = {.c = &cases[i % NUM_CASES], .segments = &segments_of[i / NUM_CASES]};
        assert_int_equal(testing_run_ranks(1, record_whole, &whole), 0);
        check_layouts(&whole);
        for (int p = 0; p < PARAMS_MAX; p++) {
            memory_free(whole.grads[p]);
        }
    }
}

/* ---- memory ---- */

static Status check_memory(LayerContext *context, Device *device, void *argument,
                           TestingReport *report)
{
    (void)argument;
    int64_t bytes[3];
    for (int i = 0; i < 3; i++) {
        Setting setting = {.c = &cases[0], .segments = &segments_of[0], .recompute = (Recompute)i};
        Fixture f;
        TRY(open_fixture(context, device, setting, &f));
        bytes[i] = f.slot_bytes;
        close_fixture(device, &f);
    }
    /* Arrays begin at multiples of 64 bytes. 13 tokens; each block keeps gate and up [N, F]. */
    const int64_t inner = 704; /* 13 * 13 * 4 bytes */
    const int64_t x = 448;     /* 13 * 8 * 4 bytes */
    const int64_t blocks = BLOCKS;
    if (llabs(bytes[0] - bytes[1] - blocks * 2 * inner) > 64) {
        testing_failed(report, "selective keeps %lld bytes less than none",
                       (long long)(bytes[0] - bytes[1]));
    }
    if (llabs(bytes[2] - (blocks + 1) * x) > 64) {
        testing_failed(report, "full keeps %lld bytes", (long long)bytes[2]);
    }
    return STATUS_OK;
}

static void test_recomputation_keeps_less(void **state)
{
    (void)state;
    assert_int_equal(testing_run_ranks(1, check_memory, NULL), 0);
}

/* ---- frozen parameters ---- */

typedef struct FrozenCase {
    const char *patterns[4];
    size_t num_patterns;
    bool wants_input_grad;
    int first_trained;
    int products; /* matrix products of one backward */
} FrozenCase;

/* A block of the decoder has 7 matrices and backward 14 products: one for the weight and one for
 * the input of each. */
static const FrozenCase frozen_cases[] = {
    {{NULL}, 0, true, 0, 28},
    {{NULL}, 0, false, 0, 28}, /* norm1 needs the gradient of its output */
    {{"*"}, 1, true, 2, 14},
    {{"*"}, 1, false, 2, 0},
    {{"*norm*"}, 1, true, 0, 28},
    {{"*norm*"}, 1, false, 0, 25},            /* no input of q, k, v of the lowest block */
    {{"*.5.*"}, 1, false, 1, 14},             /* one block of two */
    {{"*.6.*"}, 1, false, 0, 21},             /* through the upper one */
    {{"*.5.*", "*.6.[!d]*"}, 2, false, 1, 1}, /* down alone */
    {{"*.5.*", "*.6.[!q]*"}, 2, false, 1, 5}, /* q: inputs of down, gate, up, o */
    {{"*.5.*", "*.6.[!o]*"}, 2, false, 1, 4}, /* o: inputs of down, gate, up */
    {{"*.6.*", "*.5.[!n]*", "*.5.norm2.*"}, 3, false, 0, 14},
    {{"*.6.*", "*.5.[!n]*", "*.5.norm1.*"}, 3, false, 0, 10},
    {{"*.gate.*", "*.v.*"}, 2, true, 0, 24},
};

/* With biases, and layer norm's two parameters one by one. Products as above; a block has 6
 * matrices.
 */
static const FrozenCase frozen_biases[] = {
    {{"*.bias"}, 1, true, 0, 24},
    {{"*.weight"}, 1, true, 0, 12},
    {{"*.weight"}, 1, false, 0, 12},
    {{"*norm1.weight", "*norm2.bias"}, 2, true, 0, 24},
    {{"*.6.norm*.weight"}, 1, true, 0, 24},               /* blocks that are not alike */
    {{"*.5.*", "*.6.[!o]*", "*.weight"}, 3, false, 1, 2}, /* o's bias: inputs of down, up */
};

typedef struct FrozenCases {
    const Case *c;
    const FrozenCase *list;
    int count;
} FrozenCases;

static const FrozenCases frozen_of[] = {
    {&cases[0], frozen_cases, sizeof frozen_cases / sizeof frozen_cases[0]},
    {&cases[1], frozen_biases, sizeof frozen_biases / sizeof frozen_biases[0]},
};

/* Of the rank that runs in this thread. */
static _Thread_local int num_products;
static _Thread_local Status (*real_matmul)(const MatMul *matmul, Stream *stream);

static Status count_matmul(const MatMul *matmul, Stream *stream)
{
    num_products++;
    return real_matmul(matmul, stream);
}

/* What is left has the bits that it has when all is trained. */
static void compare_trained(const Fixture *f, const Fixture *all, TestingReport *report)
{
    for (int p = 0; p < f->params.num_params; p++) {
        const Param *param = &f->params.params[p];
        const Param *expected = &all->params.params[p];
        if (param->is_trained) {
            expect_same_bits(report, param->spec.name, param->grad.data, expected->grad.data,
                             tensor_bytes(&expected->grad));
        } else if (param->grad.data) {
            testing_failed(report, "%s has a gradient", param->spec.name);
        }
    }
    for (int slot = 0; f->setting.wants_input_grad && slot < SLOTS; slot++) {
        expect_same_bits(report, "x_grad", f->grad[slot], all->grad[slot],
                         local_count(f) * (int64_t)sizeof(float));
    }
}

static Status check_frozen_case(LayerContext *context, Device *device, const FrozenCase *c,
                                const Fixture *all, TestingReport *report)
{
    Setting setting = all->setting;
    setting.frozen = (char *const *)c->patterns;
    setting.num_frozen = c->num_patterns;
    setting.wants_input_grad = c->wants_input_grad;
    for (int recompute = 0; recompute < 3; recompute++) {
        setting.recompute = (Recompute)recompute;
        Fixture f;
        TRY(open_fixture(context, device, setting, &f));
        TRY(run(context, &f));
        compare_trained(&f, all, report);
        if (f.stack.first_trained != c->first_trained) {
            testing_failed(report, "first trained %d, expected %d", f.stack.first_trained,
                           c->first_trained);
        }
        num_products = 0;
        TRY(backward(context, &f));
        if (recompute == RECOMPUTE_NONE && num_products != SLOTS * c->products) {
            testing_failed(report, "%s ...: %d products, expected %d", c->patterns[0], num_products,
                           SLOTS * c->products);
        }
        close_fixture(device, &f);
    }
    return STATUS_OK;
}

static Status check_frozen(LayerContext *context, Device *device, void *argument,
                           TestingReport *report)
{
    const FrozenCases *frozen = argument;
    Kernels counted = *context->kernels;
    real_matmul = counted.matmul;
    counted.matmul = count_matmul;
    context->kernels = &counted;
    Fixture all;
    TRY(open_fixture(
        context, device,
        (Setting){.c = frozen->c, .segments = &segments_of[0], .wants_input_grad = true}, &all));
    TRY(run(context, &all));
    for (int i = 0; i < frozen->count; i++) {
        TRY(check_frozen_case(context, device, &frozen->list[i], &all, report));
    }
    close_fixture(device, &all);
    return STATUS_OK;
}

static void test_frozen_parameters_cost_nothing(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        FrozenCases frozen = frozen_of[i];
        assert_int_equal(testing_run_grid(1, 1, false, check_frozen, &frozen), 0);
        assert_int_equal(testing_run_grid(2, 1, true, check_frozen, &frozen), 0);
        assert_int_equal(testing_run_grid(3, 2, true, check_frozen, &frozen), 0);
        assert_int_equal(testing_run_grid(2, 3, false, check_frozen, &frozen), 0);
    }
}

/* ---- empty stack ---- */

static Status check_empty(LayerContext *context, Device *device, void *argument,
                          TestingReport *report)
{
    (void)argument;
    ParamSet params;
    param_set_init(&params, device);
    context->params = &params;
    BlockSpec spec = make_spec(&cases[0]);
    Stack stack;
    TRY(stack_init(context, "layers", &spec, (Range){3, 3}, RECOMPUTE_FULL, &stack));
    StackActs acts;
    TRY(stack_acts_init(&stack, &acts));
    Arena arena;
    float memory[4 * WIDTH];
    arena_init(&arena, memory, sizeof memory);
    StackShared shared;
    LayerLimits limits = {.tokens = 4, .local = 4, .keys = 4};
    stack_carve_shared(context, &stack, &arena, &limits, &shared);
    stack_carve(context, &stack, &arena, &limits, &shared, &acts);
    if (stack_input(&acts) != stack_output(&stack, &acts) || stack_input(&acts) != memory ||
        arena.used != sizeof memory || stack.first_trained != 0) {
        testing_failed(report, "an empty stack's input is not its output");
    }
    Sequences sequences = {.num_keys = 4, .rows = {.count = 4, .part = {0, 4}}};
    TRY(stack_forward(context, &stack, &acts, &shared, &sequences));
    TRY(stack_backward(context, &stack, &acts, &shared, &sequences, memory, true));
    stack_acts_done(&acts);
    stack_done(&stack);
    param_set_done(&params);
    return STATUS_OK;
}

static void test_empty_stack(void **state)
{
    (void)state;
    assert_int_equal(testing_run_ranks(1, check_empty, NULL), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_layout_gives_the_same),
        cmocka_unit_test(test_recomputation_keeps_less),
        cmocka_unit_test(test_frozen_parameters_cost_nothing),
        cmocka_unit_test(test_empty_stack),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
