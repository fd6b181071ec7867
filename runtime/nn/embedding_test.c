/* The vocabulary cut into parts, with and without sequence parallelism: embedding, tied head and
 * loss against sums in double precision over the whole vocabulary. */
#include "nn/cross_entropy.h"
#include "nn/embedding.h"
#include "nn/testing.h"

/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    TOKENS = 7,     /* N */
    WIDTH = 5,      /* D */
    VOCABULARY = 11 /* V */
};

static const int32_t ids[TOKENS] = {0, 10, 3, 3, 5, 9, 1};
static const int32_t labels[TOKENS] = {10, -1, 0, 4, 4, -1, 7};
static const float scale = 0.25f;

/* Large, so that a wrong maximum overflows. */
static float table_value(int64_t i)
{
    return 20.0f * testing_value(5, i);
}

typedef struct Work {
    ShardRows rows;
    int64_t begins[TESTING_RANKS_MAX + 1];
    float x[TOKENS * WIDTH];           /* [n, D] */
    float x_grad[TOKENS * WIDTH];      /* [n, D] */
    float full[TOKENS * WIDTH];        /* [N, D] */
    float logits[TOKENS * VOCABULARY]; /* [N, V/tp] */
    float loss_memory[4 * TOKENS];
    CrossEntropy loss;
} Work;

static Status run(LayerContext *context, const Embedding *embedding, Work *work)
{
    work->loss = (CrossEntropy){.max = work->loss_memory,
                                .sums = work->loss_memory + TOKENS,
                                .losses = work->loss_memory + (ptrdiff_t)3 * TOKENS};
    const ShardRows *rows = &work->rows;
    Linear head = embedding_as_head(embedding);
    TRY(embedding_forward(context, embedding, rows, work->x, work->full, ids));
    const float *whole = NULL;
    TRY(layer_join(context, rows, work->full, work->x, WIDTH, &whole));
    TRY(linear_forward(context, &head, work->logits, whole, TOKENS));
    TRY(cross_entropy_forward(context, &work->loss, work->logits, labels, TOKENS, embedding->part,
                              scale));
    TRY(linear_backward_params(context, &head, work->logits, whole, TOKENS));
    float *addend = layer_addend(rows, work->x_grad, work->full);
    TRY(linear_backward_x(context, &head, addend, work->logits, TOKENS, false));
    TRY(layer_reduce_to(context, rows, work->x_grad, addend, WIDTH));
    return embedding_backward(context, embedding, rows, work->x_grad, work->full, ids);
}

static void set_rows(const LayerContext *context, Work *work)
{
    ShardRank rank = layer_shard_rank(context);
    for (int r = 0; r < rank.tp_size; r++) {
        work->begins[r + 1] = range_part(TOKENS, rank.tp_size, r).end;
    }
    work->rows = (ShardRows){.count = TOKENS,
                             .part = range_part(TOKENS, rank.tp_size, rank.tp_rank),
                             .begins = rank.tp_size > 1 ? work->begins : NULL};
}

/* Whole model in double precision. */
typedef struct Reference {
    bool is_frozen; /* the table: all but its gradient is the same */
    double losses[TOKENS];
    double x_grad[TOKENS * WIDTH];
    double table_grad[VOCABULARY * WIDTH];
} Reference;

static void reference_token(Reference *reference, int t)
{
    double logits[VOCABULARY] = {0};
    double max = -INFINITY;
    for (int v = 0; v < VOCABULARY; v++) {
        for (int d = 0; d < WIDTH; d++) {
            logits[v] += (double)table_value(v * WIDTH + d) * table_value(ids[t] * WIDTH + d);
        }
        max = fmax(max, logits[v]);
    }
    double sum = 0;
    for (int v = 0; v < VOCABULARY; v++) {
        sum += exp(logits[v] - max);
    }
    if (labels[t] < 0) {
        return;
    }
    reference->losses[t] = log(sum) + max - logits[labels[t]];
    for (int v = 0; v < VOCABULARY; v++) {
        double grad = scale * (exp(logits[v] - max) / sum - (v == labels[t]));
        for (int d = 0; d < WIDTH; d++) {
            reference->table_grad[v * WIDTH + d] += grad * table_value(ids[t] * WIDTH + d);
            reference->x_grad[t * WIDTH + d] += grad * table_value(v * WIDTH + d);
        }
    }
}

static void make_reference(Reference *reference)
{
    *reference = (Reference){.is_frozen = false};
    for (int t = 0; t < TOKENS; t++) {
        reference_token(reference, t);
    }
    for (int t = 0; t < TOKENS; t++) { /* through the embedding, into the same table */
        for (int d = 0; d < WIDTH; d++) {
            reference->table_grad[ids[t] * WIDTH + d] += reference->x_grad[t * WIDTH + d];
        }
    }
}

static Status compare(LayerContext *context, Device *device, void *argument, TestingReport *report)
{
    const Reference *reference = argument;
    ParamSet params;
    param_set_init(&params, device);
    char pattern[] = "model.*";
    char *const frozen[] = {pattern};
    param_set_freeze(&params, frozen, reference->is_frozen);
    context->params = &params;
    Embedding embedding;
    TRY(embedding_declare(context, "model", "embed", VOCABULARY, WIDTH, 0.02f, &embedding));
    TRY(param_set_allocate(&params));
    const Param *table = &params.params[embedding.table];
    for (int64_t i = 0; i < tensor_count(&table->value); i++) {
        tensor_f32(&table->value)[i] = table_value(testing_global_index(table, i));
    }
    Work work = {0};
    set_rows(context, &work);
    TRY(run(context, &embedding, &work));
    for (int t = 0; t < TOKENS; t++) {
        testing_near(report, "loss", t, work.loss.losses[t], reference->losses[t], 1e-5, 1e-3);
    }
    for (int64_t t = work.rows.part.begin; t < work.rows.part.end; t++) {
        for (int d = 0; d < WIDTH; d++) {
            int64_t local = (t - work.rows.part.begin) * WIDTH + d;
            int64_t i = t * WIDTH + d;
            testing_near(report, "x", i, work.x[local], table_value(ids[t] * WIDTH + d), 0, 0);
            testing_near(report, "x_grad", i, work.x_grad[local], reference->x_grad[i], 1e-4, 1e-4);
        }
    }
    if (reference->is_frozen && table->grad.data) {
        testing_failed(report, "a frozen table has a gradient");
    }
    for (int64_t i = 0; !reference->is_frozen && i < tensor_count(&table->grad); i++) {
        testing_near(report, "table", i, tensor_f32(&table->grad)[i],
                     reference->table_grad[testing_global_index(table, i)], 1e-4, 1e-3);
    }
    param_set_done(&params);
    return STATUS_OK;
}

static void test_vocabulary_in_parts(void **state)
{
    (void)state;
    Reference reference;
    make_reference(&reference);
    for (int tp = 1; tp <= 5; tp++) {
        assert_int_equal(testing_run_ranks(tp, compare, &reference), 0);
        assert_int_equal(testing_run_grid(tp, 1, true, compare, &reference), 0);
    }
    reference.is_frozen = true;
    assert_int_equal(testing_run_ranks(1, compare, &reference), 0);
    assert_int_equal(testing_run_grid(3, 1, true, compare, &reference), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_vocabulary_in_parts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
