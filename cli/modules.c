#include "cli/modules.h"

#include "encoder_worker/audio_encoder.h"
#include "encoder_worker/vision_encoder.h"
#include "llm_worker/llm.h"

const ModuleOps *const cli_modules[] = {&vision_module_ops, &audio_module_ops, &llm_module_ops};
const int cli_num_modules = sizeof cli_modules / sizeof cli_modules[0];
