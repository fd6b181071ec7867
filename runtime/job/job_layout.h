/* JobLayout: which ranks of a job's world serve which pool and which module. A pure function of the
 * spec that coordinator, command line and trainer share, so that all mean the same rank.
 *
 * Modules come in a fixed order: the encoders that the job has ("vision", "audio"), then "llm".
 * Pools come in the order in which these modules name them, each as a run of consecutive ranks. A
 * pool has as many ranks as the largest of its modules; modules that share a pool (colocated) all
 * begin at its first rank.
 * Threading: pure functions on plain data.
 */
#ifndef JOB_JOB_LAYOUT_H
#define JOB_JOB_LAYOUT_H

#include "job/job_spec.h"

#include <stdbool.h>

enum {
    JOB_MODULES_MAX = 4, /* encoders and the decoder */
};

typedef struct JobLayoutModule {
    const ModuleSpec *spec; /* borrowed */
    int pool;               /* index */
    int first_rank;         /* of the world */
    int num_ranks;          /* tp * cp * pp * dp */
} JobLayoutModule;

typedef struct JobLayoutPool {
    const PoolSpec *spec; /* borrowed */
    int first_rank;
    int num_ranks;
    int num_modules; /* more than 1: colocated */
} JobLayoutPool;

typedef struct JobLayout {
    int num_modules; /* the last one is the decoder */
    JobLayoutModule modules[JOB_MODULES_MAX];
    int num_pools;
    JobLayoutPool pools[JOB_MODULES_MAX];
    int num_ranks; /* of the world */
} JobLayout;

/* Of a spec that was checked (job_spec_check): CHECKs what that makes sure. */
JobLayout job_layout_make(const JobSpec *spec);

/* Index of a module by name; -1: the job has none. */
int job_layout_find(const JobLayout *layout, const char *module);

static inline int job_layout_num_encoders(const JobLayout *layout)
{
    return layout->num_modules - 1;
}

#endif
