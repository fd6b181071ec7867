#include "tests/parity/parity_reference.h"

#include "base/hash.h"
#include "base/memory.h"
#include "base/rng.h"
#include "encoder_worker/vision_encoder.h"
#include "llm_worker/llm.h"
#include "nn/testing.h"

#include <string.h>

/* Test code ends the process where nothing but a bug can fail. */
#define MUST(call) CHECK((call) == STATUS_OK)

static const double loss_relative = 1e-5;
static const double tensor_relative = 5e-5;
static const double anywhere_relative = 5e-7;

/* ---- the whole batch as one input ---- */

typedef struct Whole {
    ModuleBatch batch;
    int32_t *segment_begins;
    int32_t *ids;
    int32_t *positions;
    int32_t *labels;
    int32_t *row_tokens;
    uint8_t *pixels;
    float *rows;
    float *rows_grad;
    int64_t num_labels;
} Whole;

static void allocate(Whole *whole, const Dataset *dataset, const int64_t *samples, int num,
                     const ModelSpec *model)
{
    int64_t tokens = 0;
    int64_t images = 0;
    for (int i = 0; i < num; i++) {
        tokens += dataset_sample(dataset, samples[i])->num_tokens;
        images += dataset_sample(dataset, samples[i])->num_images;
    }
    int64_t rows = images * module_rows_per_image(model);
    int64_t size = model->vision->image_size;
    *whole = (Whole){0};
    MUST(MEMORY_NEW(&whole->segment_begins, num + 1));
    MUST(MEMORY_NEW(&whole->ids, tokens));
    MUST(MEMORY_NEW(&whole->positions, tokens));
    MUST(MEMORY_NEW(&whole->labels, tokens));
    MUST(MEMORY_NEW(&whole->row_tokens, rows + 1));
    MUST(MEMORY_NEW(&whole->pixels, images * size * size * 3 + 1));
    MUST(MEMORY_NEW(&whole->rows, rows * model->llm->width + 1));
    MUST(MEMORY_NEW(&whole->rows_grad, rows * model->llm->width + 1));
}

static void whole_free(Whole *whole)
{
    memory_free(whole->segment_begins);
    memory_free(whole->ids);
    memory_free(whole->positions);
    memory_free(whole->labels);
    memory_free(whole->row_tokens);
    memory_free(whole->pixels);
    memory_free(whole->rows);
    memory_free(whole->rows_grad);
}

static void add_sample(Whole *whole, const Dataset *dataset, int64_t sample, int64_t images_from,
                       bool is_masked)
{
    ModuleBatch *batch = &whole->batch;
    const SampleInfo *info = dataset_sample(dataset, sample);
    int64_t size = dataset_image_size(dataset);
    int64_t begin = batch->num_tokens;
    MUST(dataset_read_tokens(dataset, sample, whole->ids + begin, whole->labels + begin));
    for (int32_t t = 0; t < info->num_tokens; t++) {
        whole->positions[begin + t] = t;
        whole->num_labels += whole->labels[begin + t] >= 0;
        whole->labels[begin + t] = is_masked ? -1 : whole->labels[begin + t];
        if (whole->ids[begin + t] == TOKEN_IMAGE) {
            whole->row_tokens[batch->num_rows++] = (int32_t)begin + t;
        }
    }
    batch->num_tokens += info->num_tokens;
    whole->segment_begins[++batch->num_segments] = (int32_t)batch->num_tokens;
    for (int i = 0; i < info->num_images; i++) {
        MUST(dataset_read_image(dataset, images_from,
                                i % dataset_sample(dataset, images_from)->num_images,
                                whole->pixels + batch->num_images++ * size * size * 3));
    }
}

static void whole_make(Whole *whole, const ParityReference *reference, const Dataset *dataset,
                       const int64_t *samples, const int64_t *images_from, int num)
{
    allocate(whole, dataset, samples, num, reference->spec->model);
    for (int i = 0; i < num; i++) {
        add_sample(whole, dataset, samples[i], images_from[i],
                   i >= reference->masked.begin && i < reference->masked.end);
    }
    ModuleBatch *batch = &whole->batch;
    CHECK(batch->num_rows == batch->num_images * module_rows_per_image(reference->spec->model));
    batch->pixels = whole->pixels;
    batch->segment_begins = whole->segment_begins;
    batch->ids = whole->ids;
    batch->positions = whole->positions;
    batch->labels = whole->labels;
    batch->row_tokens = whole->row_tokens;
    batch->rows = whole->rows;
    batch->loss_scale = whole->num_labels > 0 ? 1.0f / (float)whole->num_labels : 0.0f;
}

static double forward(ParityReference *reference, Whole *whole)
{
    double loss_sum = 0;
    Module *vision = reference->modules[0];
    Module *llm = reference->modules[1];
    MUST(vision->ops->forward(vision, 0, &whole->batch, whole->rows, NULL));
    MUST(llm->ops->forward(llm, 0, &whole->batch, NULL, &loss_sum));
    return whole->num_labels > 0 ? loss_sum / (double)whole->num_labels : 0.0;
}

