/* Both modules together, forward, backward and three optimizer steps, against PyTorch in float64:
 * on one to four ranks, where heads, widths and vocabulary cannot all be cut evenly and some ranks
 * have no heads. Tolerance: 1e-4 relative + 1e-6 absolute. A swapped head, a missing bias or a
 * doubled sum is off by 10 % and more.
 */
#include "base/memory.h"
#include "encoder_worker/vision_encoder.h"
#include "llm_worker/llm.h"
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
    SEGMENTS = 3,
    TOKENS_MAX = 64,
    ROWS_MAX = 16,
    WIDTH_MAX = 16
};

static const double relative = 1e-4;
static const double absolute = 1e-6;

/* ---- the model and its input, from the file ---- */

typedef struct Model {
    ModelSpec model;
    VisionSpec vision;
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
    viaduct__v1__vision_spec__init(&out->vision);
    viaduct__v1__projector_spec__init(&out->projector);
    viaduct__v1__decoder_spec__init(&out->llm);
    out->model.vision = &out->vision;
    out->model.projector = &out->projector;
    out->model.llm = &out->llm;
    VisionSpec *vision = &out->vision;
    vision->image_size = config_int(file, "image_size");
    vision->patch_size = config_int(file, "patch_size");
    vision->width = config_int(file, "vision_width");
    vision->layers = config_int(file, "vision_layers");
    vision->heads = config_int(file, "vision_heads");
    vision->mlp_width = config_int(file, "vision_mlp_width");
    vision->activation = config_int(file, "quick_gelu") ? VIADUCT__V1__ACTIVATION__QUICK_GELU
                                                        : VIADUCT__V1__ACTIVATION__GELU;
    vision->class_token = config_int(file, "class_token");
    vision->feature_layer = config_int(file, "feature_layer");
    vision->norm_epsilon = golden_config(file, "vision_norm_epsilon");
    out->projector.width = config_int(file, "projector_width");
    DecoderSpec *llm = &out->llm;
    llm->vocabulary = config_int(file, "vocabulary");
    llm->width = config_int(file, "width");
    llm->layers = config_int(file, "layers");
    llm->heads = config_int(file, "heads");
    llm->kv_heads = config_int(file, "kv_heads");
    llm->head_width = config_int(file, "head_width");
    llm->mlp_width = config_int(file, "mlp_width");
    llm->rope_theta = golden_config(file, "rope_theta");
    llm->norm_epsilon = golden_config(file, "norm_epsilon");
    llm->tied_head = config_int(file, "tied_head");
}

/* All samples, the first alone, the last alone. */
enum {
    TEXT_ALL,
    TEXT_FIRST,
    TEXT_LAST,
    TEXT_COUNT
};

typedef struct Input {
    ModuleBatch batch;
    int32_t segment_begins[SEGMENTS + 1];
    SequencesBuffer *buffers[TEXT_COUNT];
    Sequences texts[TEXT_COUNT];
    int32_t labels[TOKENS_MAX];
    int32_t row_tokens[ROWS_MAX];
    float rows[ROWS_MAX * WIDTH_MAX];      /* [R, D] */
    float rows_grad[ROWS_MAX * WIDTH_MAX]; /* [R, D] */
    int64_t num_labels;
} Input;

static void make_input(const GoldenFile *file, const Model *model, Input *input)
{
    enum {
        IMAGE_ID = 35
    };
    const Tensor *ids = golden_tensor(file, "", "ids");
    const int32_t *lengths = golden_tensor(file, "", "lengths")->data;
    const int32_t *labels = golden_tensor(file, "", "labels")->data;
    const Tensor *pixels = golden_tensor(file, "", "pixels");
    *input = (Input){0};
    ModuleBatch *batch = &input->batch;
    *batch = (ModuleBatch){.num_items = pixels->dims[0],
                           .pixels = pixels->data,
                           .sequences = &input->texts[TEXT_ALL],
                           .ids = ids->data,
                           .labels = input->labels,
                           .row_tokens = input->row_tokens,
                           .rows = input->rows};
    CHECK(ids->dims[0] <= TOKENS_MAX && model->llm.width <= WIDTH_MAX);
    int32_t token = 0;
    for (int s = 0; s < SEGMENTS; s++) {
        input->segment_begins[s + 1] = input->segment_begins[s] + lengths[s];
        for (; token < input->segment_begins[s + 1]; token++) {
            input->labels[token] = labels[token];
            input->num_labels += labels[token] >= 0;
            if (batch->ids[token] == IMAGE_ID) {
                CHECK(batch->num_rows < ROWS_MAX);
                input->row_tokens[batch->num_rows++] = token;
            }
        }
    }
    CHECK(batch->num_rows == batch->num_items * module_rows_per_image(&model->model));
    batch->loss_scale = 1.0f / (float)input->num_labels;
}

