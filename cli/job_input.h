/* JobInput: a job file with its --set overrides, read and checked before anything is sent or
 * started.
 * Threading: main thread.
 */
#ifndef CLI_JOB_INPUT_H
#define CLI_JOB_INPUT_H

#include "base/config.h"
#include "cli/verbs.h"
#include "job/job_spec.h"

/* Prints every problem. On EXIT_CODE_OK *spec_out is owned by the caller, as read when not
 * resolved. */
ExitCode job_input_read(const char *path, const ConfigList *settings, JobSpec **spec_out);

/* A job id made of the file's name, or of its folder's when the file is called job.yaml: "emoji" of
 * "examples/emoji/job.yaml", "my-run" of "My Run.yml". */
void job_input_id(const char *path, char *id_out, size_t size);

#endif
