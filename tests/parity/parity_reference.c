#include "tests/parity/parity_reference.h"

#include "base/hash.h"
#include "base/memory.h"
#include "base/rng.h"
#include "data/audio.h"
#include "nn/testing.h"
#include "train/feed.h"

#include <string.h>

/* Test code ends the process where nothing but a bug can fail. */
#define MUST(call) CHECK((call) == STATUS_OK)

static const double loss_relative = 1e-5;
static const double tensor_relative = 5e-5;
static const double anywhere_relative = 5e-7;

enum {
    ITEMS_MAX = 160,
    TOKENS_MAX = 6000,
    SEGMENTS_MAX = 64,
    ROWS_MAX = 3000
};

/* ---- the whole batch as one input ---- */

/* One encoder's items. */
typedef struct WholeItems {
    ModuleBatch batch;
    int32_t frame_begins[ITEMS_MAX + 1];
    uint8_t *data; /* pixels or frames, one item after another */
    int64_t data_bytes;
    int64_t num_rows;
} WholeItems;

typedef struct Whole {
    ModuleBatch batch;
    Sequences sequences;
    int64_t num_tokens;
    int32_t num_segments;
    int32_t segment_begins[SEGMENTS_MAX + 1];
    int32_t ids[TOKENS_MAX];
    int32_t labels[TOKENS_MAX];
    int32_t row_tokens[ROWS_MAX]; /* of the first encoder, then of the next */
    float *rows;
    float *rows_grad;
    int64_t num_labels;
    WholeItems items[PARITY_MODULES_MAX];
} Whole;

static int decoder_of(const ParityReference *reference)
{
    return reference->num_modules - 1;
}

static SampleMedia media_of(const ParityReference *reference, int encoder)
{
    bool is_vision = strcmp(reference->modules[encoder]->ops->name, "vision") == 0;
    return is_vision ? SAMPLE_MEDIA_IMAGE : SAMPLE_MEDIA_AUDIO;
}

/* Item number `index` of `media` of a sample; wraps around. NULL where it has none. */
static const SampleItem *find_item(const SampleInfo *info, SampleMedia media, int index)
{
    int num = 0;
    for (int i = 0; i < info->num_items; i++) {
        num += info->items[i].media == media;
    }
    for (int i = 0; i < info->num_items; i++) {
        if (info->items[i].media == media && info->items[i].index == index % num) {
            return &info->items[i];
        }
    }
    return NULL;
}

static void add_item(WholeItems *items, const Dataset *dataset, int64_t from,
                     const SampleItem *item)
{
    ModuleBatch *batch = &items->batch;
    CHECK(batch->num_items < ITEMS_MAX);
    int64_t size = dataset_image_size(dataset);
    uint8_t *data = items->data + items->data_bytes;
    if (item->media == SAMPLE_MEDIA_IMAGE) {
        MUST(dataset_read_image(dataset, from, item->index, data));
        items->data_bytes += size * size * 3;
    } else {
        int64_t frames = audio_frames(item->rows);
        MUST(dataset_read_audio(dataset, from, item->index, item->rows, (float *)(void *)data));
        items->data_bytes += frames * dataset_mels(dataset) * (int64_t)sizeof(float);
        items->frame_begins[batch->num_items + 1] =
            items->frame_begins[batch->num_items] + (int32_t)frames;
    }
    batch->num_items++;
    items->num_rows += item->rows;
}

static void add_sample(const ParityReference *reference, Whole *whole, const Dataset *dataset,
                       int64_t sample, int64_t items_from, bool is_masked)
{
    const SampleInfo *info = dataset_sample(dataset, sample);
    const SampleInfo *from = dataset_sample(dataset, items_from);
    int64_t begin = whole->num_tokens;
    CHECK(begin + info->num_tokens <= TOKENS_MAX && whole->num_segments < SEGMENTS_MAX);
    MUST(dataset_read_tokens(dataset, sample, whole->ids + begin, whole->labels + begin));
    for (int32_t t = 0; t < info->num_tokens; t++) {
        whole->num_labels += whole->labels[begin + t] >= 0;
        whole->labels[begin + t] = is_masked ? -1 : whole->labels[begin + t];
    }
    whole->num_tokens += info->num_tokens;
    whole->segment_begins[++whole->num_segments] = (int32_t)whole->num_tokens;
    for (int i = 0; i < info->num_items; i++) {
        const SampleItem *item = &info->items[i];
        for (int e = 0; e < decoder_of(reference); e++) {
            if (item->media != media_of(reference, e)) {
                continue;
            }
            const SampleItem *shown = find_item(from, item->media, item->index);
            SampleItem taken = shown ? *shown : *item;
            taken.rows = item->rows;
            add_item(&whole->items[e], dataset, shown ? items_from : sample, &taken);
        }
    }
}

