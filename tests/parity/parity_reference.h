/* ParityReference: the truth: all modules uncut in one process, the whole batch at once, SGD in
 * plain loops. It knows no plan, no schedule, no comm, no boundary and no reduction; the order of
 * samples is worked out from the documented rule.
 *
 * What is allowed: float32 sums in another order. Losses: 1e-5 relative. Gradients and weights:
 * 5e-5 of the largest in the tensor, plus, for gradients that are zero by mathematics (a key's
 * bias), 5e-7 of the largest anywhere. The faults of faults_test.c are off by 30 times that and
 * more.
 * Threading: make and free on one thread; compare on any.
 */
#ifndef TESTS_PARITY_PARITY_REFERENCE_H
#define TESTS_PARITY_PARITY_REFERENCE_H

#include "data/dataset.h"
#include "tests/parity/parity_job.h"

typedef struct ParityReferenceStep {
    double loss; /* nats per label */
    double grad_norm;
    int64_t labels;
    int64_t tokens;
    int64_t rows_of[PARITY_MODULES_MAX]; /* each encoder */
    float *grads[PARITY_MODULES_MAX];    /* of each module: [params.trained_count] */
    float *weights[PARITY_MODULES_MAX];  /* [params.count] after the step */
} ParityReferenceStep;

typedef struct ParityReference {
    const JobSpec *spec; /* borrowed */
    Device *device;
    Stream *stream;
    Dataset *dataset;
    int num_modules;
    Module *modules[PARITY_MODULES_MAX]; /* in the order of the job's layout */
    SequencesBuffer *sequences;
    int num_steps;
    ParityReferenceStep steps[PARITY_STEPS_MAX];
    /* Positions of a step (within the batch) whose labels do not count in the loss, though N counts
     * them: what a test masks. */
    Range masked;
} ParityReference;

/* Runs all steps of the spec. */
void parity_reference_make(ParityReference *reference, const JobSpec *spec, Range masked);
void parity_reference_free(ParityReference *reference);

/* Loss per label of samples one after another, each with the images of images_from[i], by the
 * weights as they stand. */
double parity_reference_loss(ParityReference *reference, const Dataset *dataset,
                             const int64_t *samples, const int64_t *images_from, int num);

/* Index in the data set of sample `position` of the whole run. */
int64_t parity_reference_sample(const JobSpec *spec, int64_t count, int64_t position);

/* A rank after step number step->step: everything it knows against the truth. */
void parity_compare(const ParityReference *reference, ParityRank *rank, const TrainerStep *step);

#endif
