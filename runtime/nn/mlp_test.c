/* An MLP whose output is wider than its input and has no residual, as the projector's: 1 to 4 ranks,
 * with and without sequence parallelism, against one. Its formulas are checked in block_test.c. */
#include "nn/mlp.h"
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
    TOKENS = 7, /* N */
    IN = 6,
    INNER = 9,
    OUT = 11,
    PARAMS = 4,
    GRADS = INNER * IN + INNER + OUT * INNER + OUT
};

typedef struct Whole {
    bool wants_x_grad;
    float out[TOKENS * OUT];
    float x_grad[TOKENS * IN];
    float grads[PARAMS][OUT * INNER];
} Whole;

typedef struct Work {
    ParamSet params;
    Mlp mlp;
    int64_t begins[TESTING_RANKS_MAX + 1];
    ShardRows rows;
    float out[TOKENS * OUT];      /* [n, OUT] */
    float out_grad[TOKENS * OUT]; /* [n, OUT] */
    float x[TOKENS * IN];         /* [n, IN] */
    float x_grad[TOKENS * IN];    /* [n, IN] */
    _Alignas(ARENA_ALIGNMENT) float memory[2000];
} Work;

static Status open_work(LayerContext *context, Device *device, Work *work)
{
    *work = (Work){.rows = {.count = TOKENS}};
    param_set_init(&work->params, device);
    context->params = &work->params;
    MlpSpec spec = {.up = "up",
                    .down = "down",
                    .kind = MLP_KIND_GELU,
                    .in = IN,
                    .inner = INNER,
                    .out = OUT,
                    .bias = true};
    TRY(mlp_declare(context, "mlp", &spec, &work->mlp));
    TRY(param_set_allocate(&work->params));
    for (int p = 0; p < work->params.num_params; p++) {
        const Param *param = &work->params.params[p];
        for (int64_t i = 0; i < tensor_count(&param->value); i++) {
            tensor_f32(&param->value)[i] =
                0.5f * testing_value((uint64_t)p, testing_global_index(param, i));
        }
    }
    ShardRank rank = layer_shard_rank(context);
    work->rows.part = range_part(TOKENS, rank.tp_size, rank.tp_rank);
    for (int r = 0; r < rank.tp_size; r++) {
        work->begins[r + 1] = range_part(TOKENS, rank.tp_size, r).end;
    }
    work->rows.begins = rank.tp_size > 1 ? work->begins : NULL;
    return STATUS_OK;
}

static Status run(LayerContext *context, Work *work, bool wants_x_grad)
{
    Arena arena;
    arena_init(&arena, work->memory, sizeof work->memory);
    MlpActs acts;
    MlpScratch scratch;
    mlp_carve(&work->mlp, &arena, TOKENS, &acts);
    mlp_carve_scratch(context, &work->mlp, &arena, TOKENS, &scratch);
    int64_t n = range_count(work->rows.part);
    for (int64_t i = 0; i < n * IN; i++) {
        work->x[i] = testing_value(100, work->rows.part.begin * IN + i);
    }
    for (int64_t i = 0; i < n * OUT; i++) {
        work->out_grad[i] = testing_value(200, work->rows.part.begin * OUT + i);
    }
    TRY(mlp_forward(context, &work->mlp, &acts, &scratch, &work->rows, work->out, work->x, NULL));
    return mlp_backward(context, &work->mlp, &acts, &scratch, &work->rows,
                        wants_x_grad ? work->x_grad : NULL, work->out_grad, work->x);
}

static Status record(LayerContext *context, Device *device, void *argument, TestingReport *report)
{
    (void)report;
    Whole *whole = argument;
    Work work;
    TRY(open_work(context, device, &work));
    TRY(run(context, &work, true));
    memcpy(whole->out, work.out, sizeof whole->out);
    memcpy(whole->x_grad, work.x_grad, sizeof whole->x_grad);
    CHECK(work.params.num_params == PARAMS && work.params.count == GRADS);
    for (int p = 0; p < PARAMS; p++) {
        const Tensor *grad = &work.params.params[p].grad;
        memcpy(whole->grads[p], grad->data, (size_t)tensor_bytes(grad));
    }
    param_set_done(&work.params);
    return STATUS_OK;
}

/* Values and gradients are about 1: 1e-5 is what float32 leaves of sums in another order. */
static Status compare(LayerContext *context, Device *device, void *argument, TestingReport *report)
{
    const Whole *whole = argument;
    Work work;
    TRY(open_work(context, device, &work));
    TRY(run(context, &work, whole->wants_x_grad));
    int64_t begin = work.rows.part.begin;
    int64_t n = range_count(work.rows.part);
    for (int64_t i = 0; i < n * OUT; i++) {
        testing_near(report, "out", i, work.out[i], whole->out[begin * OUT + i], 1e-5, 1e-5);
    }
    for (int64_t i = 0; i < n * IN; i++) {
        double expected = whole->wants_x_grad ? whole->x_grad[begin * IN + i] : 0;
        testing_near(report, "x_grad", i, work.x_grad[i], expected, 1e-5, 1e-5);
    }
    for (int p = 0; p < PARAMS; p++) {
        const Param *param = &work.params.params[p];
        for (int64_t i = 0; i < tensor_count(&param->grad); i++) {
            testing_near(report, param->spec.name, i, tensor_f32(&param->grad)[i],
                         whole->grads[p][testing_global_index(param, i)], 1e-5, 1e-5);
        }
    }
    param_set_done(&work.params);
    return STATUS_OK;
}

static void test_every_layout_gives_the_same(void **state)
{
    (void)state;
    Whole whole = {.wants_x_grad = true};
    assert_int_equal(testing_run_ranks(1, record, &whole), 0);
    for (int i = 0; i < 2 * 4; i++) {
        whole.wants_x_grad = i % 2 == 0;
        assert_int_equal(testing_run_grid(1 + i / 2, 1, false, compare, &whole), 0);
        assert_int_equal(testing_run_grid(1 + i / 2, 1, true, compare, &whole), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_layout_gives_the_same),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
