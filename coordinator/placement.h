/* Placement: which workers serve a job, all of them or none.
 * Threading: pure functions.
 */
#ifndef COORDINATOR_PLACEMENT_H
#define COORDINATOR_PLACEMENT_H

#include "coordinator/membership.h"
#include "job/job_spec.h"

#include <stddef.h>

typedef struct Placement {
    bool is_complete;
    bool is_short;    /* workers are missing, not only busy */
    char reason[256]; /* when not complete: "needs 4 llm workers, 2 present" */
} Placement;

/* Ranks that a job has in all (job/job_layout.h). */
int placement_ranks(const JobSpec *spec);

/* Picks free workers for each pool of the job's layout (job/job_layout.h), in the natural order of
 * their names ("llm-2" before "llm-10"): members_out[rank] = slot, placement_ranks() of them,
 * written when the placement is complete. Pools of one role share out their workers, so that a pool
 * without a selector leaves to the others those that only they can have. */
Placement placement_choose(const JobSpec *spec, const Membership *membership, int *members_out);

#endif
