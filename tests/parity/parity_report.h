/* ParityReport: the differences that one rank has found; threads cannot use a test framework's
 * assertions.
 * Threading: a report belongs to one thread at a time.
 */
#ifndef TESTS_PARITY_PARITY_REPORT_H
#define TESTS_PARITY_PARITY_REPORT_H

/* Differences found by one rank, told apart by what they are of. A ratio is a difference over what
 * is allowed: more than 1 is a failure. */
typedef struct ParityReport {
    int failures;
    double worst_loss;
    double worst_grad;
    double worst_weight;
    char first[320];
} ParityReport;

__attribute__((format(printf, 2, 3))) void parity_report_fail(ParityReport *report,
                                                              const char *format, ...);

#endif
