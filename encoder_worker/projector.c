#include "encoder_worker/projector.h"

Status projector_declare(const LayerContext *context, const ModelSpec *model, Mlp *projector_out)
{
    MlpSpec spec = {.up = "linear_1",
                    .down = "linear_2",
                    .kind = MLP_KIND_GELU,
                    .in = model->vision->width,
                    .inner = model->projector->width,
                    .out = model->llm->width,
                    .bias = true,
                    .down_gain = 1.0f};
    return mlp_declare(context, "multi_modal_projector", &spec, projector_out);
}
