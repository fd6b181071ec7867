/* viaduct-encoder-worker: a worker of encoder pools. */
#include "encoder_worker/audio_encoder.h"
#include "encoder_worker/vision_encoder.h"
#include "train/worker_main.h"

int main(int argc, char **argv)
{
    static const ModuleOps *const modules[] = {&vision_module_ops, &audio_module_ops};
    static const WorkerProgram program = {
        .name = "viaduct-encoder-worker",
        .role = "encoder",
        .about = "A worker of encoder pools: turns images and sound into rows for the language "
                 "model. It dials\n"
                 "the coordinator, waits for jobs, and runs until SIGTERM.",
        .modules = modules,
        .num_modules = sizeof modules / sizeof modules[0],
    };
    return worker_main(&program, argc, argv);
}
