/* Resample: brings sound from one rate to another: a sinc with a Kaiser window (Smith, "Digital Audio
 * Resampling Home Page", 2002), evaluated for each place of an output sample between input samples.
 *
 * Passes what is below 0.84 of the lower rate's half, keeps aliases 80 dB down, adds no delay. The same bits
 * on every run and any number of threads.
 * Threading: pure functions.
 */
#ifndef DATA_RESAMPLE_H
#define DATA_RESAMPLE_H

#include "base/status.h"

#include <stdint.h>

/* out [num_out] at rate_out: the beginning of in [count] at rate_in, silence after its end. Output sample n
 * stands at the time n / rate_out. STATUS_NO_MEMORY. */
Status resample(const float *in, int64_t count, int rate_in, int rate_out, int64_t num_out,
                float *out) STATUS_CHECKED;

/* How many input samples beyond its own place an output sample depends on, at most. */
int64_t resample_reach(int rate_in, int rate_out);

#endif
