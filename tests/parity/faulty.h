/* Faulty: modules that do one thing wrong, or one thing differently, for tests of the comparison
 * and of what the trainer does then. Each passes everything else on to the real module. Threading:
 * as train/module.h; state is kept per rank's thread. */
#ifndef TESTS_PARITY_FAULTY_H
#define TESTS_PARITY_FAULTY_H

#include "train/module.h"

enum {
    FAULTY_MICROBATCHES =
        2 /* what the two masked and not finite modules take for the microbatches of a step */
};

extern const ModuleOps faulty_vision_doubled;    /* the rows' gradients arrive twice as large */
extern const ModuleOps faulty_vision_swapped;    /* two images of a microbatch change places */
extern const ModuleOps faulty_vision_dropped;    /* the last row of a microbatch is zero */
extern const ModuleOps faulty_vision_not_finite; /* in the second step a gradient is not a number */
extern const ModuleOps faulty_vision_bad_rows;   /* in the second step a row is infinite */
extern const ModuleOps faulty_llm_halved; /* the weights' gradients are a mean over two replicas */
extern const ModuleOps faulty_llm_not_finite; /* in the second step a gradient is not a number */
extern const ModuleOps faulty_llm_masked;     /* no label of a step's first microbatch counts */

#endif