double parity_reference_loss(ParityReference *reference, const Dataset *dataset,
                             const int64_t *samples, const int64_t *images_from, int num)
{
    Whole whole;
    whole_make(&whole, reference, dataset, samples, images_from, num);
    double loss = forward(reference, &whole);
    whole_free(&whole);
    return loss;
}

/* ---- training ---- */

int64_t parity_reference_sample(const JobSpec *spec, int64_t count, int64_t position)
{
    Rng rng = {spec->training->seed,
               hash_u64(hash_text("sample order"), (uint64_t)(position / count))};
    return rng_permute(rng, position % count, count);
}

static void open_modules(ParityReference *reference)
{
    const JobSpec *spec = reference->spec;
    const DatasetOptions options = {.patterns = spec->data->train,
                                    .num_patterns = (int)spec->data->n_train,
                                    .prompt = spec->data->prompt,
                                    .rows_per_image = module_rows_per_image(spec->model),
                                    .image_size = spec->model->vision->image_size,
                                    .max_tokens = spec->model->llm->max_tokens};
    MUST(device_open("cpu", 0, &reference->device));
    MUST(stream_create(reference->device, &reference->stream));
    MUST(dataset_open(&options, &reference->dataset));
    const ModuleContext context = {reference->device, kernels_for(reference->device),
                                   reference->stream, NULL};
    const ModuleLimits limits = {
        .slots = 1, .images = 128, .tokens = 2048, .segments = 64, .rows = 512};
    const ModuleOps *ops[2] = {&vision_module_ops, &llm_module_ops};
    for (int k = 0; k < 2; k++) {
        MUST(ops[k]->create(spec->model, &context, &limits, &reference->modules[k]));
        MUST(param_set_fill(&reference->modules[k]->params, spec->training->seed,
                            reference->stream));
    }
}

static float *snapshot(const float *values, int64_t count)
{
    float *copy = NULL;
    MUST(MEMORY_NEW(&copy, count));
    memcpy(copy, values, (size_t)count * sizeof *copy);
    return copy;
}

/* w -= learning rate * (clipped gradient + decay * w) */
static void update(const ParityReference *reference, int64_t number, double grad_norm)
{
    const OptimizerSpec *optimizer = reference->spec->optimizer;
    double warm =
        optimizer->warmup_steps > 0 ? (double)number / (double)optimizer->warmup_steps : 1;
    double learning_rate = optimizer->learning_rate * (warm < 1 ? warm : 1);
    double limit = optimizer->max_grad_norm;
    double scale = limit > 0 && grad_norm > limit ? limit / grad_norm : 1;
    for (int k = 0; k < 2; k++) {
        const ParamSet *params = &reference->modules[k]->params;
        for (int p = 0; p < params->num_params; p++) {
            const Param *param = &params->params[p];
            double decay = param->spec.decay ? optimizer->weight_decay : 0;
            for (int64_t i = 0; i < tensor_count(&param->value); i++) {
                float *w = tensor_f32(&param->value) + i;
                double grad = scale * (double)tensor_f32(&param->grad)[i];
                *w = (float)((double)*w - learning_rate * (grad + decay * (double)*w));
            }
        }
    }
}

static void run_step(ParityReference *reference, int number)
{
    const JobSpec *spec = reference->spec;
    int batch = spec->training->global_batch;
    int64_t samples[64];
    Whole whole;
    CHECK(batch <= 64);
    for (int i = 0; i < batch; i++) {
        samples[i] = parity_reference_sample(spec, dataset_count(reference->dataset),
                                             (int64_t)(number - 1) * batch + i);
    }
    whole_make(&whole, reference, reference->dataset, samples, samples, batch);
    ParityReferenceStep *step = &reference->steps[number - 1];
    step->labels = whole.num_labels;
    step->tokens = whole.batch.num_tokens;
    step->rows = whole.batch.num_rows;
    for (int k = 0; k < 2; k++) {
        const ParamSet *params = &reference->modules[k]->params;
        memset(params->grads, 0, (size_t)params->count * sizeof *params->grads);
    }
    step->loss = forward(reference, &whole);
    MUST(reference->modules[1]->ops->backward(reference->modules[1], 0, &whole.batch,
                                              whole.rows_grad));
    MUST(reference->modules[0]->ops->backward(reference->modules[0], 0, &whole.batch,
                                              whole.rows_grad));
    whole_free(&whole);
    double square = 0;
    for (int k = 0; k < 2; k++) {
        const ParamSet *params = &reference->modules[k]->params;
        step->grads[k] = snapshot(params->grads, params->count);
        for (int64_t i = 0; i < params->count; i++) {
            square += (double)params->grads[i] * (double)params->grads[i];
        }
    }
    step->grad_norm = sqrt(square);
    update(reference, number, step->grad_norm);
    for (int k = 0; k < 2; k++) {
        const ParamSet *params = &reference->modules[k]->params;
        step->weights[k] = snapshot(params->values, params->count);
    }
}

