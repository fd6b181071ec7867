/* The vision encoder cut over tp, cp, stages and chunks, with sequence parallelism, recompute and
 * frozen parameters, against the same encoder in one piece: rows and the gradients of every
 * parameter. The one piece itself is compared with PyTorch in tests/golden. */
#include "base/clock.h"
#include "encoder_worker/vision_encoder.h"
#include "train/testing.h"

/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    IMAGES_MAX = 3, /* of a microbatch */
    PATCH = 2,
    PATCHES_MAX = 16,
    TOKENS_MAX = IMAGES_MAX * (PATCHES_MAX + 1),
    ROWS_MAX = IMAGES_MAX * PATCHES_MAX,
    PIXELS_MAX = IMAGES_MAX * PATCHES_MAX * PATCH * PATCH * 3,
    WIDTH = 12,     /* D */
    ROW_WIDTH = 10, /* D2 */
};

/* Different, so that the second makes the places of tokens again. */
static const int64_t images_of[TESTING_BATCHES] = {IMAGES_MAX, 2};

typedef struct Shape {
    const char *name;
    int image_size;
    bool class_token;
    int heads;
    int layers, feature_layer;
    int layers_run;
    int activation;
} Shape;

/* Heads that cannot be cut evenly; fewer layers than parts; images of one patch, which some cp
 * ranks have no token of; no layer at all. */
static const Shape shapes[] = {
    {"class token", 8, true, 3, 5, -2, 4, VIADUCT__V1__ACTIVATION__QUICK_GELU},
    {"patches only", 6, false, 2, 3, -1, 3, VIADUCT__V1__ACTIVATION__GELU},
    {"one patch", 2, true, 3, 2, 1, 1, VIADUCT__V1__ACTIVATION__GELU},
    {"no layers", 4, true, 3, 2, 0, 0, VIADUCT__V1__ACTIVATION__GELU},
};

typedef struct Model {
    ModelSpec model;
    VisionSpec vision;
    ProjectorSpec projector;
    DecoderSpec llm;
} Model;

static void make_model(const Shape *shape, Model *out)
{
    viaduct__v1__model_spec__init(&out->model);
    viaduct__v1__vision_spec__init(&out->vision);
    viaduct__v1__projector_spec__init(&out->projector);
    viaduct__v1__decoder_spec__init(&out->llm);
    out->model.vision = &out->vision;
    out->model.projector = &out->projector;
    out->model.llm = &out->llm;
    out->vision.image_size = shape->image_size;
    out->vision.patch_size = PATCH;
    out->vision.width = WIDTH;
    out->vision.layers = shape->layers;
    out->vision.heads = shape->heads;
    out->vision.mlp_width = 19;
    out->vision.activation = shape->activation;
    out->vision.class_token = shape->class_token;
    out->vision.feature_layer = shape->feature_layer;
    out->vision.norm_epsilon = 1e-5;
    out->projector.width = 7;
    out->llm.width = ROW_WIDTH;
}

/* ---- what the one piece gave, with nothing frozen ---- */

typedef struct Expected {
    float rows[TESTING_BATCHES][ROWS_MAX * ROW_WIDTH];
    TestingGrads grads;
} Expected;

typedef struct Work {
    const Shape *shape;
    const ModelSpec *model;
    TestingLayout layout;
    bool is_whole; /* fills `expected` */
    Expected *expected;
} Work;

/* ---- a microbatch on one rank ---- */

typedef struct Batch {
    ModuleBatch batch;
    uint8_t pixels[PIXELS_MAX];
    int64_t num_rows;        /* on this rank */
    int32_t which[ROWS_MAX]; /* of the microbatch's rows they are */
    float rows[ROWS_MAX * ROW_WIDTH];
    float rows_grad[ROWS_MAX * ROW_WIDTH];
    float grad[TOKENS_MAX * WIDTH];
} Batch;

/* This rank's rows: the patches among its part of the cp rank's tokens. */
static void find_rows(const LayerContext *layers, const Shape *shape, Batch *batch)
{
    int32_t side = shape->image_size / PATCH;
    int32_t patches = side * side;
    int32_t extra = shape->class_token ? 1 : 0;
    int32_t rows[TOKENS_MAX]; /* row of each token of this cp rank; -1: class token */
    int64_t count = 0;
    ShardRank rank = layer_shard_rank(layers);
    for (int32_t i = 0; i < batch->batch.num_items; i++) {
        Range chunks[SHARD_CHUNKS];
        int num = shard_chunks(patches + extra, rank.cp_size, rank.cp_rank, chunks);
        for (int c = 0; c < num; c++) {
            for (int64_t t = chunks[c].begin; t < chunks[c].end; t++) {
                rows[count++] = t < extra ? -1 : i * patches + (int32_t)t - extra;
            }
        }
    }
    Range part = range_part(count, rank.tp_size, rank.tp_rank);
    for (int64_t n = part.begin; n < part.end; n++) {
        if (rows[n] >= 0) {
            batch->which[batch->num_rows++] = rows[n];
        }
    }
}

