/* JobFile: a job in YAML. Keys are the field names of JobSpec, mapped through its protobuf-c
 * descriptors: scalars, enums by name, durations as "30s", "5m", "1h30m", messages as mappings,
 * repeated fields as sequences, map<> as mappings.
 *
 * An error names file, line, column, field and what was expected: "job.yaml:12:9: training.steps:
 * expected a whole number, got "many"". Unknown and repeated keys are errors. Depth, size and
 * number of elements are bounded.
 * Threading: pure functions.
 */
#ifndef JOB_JOB_FILE_H
#define JOB_JOB_FILE_H

#include "job/job_spec.h"

#include <stddef.h>

/* Reads text of `size_bytes` bytes; `name` stands in errors. Not resolved, not checked. Owned by
 * the caller: viaduct__v1__job_spec__free_unpacked(spec, NULL). STATUS_INVALID. */
Status job_file_parse(const char *name, const char *text, size_t size_bytes,
                      JobSpec **spec_out) STATUS_CHECKED;

/* Same from a file. STATUS_NOT_FOUND, STATUS_IO, STATUS_INVALID. */
Status job_file_read(const char *path, JobSpec **spec_out) STATUS_CHECKED;

/* Applies one "training.steps=100" to a spec: a path of field names; elements of repeated messages
 * by number or, where they have one, by name ("modules.vision.dp=2", "modules.0.dp=2"). Only single
 * scalars can be set. STATUS_INVALID. */
Status job_file_set(JobSpec *spec, const char *assignment) STATUS_CHECKED;

#endif
