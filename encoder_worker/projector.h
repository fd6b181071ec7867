/* Projector: from the encoder's width to the decoder's: linear, GELU, linear, as LLaVA 1.5 (Liu et
 * al. 2023). Threading: the step thread.
 */
#ifndef ENCODER_WORKER_PROJECTOR_H
#define ENCODER_WORKER_PROJECTOR_H

#include "job/job_spec.h"
#include "nn/mlp.h"

/* Adds "multi_modal_projector.linear_1" and ".linear_2"; run it with mlp_forward and mlp_backward.
 */
Status projector_declare(const LayerContext *context, const ModelSpec *model,
                         Mlp *projector_out) STATUS_CHECKED;

#endif