/* Every rank has all tokens. */
static Status make_text(Input *input, int text, const int32_t *begins, int num, Device *device,
                        Stream *stream)
{
    TRY(sequences_buffer_create(device, (ShardRank){1, 0, 1, 0}, TOKENS_MAX, SEGMENTS, true,
                                &input->buffers[text]));
    return sequences_make(input->buffers[text], begins, num, stream, &input->texts[text]);
}

static Status make_texts(Input *input, Device *device, Stream *stream)
{
    const int32_t *begins = input->segment_begins;
    const int32_t last[2] = {0, begins[SEGMENTS] - begins[SEGMENTS - 1]};
    TRY(make_text(input, TEXT_ALL, begins, SEGMENTS, device, stream));
    TRY(make_text(input, TEXT_FIRST, begins, 1, device, stream));
    return make_text(input, TEXT_LAST, last, 1, device, stream);
}

/* ---- one rank ---- */

typedef struct Rank {
    const GoldenFile *file;
    Model model;
    Input input;
    LayerContext vision_layers;
    LayerContext llm_layers;
    Module *vision;
    Module *llm;
    float *m[2]; /* optimizer state of vision, llm */
    float *v[2];
    TestingReport *report;
} Rank;

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

static void compare_array(Rank *rank, const char *name, const float *found)
{
    const Tensor *expected = golden_tensor(rank->file, "", name);
    for (int64_t i = 0; i < tensor_count(expected); i++) {
        testing_near(rank->report, name, i, found[i], tensor_f32(expected)[i], relative, absolute);
    }
}

/* All of a set's gradients, or values after a step. A key's bias shifts all scores of a query alike
 * and so has no gradient; what is left is rounding, which AdamW turns into steps of any size up to
 * the learning rate. */
static void compare_params(Rank *rank, const ParamSet *params, const char *group, bool grads)
{
    double learning_rate = golden_config(rank->file, "learning_rate");
    for (int p = 0; p < params->num_params; p++) {
        const Param *param = &params->params[p];
        const Tensor *whole = golden_tensor(rank->file, group, param->spec.name);
        const Tensor *local = grads ? &param->grad : &param->value;
        bool key_bias = strstr(param->spec.name, "k_proj.bias") != NULL;
        double slack = key_bias && !grads ? 3 * learning_rate : 0;
        char what[192];
        snprintf(what, sizeof what, "%s%s", group, param->spec.name);
        for (int64_t i = 0; i < tensor_count(local); i++) {
            testing_near(rank->report, what, i, tensor_f32(local)[i],
                         tensor_f32(whole)[testing_global_index(param, i)], relative,
                         absolute + slack);
        }
    }
}

static Status create_modules(Rank *rank, LayerContext *context, Device *device)
{
    ModuleContext module_context = {.device = device,
                                    .kernels = context->kernels,
                                    .stream = context->stream,
                                    .tp = context->tp};
    const ModuleBatch *batch = &rank->input.batch;
    /* Larger than needed, as in training. */
    TRY(make_texts(&rank->input, device, context->stream));
    ModuleLimits limits = {.slots = {2},
                           .items = batch->num_items + 1,
                           .keys = batch->sequences->num_keys + 5,
                           .segments = SEGMENTS + 1,
                           .rows = batch->num_rows + 3};
    TRY(vision_module_ops.create(&rank->model.model, &module_context, &limits, &rank->vision));
    TRY(llm_module_ops.create(&rank->model.model, &module_context, &limits, &rank->llm));
    rank->vision_layers = *context;
    rank->vision_layers.params = &rank->vision->params;
    rank->llm_layers = *context;
    rank->llm_layers.params = &rank->llm->params;
    Module *modules[2] = {rank->vision, rank->llm};
    for (int i = 0; i < 2; i++) {
        load_weights(rank->file, &modules[i]->params);
        TRY(MEMORY_NEW(&rank->m[i], modules[i]->params.count));
        TRY(MEMORY_NEW(&rank->v[i], modules[i]->params.count));
    }
    return STATUS_OK;
}

static void destroy_modules(Rank *rank)
{
    for (int i = 0; i < 2; i++) {
        memory_free(rank->m[i]);
        memory_free(rank->v[i]);
    }
    for (int i = 0; i < TEXT_COUNT; i++) {
        sequences_buffer_destroy(rank->input.buffers[i]);
    }
    vision_module_ops.destroy(rank->vision);
    llm_module_ops.destroy(rank->llm);
}

