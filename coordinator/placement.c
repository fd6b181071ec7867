#include "coordinator/placement.h"

#include "job/job_layout.h"

#include <ctype.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    POOL_SETS = 1 << JOB_MODULES_MAX /* sets of a job's pools, as bits */
};

/* The workers that a job could have. Pools of one role compete for the same workers. */
typedef struct Candidates {
    const WorkerRecord *free[MEMBERSHIP_WORKERS_MAX]; /* in the natural order of their names */
    int num_free;
    int present[POOL_SETS];   /* workers that serve just these pools */
    int available[POOL_SETS]; /* the free ones of them that are not chosen yet */
    int wanted[JOB_MODULES_MAX];
} Candidates;

int placement_ranks(const JobSpec *spec)
{
    return job_layout_make(spec).num_ranks;
}

/* Texts in order, runs of digits by their value. */
static int compare_natural(const char *a, const char *b)
{
    while (*a && *b) {
        if (isdigit((unsigned char)*a) && isdigit((unsigned char)*b)) {
            a += strspn(a, "0");
            b += strspn(b, "0");
            size_t a_digits = strspn(a, "0123456789");
            size_t b_digits = strspn(b, "0123456789");
            if (a_digits != b_digits) {
                return a_digits < b_digits ? -1 : 1;
            }
            int order = strncmp(a, b, a_digits);
            if (order != 0) {
                return order;
            }
            a += a_digits;
            b += b_digits;
        } else if (*a != *b) {
            return (unsigned char)*a < (unsigned char)*b ? -1 : 1;
        } else {
            a++;
            b++;
        }
    }
    return *a ? 1 : *b ? -1 : 0;
}

static bool matches_selector(const WorkerRecord *worker, const PoolSpec *pool)
{
    for (size_t i = 0; i < pool->n_selector; i++) {
        bool found = false;
        for (int j = 0; j < worker->num_labels && !found; j++) {
            found = strcmp(worker->labels[j].key, pool->selector[i]->key) == 0 &&
                    strcmp(worker->labels[j].value, pool->selector[i]->value) == 0;
        }
        if (!found) {
            return false;
        }
    }
    return true;
}

/* The pools that a worker could serve, as bits. */
static unsigned pools_of(const WorkerRecord *worker, const JobLayout *layout)
{
    unsigned pools = 0;
    for (int i = 0; i < layout->num_pools; i++) {
        const PoolSpec *pool = layout->pools[i].spec;
        if (strcmp(worker->role, pool->role) == 0 && matches_selector(worker, pool)) {
            pools |= 1U << i;
        }
    }
    return pools;
}

/* Free to be assigned: its assignment stream is open, so that it hears of it. */
static bool is_free(const WorkerRecord *worker)
{
    return worker->job == 0 && worker->stream_open;
}

static int by_name(const void *a, const void *b)
{
    return compare_natural((*(const WorkerRecord *const *)a)->name,
                           (*(const WorkerRecord *const *)b)->name);
}

static void find_candidates(const JobLayout *layout, const Membership *membership,
                            Candidates *candidates)
{
    *candidates = (Candidates){0};
    for (int i = 0; i < membership->count; i++) {
        const WorkerRecord *worker = &membership->workers[i];
        unsigned pools = membership_is_present(worker) ? pools_of(worker, layout) : 0;
        if (pools == 0) {
            continue;
        }
        candidates->present[pools]++;
        if (is_free(worker)) {
            candidates->available[pools]++;
            candidates->free[candidates->num_free++] = worker;
        }
    }
    qsort((void *)candidates->free, (size_t)candidates->num_free, sizeof(WorkerRecord *), by_name);
    for (int i = 0; i < layout->num_pools; i++) {
        candidates->wanted[i] = layout->pools[i].num_ranks;
    }
}

/* Workers that serve any of the pools of a set. */
static int count_serving(const int *workers, unsigned set)
{
    int count = 0;
    for (unsigned pools = 1; pools < POOL_SETS; pools++) {
        count += pools & set ? workers[pools] : 0;
    }
    return count;
}

static int count_wanted(const Candidates *candidates, unsigned set)
{
    int count = 0;
    for (unsigned i = 0; i < JOB_MODULES_MAX; i++) {
        count += set >> i & 1 ? candidates->wanted[i] : 0;
    }
    return count;
}

/* Whether these workers are enough for the pools of a set, each of them in one pool: by Hall's
 * theorem they are when no set of pools wants more workers than serve any of them. */
