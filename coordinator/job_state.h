/* JobState: which states a job may go through, as one table.
 * Threading: pure functions.
 */
#ifndef COORDINATOR_JOB_STATE_H
#define COORDINATOR_JOB_STATE_H

#include "viaduct/v1/viaduct.pb-c.h"

#include <stdbool.h>

typedef Viaduct__V1__JobStatus__State JobState;
#define JOB_STATE(name) VIADUCT__V1__JOB_STATUS__STATE__##name

/* Whether a job may go from one state directly to the other. */
bool job_state_allows(JobState from, JobState to);

/* SUCCEEDED, FAILED, CANCELLED: nothing follows. */
bool job_state_is_terminal(JobState state);

/* "RUNNING" */
const char *job_state_name(JobState state);

#endif
