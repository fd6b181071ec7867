/* viaduct-llm-worker: a worker of LLM pools. */
#include "llm_worker/llm.h"
#include "train/worker_main.h"

int main(int argc, char **argv)
{
    static const ModuleOps *const modules[] = {&llm_module_ops};
    static const WorkerProgram program = {
        .name = "viaduct-llm-worker",
        .role = "llm",
        .about = "A worker of LLM pools: runs the decoder of a job. It dials the coordinator, "
                 "waits for\n"
                 "jobs, and runs until SIGTERM.",
        .modules = modules,
        .num_modules = 1,
    };
    return worker_main(&program, argc, argv);
}
