/* viaduct-llm-worker: a worker of LLM pools. */
#include "encoder_worker/audio_encoder.h"
#include "encoder_worker/vision_encoder.h"
#include "llm_worker/llm.h"
#include "train/worker_main.h"

int main(int argc, char **argv)
{
    static const ModuleOps *const modules[] = {&vision_module_ops, &audio_module_ops,
                                               &llm_module_ops};
    static const WorkerProgram program = {
        .name = "viaduct-llm-worker",
        .role = "llm",
        .about =
            "A worker of LLM pools: runs the decoder of a job, and the encoders that share its "
            "pool. It\n"
            "dials the coordinator, waits for jobs, and runs until SIGTERM.",
        .modules = modules,
        .num_modules = sizeof modules / sizeof modules[0],
    };
    return worker_main(&program, argc, argv);
}