/* Where rows go: all placeholders of the first encoder, then of the next. */
static void find_rows(const ParityReference *reference, Whole *whole)
{
    for (int e = 0; e < decoder_of(reference); e++) {
        int32_t placeholder =
            media_of(reference, e) == SAMPLE_MEDIA_IMAGE ? TOKEN_IMAGE : TOKEN_AUDIO;
        int64_t before = whole->batch.num_rows;
        for (int64_t t = 0; t < whole->num_tokens; t++) {
            if (whole->ids[t] == placeholder) {
                CHECK(whole->batch.num_rows < ROWS_MAX);
                whole->row_tokens[whole->batch.num_rows++] = (int32_t)t;
            }
        }
        CHECK(whole->batch.num_rows - before == whole->items[e].num_rows);
    }
}

static Whole *whole_make(ParityReference *reference, const Dataset *dataset, const int64_t *samples,
                         const int64_t *items_from, int num)
{
    Whole *whole = NULL;
    int64_t width = reference->spec->model->llm->width;
    MUST(MEMORY_NEW(&whole, 1));
    MUST(MEMORY_NEW(&whole->rows, ROWS_MAX * width));
    MUST(MEMORY_NEW(&whole->rows_grad, ROWS_MAX * width));
    for (int e = 0; e < decoder_of(reference); e++) {
        WholeItems *items = &whole->items[e];
        MUST(MEMORY_NEW(&items->data, 4 << 20));
        items->batch.pixels = items->data;
        items->batch.frames = (const float *)(const void *)items->data;
        items->batch.frame_begins = items->frame_begins;
    }
    for (int i = 0; i < num; i++) {
        add_sample(reference, whole, dataset, samples[i], items_from[i],
                   i >= reference->masked.begin && i < reference->masked.end);
    }
    find_rows(reference, whole);
    MUST(sequences_make(reference->sequences, whole->segment_begins, whole->num_segments,
                        reference->stream, &whole->sequences));
    ModuleBatch *batch = &whole->batch;
    batch->sequences = &whole->sequences;
    batch->ids = whole->ids;
    batch->labels = whole->labels;
    batch->row_tokens = whole->row_tokens;
    batch->rows = whole->rows;
    batch->loss_scale = whole->num_labels > 0 ? 1.0f / (float)whole->num_labels : 0.0f;
    return whole;
}

static void whole_free(Whole *whole)
{
    for (int e = 0; e < PARITY_MODULES_MAX; e++) {
        memory_free(whole->items[e].data);
    }
    memory_free(whole->rows);
    memory_free(whole->rows_grad);
    memory_free(whole);
}

static double forward(ParityReference *reference, Whole *whole)
{
    double loss_sum = 0;
    float *rows = whole->rows;
    for (int e = 0; e < decoder_of(reference); e++) {
        Module *encoder = reference->modules[e];
        MUST(encoder->ops->forward(encoder, 0, 0, &whole->items[e].batch, rows, NULL));
        rows += whole->items[e].num_rows * reference->spec->model->llm->width;
    }
    Module *llm = reference->modules[decoder_of(reference)];
    MUST(llm->ops->forward(llm, 0, 0, &whole->batch, NULL, &loss_sum));
    return whole->num_labels > 0 ? loss_sum / (double)whole->num_labels : 0.0;
}

static void backward(ParityReference *reference, Whole *whole)
{
    float *rows_grad = whole->rows_grad;
    Module *llm = reference->modules[decoder_of(reference)];
    float *grad = NULL; /* [n, D] of the widest module */
    MUST(MEMORY_NEW(&grad, TOKENS_MAX * 64));
    MUST(llm->ops->backward(llm, 0, 0, &whole->batch, grad, rows_grad));
    for (int e = 0; e < decoder_of(reference); e++) {
        Module *encoder = reference->modules[e];
        if (encoder->params.trained_count > 0) {
            MUST(encoder->ops->backward(encoder, 0, 0, &whole->items[e].batch, grad, rows_grad));
        }
        rows_grad += whole->items[e].num_rows * reference->spec->model->llm->width;
    }
    memory_free(grad);
}

double parity_reference_loss(ParityReference *reference, const Dataset *dataset,
                             const int64_t *samples, const int64_t *items_from, int num)
{
    Whole *whole = whole_make(reference, dataset, samples, items_from, num);
    double loss = forward(reference, whole);
    whole_free(whole);
    return loss;
}

