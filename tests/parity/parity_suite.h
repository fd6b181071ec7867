/* ParitySuite: many layouts of one job against the truth, made once.
 * Threading: one thread.
 */
#ifndef TESTS_PARITY_PARITY_SUITE_H
#define TESTS_PARITY_PARITY_SUITE_H

#include "tests/parity/parity_data.h"
#include "tests/parity/parity_reference.h"

typedef struct ParitySuite {
    ParityData data;
    ParityOptions options; /* of the truth; layout, microbatches and the like vary */
    JobSpec *spec;
    ParityReference reference;
    ParityReport worst; /* of all cases */
    int num_cases;
    int64_t begin_ns;
} ParitySuite;

/* images [num]: of each sample. */
void parity_suite_open(ParitySuite *suite, const ParityOptions *options, const int *images,
                       const int *clips, int num);
/* Runs the layout; what is sent between pools must be the least there can be. Fails the test,
 * naming the layout. */
void parity_suite_run(ParitySuite *suite, const ParityOptions *options, const char *what);
/* Prints how near the limits the worst came. */
void parity_suite_close(ParitySuite *suite);

#endif
