#include "base/hash.h"
#include "base/rng.h"
#include "coordinator/placement.h"
#include "job/job_file.h"

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
    RANKS_MAX = 64,
    RANDOM_CASES = 2000
};

static const uint64_t seed = 7;

/* A job of these modules and pools; the rest does not matter to a placement. */
static JobSpec *make(const char *modules, const char *pools)
{
    char text[1024];
    snprintf(text, sizeof text, "modules: [%s]\npools: [%s]\n", modules, pools);
    JobSpec *spec = NULL;
    if (job_file_parse("job.yaml", text, strlen(text), &spec) != STATUS_OK) {
        fail_msg("%s", status_message());
    }
    assert_int_equal(job_spec_resolve(spec), STATUS_OK);
    return spec;
}

/* A free worker; zone NULL: without a label. Returns its slot. */
static int enter(Membership *membership, const char *name, const char *role, const char *zone)
{
    Viaduct__V1__Worker worker = VIADUCT__V1__WORKER__INIT;
    Viaduct__V1__Worker__LabelsEntry label = VIADUCT__V1__WORKER__LABELS_ENTRY__INIT;
    Viaduct__V1__Worker__LabelsEntry *labels[] = {&label};
    worker.name = (char *)(uintptr_t)name;
    worker.role = (char *)(uintptr_t)role;
    worker.incarnation = (char *)(uintptr_t)name;
    worker.data_address = (char *)(uintptr_t) "127.0.0.1:1";
    worker.protocol_version = MEMBERSHIP_PROTOCOL;
    label.key = (char *)(uintptr_t) "zone";
    label.value = (char *)(uintptr_t)zone;
    worker.labels = labels;
    worker.n_labels = zone ? 1 : 0;
    int slot = -1;
    bool replaced = false;
    RpcError error;
    assert_true(membership_register(membership, &worker, 0, &slot, &replaced, &error));
    membership->workers[slot].stream_open = true;
    return slot;
}

static void expect_reason(const JobSpec *spec, const Membership *membership, bool is_short,
                          const char *reason)
{
    int members[RANKS_MAX];
    Placement placement = placement_choose(spec, membership, members);
    assert_false(placement.is_complete);
    assert_string_equal(placement.reason, reason);
    assert_int_equal(placement.is_short, is_short);
}

