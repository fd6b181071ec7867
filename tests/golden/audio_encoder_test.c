/* The audio encoder, forward and backward, against PyTorch in float64 (audio_encoder_generate.py):
 * cut over tp, cp and tokens where heads, widths and clips cannot all be cut evenly and some ranks
 * have no heads or no tokens, in parts of a pipeline, one of them without layers, with recompute
 * and with frozen parameters. Two microbatches are in flight at once. Tolerance: 1e-4 relative +
 * 1e-5 absolute, of values around 1 that float32 knows to 1e-7 and that some tens of sums went
 * into. A swapped head, a missing bias or a doubled sum is off by 10 % and more.
 */
#include "base/memory.h"
#include "encoder_worker/audio_encoder.h"
#include "nn/testing.h"
#include "tests/golden/golden_file.h"

#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    CLIPS = 5,
    BATCHES = 2,
    STAGES_MAX = 4,
    ROWS_MAX = 32,
    WIDTH_MAX = 16, /* of rows and of the encoder */
    FROZEN_MAX = 3
};

static const double relative = 1e-4;
static const double absolute = 1e-5;

typedef struct Case {
    int tp, cp;
    bool is_sequence_parallel;
    int stages, chunks;
    Recompute recompute;
    const char *frozen[FROZEN_MAX];
    int first_trained; /* part */
} Case;

typedef struct Work {
    const Case *layout;
    const GoldenFile *file;
} Work;

typedef struct Model {
    ModelSpec model;
    AudioSpec audio;
    ProjectorSpec projector;
    DecoderSpec llm;
} Model;

static int config_int(const GoldenFile *file, const char *name)
{
    return (int)golden_config(file, name);
}

static void make_model(const GoldenFile *file, Model *out)
{
    viaduct__v1__model_spec__init(&out->model);
    viaduct__v1__audio_spec__init(&out->audio);
    viaduct__v1__projector_spec__init(&out->projector);
    viaduct__v1__decoder_spec__init(&out->llm);
    out->model.audio = &out->audio;
    out->model.audio_projector = &out->projector;
    out->model.llm = &out->llm;
    out->audio.mels = config_int(file, "mels");
    out->audio.width = config_int(file, "audio_width");
    out->audio.layers = config_int(file, "audio_layers");
    out->audio.heads = config_int(file, "audio_heads");
    out->audio.mlp_width = config_int(file, "audio_mlp_width");
    out->audio.norm_epsilon = golden_config(file, "norm_epsilon");
    out->projector.width = config_int(file, "projector_width");
    out->llm.width = config_int(file, "width");
    CHECK(out->llm.width <= WIDTH_MAX && out->audio.width <= WIDTH_MAX);
}

/* One microbatch on one rank. */
typedef struct Batch {
    ModuleBatch batch;
    int32_t frame_begins[CLIPS + 1];
    int64_t n;                /* rows on this rank */
    int32_t places[ROWS_MAX]; /* [n]: which of the file's rows they are */
    float rows[ROWS_MAX * WIDTH_MAX];
    float rows_grad[ROWS_MAX * WIDTH_MAX];
    float grad[ROWS_MAX * WIDTH_MAX];
} Batch;

typedef struct Rank {
    const Case *layout;
    const GoldenFile *file;
    LayerContext *context;
    Model model;
    Module *stages[STAGES_MAX];
    Batch batches[BATCHES];
    TestingReport *report;
} Rank;

