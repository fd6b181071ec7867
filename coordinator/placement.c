#include "coordinator/placement.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

static const char *const module_order[] = {"vision", "llm"};
enum {
    MODULE_COUNT = sizeof module_order / sizeof *module_order
};

int placement_ranks(const JobSpec *spec)
{
    int ranks = 0;
    for (int i = 0; i < MODULE_COUNT; i++) {
        const ModuleSpec *module = job_spec_module(spec, module_order[i]);
        ranks += module ? job_spec_module_ranks(module) : 0;
    }
    return ranks;
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

static bool serves(const WorkerRecord *worker, const PoolSpec *pool)
{
    return membership_is_present(worker) && strcmp(worker->role, pool->role) == 0 &&
           matches_selector(worker, pool);
}

/* Free to be assigned: its assignment stream is open, so that it hears of it. */
static bool is_free(const WorkerRecord *worker)
{
    return worker->job == 0 && worker->stream_open;
}

/* Inserts a slot into the sorted list of at most `wanted` slots. */
static int insert_sorted(const Membership *membership, int *slots, int count, int wanted, int slot)
{
    const WorkerRecord *workers = membership->workers;
    int at = count;
    while (at > 0 && compare_natural(workers[slot].name, workers[slots[at - 1]].name) < 0) {
        at--;
    }
    if (at == wanted) {
        return count;
    }
    int kept = count < wanted ? count : wanted - 1;
    memmove(&slots[at + 1], &slots[at], (size_t)(kept - at) * sizeof *slots);
    slots[at] = slot;
    return kept + 1;
}

/* Picks one module's workers. Returns whether there are enough; else appends to the reason. */
static bool choose_module(const JobSpec *spec, const ModuleSpec *module,
                          const Membership *membership, int *slots, Placement *placement)
{
    const PoolSpec *pool = NULL;
    for (size_t i = 0; i < spec->n_pools; i++) {
        if (strcmp(spec->pools[i]->name, module->pool) == 0) {
            pool = spec->pools[i];
        }
    }
    CHECK(pool); /* job_spec_check saw to it */
    int wanted = job_spec_module_ranks(module);
    int present = 0;
    int available = 0;
    int chosen = 0;
    for (int i = 0; i < membership->count; i++) {
        const WorkerRecord *worker = &membership->workers[i];
        if (!serves(worker, pool)) {
            continue;
        }
        present++;
        if (is_free(worker)) {
            available++;
            chosen = insert_sorted(membership, slots, chosen, wanted, i);
        }
    }
    if (chosen == wanted) {
        return true;
    }
    size_t used = strlen(placement->reason);
    char busy[48] = "";
    if (present >= wanted) {
        snprintf(busy, sizeof busy, ", %d free", available);
    } else {
        placement->is_short = true;
    }
    snprintf(placement->reason + used, sizeof placement->reason - used,
             "%sneeds %d %s worker%s%s, %d present%s", used ? "; " : "", wanted, pool->role,
             wanted == 1 ? "" : "s", pool->n_selector ? " that match the selector" : "", present,
             busy);
    return false;
}

Placement placement_choose(const JobSpec *spec, const Membership *membership, int *members_out)
{
    Placement placement = {.is_complete = true};
    int rank = 0;
    for (int i = 0; i < MODULE_COUNT; i++) {
        const ModuleSpec *module = job_spec_module(spec, module_order[i]);
        CHECK(module);
        if (!choose_module(spec, module, membership, members_out + rank, &placement)) {
            placement.is_complete = false;
        }
        rank += job_spec_module_ranks(module);
    }
    return placement;
}
