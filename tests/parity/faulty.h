/* Faulty: modules that do one thing wrong, or one thing differently, for tests of the comparison
 * and of what the trainer does then. A faulty module is a real one whose table was exchanged after
 * it was made (ParityRun.faulty); everything else is passed on. Threading: as train/module.h; state
 * is kept per rank's thread.
 */
#ifndef TESTS_PARITY_FAULTY_H
#define TESTS_PARITY_FAULTY_H

#include "train/module.h"

enum {
    FAULTY_MICROBATCHES =
        2 /* what the masked, unequal and not finite modules take for the microbatches of a step */
};

typedef enum FaultyKind {
    FAULTY_VISION_DOUBLED,    /* the rows' gradients arrive twice as large: scaled by the ratio of
                                 replicas */
    FAULTY_VISION_SWAPPED,    /* two images of a microbatch change places */
    FAULTY_VISION_LATE,       /* a microbatch gets the images of the one before */
    FAULTY_VISION_DROPPED,    /* the last row of a microbatch is zero */
    FAULTY_VISION_NOT_FINITE, /* in the second step a gradient is not a number */
    FAULTY_VISION_BAD_ROWS,   /* in the second step a row is infinite */
    FAULTY_LLM_HALVED,        /* the weights' gradients are a mean over two replicas */
    FAULTY_LLM_UNEQUAL,       /* the loss is a mean over microbatches, whatever their labels */
    FAULTY_LLM_ONE_COPY,      /* of the cp ranks' gradients only the first counts */
    FAULTY_LLM_SKIPPED,       /* the first step's update is undone */
    FAULTY_LLM_NOT_FINITE,    /* in the second step a gradient is not a number */
    FAULTY_LLM_MASKED,        /* no label of a step's first microbatch counts */
    FAULTY_KIND_COUNT,
} FaultyKind;

/* Constant. */
const ModuleOps *faulty_ops(FaultyKind kind);

/* On each rank's thread before its first step. */
void faulty_begin(const ModelSpec *model, int cp_rank);

#endif
