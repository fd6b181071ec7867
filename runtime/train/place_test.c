/* Groups against a plain search: ranks of a module whose coordinates, worked out here from the
 * order of the axes, differ only where the group says so. Then the comms, ranks as threads. */
#include "base/memory.h"
#include "comm/comm_local.h"
#include "train/place.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    MODULES = 3,
    RANKS = 6 + 16, /* audio is smaller than vision, with which it shares a pool */
    TIMEOUT_MS = 20000
};

typedef struct Job {
    JobSpec spec;
    ModuleSpec modules[MODULES];
    ModuleSpec *module_list[MODULES];
    PoolSpec pools[2];
    PoolSpec *pool_list[2];
} Job;

/* Vision 3 x cp 2, audio tp 2 x dp 2, decoder tp 2 x cp 2 x dp 2 x pp 2. */
static void make_job(Job *job)
{
    static const struct {
        const char *name, *pool;
        int tp, cp, pp, dp, chunks;
    } layouts[MODULES] = {{"vision", "encoders", 1, 2, 1, 3, 1},
                          {"audio", "encoders", 2, 1, 1, 2, 1},
                          {"llm", "decoders", 2, 2, 2, 2, 3}};
    viaduct__v1__job_spec__init(&job->spec);
    for (int i = 0; i < MODULES; i++) {
        ModuleSpec *module = &job->modules[i];
        viaduct__v1__module_spec__init(module);
        module->name = (char *)layouts[i].name;
        module->pool = (char *)layouts[i].pool;
        module->tp = layouts[i].tp;
        module->cp = layouts[i].cp;
        module->pp = layouts[i].pp;
        module->dp = layouts[i].dp;
        module->virtual_stages = layouts[i].chunks;
        job->module_list[i] = module;
    }
    for (int i = 0; i < 2; i++) {
        viaduct__v1__pool_spec__init(&job->pools[i]);
        job->pools[i].name = (char *)(i == 0 ? "encoders" : "decoders");
        job->pool_list[i] = &job->pools[i];
    }
    job->spec.modules = job->module_list;
    job->spec.n_modules = MODULES;
    job->spec.pools = job->pool_list;
    job->spec.n_pools = 2;
}

typedef struct Coords {
    int tp, cp, dp, pp;
} Coords;

static Coords coords_of(const ModuleSpec *spec, int index)
{
    return (Coords){.tp = index % spec->tp,
                    .cp = index / spec->tp % spec->cp,
                    .dp = index / (spec->tp * spec->cp) % spec->dp,
                    .pp = index / (spec->tp * spec->cp * spec->dp)};
}

static bool is_in_group(const ModuleSpec *spec, PlaceGroup group, Coords a, Coords b)
{
    bool is_end_a = a.pp == 0 || a.pp == spec->pp - 1;
    bool is_end_b = b.pp == 0 || b.pp == spec->pp - 1;
    switch (group) {
    case PLACE_GROUP_TP:
        return a.cp == b.cp && a.dp == b.dp && a.pp == b.pp;
    case PLACE_GROUP_CP:
        return a.tp == b.tp && a.dp == b.dp && a.pp == b.pp;
    case PLACE_GROUP_PP:
        return a.tp == b.tp && a.cp == b.cp && a.dp == b.dp;
    case PLACE_GROUP_DATA:
        return a.tp == b.tp && a.pp == b.pp;
    default:
        return a.tp == b.tp && a.cp == b.cp && a.dp == b.dp && is_end_a && is_end_b;
    }
}

