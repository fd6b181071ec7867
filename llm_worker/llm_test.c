/* The decoder cut over tp, cp, stages and chunks, with sequence parallelism, recompute and frozen
 * parameters, against the same decoder in one piece: losses, predictions, gradients of the
 * encoders' rows and of every parameter. The one piece itself is compared with PyTorch in
 * tests/golden. */
#include "base/clock.h"
#include "llm_worker/llm.h"
#include "train/testing.h"

/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    TOKENS_MAX = 20, /* K of a microbatch */
    SEGMENTS_MAX = 3,
    ROWS_MAX = 8,
    WIDTH = 12, /* D */
    VOCABULARY = 23,
    LAYERS = 5,
    PLACEHOLDER = -2
};

/* On 3 tp ranks the 6 query heads fall between groups of key/value heads, on 2 ranks they do not;
 * 6 parts have 5 layers. */
static void make_model(bool tied_head, ModelSpec *model, DecoderSpec *llm)
{
    viaduct__v1__model_spec__init(model);
    viaduct__v1__decoder_spec__init(llm);
    model->llm = llm;
    llm->vocabulary = VOCABULARY;
    llm->width = WIDTH;
    llm->layers = LAYERS;
    llm->heads = 6;
    llm->kv_heads = 3;
    llm->head_width = 4;
    llm->mlp_width = 17;
    llm->rope_theta = 100;
    llm->norm_epsilon = 1e-5;
    llm->tied_head = tied_head;
}

/* A microbatch of the replica. Of the second, some cp ranks have no token. */
typedef struct Text {
    int32_t num_segments;
    int32_t begins[SEGMENTS_MAX + 1];
    int32_t num_rows;
    int32_t rows[ROWS_MAX]; /* which token each replaces */
} Text;

static const Text texts[TESTING_BATCHES] = {
    {3, {0, 7, 8, 17}, 7, {1, 2, 3, 12, 11, 10, 16}},
    {2, {0, 1, 3}, 1, {2}},
};

static bool is_row(const Text *text, int32_t token)
{
    for (int32_t r = 0; r < text->num_rows; r++) {
        if (text->rows[r] == token) {
            return true;
        }
    }
    return false;
}

static int32_t id_of(int batch, int32_t token)
{
    return is_row(&texts[batch], token) ? PLACEHOLDER : (token * 7 + batch * 3 + 1) % VOCABULARY;
}

static int32_t label_of(int batch, int32_t token)
{
    return token % 4 == 3 ? -1 : (token * 5 + batch + 2) % VOCABULARY;
}

/* ---- what the one piece gave, with nothing frozen ---- */

typedef struct Expected {
    float losses[TESTING_BATCHES];
    int32_t ids[TESTING_BATCHES][TOKENS_MAX]; /* predicted */
    float rows_grad[TESTING_BATCHES][ROWS_MAX * WIDTH];
    TestingGrads grads;
} Expected;

typedef struct Work {
    const ModelSpec *model;
    TestingLayout layout;
    bool is_whole; /* fills `expected` */
    Expected *expected;
} Work;

/* ---- a microbatch on one rank ---- */

typedef struct Batch {
    SequencesBuffer *buffer;
    Sequences sequences;
    ModuleBatch batch;
    int32_t ids[TOKENS_MAX];
    int32_t labels[TOKENS_MAX];
    int32_t row_tokens[ROWS_MAX];
    int32_t which[ROWS_MAX]; /* of the text's rows */
    float rows[ROWS_MAX * WIDTH];
    float rows_grad[ROWS_MAX * WIDTH];
    float grad[TOKENS_MAX * WIDTH];
} Batch;

/* Rows whose token is among this rank's n. */
static void take_rows(const Text *text, int index, Batch *batch)
{
    ModuleBatch *input = &batch->batch;
    Range part = batch->sequences.rows.part;
    for (int32_t r = 0; r < text->num_rows; r++) {
        int64_t n = part.begin;
        while (n < part.end && batch->sequences.tokens[n] != text->rows[r]) {
            n++;
        }
        if (n == part.end) {
            continue;
        }
        for (int i = 0; i < WIDTH; i++) {
            batch->rows[input->num_rows * WIDTH + i] =
                testing_value((uint64_t)index + 50, r * WIDTH + i);
        }
        batch->which[input->num_rows] = r;
        batch->row_tokens[input->num_rows++] = (int32_t)(n - part.begin);
    }
}

static Status make_batch(const LayerContext *layers, Device *device, int index, Batch *batch)
{
    const Text *text = &texts[index];
    TRY(sequences_buffer_create(device, layer_shard_rank(layers), TOKENS_MAX, SEGMENTS_MAX, true,
                                &batch->buffer));
    TRY(sequences_make(batch->buffer, text->begins, text->num_segments, layers->stream,
                       &batch->sequences));
    for (int64_t i = 0; i < batch->sequences.rows.count; i++) {
        batch->ids[i] = id_of(index, batch->sequences.tokens[i]);
        batch->labels[i] = label_of(index, batch->sequences.tokens[i]);
    }
    batch->batch = (ModuleBatch){.sequences = &batch->sequences,
                                 .ids = batch->ids,
                                 .labels = batch->labels,
                                 .row_tokens = batch->row_tokens,
                                 .rows = batch->rows,
                                 .loss_scale = 0.1f};
    take_rows(text, index, batch);
    return STATUS_OK;
}

