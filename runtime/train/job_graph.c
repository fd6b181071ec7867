#include "train/job_graph.h"

#include "reshard/reshard.h"
#include "train/module_cost.h"

#include <string.h>

SampleMedia job_graph_media(const char *module)
{
    return strcmp(module, "audio") == 0 ? SAMPLE_MEDIA_AUDIO : SAMPLE_MEDIA_IMAGE;
}

static int larger(int a, int b)
{
    return a > b ? a : b;
}

static int smaller(int a, int b)
{
    return a < b ? a : b;
}

int job_graph_window(const JobSpec *spec, const Place *place)
{
    const PlaceModule *decoder = place_decoder(place);
    int stages = decoder->grid.sizes[GRID_AXIS_PP];
    int full = decoder->chunks > 1 ? 2 * (stages - 1) : stages - 1;
    int window = larger(1, spec->training->encoder_window) + full;
    return smaller(smaller(window, spec->training->microbatches), RESHARD_WINDOW_MAX);
}

/* ---------------------------------------------------------------- costs */

/* The mean sample. */
typedef struct SampleMeans {
    double tokens;
    double items[SAMPLE_MEDIA_COUNT];
    double rows[SAMPLE_MEDIA_COUNT];
} SampleMeans;

static SampleMeans mean_of(const StepSource *source)
{
    SampleMeans means = {0};
    double weight = 1.0 / (double)source->num_samples;
    for (int64_t i = 0; i < source->num_samples; i++) {
        const StepSample *sample = &source->samples[i];
        means.tokens += weight * sample->num_tokens;
        for (int32_t j = 0; j < sample->num_items; j++) {
            means.items[sample->items[j].media] += weight;
            means.rows[sample->items[j].media] += weight * sample->items[j].rows;
        }
    }
    return means;
}

/* Of one part of the module on one rank. */
static double part_cost(const JobSpec *spec, const PlaceModule *module, bool is_decoder,
                        const StepSource *source, const SampleMeans *means)
{
    double samples =
        (double)source->batch / source->microbatches / module->grid.sizes[GRID_AXIS_DP];
    ModuleCostBatch batch = {.tokens = samples * means->tokens, .segment = means->tokens};
    if (!is_decoder) {
        SampleMedia media = job_graph_media(module->name);
        batch.tokens = samples * means->rows[media];
        batch.segment = means->items[media] > 0.0 ? means->rows[media] / means->items[media] : 0.0;
    }
    double parts = (double)module->grid.sizes[GRID_AXIS_PP] * module->chunks;
    double ranks = (double)module->grid.sizes[GRID_AXIS_TP] * module->grid.sizes[GRID_AXIS_CP];
    return 1.0 + module_cost_forward(spec->model, module->name, &batch) / (parts * ranks);
}

/* Backward multiplies by the weights and by the inputs; what is computed again comes on top. */
static double backward_share(const ModuleSpec *spec, bool is_trained)
{
    double share = is_trained ? 2.0 : 1.0;
    return share + (spec->recompute == VIADUCT__V1__MODULE_SPEC__RECOMPUTE__FULL ? 1.0 : 0.0);
}

/* ---------------------------------------------------------------- graph */

Status job_graph_make(const JobSpec *spec, const Place *place, const StepSource *source,
                      const int *first_trained, ScheduleGraph *graph_out)
{
    ScheduleGraph graph = {.num_modules = place->num_modules};
    SampleMeans means = mean_of(source);
    int decoder = place->num_modules - 1;
    bool wants_rows_grad = false;
    bool is_any_trained = false;
    for (int i = 0; i < place->num_modules; i++) {
        const PlaceModule *module = &place->modules[i];
        int parts = module->grid.sizes[GRID_AXIS_PP] * module->chunks;
        bool is_trained = first_trained[i] < parts;
        double cost = part_cost(spec, module, i == decoder, source, &means);
        graph.modules[i] =
            (ScheduleModule){.grid = module->grid,
                             .chunks = module->chunks,
                             .feeds = i == decoder ? -1 : decoder,
                             .is_trained = is_trained,
                             .backward_begin = first_trained[i],
                             .forward_cost = cost,
                             .backward_cost = cost * backward_share(module->spec, is_trained)};
        is_any_trained = is_any_trained || is_trained;
        wants_rows_grad = wants_rows_grad || (is_trained && i != decoder);
    }
    if (!is_any_trained) {
        return fail(STATUS_INVALID, "training.frozen: its patterns freeze every parameter of the "
                                    "model, expected at least one that is trained");
    }
    if (wants_rows_grad) {
        graph.modules[decoder].backward_begin = 0;
    }
    *graph_out = graph;
    return STATUS_OK;
}
