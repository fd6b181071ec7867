/* ParityJob: a tiny job and its run with every rank a thread of this process.
 * Threading: one thread; visits run on the ranks' threads.
 */
#ifndef TESTS_PARITY_PARITY_JOB_H
#define TESTS_PARITY_PARITY_JOB_H

#include "tests/parity/parity_report.h"
#include "train/trainer.h"

enum {
    PARITY_RANKS_MAX = 24,
    PARITY_STEPS_MAX = 12,
    PARITY_TIMEOUT_MS = 60 * 1000
};

enum {
    PARITY_MODULES_MAX = 3
};

/* Zeros: 1, off, none. */
typedef struct ParityModule {
    int tp, dp, cp, pp;
    int chunks; /* virtual stages */
    bool is_sequence_parallel;
    const char *recompute;
} ParityModule;

typedef struct ParityLayout {
    ParityModule vision;
    ParityModule audio; /* with ParityOptions.has_audio */
    ParityModule llm;
    bool is_colocated; /* all modules on one pool */
    bool shares_pool;  /* both encoders on one pool, the decoder on its own */
} ParityLayout;

/* Both modules with tp and dp alone, on pools of their own. */
#define PARITY_PLAIN(vision_tp, vision_dp, llm_tp, llm_dp)                                         \
    (ParityLayout)                                                                                 \
    {                                                                                              \
        .vision = {.tp = (vision_tp), .dp = (vision_dp)}, .llm = {.tp = (llm_tp), .dp = (llm_dp) } \
    }

/* What varies between jobs; the model is the same. Zeros: defaults. */
typedef struct ParityOptions {
    const char *shard;
    const char *heldout;
    const char *checkpoints; /* directory */
    ParityLayout layout;
    bool has_audio;
    bool has_tied_head;
    int widening;          /* of all widths; 0: 1 */
    const char *row_cache; /* directory */
    const char *frozen;    /* patterns as a YAML list's inside: "\"a*\", \"b*\"" */
    int steps;
    int batch;
    int microbatches;
    int window;
    int captions;
    int checkpoint_every;
    int warmup;
    int seed;
    bool is_adamw;
    bool is_sharded; /* ZERO1 */
    double max_grad_norm;
} ParityOptions;

typedef struct ParityRank ParityRank;

typedef struct ParityRun {
    JobSpec *spec;
    JobSpec *encoder_spec; /* NULL: ranks without the decoder have the same */
    /* What forward and backward of modules do instead, by name; NULL: the real ones do. */
    const ModuleOps *faulty;
    /* Leaves gradients as each replica has them: no sum over cp and dp of the decoder. */
    bool keeps_parts;
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
    JobLayout layout;
    Comm *world;
    Device *device;     /* during the run */
    Trainer *trainer;   /* during the run */
    int64_t bytes_sent; /* to the other pool, counted where the transport takes them */
    int rank;
    Status status;
    char message[512];
    ParityReport report;
};

/* A resolved and checked spec; free with viaduct__v1__job_spec__free_unpacked. */
JobSpec *parity_spec(const ParityOptions *options);

/* The modules that ranks may serve. */
extern const ModuleOps *const parity_modules[];
extern const int parity_num_modules;

/* Runs all ranks; ranks_out [number of ranks]. */
void parity_run(ParityRun *run, ParityRank *ranks_out);

int parity_ranks(const ParityRun *run);
/* This rank serves the module of that index. */
bool parity_serves(const ParityRank *rank, int module);

/* Fails the test, naming rank and message, unless all ranks ended well and without a difference. */
void parity_expect_good(const ParityRun *run, const ParityRank *ranks, const char *what);

#endif