/* Clips [first, end) and this rank's of their rows. */
static void make_batch(const Rank *rank, int first, int end, Batch *out)
{
    const Tensor *frames = golden_tensor(rank->file, "", "frames");
    const int32_t *lengths = golden_tensor(rank->file, "", "lengths")->data;
    ShardRank shard = layer_shard_rank(rank->context);
    int32_t frame = 0;
    int32_t row = 0;
    int32_t first_frame = 0;
    int32_t places[ROWS_MAX]; /* of this cp rank */
    int64_t count = 0;
    for (int clip = 0; clip < end; clip++) {
        int32_t rows = (lengths[clip] + 1) / 2;
        first_frame = clip == first ? frame : first_frame;
        Range chunks[SHARD_CHUNKS];
        int num = shard_chunks(rows, shard.cp_size, shard.cp_rank, chunks);
        for (int c = 0; clip >= first && c < num; c++) {
            for (int64_t t = chunks[c].begin; t < chunks[c].end; t++) {
                CHECK(count < ROWS_MAX);
                places[count++] = row + (int32_t)t;
            }
        }
        frame += lengths[clip];
        row += rows;
        if (clip >= first) {
            out->frame_begins[clip - first + 1] = frame - first_frame;
        }
    }
    Range part = range_part(count, shard.tp_size, shard.tp_rank);
    out->n = range_count(part);
    memcpy(out->places, places + part.begin, (size_t)out->n * sizeof *places);
    out->batch = (ModuleBatch){
        .num_items = end - first,
        .frame_begins = out->frame_begins,
        .frames = tensor_f32(frames) + first_frame * frames->dims[1],
    };
    int64_t width = rank->model.llm.width;
    const float *rows_grad = golden_tensor(rank->file, "", "rows_grad")->data;
    for (int64_t i = 0; i < out->n; i++) {
        memcpy(out->rows_grad + i * width, rows_grad + out->places[i] * width,
               (size_t)width * sizeof(float));
    }
}

static void load_weights(const GoldenFile *file, ParamSet *params)
{
    for (int p = 0; p < params->num_params; p++) {
        Param *param = &params->params[p];
        const Tensor *whole = golden_tensor(file, "weight/", param->spec.name);
        CHECK(whole->num_dims == param->spec.num_dims);
        CHECK(memcmp(whole->dims, param->spec.dims, sizeof whole->dims) == 0);
        for (int64_t i = 0; i < tensor_count(&param->value); i++) {
            tensor_f32(&param->value)[i] = tensor_f32(whole)[testing_global_index(param, i)];
        }
    }
}

static size_t count_frozen(const Case *layout)
{
    size_t count = 0;
    while (count < FROZEN_MAX && layout->frozen[count]) {
        count++;
    }
    return count;
}

static Status create_stages(Rank *rank, Device *device)
{
    const Case *layout = rank->layout;
    ModuleContext context = {.device = device,
                             .kernels = rank->context->kernels,
                             .stream = rank->context->stream,
                             .tp = rank->context->tp,
                             .cp = rank->context->cp,
                             .is_sequence_parallel = layout->is_sequence_parallel,
                             .stages = layout->stages,
                             .chunks = layout->chunks,
                             .recompute = layout->recompute,
                             .frozen = (char *const *)layout->frozen,
                             .num_frozen = count_frozen(layout)};
    TRY(audio_module_ops.first_trained(&rank->model.model, &context, &context.backward_begin));
    if (context.backward_begin != layout->first_trained) {
        testing_failed(rank->report, "first trained part %d, expected %d", context.backward_begin,
                       layout->first_trained);
    }
    /* Larger than needed, as in training. */
    ModuleLimits limits = {.items = CLIPS + 1, .frames = 40};
    for (int c = 0; c < layout->chunks; c++) {
        limits.slots[c] = BATCHES;
    }
    for (int s = 0; s < layout->stages; s++) {
        context.stage = s;
        TRY(audio_module_ops.create(&rank->model.model, &context, &limits, &rank->stages[s]));
        load_weights(rank->file, &rank->stages[s]->params);
    }
    return STATUS_OK;
}