/* Another microbatch in flight in slot 1: one image, one sample. It may not disturb slot 0. */
static Status forward_other(Rank *rank)
{
    ModuleBatch other = rank->input.batch;
    float rows[ROWS_MAX * WIDTH_MAX];
    double loss = 0;
    other.num_items = 1;
    other.num_rows = module_rows_per_image(&rank->model.model);
    other.sequences = &rank->input.texts[TEXT_FIRST];
    other.rows = rows;
    TRY(vision_module_ops.forward(rank->vision, 0, 1, &other, rows, NULL));
    return llm_module_ops.forward(rank->llm, 0, 1, &other, NULL, &loss);
}

/* Microbatches without images and without tokens: nothing changes. Text alone: no rows are read or
 * written. */
static Status check_small_batches(Rank *rank)
{
    const Sequences nothing = {0};
    ModuleBatch none = {.loss_scale = 1, .sequences = &nothing};
    float grad[TOKENS_MAX * WIDTH_MAX];
    double loss = 0;
    TRY(vision_module_ops.forward(rank->vision, 0, 0, &none, NULL, NULL));
    TRY(vision_module_ops.backward(rank->vision, 0, 0, &none, grad, NULL));
    TRY(llm_module_ops.forward(rank->llm, 0, 0, &none, NULL, &loss));
    TRY(llm_module_ops.backward(rank->llm, 0, 0, &none, grad, NULL));
    testing_near(rank->report, "loss of nothing", 0, loss, 0, 0, 0);
    for (int64_t i = 0; i < rank->llm->params.count; i++) {
        testing_near(rank->report, "gradient of nothing", i, rank->llm->params.grads[i], 0, 0, 0);
    }

    ModuleBatch text = rank->input.batch; /* the last sample has no image */
    int32_t first = rank->input.segment_begins[SEGMENTS - 1];
    text.sequences = &rank->input.texts[TEXT_LAST];
    text.ids += first;
    text.labels += first;
    text.num_rows = 0;
    text.row_tokens = NULL;
    text.rows = NULL;
    TRY(llm_module_ops.forward(rank->llm, 0, 0, &text, NULL, &loss));
    TRY(llm_module_ops.backward(rank->llm, 0, 0, &text, grad, NULL));
    const Tensor *log_probs = golden_tensor(rank->file, "", "log_probs");
    double expected = 0;
    for (int64_t t = 0; t < text.sequences->num_keys; t++) {
        expected -= text.labels[t] < 0
                        ? 0
                        : tensor_f32(log_probs)[(first + t) * log_probs->dims[1] + text.labels[t]];
    }
    testing_near(rank->report, "loss of text alone", 0, loss, expected, relative, absolute);
    return STATUS_OK;
}

/* Gradients of one step; the loss is checked. */
static Status step_forward_backward(Rank *rank, int step)
{
    Input *input = &rank->input;
    ModuleBatch *batch = &input->batch;
    const float *losses = golden_tensor(rank->file, "", "loss")->data;
    Module *modules[2] = {rank->vision, rank->llm};
    for (int i = 0; i < 2; i++) {
        memset(modules[i]->params.grads, 0, (size_t)modules[i]->params.count * sizeof(float));
    }
    float grad[TOKENS_MAX * WIDTH_MAX];
    double loss = 0.5; /* added to */
    TRY(vision_module_ops.forward(rank->vision, 0, 0, batch, input->rows, NULL));
    TRY(llm_module_ops.forward(rank->llm, 0, 0, batch, NULL, &loss));
    TRY(forward_other(rank));
    TRY(llm_module_ops.backward(rank->llm, 0, 0, batch, grad, input->rows_grad));
    TRY(vision_module_ops.backward(rank->vision, 0, 0, batch, grad, input->rows_grad));
    TRY(testing_sum_partial_grads(&rank->vision_layers));
    TRY(testing_sum_partial_grads(&rank->llm_layers));
    testing_near(rank->report, "loss", step, (loss - 0.5) / (double)input->num_labels,
                 losses[step - 1], relative, absolute);
    return STATUS_OK;
}

static Status update(Rank *rank, const LayerContext *layers, int which, int64_t step)
{
    const GoldenFile *file = rank->file;
    const ParamSet *params = layers->params;
    for (int p = 0; p < params->num_params; p++) {
        const Param *param = &params->params[p];
        AdamWStep adamw = {.learning_rate = (float)golden_config(file, "learning_rate"),
                           .beta1 = (float)golden_config(file, "beta1"),
                           .beta2 = (float)golden_config(file, "beta2"),
                           .epsilon = (float)golden_config(file, "epsilon"),
                           .weight_decay =
                               param->spec.decay ? (float)golden_config(file, "weight_decay") : 0,
                           .grad_scale = 1,
                           .step = step};
        TRY(layers->kernels->adamw(params->values + param->offset, rank->m[which] + param->offset,
                                   rank->v[which] + param->offset, params->grads + param->offset,
                                   tensor_count(&param->value), &adamw, layers->stream));
    }
    return STATUS_OK;
}