static void make_batch(const LayerContext *layers, const Shape *shape, int index, Batch *batch)
{
    int64_t pixels = images_of[index] * shape->image_size * shape->image_size * 3;
    for (int64_t i = 0; i < pixels; i++) {
        batch->pixels[i] = (uint8_t)(127.5f + 127.0f * testing_value((uint64_t)index + 70, i));
    }
    batch->batch = (ModuleBatch){.num_items = images_of[index], .pixels = batch->pixels};
    find_rows(layers, shape, batch);
    for (int64_t r = 0; r < batch->num_rows; r++) {
        for (int i = 0; i < ROW_WIDTH; i++) {
            batch->rows_grad[r * ROW_WIDTH + i] =
                testing_value((uint64_t)index + 80, batch->which[r] * ROW_WIDTH + i);
        }
    }
}

/* ---- one rank ---- */

typedef struct Rank {
    const Work *work;
    TestingStages stages;
    Batch batches[TESTING_BATCHES];
    TestingReport *report;
} Rank;

static void check_rows(Rank *rank, int index)
{
    const Batch *batch = &rank->batches[index];
    float *whole = rank->work->expected->rows[index];
    if (rank->work->is_whole) {
        memcpy(whole, batch->rows, sizeof batch->rows);
    }
    double largest = testing_largest(whole, (int64_t)ROWS_MAX * ROW_WIDTH);
    for (int64_t r = 0; r < batch->num_rows; r++) {
        testing_compare(rank->report, "rows", batch->rows + r * ROW_WIDTH,
                        whole + (int64_t)batch->which[r] * ROW_WIDTH, ROW_WIDTH, largest);
    }
}

static Status forward(Rank *rank, int index)
{
    Batch *batch = &rank->batches[index];
    for (int s = 0; s < rank->work->layout.stages; s++) {
        int64_t rows = vision_module_ops.count_rows(rank->stages.modules[s], &batch->batch);
        testing_near(rank->report, "count_rows", s, (double)rows, (double)batch->num_rows, 0, 0);
    }
    TRY(testing_stages_forward(&rank->stages, index, &batch->batch, batch->rows, NULL));
    TRY(stream_wait(rank->stages.layers.stream, clock_deadline_in_ms(TESTING_TIMEOUT_MS)));
    check_rows(rank, index);
    return STATUS_OK;
}

/* A microbatch without images changes nothing. */
static Status run_nothing(Rank *rank)
{
    const ModuleBatch none = {.num_items = 0};
    TRY(testing_stages_forward(&rank->stages, 0, &none, NULL, NULL));
    return testing_stages_backward(&rank->stages, 0, &none, rank->batches[0].grad, NULL);
}

static Status run(Rank *rank, Device *device)
{
    const Work *work = rank->work;
    const ModuleLimits limits = {.items = IMAGES_MAX + 1}; /* more than needed */
    TRY(testing_stages_open(&rank->stages, work->model, device, limits));
    TRY(run_nothing(rank));
    for (int i = 0; i < TESTING_BATCHES; i++) {
        make_batch(&rank->stages.layers, work->shape, i, &rank->batches[i]);
        TRY(forward(rank, i));
    }
    for (int i = 0; i < TESTING_BATCHES; i++) {
        Batch *batch = &rank->batches[i];
        TRY(testing_stages_backward(&rank->stages, i, &batch->batch, batch->grad,
                                    batch->rows_grad));
    }
    TRY(testing_stages_sum(&rank->stages, rank->report));
    if (work->is_whole) {
        TRY(testing_grads_keep(&rank->stages.modules[0]->params, &work->expected->grads));
    }
    return testing_stages_compare(&rank->stages, &work->expected->grads, work->shape->layers_run,
                                  rank->report);
}

static Status run_rank(LayerContext *context, Device *device, void *argument, TestingReport *report)
{
    Rank *rank = NULL;
    TRY(MEMORY_NEW(&rank, 1));
    rank->work = argument;
    rank->report = report;
    rank->stages = (TestingStages){
        .ops = &vision_module_ops, .layout = &rank->work->layout, .layers = *context};
    Status status = run(rank, device);
    testing_stages_close(&rank->stages);
    memory_free(rank);
    return status;
}

