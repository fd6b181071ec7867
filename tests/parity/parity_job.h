/* ParityJob: a tiny job and its run with every rank a thread of this process.
 * Threading: one thread; visits run on the ranks' threads.
 */
#ifndef TESTS_PARITY_PARITY_JOB_H
#define TESTS_PARITY_PARITY_JOB_H

#include "tests/parity/parity_report.h"
#include "train/trainer.h"

enum {
    PARITY_RANKS_MAX = 16,
    PARITY_STEPS_MAX = 12,
    PARITY_TIMEOUT_MS = 60 * 1000
};

typedef struct ParityLayout {
    int encoder_tp;
    int encoder_dp;
    int llm_tp;
    int llm_dp;
} ParityLayout;

/* What varies between jobs; the model is the same. Zeros: defaults. */
typedef struct ParityOptions {
    const char *shard;
    const char *heldout;
    const char *checkpoints; /* directory */
    ParityLayout layout;
    int steps;
    int batch;
    int microbatches;
    int window;
    int captions;
    int checkpoint_every;
    int warmup;
    int seed;
    bool is_adamw;
    double max_grad_norm;
} ParityOptions;

typedef struct ParityRank ParityRank;

typedef struct ParityRun {
    JobSpec *spec;
    JobSpec *encoder_spec; /* NULL: the encoder's ranks have the same */
    ParityLayout layout;
    const ModuleOps *vision; /* NULL: the real ones */
    const ModuleOps *llm;
    const char *resume_from;
    bool is_whole; /* trainer_run instead of trainer_step, step by step */
    /* On each rank's thread after each step; with is_whole once, after the last, `step` NULL. */
    void (*visit)(ParityRank *rank, const TrainerStep *step);
    void *context;
    /* filled by the run, on the first rank of the llm */
    TrainerStep steps[PARITY_STEPS_MAX];
    int num_steps;
    double heldout_loss;
    double heldout_loss_shuffled;
    int num_captions;
    char captions[8][64];
    char checkpoint[512]; /* the first one */
} ParityRun;

struct ParityRank {
    ParityRun *run;
    int rank;
    bool is_encoder;
    Comm *world;
    Trainer *trainer;   /* during the run */
    int64_t bytes_sent; /* to the other pool, counted where the transport takes them */
    Status status;
    char message[512];
    ParityReport report;
};

/* A resolved and checked spec; free with viaduct__v1__job_spec__free_unpacked. */
JobSpec *parity_spec(const ParityOptions *options);

/* Runs all ranks; ranks_out [number of ranks]. */
void parity_run(ParityRun *run, ParityRank *ranks_out);

int parity_ranks(ParityLayout layout);

/* Fails the test, naming rank and message, unless all ranks ended well and without a difference. */
void parity_expect_good(const ParityRun *run, const ParityRank *ranks, const char *what);

#endif