/* ---- training ---- */

int64_t parity_reference_sample(const JobSpec *spec, int64_t count, int64_t position)
{
    Rng rng = {spec->training->seed,
               hash_u64(hash_text("sample order"), (uint64_t)(position / count))};
    return rng_permute(rng, position % count, count);
}

static const ModuleOps *ops_of(const char *name)
{
    for (int i = 0; i < parity_num_modules; i++) {
        if (strcmp(parity_modules[i]->name, name) == 0) {
            return parity_modules[i];
        }
    }
    CHECK(!"every module is known");
    return NULL;
}

static void open_modules(ParityReference *reference)
{
    const JobSpec *spec = reference->spec;
    MUST(device_open("cpu", 0, &reference->device));
    MUST(stream_create(reference->device, &reference->stream));
    MUST(feed_open_dataset(spec, spec->data->train, spec->data->n_train, &reference->dataset));
    MUST(sequences_buffer_create(reference->device, (ShardRank){1, 0, 1, 0}, TOKENS_MAX,
                                 SEGMENTS_MAX, true, &reference->sequences));
    const ModuleContext context = {.device = reference->device,
                                   .kernels = kernels_for(reference->device),
                                   .stream = reference->stream,
                                   .frozen = spec->training->frozen,
                                   .num_frozen = spec->training->n_frozen};
    const ModuleLimits limits = {.slots = {1},
                                 .items = ITEMS_MAX,
                                 .frames = TOKENS_MAX,
                                 .keys = TOKENS_MAX,
                                 .segments = SEGMENTS_MAX,
                                 .rows = ROWS_MAX};
    JobLayout layout = job_layout_make(spec);
    reference->num_modules = layout.num_modules;
    CHECK(layout.num_modules <= PARITY_MODULES_MAX);
    for (int k = 0; k < layout.num_modules; k++) {
        const ModuleOps *ops = ops_of(layout.modules[k].spec->name);
        MUST(ops->create(spec->model, &context, &limits, &reference->modules[k]));
        MUST(param_set_fill(&reference->modules[k]->params, spec->training->seed,
                            reference->stream));
    }
}

