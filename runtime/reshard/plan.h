/* Plan: which boxes go from whom to whom so that an array in one layout comes to stand in
 * another.
 *
 * Four phases, each a set of transfers, empty where not needed:
 *   reduce:  inside the source group, only for PARTIAL sources: holders send parts to the owner
 *   of each part, who sums them;
 *   within:  a destination rank, or another of its group, holds the element as a source
 *   (colocated groups): it goes from there;
 *   cross:   from the source group to the destination group: each needed element crosses exactly
 *   once;
 *   spread:  inside the destination group: an element that several destination ranks need goes
 *   from the one that received it to the others.
 * Within and cross need only the source (or what reduce made of it) and may run together; spread
 * sends what cross brought.
 *
 * Sharing: all elements held by one set of ranks and needed by one set of ranks are one sequence,
 * cut into even shares, one per sender and one per receiver; no rank leads. A cut falls between
 * rows (dim 0) while a share has PLAN_SHARE_SLICES_MIN rows or more, else along the longest dim of
 * the box where it falls: a share is at most one such slice off. The rule is the same from both
 * sides, so the plan from B back to A has the same cross transfers reversed (groups disjoint,
 * both REPLICATE).
 * "Group" = the ranks that appear in a layout.
 * Properties (tested over thousands of random pairs): every destination element is written
 * exactly once; the elements of cross are plan_minimum_count; shares are even; the transpose.
 * Threading: pure. A plan owns its memory: plan_done.
 */
#ifndef RESHARD_PLAN_H
#define RESHARD_PLAN_H

#include "reshard/layout.h"

typedef enum PlanPhase {
    PLAN_PHASE_REDUCE,
    PLAN_PHASE_WITHIN,
    PLAN_PHASE_CROSS,
    PLAN_PHASE_SPREAD,
    PLAN_PHASE_COUNT,
} PlanPhase;

enum {
    PLAN_SHARE_SLICES_MIN = 4, /* a share cut between rows is off by a quarter at most */
};

/* Where the box lies in the local buffer of one end. In reduce both ends use the source layout
 * (the owner sums into a buffer laid out as its source), in spread both use the destination
 * layout; otherwise source to destination. */
typedef struct PlanPlace {
    int64_t offset;     /* elements */
    int32_t piece;      /* of the layout, whose box gives the strides; of several the first */
    bool is_contiguous; /* one run of memory; always so when the box reaches over several pieces */
} PlanPlace;

typedef struct PlanTransfer {
    int source;      /* rank */
    int destination; /* rank; equal to source: a copy inside the rank */
    Box box;         /* of the global array */
    int64_t count;   /* elements */
    PlanPlace from;
    PlanPlace to;
    bool accumulates; /* reduce: not the first contribution; they add up in the order of ranks */
} PlanTransfer;

typedef struct PlanScratch PlanScratch;

typedef struct Plan {
    int num_dims;
    uint64_t
        digest; /* plan_digest of the layouts: ranks whose digests agree have made the same plan */
    int num_transfers[PLAN_PHASE_COUNT];
    /* Sorted by (source, destination, position of the box): both ends list messages in the same
     * order. */
    PlanTransfer *transfers[PLAN_PHASE_COUNT];
    size_t capacities[PLAN_PHASE_COUNT];
    PlanScratch *scratch; /* kept for the next plan_make into this Plan */
} Plan;

static inline uint64_t plan_digest(const Layout *source, const Layout *destination)
{
    return source->digest * UINT64_C(0x9e3779b97f4a7c15) ^ destination->digest;
}

/* `plan` is zeroed, or was made before: then its memory is used again, and nothing is allocated
 * unless the new plan is larger than any before. STATUS_INVALID if a destination element is held
 * by no source, dims differ, the destination is PARTIAL (whose share of a sum would each holder
 * get?), or boxes of one rank overlap; the message names the box. The plan is then empty. */
Status plan_make(const Layout *source, const Layout *destination, Plan *plan) STATUS_CHECKED;
void plan_done(Plan *plan);

/* Elements that go between different ranks in a phase. */
int64_t plan_moved_count(const Plan *plan, PlanPhase phase);

/* The lower bound on elements that must go from the source group to the destination group: those
 * that a destination needs and no rank of its group holds already as a source, once each.
 * Computed from the layouts alone, independently of plan_make. */
int64_t plan_minimum_count(const Layout *source, const Layout *destination);

#endif
