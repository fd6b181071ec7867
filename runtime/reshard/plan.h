/* Plan: which bytes go from whom to whom so that an array in one layout comes to stand in another.
 *
 * Three phases, each a set of transfers, empty where not needed:
 *   reduce:  inside the source group, only for PARTIAL sources: holders send parts to the owner of each part, who sums them;
 *   cross:   from the source group to the destination group: each needed element crosses exactly once;
 *   spread:  inside the destination group: an element that several destination ranks need goes from the one that received it to the others.
 * Properties (tested over thousands of random pairs): every destination element is written exactly once; cross bytes equal the lower bound
 * (elements that a destination needs and no rank of its group holds already as a source, once each); replicated senders and receivers share the load
 * evenly: no leader; the plan from B back to A is the transpose: the same cross transfers reversed, where copies allow it.
 * "Group" = the ranks that appear in a layout. Groups may overlap (colocated); an element that its destination rank also holds as source is a local copy.
 * Threading: pure. A plan owns its transfers: plan_done.
 */
#ifndef RESHARD_PLAN_H
#define RESHARD_PLAN_H

#include "reshard/layout.h"

#include <stdbool.h>

typedef enum PlanPhase {
    PLAN_PHASE_REDUCE,
    PLAN_PHASE_CROSS,
    PLAN_PHASE_SPREAD,
    PLAN_PHASE_COUNT,
} PlanPhase;

typedef struct PlanTransfer {
    int source;      /* rank */
    int destination; /* rank; equal to source: a copy inside the rank */
    Box box;         /* of the global array */
} PlanTransfer;

typedef struct Plan {
    int num_dims;
    int num_transfers[PLAN_PHASE_COUNT];
    PlanTransfer *transfers[PLAN_PHASE_COUNT]; /* sorted by (source, destination, box): both ends list messages in the same order */
    size_t capacities[PLAN_PHASE_COUNT];
} Plan;

/* STATUS_INVALID if a destination element is held by no source, or dims differ; the message names the box. */
Status plan_make(const Layout *source, const Layout *destination, Plan *plan_out) STATUS_CHECKED;
void plan_done(Plan *plan);

/* Elements that go between different ranks in a phase. */
int64_t plan_moved_count(const Plan *plan, PlanPhase phase);

/* The lower bound on elements that must go from the source group to the destination group. */
int64_t plan_minimum_count(const Layout *source, const Layout *destination);

#endif