/* ---- one rank ---- */

typedef struct Rank {
    const Work *work;
    TestingStages stages;
    Batch batches[TESTING_BATCHES];
    TestingReport *report;
} Rank;

static Status check_loss(Rank *rank, int index, double loss)
{
    const LayerContext *layers = &rank->stages.layers;
    Expected *expected = rank->work->expected;
    float same[2] = {(float)loss, -(float)loss}; /* its largest and smallest on the tp ranks */
    TRY(comm_all_reduce(layers->tp, same, 2, DTYPE_F32, COMM_REDUCE_MAX, layers->stream));
    testing_near(rank->report, "loss on tp ranks", index, same[0], -(double)same[1], 0, 0);
    float sum = (float)loss;
    TRY(comm_all_reduce(layers->cp, &sum, 1, DTYPE_F32, COMM_REDUCE_SUM, layers->stream));
    if (rank->work->is_whole) {
        expected->losses[index] = sum;
    }
    testing_near(rank->report, "loss", index, sum, expected->losses[index], testing_relative, 0);
    return STATUS_OK;
}

static Status check_predictions(Rank *rank, int index)
{
    const Batch *batch = &rank->batches[index];
    const Sequences *sequences = &batch->sequences;
    int32_t num = (int32_t)sequences->rows.count;
    int32_t tokens[TOKENS_MAX];
    int32_t ids[TOKENS_MAX];
    for (int32_t i = 0; i < num; i++) {
        tokens[i] = num - 1 - i;
    }
    TRY(llm_module_ops.predict(rank->stages.modules[rank->work->layout.stages - 1], index, tokens,
                               num, ids));
    for (int32_t i = 0; i < num; i++) {
        int32_t *expected = &rank->work->expected->ids[index][sequences->tokens[tokens[i]]];
        if (rank->work->is_whole) {
            *expected = ids[i];
        }
        testing_near(rank->report, "predicted", i, ids[i], *expected, 0, 0);
    }
    return STATUS_OK;
}

static Status forward(Rank *rank, int index)
{
    const ModuleBatch *batch = &rank->batches[index].batch;
    double loss = 0.25;                                                   /* added to */
    TRY(testing_stages_forward(&rank->stages, index, batch, NULL, NULL)); /* without the head */
    TRY(check_predictions(rank, index));
    TRY(testing_stages_forward(&rank->stages, index, batch, NULL, &loss));
    TRY(stream_wait(rank->stages.layers.stream, clock_deadline_in_ms(TESTING_TIMEOUT_MS)));
    return check_loss(rank, index, loss - 0.25);
}

static Status backward(Rank *rank, int index)
{
    Batch *batch = &rank->batches[index];
    float *whole = rank->work->expected->rows_grad[index];
    bool wants_rows = rank->work->layout.wants_rows_grad;
    TRY(testing_stages_backward(&rank->stages, index, &batch->batch, batch->grad,
                                wants_rows ? batch->rows_grad : NULL));
    for (int64_t r = 0; wants_rows && r < batch->batch.num_rows; r++) {
        float *expected = whole + (int64_t)batch->which[r] * WIDTH;
        if (rank->work->is_whole) {
            memcpy(expected, batch->rows_grad + r * WIDTH, WIDTH * sizeof(float));
        }
        testing_compare(rank->report, "rows_grad", batch->rows_grad + r * WIDTH, expected, WIDTH,
                        testing_largest(whole, (int64_t)texts[index].num_rows * WIDTH));
    }
    return STATUS_OK;
}

/* A microbatch without tokens changes nothing. */
static Status run_nothing(Rank *rank)
{
    const Sequences nothing = {0};
    const ModuleBatch none = {.loss_scale = 1, .sequences = &nothing};
    double loss = 0;
    TRY(testing_stages_forward(&rank->stages, 0, &none, NULL, &loss));
    TRY(testing_stages_backward(&rank->stages, 0, &none, rank->batches[0].grad, NULL));
    testing_near(rank->report, "loss of nothing", 0, loss, 0, 0, 0);
    return STATUS_OK;
}

static Status run(Rank *rank, Device *device)
{
    const Work *work = rank->work;
    const ModuleLimits limits = {
        .keys = TOKENS_MAX, .segments = SEGMENTS_MAX, .rows = ROWS_MAX}; /* more than needed */
    TRY(testing_stages_open(&rank->stages, work->model, device, limits));
    TRY(run_nothing(rank));
    for (int i = 0; i < TESTING_BATCHES; i++) {
        TRY(make_batch(&rank->stages.layers, device, i, &rank->batches[i]));
        TRY(forward(rank, i));
    }
    for (int i = 0; i < TESTING_BATCHES; i++) {
        TRY(backward(rank, i));
    }
    TRY(testing_stages_sum(&rank->stages, rank->report));
    if (work->is_whole) {
        TRY(testing_grads_keep(&rank->stages.modules[0]->params, &work->expected->grads));
    }
    return testing_stages_compare(&rank->stages, &work->expected->grads, LAYERS, rank->report);
}

