/* Trains a job with every rank a thread of this process and prints the loss of each step: the child that
 * bench/curves.py drives.
 *
 * Usage: bench_curves JOB.yaml STEPS
 */
#include "comm/comm_local.h"
#include "encoder_worker/audio_encoder.h"
#include "encoder_worker/vision_encoder.h"
#include "job/job_file.h"
#include "llm_worker/llm.h"
#include "train/trainer.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    RANKS_MAX = 64,
    TIMEOUT_MS = 120 * 1000
};

typedef struct Rank {
    const JobSpec *spec;
    Comm *world;
    bool is_first; /* of the decoder: it prints */
} Rank;

static void print_step(void *context, const TrainerStep *step)
{
    const Rank *rank = context;
    if (rank->is_first) {
        printf("%lld %.9g\n", (long long)step->step, step->loss);
        fflush(stdout);
    }
}

static Status run_trainer(Rank *rank)
{
    static const ModuleOps *const modules[] = {&vision_module_ops, &audio_module_ops,
                                               &llm_module_ops};
    Device *device = NULL;
    Trainer *trainer = NULL;
    TRY(device_open("cpu", 0, &device));
    const TrainerOptions options = {.spec = rank->spec,
                                    .world = rank->world,
                                    .device = device,
                                    .modules = modules,
                                    .num_modules = sizeof modules / sizeof modules[0],
                                    .events = {.context = rank, .step = print_step}};
    Status status = trainer_create(&options, &trainer);
    if (status == STATUS_OK) {
        status = trainer_run(trainer);
    }
    trainer_destroy(trainer);
    device_close(device);
    return status;
}

static void *rank_main(void *context)
{
    Rank *rank = context;
    if (run_trainer(rank) != STATUS_OK) {
        fprintf(stderr, "bench_curves: rank %d: %s\n", rank->world->rank, status_message());
        exit(1);
    }
    comm_destroy(rank->world);
    return NULL;
}

static Status run_job(const JobSpec *spec)
{
    Comm *comms[RANKS_MAX];
    Rank ranks[RANKS_MAX];
    pthread_t threads[RANKS_MAX];
    JobLayout layout = job_layout_make(spec);
    if (layout.num_ranks > RANKS_MAX) {
        return fail(STATUS_INVALID, "%d ranks, at most %d", layout.num_ranks, RANKS_MAX);
    }
    TRY(comm_local_create(layout.num_ranks, TIMEOUT_MS, comms));
    for (int i = 0; i < layout.num_ranks; i++) {
        ranks[i] = (Rank){spec, comms[i], i == layout.modules[layout.num_modules - 1].first_rank};
        CHECK(pthread_create(&threads[i], NULL, rank_main, &ranks[i]) == 0);
    }
    for (int i = 0; i < layout.num_ranks; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    return STATUS_OK;
}

/* Neither evaluates nor saves. */
static Status read_job(const char *path, const char *steps, JobSpec **spec_out)
{
    JobSpec *spec = NULL;
    JobProblem problem;
    char setting[64];
    TRY(job_file_read(path, &spec));
    snprintf(setting, sizeof setting, "training.steps=%s", steps);
    TRY(job_file_set(spec, setting));
    TRY(job_file_set(spec, "checkpoint.directory="));
    TRY(job_spec_resolve(spec));
    if (job_spec_check(spec, &problem, 1) > 0) {
        return fail(STATUS_INVALID, "%s: %s", problem.field, problem.message);
    }
    *spec_out = spec;
    return STATUS_OK;
}

int main(int argc, char **argv)
{
    JobSpec *spec = NULL;
    if (argc != 3) {
        fprintf(stderr, "usage: bench_curves JOB.yaml STEPS\n");
        return 2;
    }
    Status status = read_job(argv[1], argv[2], &spec);
    if (status == STATUS_OK) {
        status = run_job(spec);
        viaduct__v1__job_spec__free_unpacked(spec, NULL);
    }
    if (status != STATUS_OK) {
        fprintf(stderr, "bench_curves: %s\n", status_message());
        return 1;
    }
    return 0;
}