static bool are_enough(const Candidates *candidates, const int *workers, unsigned set)
{
    for (unsigned part = 1; part <= set; part++) {
        if ((part & ~set) == 0 && count_wanted(candidates, part) > count_serving(workers, part)) {
            return false;
        }
    }
    return true;
}

/* Appends "needs 4 llm workers, 2 present" for a set of pools of one role. */
static void explain(const Candidates *candidates, const JobLayout *layout, unsigned set,
                    Placement *placement)
{
    const PoolSpec *pool = NULL;
    size_t selectors = 0;
    for (int i = 0; i < layout->num_pools; i++) {
        if (set >> i & 1) {
            pool = layout->pools[i].spec;
            selectors += pool->n_selector;
        }
    }
    CHECK(pool);
    int wanted = count_wanted(candidates, set);
    int present = count_serving(candidates->present, set);
    char busy[48] = "";
    if (present >= wanted) {
        snprintf(busy, sizeof busy, ", %d free", count_serving(candidates->available, set));
    }
    size_t used = strlen(placement->reason);
    snprintf(placement->reason + used, sizeof placement->reason - used,
             "%sneeds %d %s worker%s%s, %d present%s", used ? "; " : "", wanted, pool->role,
             wanted == 1 ? "" : "s", selectors ? " with the selector's labels" : "", present, busy);
}

/* Explains the pools of one role, whose workers are not enough: together, or where selectors tell
 * the workers apart, each set of them that lacks workers by itself. */
static void explain_role(const Candidates *candidates, const JobLayout *layout, unsigned role,
                         Placement *placement)
{
    const int *workers = are_enough(candidates, candidates->present, role) ? candidates->available
                                                                           : candidates->present;
    bool has_selector = false;
    for (int i = 0; i < layout->num_pools; i++) {
        has_selector = has_selector || ((role >> i & 1) && layout->pools[i].spec->n_selector > 0);
    }
    if (!has_selector) {
        explain(candidates, layout, role, placement);
        return;
    }
    unsigned explained = 0;
    for (int size = 1; size <= layout->num_pools; size++) {
        for (unsigned set = 1; set <= role; set++) {
            bool is_new =
                (set & ~role) == 0 && (set & explained) == 0 && __builtin_popcount(set) == size;
            if (is_new && count_wanted(candidates, set) > count_serving(workers, set)) {
                explain(candidates, layout, set, placement);
                explained |= set;
            }
        }
    }
}

/* Says what is missing, role by role in the order of pools. */
static void explain_all(const Candidates *candidates, const JobLayout *layout, Placement *placement)
{
    unsigned done = 0;
    for (int i = 0; i < layout->num_pools; i++) {
        unsigned role = 0;
        for (int j = i; j < layout->num_pools; j++) {
            bool is_same = strcmp(layout->pools[j].spec->role, layout->pools[i].spec->role) == 0;
            role |= is_same ? 1U << j : 0;
        }
        if ((role & ~done) != role || are_enough(candidates, candidates->available, role)) {
            continue;
        }
        done |= role;
        if (!are_enough(candidates, candidates->present, role)) {
            placement->is_short = true;
        }
        explain_role(candidates, layout, role, placement);
    }
}

/* Takes the first workers of a pool that the other pools can do without. */
static void take_workers(Candidates *candidates, const JobLayout *layout, int pool,
                         const Membership *membership, int *slots)
{
    unsigned all = (1U << layout->num_pools) - 1;
    for (int i = 0; i < candidates->num_free && candidates->wanted[pool] > 0; i++) {
        const WorkerRecord *worker = candidates->free[i];
        unsigned pools = worker ? pools_of(worker, layout) : 0;
        if (!(pools >> pool & 1)) {
            continue;
        }
        candidates->available[pools]--;
        candidates->wanted[pool]--;
        if (are_enough(candidates, candidates->available, all)) {
            *slots++ = (int)(worker - membership->workers);
            candidates->free[i] = NULL;
        } else {
            candidates->available[pools]++;
            candidates->wanted[pool]++;
        }
    }
    CHECK(candidates->wanted[pool] == 0);
}

Placement placement_choose(const JobSpec *spec, const Membership *membership, int *members_out)
{
    Placement placement = {.is_complete = false};
    Candidates candidates;
    JobLayout layout = job_layout_make(spec);
    find_candidates(&layout, membership, &candidates);
    if (!are_enough(&candidates, candidates.available, (1U << layout.num_pools) - 1)) {
        explain_all(&candidates, &layout, &placement);
        return placement;
    }
    for (int i = 0; i < layout.num_pools; i++) {
        take_workers(&candidates, &layout, i, membership, members_out + layout.pools[i].first_rank);
    }
    placement.is_complete = true;
    return placement;
}
