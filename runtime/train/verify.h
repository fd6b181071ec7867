/* Verify: a job's own model and data for a few steps, once in one process and once in the layout
 * asked for, compared tensor by tensor.
 *
 * One process is a single rank that serves all modules uncut and takes the step's whole batch as
 * one microbatch. The layout's ranks are threads of this process. Both train with plain SGD and
 * clipping instead of the job's optimizer: AdamW would hide a gradient of the wrong size and
 * magnify rounding where one is nearly zero. The job's ZeRO-1 sharding stays.
 *
 * What is allowed is float32 sums in another order: of the loss 1e-5 of itself; of a gradient 1e-4
 * of the largest in its tensor; of a weight 1e-3 of the largest change of its tensor so far, well
 * below one step's, and the rounding of the weight itself. Both have a floor, for tensors whose
 * gradient is zero but for rounding.
 * Threading: runs its own threads and joins them.
 */
#ifndef TRAIN_VERIFY_H
#define TRAIN_VERIFY_H

#include "train/trainer.h"

enum {
    VERIFY_STEPS_MAX = 16,
    VERIFY_RANKS_MAX = 512 /* what links between all pairs need grows with the square */
};

/* Differences as shares of what is allowed: up to 1 is equal. */
typedef struct VerifyTensor {
    char name[128];
    const char *module; /* of the spec */
    bool is_trained;
    double grad;
    double weight;
} VerifyTensor;

typedef struct VerifyStep {
    double whole_loss; /* nats per label, in one process */
    double loss;
    double whole_grad_norm;
    double grad_norm;
} VerifyStep;

typedef struct VerifyResult {
    int num_ranks;
    int num_steps;
    VerifyStep steps[VERIFY_STEPS_MAX];
    double worst_loss; /* shares of what is allowed */
    double worst_grad;
    double worst_weight;
    int num_tensors;
    VerifyTensor *tensors; /* in the order of modules and parameters */
    bool is_equal;
} VerifyResult;

typedef struct VerifyOptions {
    const JobSpec *spec; /* resolved and checked; borrowed, as all here */
    const ModuleOps *const *modules;
    int num_modules;
    int steps;     /* 1 to VERIFY_STEPS_MAX; the job's own first ones */
    void *context; /* of what follows; both may be NULL */
    void (*progress)(void *context, const char *what, int step);
    /* On each rank's thread once its trainer is made: for tests, to spoil something. */
    void (*spoil)(void *context, Trainer *trainer);
} VerifyOptions;

/* STATUS_OK also when they differ: look at is_equal. STATUS_INVALID: too many ranks. Other failures
 * are those of the job itself (data, memory), and say which run and rank. Result owned by the
 * caller: verify_result_done. */
Status verify_run(const VerifyOptions *options, VerifyResult *result_out) STATUS_CHECKED;
void verify_result_done(VerifyResult *result);

#endif