/* ---- layouts ---- */

static const char *const freezes[][TESTING_FROZEN_MAX] = {
    {NULL},
    {"vision_tower.*"},
    {"multi_modal_projector.*"},
    {"*.embeddings.*", "*.pre_layrnorm.*"},
    {"*.position_embedding.*", "*.class_embedding", "*.layers.0.*", "*.linear_1.weight"},
    {"*.patch_embedding.*", "*.pre_layrnorm.bias", "*.linear_2.*"},
    {"*.embeddings.*", "*.layers.*", "multi_modal_projector.*"},
    {"*.patch_embedding.*", "*.class_embedding", "*.pre_layrnorm.*", "*.layers.*"},
    {"*.patch_embedding.*", "*.position_embedding.*", "*.pre_layrnorm.*", "*.layers.*"},
};

enum {
    NUM_SHAPES = sizeof shapes / sizeof shapes[0],
    NUM_FREEZES = sizeof freezes / sizeof freezes[0],
    RECOMPUTES = RECOMPUTE_FULL + 1
};

static TestingLayout layout_of(int freeze)
{
    return (TestingLayout){.tp = 1, .cp = 1, .stages = 1, .chunks = 1, .frozen = freezes[freeze]};
}

static int run_layout(Work *work)
{
    const TestingLayout *layout = &work->layout;
    int failures =
        testing_run_grid(layout->tp, layout->cp, layout->is_sequence_parallel, run_rank, work);
    if (failures > 0) {
        fprintf(stderr, "%s: tp %d, cp %d, sp %d, stages %d, chunks %d, recompute %d, \"%s\"\n",
                work->shape->name, layout->tp, layout->cp, layout->is_sequence_parallel,
                layout->stages, layout->chunks, layout->recompute,
                layout->frozen[0] ? layout->frozen[0] : "");
    }
    return failures;
}

/* Every tp, cp, sequence parallelism, stages and chunks; frozen subsets and recompute take turns.
 */
static int run_layouts(const Shape *shape, const ModelSpec *model, Expected *expected)
{
    int failures = 0;
    for (int i = 0; i < 3 * 3 * 2 * 3 * 2; i++) {
        int freeze = (i + i / NUM_FREEZES) % NUM_FREEZES;
        Work work = {
            .shape = shape, .model = model, .layout = layout_of(freeze), .expected = expected};
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

static void test_layouts(void **state)
{
    const Shape *shape = *state;
    Model model;
    Expected expected = {0};
    make_model(shape, &model);
    int failures = 0;
    for (int f = 0; f < NUM_FREEZES; f++) {
        Work work = {.shape = shape,
                     .model = &model.model,
                     .layout = layout_of(f),
                     .is_whole = f == 0,
                     .expected = &expected};
        failures += run_layout(&work);
    }
    failures += failures == 0 ? run_layouts(shape, &model.model, &expected) : 0;
    testing_grads_done(&expected.grads);
    assert_int_equal(failures, 0);
}

/* Models that cannot be built are refused with their reason. */
static void test_refused(void **state)
{
    (void)state;
    Model model;
    ModuleContext context = {0};
    ModuleLimits limits = {0};
    Module *module = NULL;
    make_model(&shapes[0], &model);
    model.vision.image_size = 7;
    assert_int_equal(vision_module_ops.create(&model.model, &context, &limits, &module),
                     STATUS_INVALID);
    assert_non_null(strstr(status_message(), "image_size 7 is not a multiple of patch_size 2"));
    make_model(&shapes[0], &model);
    model.vision.heads = 5;
    assert_int_equal(vision_module_ops.create(&model.model, &context, &limits, &module),
                     STATUS_INVALID);
    assert_non_null(strstr(status_message(), "width 12 is not a multiple of heads 5"));
    make_model(&shapes[0], &model);
    model.vision.feature_layer = -7;
    assert_int_equal(vision_module_ops.create(&model.model, &context, &limits, &module),
                     STATUS_INVALID);
    assert_non_null(strstr(status_message(), "feature_layer -7"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test_prestate(test_layouts, (void *)&shapes[0]),
                                       cmocka_unit_test_prestate(test_layouts, (void *)&shapes[1]),
                                       cmocka_unit_test_prestate(test_layouts, (void *)&shapes[2]),
                                       cmocka_unit_test_prestate(test_layouts, (void *)&shapes[3]),
                                       cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
