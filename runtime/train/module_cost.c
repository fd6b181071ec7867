#include "train/module_cost.h"

#include <string.h>

/* Of a stack of blocks whose attention has `heads_width` columns for queries and `kv_width` for
 * keys. */
static double blocks_cost(double layers, double width, double heads_width, double kv_width,
                          double mlp_weights, bool is_causal, const ModuleCostBatch *batch)
{
    double weights = width * (2.0 * heads_width + 2.0 * kv_width) + mlp_weights;
    double seen = is_causal ? batch->segment / 2.0 : batch->segment;
    return layers * batch->tokens * (2.0 * weights + 4.0 * heads_width * seen);
}

static double projector_cost(const ModelSpec *model, double width, const ProjectorSpec *projector,
                             double rows)
{
    return 2.0 * rows * projector->width * (width + model->llm->width);
}

double module_cost_forward(const ModelSpec *model, const char *module, const ModuleCostBatch *batch)
{
    if (strcmp(module, "vision") == 0) {
        const VisionSpec *vision = model->vision;
        double layers = vision->feature_layer < 0 ? vision->layers + 1 + vision->feature_layer
                                                  : vision->feature_layer;
        double patch = 3.0 * vision->patch_size * vision->patch_size;
        return blocks_cost(layers, vision->width, vision->width, vision->width,
                           2.0 * vision->width * vision->mlp_width, false, batch) +
               2.0 * batch->tokens * patch * vision->width +
               projector_cost(model, vision->width, model->projector, batch->tokens);
    }
    if (strcmp(module, "audio") == 0) {
        const AudioSpec *audio = model->audio;
        double conv = 3.0 * audio->width * (2.0 * audio->mels + audio->width);
        return blocks_cost(audio->layers, audio->width, audio->width, audio->width,
                           2.0 * audio->width * audio->mlp_width, false, batch) +
               2.0 * batch->tokens * conv +
               projector_cost(model, audio->width, model->audio_projector, batch->tokens);
    }
    const DecoderSpec *llm = model->llm;
    return blocks_cost(llm->layers, llm->width, (double)llm->heads * llm->head_width,
                       (double)llm->kv_heads * llm->head_width, 3.0 * llm->width * llm->mlp_width,
                       true, batch) +
           2.0 * batch->tokens * llm->width * llm->vocabulary;
}