/* Log probability of id v after token t = the loss with that one label; and the likeliest ids.
 * `every`-th pair only. */
static Status check_log_probs(Rank *rank, int every)
{
    const Tensor *expected = golden_tensor(rank->file, "", "log_probs");
    int64_t n = expected->dims[0];
    int64_t vocabulary = expected->dims[1];
    ModuleBatch batch = rank->input.batch;
    int32_t labels[TOKENS_MAX];
    int32_t tokens[TOKENS_MAX];
    int32_t predicted[TOKENS_MAX];
    batch.labels = labels;
    TRY(vision_module_ops.forward(rank->vision, 0, 0, &batch, rank->input.rows, NULL));
    for (int64_t i = 0; i < n * vocabulary; i += every) {
        for (int64_t t = 0; t < n; t++) {
            labels[t] = t == i / vocabulary ? (int32_t)(i % vocabulary) : -1;
        }
        double loss = 0;
        TRY(llm_module_ops.forward(rank->llm, 0, 0, &batch, NULL, &loss));
        testing_near(rank->report, "log_probs", i, -loss, tensor_f32(expected)[i], relative,
                     absolute);
    }
    TRY(llm_module_ops.forward(rank->llm, 0, 1, &batch, NULL, NULL)); /* without the head */
    for (int32_t t = 0; t < n; t++) {
        tokens[t] = (int32_t)n - 1 - t;
    }
    TRY(llm_module_ops.predict(rank->llm, 1, tokens, (int32_t)n, predicted));
    for (int64_t t = 0; t < n; t++) {
        const float *row = tensor_f32(expected) + tokens[t] * vocabulary;
        int32_t best = 0;
        for (int32_t v = 1; v < vocabulary; v++) {
            best = row[v] > row[best] ? v : best;
        }
        if (predicted[t] != best) {
            testing_failed(rank->report, "predict after token %d: %d, expected %d", tokens[t],
                           predicted[t], best);
        }
    }
    return STATUS_OK;
}

static Status check_rank(LayerContext *context, Device *device, void *argument,
                         TestingReport *report)
{
    Rank rank = {.file = argument, .report = report};
    make_model(rank.file, &rank.model);
    make_input(rank.file, &rank.model, &rank.input);
    TRY(create_modules(&rank, context, device));
    TRY(check_log_probs(&rank, layer_tp_size(context) == 1 ? 1 : 7));
    TRY(check_small_batches(&rank));
    for (int step = 1; step <= config_int(rank.file, "steps"); step++) {
        TRY(step_forward_backward(&rank, step));
        if (step == 1) {
            compare_array(&rank, "rows", rank.input.rows);
            compare_array(&rank, "rows_grad", rank.input.rows_grad);
            compare_params(&rank, &rank.vision->params, "grad/", true);
            compare_params(&rank, &rank.llm->params, "grad/", true);
        }
        TRY(update(&rank, &rank.vision_layers, 0, step));
        TRY(update(&rank, &rank.llm_layers, 1, step));
        char group[16];
        snprintf(group, sizeof group, "step%d/", step);
        compare_params(&rank, &rank.vision->params, group, false);
        compare_params(&rank, &rank.llm->params, group, false);
    }
    destroy_modules(&rank);
    return STATUS_OK;
}

/* Every weight of the file is a parameter of one module: none is forgotten. */
static Status check_names(LayerContext *context, Device *device, void *argument,
                          TestingReport *report)
{
    Rank rank = {.file = argument, .report = report};
    make_model(rank.file, &rank.model);
    make_input(rank.file, &rank.model, &rank.input);
    TRY(create_modules(&rank, context, device)); /* CHECKs that each parameter is in the file */
    int weights = 0;
    for (int i = 0; i < rank.file->num_tensors; i++) {
        weights += strncmp(rank.file->tensors[i].name, "weight/", 7) == 0;
    }
    int params = rank.vision->params.num_params + rank.llm->params.num_params;
    if (weights != params) {
        testing_failed(report, "%d weights in the file, %d parameters", weights, params);
    }
    destroy_modules(&rank);
    return STATUS_OK;
}

static void check_case(const char *name)
{
    GoldenFile file;
    assert_int_equal(golden_open(name, &file), STATUS_OK);
    assert_int_equal(testing_run_ranks(1, check_names, &file), 0);
    for (int tp = 1; tp <= 4; tp++) {
        if (testing_run_ranks(tp, check_rank, &file) > 0) {
            fail_msg("%s with tp %d", name, tp);
        }
    }
    golden_close(&file);
}

static void test_grouped_query(void **state)
{
    (void)state;
    check_case("grouped_query");
}

static void test_class_token(void **state)
{
    (void)state;
    check_case("class_token");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_grouped_query),
        cmocka_unit_test(test_class_token),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
