/* viaduct-encoder-worker: a worker of encoder pools. */
#include "encoder_worker/vision_encoder.h"
#include "train/worker_main.h"

int main(int argc, char **argv)
{
    static const ModuleOps *const modules[] = {&vision_module_ops};
    static const WorkerProgram program = {
        .name = "viaduct-encoder-worker",
        .role = "encoder",
        .about = "A worker of encoder pools: turns images into rows for the language model. It "
                 "dials the\n"
                 "coordinator, waits for jobs, and runs until SIGTERM.",
        .modules = modules,
        .num_modules = 1,
    };
    return worker_main(&program, argc, argv);
}
