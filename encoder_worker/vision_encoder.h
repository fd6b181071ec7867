/* Vision encoder: CLIP's vision transformer (Radford et al. 2021) up to the feature layer, then the
 * projector: images in, rows for the decoder out.
 *
 * Parameters carry the names of Hugging Face's LLaVA 1.5. Layers after the feature layer, and the
 * norm after the last, do not exist here.
 *
 * Threading: as train/module.h.
 */
#ifndef ENCODER_WORKER_VISION_ENCODER_H
#define ENCODER_WORKER_VISION_ENCODER_H

#include "train/module.h"

extern const ModuleOps vision_module_ops;

#endif
