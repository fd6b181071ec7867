/* JobSpec: what a user asks for. The proto message is the one schema; this header gives its C types
 * short names, fills defaults in and checks a spec as a whole.
 *
 * Threading: pure functions; a resolved spec is read-only and may be shared.
 */
#ifndef JOB_JOB_SPEC_H
#define JOB_JOB_SPEC_H

#include "base/status.h"
#include "viaduct/v1/job_spec.pb-c.h"

#include <stdbool.h>

typedef Viaduct__V1__JobSpec JobSpec;
typedef Viaduct__V1__ModelSpec ModelSpec;
typedef Viaduct__V1__VisionSpec VisionSpec;
typedef Viaduct__V1__AudioSpec AudioSpec;
typedef Viaduct__V1__ProjectorSpec ProjectorSpec;
typedef Viaduct__V1__DecoderSpec DecoderSpec;
typedef Viaduct__V1__DataSpec DataSpec;
typedef Viaduct__V1__ModuleSpec ModuleSpec;
typedef Viaduct__V1__PoolSpec PoolSpec;
typedef Viaduct__V1__TrainingSpec TrainingSpec;
typedef Viaduct__V1__OptimizerSpec OptimizerSpec;
typedef Viaduct__V1__RowCacheSpec RowCacheSpec;
typedef Viaduct__V1__CheckpointSpec CheckpointSpec;
typedef Viaduct__V1__EvaluationSpec EvaluationSpec;

/* Fills every zero that means "the default", in place; missing sub-messages are created (freed with
 * the message by viaduct__v1__job_spec__free_unpacked), those of an encoder (model.vision and
 * model.projector, model.audio and model.audio_projector) only where a module of its name exists.
 * A resolved spec resolves to itself. */
Status job_spec_resolve(JobSpec *spec) STATUS_CHECKED;

/* One problem of a spec. */
typedef struct JobProblem {
    char field[96];    /* "modules[0].tp" */
    char message[256]; /* what was found, what was expected */
} JobProblem;

/* Checks a resolved spec whole: ranges, axes against layers and heads, names, pools and roles, the
 * timeouts' hierarchy. Writes up to `capacity` problems and returns how many there are in all; 0 =
 * the spec is good. What the schema has and is not built yet is a problem whose message begins with
 * "not supported yet". */
int job_spec_check(const JobSpec *spec, JobProblem *problems_out, int capacity);

/* The module of that name, NULL if the spec has none. */
const ModuleSpec *job_spec_module(const JobSpec *spec, const char *name);

/* tp * cp * pp * dp. */
int job_spec_module_ranks(const ModuleSpec *module);

#endif