static Status forward(Rank *rank, int slot)
{
    const Case *layout = rank->layout;
    Batch *batch = &rank->batches[slot];
    size_t bytes = (size_t)(batch->n * rank->model.audio.width) * sizeof(float);
    for (int part = 0; part < layout->stages * layout->chunks; part++) {
        Module *module = rank->stages[part % layout->stages];
        if (part > 0) {
            const Module *below = rank->stages[(part - 1) % layout->stages];
            memcpy(audio_module_ops.input(module, part / layout->stages, slot),
                   audio_module_ops.output((Module *)below, (part - 1) / layout->stages, slot),
                   bytes);
        }
        CHECK(audio_module_ops.count_local(module, &batch->batch) == batch->n);
        CHECK(audio_module_ops.count_rows(module, &batch->batch) == batch->n);
        CHECK(batch->n <= module->local_max && module->width == rank->model.audio.width);
        TRY(audio_module_ops.forward(module, part / layout->stages, slot, &batch->batch,
                                     batch->rows, NULL));
    }
    return STATUS_OK;
}

static Status backward(Rank *rank, int slot)
{
    const Case *layout = rank->layout;
    Batch *batch = &rank->batches[slot];
    for (int i = 0; i < ROWS_MAX * WIDTH_MAX; i++) {
        batch->grad[i] = NAN; /* not read by the last part */
    }
    for (int part = layout->stages * layout->chunks - 1; part >= layout->first_trained; part--) {
        TRY(audio_module_ops.backward(rank->stages[part % layout->stages], part / layout->stages,
                                      slot, &batch->batch, batch->grad, batch->rows_grad));
    }
    return STATUS_OK;
}

static void compare_rows(Rank *rank, const Batch *batch)
{
    int64_t width = rank->model.llm.width;
    const float *expected = golden_tensor(rank->file, "", "rows")->data;
    for (int64_t i = 0; i < batch->n * width; i++) {
        int64_t at = batch->places[i / width] * width + i % width;
        testing_near(rank->report, "rows", at, batch->rows[i], expected[at], relative, absolute);
    }
}

/* Returns how many parameters are trained. */
static int compare_grads(Rank *rank, const ParamSet *params)
{
    int num_trained = 0;
    for (int p = 0; p < params->num_params; p++) {
        const Param *param = &params->params[p];
        if (!param->is_trained) {
            CHECK(param->grad.data == NULL);
            continue;
        }
        num_trained++;
        const Tensor *whole = golden_tensor(rank->file, "grad/", param->spec.name);
        for (int64_t i = 0; i < tensor_count(&param->grad); i++) {
            testing_near(rank->report, param->spec.name, i, tensor_f32(&param->grad)[i],
                         tensor_f32(whole)[testing_global_index(param, i)], relative, absolute);
        }
    }
    return num_trained;
}

/* A microbatch without clips changes nothing. */
static Status run_empty(Rank *rank)
{
    static const int32_t begins[1] = {0};
    ModuleBatch none = {.num_items = 0, .frame_begins = begins};
    CHECK(audio_module_ops.count_local(rank->stages[0], &none) == 0);
    TRY(audio_module_ops.forward(rank->stages[0], 0, 0, &none, NULL, NULL));
    return audio_module_ops.backward(rank->stages[0], 0, 0, &none, NULL, NULL);
}

static Status run(Rank *rank, Device *device)
{
    TRY(create_stages(rank, device));
    TRY(run_empty(rank));
    for (int slot = 0; slot < BATCHES; slot++) {
        TRY(forward(rank, slot));
    }
    for (int slot = 0; slot < BATCHES; slot++) {
        TRY(backward(rank, slot));
        compare_rows(rank, &rank->batches[slot]);
    }
    int num_trained = 0;
    for (int s = 0; s < rank->layout->stages; s++) {
        LayerContext layers = *rank->context;
        layers.params = &rank->stages[s]->params;
        TRY(testing_sum_partial_grads(&layers));
        num_trained += compare_grads(rank, layers.params);
    }
    CHECK(num_trained > 0);
    return STATUS_OK;
}

