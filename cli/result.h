/* Result: how a job ended: for people on a file, for programs as summary.json.
 * Threading: main thread.
 */
#ifndef CLI_RESULT_H
#define CLI_RESULT_H

#include "base/status.h"
#include "viaduct/v1/viaduct.pb-c.h"

#include <stdio.h>

/* State, losses with the right and with shuffled images, generated captions beside the true ones,
 * checkpoint. */
void result_print(FILE *file, const Viaduct__V1__Job *job);

/* Writes `path`: steps, losses, tokens_per_second, wall_seconds (from the first step's begin to the
 * last step), boundary bytes, layouts. Values that are not known are null. STATUS_IO. */
Status result_write_summary(const char *path, const Viaduct__V1__Job *job) STATUS_CHECKED;

#endif
