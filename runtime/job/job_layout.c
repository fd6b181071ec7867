#include "job/job_layout.h"

#include <string.h>

static const char *const module_order[] = {"vision", "audio", "llm"};
enum {
    MODULE_COUNT = sizeof module_order / sizeof *module_order
};
_Static_assert((int)MODULE_COUNT <= (int)JOB_MODULES_MAX, "a layout has room for all modules");

static const PoolSpec *find_pool_spec(const JobSpec *spec, const char *name)
{
    for (size_t i = 0; i < spec->n_pools; i++) {
        if (strcmp(spec->pools[i]->name, name) == 0) {
            return spec->pools[i];
        }
    }
    return NULL;
}

/* The layout's pool of that name, added where it is new. */
static int take_pool(JobLayout *layout, const JobSpec *spec, const char *name)
{
    for (int i = 0; i < layout->num_pools; i++) {
        if (strcmp(layout->pools[i].spec->name, name) == 0) {
            return i;
        }
    }
    const PoolSpec *pool = find_pool_spec(spec, name);
    CHECK(pool);
    layout->pools[layout->num_pools] = (JobLayoutPool){.spec = pool};
    return layout->num_pools++;
}

JobLayout job_layout_make(const JobSpec *spec)
{
    JobLayout layout = {0};
    for (int i = 0; i < MODULE_COUNT; i++) {
        const ModuleSpec *module = job_spec_module(spec, module_order[i]);
        CHECK(module || strcmp(module_order[i], "llm") != 0);
        if (!module) {
            continue;
        }
        JobLayoutModule *placed = &layout.modules[layout.num_modules++];
        *placed = (JobLayoutModule){.spec = module,
                                    .pool = take_pool(&layout, spec, module->pool),
                                    .num_ranks = job_spec_module_ranks(module)};
        CHECK(placed->num_ranks > 0);
        JobLayoutPool *pool = &layout.pools[placed->pool];
        pool->num_modules++;
        if (placed->num_ranks > pool->num_ranks) {
            pool->num_ranks = placed->num_ranks;
        }
    }
    for (int i = 0; i < layout.num_pools; i++) {
        layout.pools[i].first_rank = layout.num_ranks;
        layout.num_ranks += layout.pools[i].num_ranks;
    }
    for (int i = 0; i < layout.num_modules; i++) {
        layout.modules[i].first_rank = layout.pools[layout.modules[i].pool].first_rank;
    }
    return layout;
}

int job_layout_find(const JobLayout *layout, const char *module)
{
    for (int i = 0; i < layout->num_modules; i++) {
        if (strcmp(layout->modules[i].spec->name, module) == 0) {
            return i;
        }
    }
    return -1;
}