static void a_shared_pool_takes_each_worker_once(void **state)
{
    (void)state;
    JobSpec *spec = make("{name: vision, pool: all, dp: 2}, {name: llm, pool: all, tp: 2, cp: 2}",
                         "{name: all, role: llm}");
    Membership membership;
    membership_init(&membership, 3000, 1000, seed);
    enter(&membership, "encoder-0", "encoder", NULL);
    int slots[4];
    slots[3] = enter(&membership, "llm-10", "llm", NULL);
    slots[1] = enter(&membership, "llm-2", "llm", NULL);
    slots[0] = enter(&membership, "llm-0", "llm", NULL);
    assert_int_equal(placement_ranks(spec), 4);
    expect_reason(spec, &membership, true, "needs 4 llm workers, 3 present");
    slots[2] = enter(&membership, "llm-3", "llm", NULL);
    int members[RANKS_MAX];
    assert_true(placement_choose(spec, &membership, members).is_complete);
    assert_memory_equal(members, slots, sizeof slots);
    membership.workers[slots[0]].job = 9;
    expect_reason(spec, &membership, false, "needs 4 llm workers, 4 present, 3 free");
    membership_done(&membership);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

static void pools_of_one_role_share_out_its_workers(void **state)
{
    (void)state;
    JobSpec *spec = make("{name: llm, pool: l}, {name: audio, pool: a}, {name: vision, pool: v, "
                         "dp: 2}",
                         "{name: a, role: encoder}, {name: v, role: encoder}, {name: l, role: "
                         "llm}");
    Membership membership;
    membership_init(&membership, 3000, 1000, seed);
    expect_reason(spec, &membership, true,
                  "needs 3 encoder workers, 0 present; needs 1 llm worker, 0 present");
    int slots[4];
    slots[0] = enter(&membership, "encoder-0", "encoder", NULL);
    slots[1] = enter(&membership, "encoder-1", "encoder", NULL);
    slots[3] = enter(&membership, "llm-0", "llm", NULL);
    expect_reason(spec, &membership, true, "needs 3 encoder workers, 2 present");
    slots[2] = enter(&membership, "encoder-2", "encoder", NULL);
    int members[RANKS_MAX];
    assert_true(placement_choose(spec, &membership, members).is_complete);
    assert_memory_equal(members, slots, sizeof slots);
    membership_done(&membership);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

static void a_pool_leaves_to_others_what_only_they_can_have(void **state)
{
    (void)state;
    JobSpec *spec = make("{name: llm, pool: l}, {name: audio, pool: a}, {name: vision, pool: v}",
                         "{name: a, role: encoder, selector: {zone: north}}, {name: v, role: "
                         "encoder}, {name: l, role: llm}");
    Membership membership;
    membership_init(&membership, 3000, 1000, seed);
    int llm = enter(&membership, "llm-0", "llm", NULL);
    expect_reason(spec, &membership, true,
                  "needs 1 encoder worker, 0 present; needs 1 encoder worker with the "
                  "selector's labels, 0 present");
    int north = enter(&membership, "encoder-0", "encoder", "north");
    expect_reason(spec, &membership, true,
                  "needs 2 encoder workers with the selector's labels, 1 present");
    int south = enter(&membership, "encoder-1", "encoder", "south");
    int members[RANKS_MAX];
    assert_true(placement_choose(spec, &membership, members).is_complete);
    assert_int_equal(members[0], south); /* vision: encoder-0 comes first, but audio needs it */
    assert_int_equal(members[1], north);
    assert_int_equal(members[2], llm);
    membership_done(&membership);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

/* Two encoder pools, for the random test: each wants a zone or takes any. */
typedef struct Case {
    int num_workers;
    int worker_zone[8]; /* 0: no label */
    int wanted[2];
    int pool_zone[2]; /* 0: any */
} Case;

/* Whether each worker can get a pool or none so that all pools are full: tries all ways, each
 * worker's choice a digit to the base of three. */
static bool is_possible(const Case *tried)
{
    int ways = 1;
    for (int i = 0; i < tried->num_workers; i++) {
        ways *= 3;
    }
    for (int way = 0; way < ways; way++) {
        int got[2] = {0};
        bool is_allowed = true;
        int digits = way;
        for (int i = 0; i < tried->num_workers; i++) {
            int pool = digits % 3 - 1;
            digits /= 3;
            if (pool >= 0) {
                got[pool]++;
                is_allowed = is_allowed && (tried->pool_zone[pool] == 0 ||
                                            tried->pool_zone[pool] == tried->worker_zone[i]);
            }
        }
        if (is_allowed && got[0] == tried->wanted[0] && got[1] == tried->wanted[1]) {
            return true;
        }
    }
    return false;
}

static const char *const zones[] = {NULL, "north", "south"};

static bool place_case(const Case *tried)
{
    char modules[256];
    char pools[256];
    char selector[2][64] = {"", ""};
    for (int p = 0; p < 2; p++) {
        if (tried->pool_zone[p]) {
            snprintf(selector[p], sizeof selector[p], ", selector: {zone: %s}",
                     zones[tried->pool_zone[p]]);
        }
    }
    snprintf(modules, sizeof modules,
             "{name: vision, pool: p0, dp: %d}, {name: audio, pool: p1, tp: %d}, {name: llm, "
             "pool: l}",
             tried->wanted[0], tried->wanted[1]);
    snprintf(pools, sizeof pools,
             "{name: p0, role: encoder%s}, {name: p1, role: encoder%s}, {name: l, role: llm}",
             selector[0], selector[1]);
    JobSpec *spec = make(modules, pools);
    Membership membership;
    membership_init(&membership, 3000, 1000, seed);
    for (int i = 0; i < tried->num_workers; i++) {
        char name[32];
        snprintf(name, sizeof name, "encoder-%d", i);
        assert_int_equal(enter(&membership, name, "encoder", zones[tried->worker_zone[i]]), i);
    }
    enter(&membership, "llm-0", "llm", NULL);
    int members[RANKS_MAX];
    Placement placement = placement_choose(spec, &membership, members);
    unsigned taken = 0;
    for (int rank = 0; placement.is_complete && rank < placement_ranks(spec); rank++) {
        int pool = rank < tried->wanted[0] ? 0 : 1;
        assert_false(taken >> members[rank] & 1);
        taken |= 1U << members[rank];
        if (rank < tried->wanted[0] + tried->wanted[1]) {
            assert_in_range(members[rank], 0, tried->num_workers - 1);
            assert_true(tried->pool_zone[pool] == 0 ||
                        tried->pool_zone[pool] == tried->worker_zone[members[rank]]);
        } else {
            assert_int_equal(members[rank], tried->num_workers);
        }
    }
    assert_int_equal(placement.is_short, !placement.is_complete);
    assert_true(placement.is_complete == (placement.reason[0] == '\0'));
    membership_done(&membership);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
    return placement.is_complete;
}

static void whatever_is_possible_is_placed(void **state)
{
    (void)state;
    print_message("seed %d\n", (int)seed);
    Rng rng = {seed, hash_text("placement")};
    uint64_t drawn = 0;
    int possible = 0;
    for (int i = 0; i < RANDOM_CASES; i++) {
        Case tried = {.num_workers = (int)(rng_bits64(rng, drawn++) % 7)};
        for (int w = 0; w < tried.num_workers; w++) {
            tried.worker_zone[w] = (int)(rng_bits64(rng, drawn++) % 3);
        }
        for (int p = 0; p < 2; p++) {
            tried.wanted[p] = 1 + (int)(rng_bits64(rng, drawn++) % 3);
            tried.pool_zone[p] = (int)(rng_bits64(rng, drawn++) % 3);
        }
        bool expected = is_possible(&tried);
        if (place_case(&tried) != expected) {
            fail_msg("case %d: %s", i, expected ? "not placed" : "placed");
        }
        possible += expected;
    }
    assert_in_range(possible, RANDOM_CASES / 10, RANDOM_CASES * 9 / 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_shared_pool_takes_each_worker_once),
        cmocka_unit_test(pools_of_one_role_share_out_its_workers),
        cmocka_unit_test(a_pool_leaves_to_others_what_only_they_can_have),
        cmocka_unit_test(whatever_is_possible_is_placed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
