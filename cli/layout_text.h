/* LayoutText: a job's layouts for people to read.
 * Threading: pure functions.
 */
#ifndef CLI_LAYOUT_TEXT_H
#define CLI_LAYOUT_TEXT_H

#include "job/job_spec.h"

#include <stddef.h>
#include <stdio.h>

/* "vision 1/1/1/2 encoder, llm 2/1/1/1 llm": tp/cp/pp/dp and the pool of each module; cut where it
 * is too long. Any spec. */
void layout_text_describe(const JobSpec *spec, char *text_out, size_t size);

/* A line for each module, in the order of ranks. The spec is resolved and checked. */
void layout_text_print(FILE *file, const JobSpec *spec);

/* "images", "images and clips" or "clips": what the job's encoders take; "" with none. */
const char *layout_text_inputs(const JobSpec *spec);

/* Some encoder has a pool that is not the decoder's. */
bool layout_text_has_encoder_pool(const JobSpec *spec);

#endif