void parity_reference_make(ParityReference *reference, const JobSpec *spec, Range masked)
{
    *reference =
        (ParityReference){.spec = spec, .masked = masked, .num_steps = (int)spec->training->steps};
    CHECK(reference->num_steps <= PARITY_STEPS_MAX);
    open_modules(reference);
    for (int number = 1; number <= reference->num_steps; number++) {
        run_step(reference, number);
    }
}

void parity_reference_free(ParityReference *reference)
{
    for (int s = 0; s < reference->num_steps; s++) {
        for (int k = 0; k < 2; k++) {
            memory_free(reference->steps[s].grads[k]);
            memory_free(reference->steps[s].weights[k]);
        }
    }
    for (int k = 0; k < 2; k++) {
        reference->modules[k]->ops->destroy(reference->modules[k]);
    }
    dataset_close(reference->dataset);
    stream_destroy(reference->stream);
    device_close(reference->device);
}

/* ---- comparing ---- */

static double largest(const float *values, int64_t count)
{
    double value = 0;
    for (int64_t i = 0; i < count; i++) {
        value = fabs((double)values[i]) > value ? fabs((double)values[i]) : value;
    }
    return value;
}

/* A rank's part of one parameter against the whole one; returns the worst ratio. */
static double compare_param(ParityRank *rank, const Param *param, const float *local,
                            const float *whole, double anywhere, const char *what)
{
    double allowed =
        tensor_relative *
            largest(whole,
                    tensor_count(&(Tensor){.num_dims = param->spec.num_dims,
                                           .dims = {param->spec.dims[0], param->spec.dims[1],
                                                    param->spec.dims[2], param->spec.dims[3]}})) +
        anywhere_relative * anywhere;
    double worst = 0;
    for (int64_t i = 0; i < tensor_count(&param->value); i++) {
        double expected = (double)whole[testing_global_index(param, i)];
        double ratio = fabs((double)local[i] - expected) / allowed;
        if (!(ratio <= 1)) {
            parity_report_fail(&rank->report,
                               "%s of %s [%lld]: %.9g, expected %.9g (%.3g times allowed)", what,
                               param->spec.name, (long long)i, (double)local[i], expected, ratio);
        }
        worst = ratio <= worst ? worst : ratio;
    }
    return worst;
}

static void compare_tensors(const ParityReference *reference, ParityRank *rank,
                            const ParityReferenceStep *truth)
{
    int k = rank->is_encoder ? 0 : 1;
    const ParamSet *params = &trainer_module(rank->trainer)->params;
    const ParamSet *whole = &reference->modules[k]->params;
    CHECK(params->num_params == whole->num_params);
    double grads_largest = 0;
    for (int i = 0; i < 2; i++) {
        double value = largest(truth->grads[i], reference->modules[i]->params.count);
        grads_largest = value > grads_largest ? value : grads_largest;
    }
    ParityReport *report = &rank->report;
    for (int p = 0; p < params->num_params; p++) {
        const Param *param = &params->params[p];
        int64_t offset = whole->params[p].offset;
        CHECK(strcmp(param->spec.name, whole->params[p].spec.name) == 0);
        double grad = compare_param(rank, param, tensor_f32(&param->grad), truth->grads[k] + offset,
                                    grads_largest, "gradient");
        double weight = compare_param(rank, param, tensor_f32(&param->value),
                                      truth->weights[k] + offset, 1, "weight");
        report->worst_grad = grad > report->worst_grad ? grad : report->worst_grad;
        report->worst_weight = weight > report->worst_weight ? weight : report->worst_weight;
    }
}

static void compare_count(ParityRank *rank, const char *what, int64_t found, int64_t expected)
{
    if (found != expected) {
        parity_report_fail(&rank->report, "%s: %lld, expected %lld", what, (long long)found,
                           (long long)expected);
    }
}

static void compare_value(ParityRank *rank, const char *what, double found, double expected)
{
    double ratio = fabs(found - expected) / (loss_relative * fabs(expected) + 1e-12);
    if (!(ratio <= 1)) {
        parity_report_fail(&rank->report, "%s: %.9g, expected %.9g (%.3g times allowed)", what,
                           found, expected, ratio);
    }
    rank->report.worst_loss = ratio <= rank->report.worst_loss ? rank->report.worst_loss : ratio;
}

void parity_compare(const ParityReference *reference, ParityRank *rank, const TrainerStep *step)
{
    const ParityReferenceStep *truth = &reference->steps[step->step - 1];
    compare_value(rank, "loss", step->loss, truth->loss);
    compare_value(rank, "gradient norm", step->grad_norm, truth->grad_norm);
    compare_count(rank, "committed", step->committed, 1);
    compare_count(rank, "labels", step->labels, truth->labels);
    compare_count(rank, "tokens", step->tokens, truth->tokens);
    compare_count(rank, "samples", step->samples, reference->spec->training->global_batch);
    /* Each row crosses once there, its gradient once back. */
    int64_t bytes = 2 * truth->rows * reference->spec->model->llm->width * (int64_t)sizeof(float);
    compare_count(rank, "boundary bytes", step->boundary_bytes, bytes);
    compare_count(rank, "least boundary bytes", step->boundary_bytes_min, bytes);
    compare_tensors(reference, rank, truth);
}
