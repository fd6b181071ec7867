/* LLM: Llama's decoder (Touvron et al. 2023): RMS norm, rotary positions, grouped query heads,
 * SwiGLU, vocabulary cut over tp. Rows of the encoders take the places of their placeholder tokens
 * before the first layer.
 *
 * Parameters carry the names of Hugging Face's LLaVA 1.5.
 *
 * Threading: as train/module.h.
 */
#ifndef LLM_WORKER_LLM_H
#define LLM_WORKER_LLM_H

#include "train/module.h"

extern const ModuleOps llm_module_ops;

#endif
