/* Audio encoder: the encoder of Whisper (Radford et al. 2022), then a projector: log-mel frames of
 * clips in, rows for the decoder out, one for two frames. A clip is as long as it is: nothing is
 * padded to 30 seconds, and clips do not see one another.
 *
 * Parameters carry the names of Hugging Face's Qwen2-Audio: "audio_tower.conv1.weight",
 * "audio_tower.layers.0.self_attn.q_proj.weight", "audio_tower.layer_norm.weight"; the projector's
 * are "audio_projector.linear_1" and ".linear_2". Two differences from Whisper's checkpoints: keys
 * have a bias (which shifts all scores of a query alike, so zeros are what Whisper has), and the
 * sinusoidal positions are computed, not stored.
 *
 * Threading: as train/module.h.
 */
#ifndef ENCODER_WORKER_AUDIO_ENCODER_H
#define ENCODER_WORKER_AUDIO_ENCODER_H

#include "train/module.h"

extern const ModuleOps audio_module_ops;

#endif