static void check_module(const PlaceModule *module, const ModuleSpec *spec, int first, int rank)
{
    int size = spec->tp * spec->cp * spec->dp * spec->pp;
    bool is_here = rank >= first && rank < first + size;
    assert_int_equal(module->is_here, is_here);
    assert_string_equal(module->name, spec->name);
    assert_int_equal(module->chunks, spec->virtual_stages);
    Coords own = coords_of(spec, is_here ? rank - first : 0);
    if (is_here) {
        assert_int_equal(place_stage(module), own.pp);
        assert_int_equal(module->coords.at[GRID_AXIS_DP], own.dp);
        assert_int_equal(module->coords.at[GRID_AXIS_CP], own.cp);
        assert_int_equal(module->coords.at[GRID_AXIS_TP], own.tp);
    }
    assert_int_equal(place_is_first_stage(module), is_here && own.pp == 0);
    assert_int_equal(place_is_last_stage(module), is_here && own.pp == spec->pp - 1);
    for (int group = 0; group < PLACE_GROUP_COUNT; group++) {
        int found[RANKS];
        int num = place_group_ranks(module, rank, (PlaceGroup)group, found);
        int at = 0;
        for (int i = 0; i < size && is_here; i++) {
            if (is_in_group(spec, (PlaceGroup)group, own, coords_of(spec, i))) {
                assert_true(at < num);
                assert_int_equal(found[at++], first + i);
            }
        }
        assert_int_equal(at, num);
    }
}

static void test_groups(void **state)
{
    (void)state;
    static Job job;
    make_job(&job);
    static const int first[MODULES] = {0, 0, 6};
    for (int pp = 1; pp <= 3; pp++) {
        job.modules[2].pp = pp;
        for (int rank = 0; rank < 6 + 8 * pp; rank++) {
            Place place = place_make(&job.spec, rank);
            assert_int_equal(place.rank, rank);
            assert_int_equal(place.world_size, 6 + 8 * pp);
            assert_int_equal(place.num_modules, MODULES);
            assert_int_equal(place_num_encoders(&place), MODULES - 1);
            assert_ptr_equal(place_decoder(&place)->spec, &job.modules[2]);
            for (int i = 0; i < MODULES; i++) {
                check_module(&place.modules[i], &job.modules[i], first[i], rank);
            }
        }
    }
}

typedef struct Rank {
    Comm *world;
    const Job *job;
    Status status;
    int differences;
} Rank;

static Status split_all(Rank *rank)
{
    static const char *const names[PLACE_GROUP_COUNT] = {"tp", "cp", "pp", "data", "tied"};
    Place place = place_make(&rank->job->spec, rank->world->rank);
    TRY(place_check_world(&place, rank->world));
    for (int i = 0; i < MODULES; i++) {
        for (int group = 0; group < PLACE_GROUP_COUNT; group++) {
            Comm *comm = NULL;
            int ranks[RANKS];
            char label[32];
            TRY(place_split(&place, i, (PlaceGroup)group, rank->world, &comm));
            int num = place_group_ranks(&place.modules[i], place.rank, (PlaceGroup)group, ranks);
            snprintf(label, sizeof label, "%s %s", place.modules[i].name, names[group]);
            rank->differences += (comm == NULL) != (num == 0);
            if (comm) {
                rank->differences += comm->size != num || ranks[comm->rank] != place.rank ||
                                     strcmp(comm->label, label) != 0;
            }
            comm_destroy(comm);
        }
    }
    place.world_size++;
    rank->differences += place_check_world(&place, rank->world) != STATUS_INVALID;
    return STATUS_OK;
}

static void *rank_main(void *context)
{
    Rank *rank = context;
    rank->status = split_all(rank);
    if (rank->status != STATUS_OK) {
        printf("rank %d: %s\n", rank->world->rank, status_message());
    }
    comm_destroy(rank->world);
    return NULL;
}

static void test_split(void **state)
{
    (void)state;
    static Job job;
    make_job(&job);
    static Rank ranks[RANKS];
    Comm *comms[RANKS];
    pthread_t threads[RANKS];
    assert_int_equal(comm_local_create(RANKS, TIMEOUT_MS, comms), STATUS_OK);
    for (int i = 0; i < RANKS; i++) {
        ranks[i] = (Rank){.world = comms[i], .job = &job};
        assert_int_equal(pthread_create(&threads[i], NULL, rank_main, &ranks[i]), 0);
    }
    for (int i = 0; i < RANKS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
    for (int i = 0; i < RANKS; i++) {
        assert_int_equal(ranks[i].status, STATUS_OK);
        assert_int_equal(ranks[i].differences, 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_split),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