static float *snapshot(const float *values, int64_t count)
{
    float *copy = NULL;
    MUST(MEMORY_NEW(&copy, count));
    if (count > 0) {
        memcpy(copy, values, (size_t)count * sizeof *copy);
    }
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
    for (int k = 0; k < reference->num_modules; k++) {
        const ParamSet *params = &reference->modules[k]->params;
        for (int p = 0; p < params->num_params; p++) {
            const Param *param = &params->params[p];
            if (!param->is_trained) {
                continue;
            }
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
    CHECK(batch <= 64);
    for (int i = 0; i < batch; i++) {
        samples[i] = parity_reference_sample(spec, dataset_count(reference->dataset),
                                             (int64_t)(number - 1) * batch + i);
    }
    Whole *whole = whole_make(reference, reference->dataset, samples, samples, batch);
    ParityReferenceStep *step = &reference->steps[number - 1];
    step->labels = whole->num_labels;
    step->tokens = whole->num_tokens;
    for (int e = 0; e < decoder_of(reference); e++) {
        step->rows_of[e] = whole->items[e].num_rows;
    }
    for (int k = 0; k < reference->num_modules; k++) {
        const ParamSet *params = &reference->modules[k]->params;
        if (params->trained_count > 0) {
            memset(params->grads, 0, (size_t)params->trained_count * sizeof *params->grads);
        }
    }
    step->loss = forward(reference, whole);
    backward(reference, whole);
    whole_free(whole);
    double square = 0;
    for (int k = 0; k < reference->num_modules; k++) {
        const ParamSet *params = &reference->modules[k]->params;
        step->grads[k] = snapshot(params->grads, params->trained_count);
        for (int64_t i = 0; i < params->trained_count; i++) {
            square += (double)params->grads[i] * (double)params->grads[i];
        }
    }
    step->grad_norm = sqrt(square);
    update(reference, number, step->grad_norm);
    for (int k = 0; k < reference->num_modules; k++) {
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
        for (int k = 0; k < reference->num_modules; k++) {
            memory_free(reference->steps[s].grads[k]);
            memory_free(reference->steps[s].weights[k]);
        }
    }
    for (int k = 0; k < reference->num_modules; k++) {
        reference->modules[k]->ops->destroy(reference->modules[k]);
    }
    sequences_buffer_destroy(reference->sequences);
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

/* What is compared of one parameter, and how. */
typedef struct Comparison {
    const char *what;
    const float *local; /* of the rank's part */
    Range valid;        /* elements of the part */
    const float *whole; /* of the uncut parameter */
    double anywhere;    /* the largest of all parameters */
} Comparison;

/* Returns the worst ratio. */
static double compare_param(ParityRank *rank, const Param *param, const Comparison *comparison)
{
    Tensor global = {.num_dims = param->spec.num_dims};
    memcpy(global.dims, param->spec.dims, sizeof global.dims);
    double allowed = tensor_relative * largest(comparison->whole, tensor_count(&global)) +
                     anywhere_relative * comparison->anywhere;
    double worst = 0;
    for (int64_t i = comparison->valid.begin; i < comparison->valid.end; i++) {
        double expected = (double)comparison->whole[testing_global_index(param, i)];
        double found = (double)comparison->local[i];
        double ratio = fabs(found - expected) / allowed;
        if (!(ratio <= 1)) {
            parity_report_fail(
                &rank->report, "%s of %s [%lld]: %.9g, expected %.9g (%.3g times allowed)",
                comparison->what, param->spec.name, (long long)i, found, expected, ratio);
        }
        worst = ratio <= worst ? worst : ratio;
    }
    return worst;
}

static int find_param(const ParamSet *params, const char *name)
{
    for (int p = 0; p < params->num_params; p++) {
        if (strcmp(params->params[p].spec.name, name) == 0) {
            return p;
        }
    }
    CHECK(!"the uncut module has every parameter");
    return -1;
}

/* Elements of a parameter's part whose gradient is whole on this rank: with ZeRO-1 those in its
 * range. */
static Range valid_grads(ParityRank *rank, int module, const Param *param)
{
    Range range = trainer_summed_grads(rank->trainer, module);
    int64_t count = tensor_count(&param->value);
    int64_t begin = range.begin - param->offset;
    int64_t end = range.end - param->offset;
    begin = begin < 0 ? 0 : begin > count ? count : begin;
    end = end < begin ? begin : end > count ? count : end;
    return (Range){begin, end};
}

static double largest_grad(const ParityReference *reference, const ParityReferenceStep *truth)
{
    double worst = 0;
    for (int k = 0; k < reference->num_modules; k++) {
        double value = largest(truth->grads[k], reference->modules[k]->params.trained_count);
        worst = value > worst ? value : worst;
    }
    return worst;
}

static void compare_module(const ParityReference *reference, ParityRank *rank, int module,
                           const ParityReferenceStep *truth)
{
    ParityReport *report = &rank->report;
    const ParamSet *params = &trainer_module(rank->trainer, module)->params;
    const ParamSet *whole = &reference->modules[module]->params;
    for (int p = 0; p < params->num_params; p++) {
        const Param *param = &params->params[p];
        const Param *twin = &whole->params[find_param(whole, param->spec.name)];
        CHECK(param->is_trained == twin->is_trained);
        if (param->is_trained) {
            const Comparison grads = {
                "gradient", tensor_f32(&param->grad), valid_grads(rank, module, param),
                truth->grads[module] + twin->offset, largest_grad(reference, truth)};
            double grad = compare_param(rank, param, &grads);
            report->worst_grad = grad > report->worst_grad ? grad : report->worst_grad;
        }
        const Comparison weights = {"weight",
                                    tensor_f32(&param->value),
                                    {0, tensor_count(&param->value)},
                                    truth->weights[module] + twin->offset,
                                    1};
        double weight = compare_param(rank, param, &weights);
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

static bool is_colocated(const ParityRank *rank)
{
    return rank->layout.num_pools < rank->layout.num_modules;
}

static int64_t crossing_bytes(const ParityReference *reference, const ParityReferenceStep *truth)
{
    int64_t rows = 0;
    for (int e = 0; e < decoder_of(reference); e++) {
        int ways = reference->modules[e]->params.trained_count > 0 ? 2 : 1;
        rows += ways * truth->rows_of[e];
    }
    return rows * reference->spec->model->llm->width * (int64_t)sizeof(float);
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
    compare_count(rank, "boundary bytes over the least", step->boundary_bytes,
                  step->boundary_bytes_min);
    if (!is_colocated(rank)) { /* each row crosses once there, its gradient once back */
        compare_count(rank, "boundary bytes", step->boundary_bytes,
                      crossing_bytes(reference, truth));
    }
    for (int k = 0; k < reference->num_modules; k++) {
        if (parity_serves(rank, k)) {
            compare_module(reference, rank, k, truth);
        }
    }
}