static Status run_rank(LayerContext *context, Device *device, void *argument, TestingReport *report)
{
    const Work *work = argument;
    Rank *rank = NULL;
    TRY(MEMORY_NEW(&rank, 1));
    *rank =
        (Rank){.layout = work->layout, .file = work->file, .context = context, .report = report};
    make_model(work->file, &rank->model);
    make_batch(rank, 0, 2, &rank->batches[0]);
    make_batch(rank, 2, CLIPS, &rank->batches[1]);
    Status status = run(rank, device);
    for (int s = 0; s < STAGES_MAX; s++) {
        audio_module_ops.destroy(rank->stages[s]);
    }
    memory_free(rank);
    return status;
}

static const Case cases[] = {
    {.tp = 1, .cp = 1},
    {.tp = 2, .cp = 1},
    {.tp = 4, .cp = 1},
    {.tp = 1, .cp = 2},
    {.tp = 1, .cp = 3},
    {.tp = 3, .cp = 1, .is_sequence_parallel = true},
    {.tp = 2, .cp = 2, .is_sequence_parallel = true},
    {.tp = 2, .cp = 2},
    {.tp = 1, .cp = 1, .is_sequence_parallel = true},
    {.tp = 1, .cp = 1, .stages = 3, .recompute = RECOMPUTE_SELECTIVE},
    {.tp = 2, .cp = 1, .is_sequence_parallel = true, .stages = 2, .recompute = RECOMPUTE_FULL},
    {.tp = 1, .cp = 2, .stages = 2, .chunks = 2, .recompute = RECOMPUTE_FULL},
    {.tp = 2, .cp = 2, .is_sequence_parallel = true, .stages = 4},
    {.tp = 1, .cp = 2, .stages = 2, .frozen = {"audio_tower.*"}, .first_trained = 1},
    {.tp = 2, .cp = 1, .frozen = {"audio_tower.conv1.*"}},
    {.tp = 2, .cp = 1, .frozen = {"*.conv1.*", "audio_tower.conv2.weight"}},
    {.tp = 2,
     .cp = 2,
     .is_sequence_parallel = true,
     .stages = 3,
     .frozen = {"*.conv?.*", "audio_tower.layers.0.*"},
     .first_trained = 1},
    {.tp = 1, .cp = 1, .stages = 2, .frozen = {"audio_projector.*", "audio_tower.layer_norm.*"}},
};

static void test_layouts(void **state)
{
    (void)state;
    GoldenFile file;
    Status status = golden_open("audio_encoder", &file);
    if (status != STATUS_OK) {
        fail_msg("%s", status_message());
    }
    int failures = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Case layout = cases[i];
        layout.stages = layout.stages > 0 ? layout.stages : 1;
        layout.chunks = layout.chunks > 0 ? layout.chunks : 1;
        Work work = {.layout = &layout, .file = &file};
        int found =
            testing_run_grid(layout.tp, layout.cp, layout.is_sequence_parallel, run_rank, &work);
        if (found > 0) {
            fprintf(stderr, "case %zu: %d failures\n", i, found);
        }
        failures += found;
    }
    golden_close(&file);
    assert_int_equal(failures, 0);
}

/* Models that cannot be built are refused with their reason. */
static void test_refused(void **state)
{
    (void)state;
    Model model;
    GoldenFile file;
    assert_int_equal(golden_open("audio_encoder", &file), STATUS_OK);
    make_model(&file, &model);
    golden_close(&file);
    ModuleContext context = {0};
    ModuleLimits limits = {0};
    Module *module = NULL;
    model.audio.heads = 5;
    assert_int_equal(audio_module_ops.create(&model.model, &context, &limits, &module),
                     STATUS_INVALID);
    assert_non_null(strstr(status_message(), "width 12 is not a multiple of heads 5"));
    model.audio.heads = 1;
    model.audio.width = 7;
    assert_int_equal(audio_module_ops.create(&model.model, &context, &limits, &module),
                     STATUS_INVALID);
    assert_non_null(strstr(status_message(), "even"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_layouts),
                                       cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests_name("audio_encoder", tests, NULL, NULL);
}