static Status run_rank(LayerContext *context, Device *device, void *argument, TestingReport *report)
{
    Rank *rank = NULL;
    TRY(MEMORY_NEW(&rank, 1));
    rank->work = argument;
    rank->report = report;
    rank->stages =
        (TestingStages){.ops = &llm_module_ops, .layout = &rank->work->layout, .layers = *context};
    Status status = run(rank, device);
    for (int i = 0; i < TESTING_BATCHES; i++) {
        sequences_buffer_destroy(rank->batches[i].buffer);
    }
    testing_stages_close(&rank->stages);
    memory_free(rank);
    return status;
}

/* ---- layouts ---- */

typedef struct Freeze {
    const char *frozen[TESTING_FROZEN_MAX];
    bool wants_rows_grad;
} Freeze;

static const Freeze freezes[] = {
    {.wants_rows_grad = true},
    {.wants_rows_grad = false},
    {.frozen = {"language_model.*"}, .wants_rows_grad = true},
    {.frozen = {"*.embed_tokens.*", "*.layers.[012].*"}},
    {.frozen = {"*.model.norm.*", "*.lm_head.*", "*.down_proj.*"}, .wants_rows_grad = true},
    {.frozen = {"language_model.model.*"}},
};

enum {
    NUM_FREEZES = sizeof freezes / sizeof freezes[0],
    RECOMPUTES = RECOMPUTE_FULL + 1
};

static TestingLayout layout_of(int freeze)
{
    return (TestingLayout){.tp = 1,
                           .cp = 1,
                           .stages = 1,
                           .chunks = 1,
                           .frozen = freezes[freeze].frozen,
                           .wants_rows_grad = freezes[freeze].wants_rows_grad};
}

static int run_layout(Work *work)
{
    const TestingLayout *layout = &work->layout;
    int failures =
        testing_run_grid(layout->tp, layout->cp, layout->is_sequence_parallel, run_rank, work);
    if (failures > 0) {
        fprintf(stderr,
                "tp %d, cp %d, sp %d, stages %d, chunks %d, recompute %d, \"%s\", tied %d\n",
                layout->tp, layout->cp, layout->is_sequence_parallel, layout->stages,
                layout->chunks, layout->recompute, layout->frozen[0] ? layout->frozen[0] : "",
                work->model->llm->tied_head);
    }
    return failures;
}

/* Every tp, cp, sequence parallelism, stages and chunks; frozen subsets and recompute take turns,
 * so that each meets each of the others. */
static int run_layouts(const ModelSpec *model, Expected *expected)
{
    int failures = 0;
    for (int i = 0; i < 3 * 3 * 2 * 3 * 2; i++) {
        int freeze = (i + i / NUM_FREEZES) % NUM_FREEZES;
        Work work = {.model = model, .layout = layout_of(freeze), .expected = expected};
        work.layout.is_sequence_parallel = i % 2;
        work.layout.tp = 1 + i / 2 % 3;
        work.layout.cp = 1 + i / 6 % 3;
        work.layout.chunks = 1 + i / 18 % 2;
        work.layout.stages = 1 + i / 36;
        work.layout.recompute = (i + i / 3 + i / 18) % RECOMPUTES;
        failures += run_layout(&work);
    }
    return failures;
}

static void check_model(bool tied_head)
{
    ModelSpec model;
    DecoderSpec llm;
    Expected expected = {0};
    make_model(tied_head, &model, &llm);
    int failures = 0;
    for (int f = 0; f < NUM_FREEZES; f++) {
        Work work = {
            .model = &model, .layout = layout_of(f), .is_whole = f == 0, .expected = &expected};
        failures += run_layout(&work);
    }
    failures += failures == 0 ? run_layouts(&model, &expected) : 0;
    testing_grads_done(&expected.grads);
    assert_int_equal(failures, 0);
}

static void test_head(void **state)
{
    (void)state;
    check_model(false);
}

static void test_tied_head(void **state)
{
    (void)state;
    check_model(true);
}

/* Models that cannot be built are refused with their reason. */
static void test_refused(void **state)
{
    (void)state;
    ModelSpec model;
    DecoderSpec llm;
    ModuleContext context = {0};
    ModuleLimits limits = {0};
    Module *module = NULL;
    make_model(false, &model, &llm);
    llm.kv_heads = 4;
    assert_int_equal(llm_module_ops.create(&model, &context, &limits, &module), STATUS_INVALID);
    assert_non_null(strstr(status_message(), "heads 6 is not a multiple of kv_heads 4"));
    make_model(false, &model, &llm);
    llm.head_width = 3;
    assert_int_equal(llm_module_ops.create(&model, &context, &limits, &module), STATUS_INVALID);
    assert_non_null(strstr(status_message(), "head_width 3"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_head),
                                       cmocka_unit_test(test_tied_head),
                                       cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
