#include "base/clock.h"
#include "base/memory.h"
#include "reshard/plan.h"
#include "reshard/testing.h"

#include <malloc.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    NUM_PAIRS = 8000,
    SEED = 20240607,
};

/* What a plan does, element by element. Sums are of small whole numbers: exact. */
typedef struct Simulation {
    const Layout *source;
    const Layout *destination;
    const Plan *plan;
    TestingMap from;
    TestingMap to;
    float reduced[TESTING_RANKS_MAX][TESTING_ELEMENTS_MAX];
    bool is_reduced[TESTING_RANKS_MAX][TESTING_ELEMENTS_MAX];
    float written[TESTING_RANKS_MAX][TESTING_ELEMENTS_MAX];
    int num_written[TESTING_RANKS_MAX][TESTING_ELEMENTS_MAX];
    bool is_crossed[TESTING_RANKS_MAX][TESTING_ELEMENTS_MAX];
    int crossed_from[TESTING_ELEMENTS_MAX]; /* -1: not crossed */
    int crossed_to[TESTING_ELEMENTS_MAX];
} Simulation;

/* The place that the plan states for the k-th element of the box. */
static int64_t stated_place(const Layout *layout, const PlanTransfer *transfer,
                            const PlanPlace *place, int k)
{
    if (place->is_contiguous) {
        return place->offset + k;
    }
    const Box *outer = &layout->pieces[place->piece].box;
    int64_t at = 0;
    int64_t stride = 1;
    int64_t rest = k;
    for (int d = LAYOUT_DIMS_MAX - 1; d >= 0; d--) {
        int64_t length = range_count(transfer->box.ranges[d]);
        at += rest % length * stride;
        rest /= length;
        stride *= range_count(outer->ranges[d]);
    }
    return place->offset + at;
}

static void move_element(Simulation *sim, PlanPhase phase, const PlanTransfer *t, int element)
{
    int a = t->source;
    int b = t->destination;
    if (phase == PLAN_PHASE_REDUCE) {
        assert_true(sim->is_reduced[b][element] == t->accumulates);
        sim->reduced[b][element] += testing_value(sim->source, a, element);
        sim->is_reduced[b][element] = true;
        return;
    }
    float value = 0;
    if (phase == PLAN_PHASE_SPREAD) {
        assert_true(sim->is_crossed[a][element]);
        value = sim->written[a][element];
    } else if (sim->source->copies == LAYOUT_COPIES_PARTIAL) {
        assert_true(sim->is_reduced[a][element]);
        value = sim->reduced[a][element];
    } else {
        value = testing_value(sim->source, a, element);
    }
    sim->written[b][element] = value;
    sim->num_written[b][element]++;
    if (phase == PLAN_PHASE_CROSS) {
        assert_int_equal(sim->crossed_from[element], -1);
        sim->is_crossed[b][element] = true;
        sim->crossed_from[element] = a;
        sim->crossed_to[element] = b;
    }
}

static void check_groups(const Simulation *sim, PlanPhase phase, const PlanTransfer *t)
{
    bool is_from_source = sim->from.is_in_group[t->source];
    bool is_from_destination = sim->to.is_in_group[t->source];
    switch (phase) {
    case PLAN_PHASE_REDUCE:
        assert_true(is_from_source && sim->from.is_in_group[t->destination]);
        assert_int_equal(sim->source->copies, LAYOUT_COPIES_PARTIAL);
        break;
    case PLAN_PHASE_WITHIN:
        assert_true(is_from_source && is_from_destination);
        break;
    case PLAN_PHASE_CROSS:
        assert_true(is_from_source && !is_from_destination);
        break;
    default:
        assert_true(is_from_destination && t->source != t->destination);
    }
    assert_true(phase == PLAN_PHASE_REDUCE || sim->to.is_in_group[t->destination]);
}

static int compare_transfers(const PlanTransfer *a, const PlanTransfer *b)
{
    int by_source = (a->source > b->source) - (a->source < b->source);
    int by_destination = (a->destination > b->destination) - (a->destination < b->destination);
    return by_source ? by_source : by_destination;
}

static void simulate_phase(Simulation *sim, PlanPhase phase)
{
    const Layout *from_layout = phase == PLAN_PHASE_SPREAD ? sim->destination : sim->source;
    const Layout *to_layout = phase == PLAN_PHASE_REDUCE ? sim->source : sim->destination;
    const TestingMap *from = phase == PLAN_PHASE_SPREAD ? &sim->to : &sim->from;
    const TestingMap *to = phase == PLAN_PHASE_REDUCE ? &sim->from : &sim->to;
    int32_t elements[TESTING_ELEMENTS_MAX];
    for (int i = 0; i < sim->plan->num_transfers[phase]; i++) {
        const PlanTransfer *t = &sim->plan->transfers[phase][i];
        assert_true(i == 0 || compare_transfers(t - 1, t) <= 0);
        check_groups(sim, phase, t);
        int num = testing_enumerate(sim->source, &t->box, elements);
        assert_int_equal(num, t->count);
        assert_true(num > 0);
        for (int k = 0; k < num; k++) {
            /* The plan's offsets are where enumeration says that the element lies. */
            assert_int_equal(from->local[t->source][elements[k]],
                             stated_place(from_layout, t, &t->from, k));
            assert_int_equal(to->local[t->destination][elements[k]],
                             stated_place(to_layout, t, &t->to, k));
            move_element(sim, phase, t, elements[k]);
        }
    }
}

static void check_values(const Simulation *sim)
{
    for (int rank = 0; rank < TESTING_RANKS_MAX; rank++) {
        for (int e = 0; e < sim->to.num_elements; e++) {
            bool is_needed = sim->to.local[rank][e] >= 0;
            assert_int_equal(sim->num_written[rank][e], is_needed);
            assert_true(!is_needed ||
                        sim->written[rank][e] == testing_wanted(sim->source, &sim->from, e));
        }
    }
}

static void check_minimum(const Simulation *sim)
{
    int64_t minimum = 0;
    for (int e = 0; e < sim->to.num_elements; e++) {
        bool is_needed = false;
        bool is_in_group = false;
        for (int rank = 0; rank < TESTING_RANKS_MAX; rank++) {
            is_needed = is_needed || sim->to.local[rank][e] >= 0;
            is_in_group =
                is_in_group || (sim->to.is_in_group[rank] && sim->from.local[rank][e] >= 0);
        }
        minimum += is_needed && !is_in_group;
    }
    assert_int_equal(plan_minimum_count(sim->source, sim->destination), minimum);
    assert_int_equal(plan_moved_count(sim->plan, PLAN_PHASE_CROSS), minimum);
}

static unsigned holders_mask(const TestingMap *map, int element)
{
    unsigned mask = 0;
    for (int rank = 0; rank < TESTING_RANKS_MAX; rank++) {
        mask |= map->local[rank][element] >= 0 ? 1U << rank : 0;
    }
    return mask;
}

/* |share - total / ranks| <= one slice: a quarter of the smallest fair share when cut between
 * rows, else the slice of the longest dim of a box of the class, which is at most total^((dims -
 * 1) / dims); plus one for whole elements. */
static void check_share(const int *counts, unsigned mask, int total, double slack)
{
    int ranks = __builtin_popcount(mask);
    for (int rank = 0; rank < TESTING_RANKS_MAX; rank++) {
        if (mask & 1U << rank) {
            assert_true(fabs(counts[rank] - (double)total / ranks) <= slack);
        } else {
            assert_int_equal(counts[rank], 0);
        }
    }
}

static void check_balance(const Simulation *sim)
{
    bool is_done[TESTING_ELEMENTS_MAX] = {false};
    for (int first = 0; first < sim->to.num_elements; first++) {
        if (is_done[first] || sim->crossed_from[first] < 0) {
            continue;
        }
        unsigned sources = holders_mask(&sim->from, first);
        unsigned destinations = holders_mask(&sim->to, first);
        int sent[TESTING_RANKS_MAX] = {0};
        int received[TESTING_RANKS_MAX] = {0};
        int total = 0;
        for (int e = first; e < sim->to.num_elements; e++) {
            if (holders_mask(&sim->from, e) == sources &&
                holders_mask(&sim->to, e) == destinations) {
                is_done[e] = true;
                total++;
                sent[sim->crossed_from[e]]++;
                received[sim->crossed_to[e]]++;
            }
        }
        int most = __builtin_popcount(sources) > __builtin_popcount(destinations)
                       ? __builtin_popcount(sources)
                       : __builtin_popcount(destinations);
        double dims = sim->source->num_dims;
        double slack =
            fmax((double)total / most / PLAN_SHARE_SLICES_MIN, pow(total, (dims - 1) / dims)) + 1;
        check_share(sent, sources, total, slack);
        check_share(received, destinations, total, slack);
    }
}

static bool is_held(const TestingMap *from, const TestingMap *to)
{
    for (int e = 0; e < to->num_elements; e++) {
        if (holders_mask(to, e) && !holders_mask(from, e)) {
            return false;
        }
    }
    return true;
}

static void simulate(Simulation *sim)
{
    for (int phase = 0; phase < PLAN_PHASE_COUNT; phase++) {
        simulate_phase(sim, (PlanPhase)phase);
    }
    check_values(sim);
    check_minimum(sim);
    check_balance(sim);
}

static void prepare(Simulation *sim, const Layout *source, const Layout *destination,
                    const Plan *plan)
{
    memset(sim, 0, sizeof *sim);
    sim->source = source;
    sim->destination = destination;
    sim->plan = plan;
    testing_map(source, &sim->from);
    testing_map(destination, &sim->to);
    memset(sim->crossed_from, 0xff, sizeof sim->crossed_from);
    memset(sim->crossed_to, 0xff, sizeof sim->crossed_to);
}

static void assert_plans_equal(const Plan *a, const Plan *b)
{
    assert_true(a->digest == b->digest);
    for (int phase = 0; phase < PLAN_PHASE_COUNT; phase++) {
        assert_int_equal(a->num_transfers[phase], b->num_transfers[phase]);
        for (int i = 0; i < a->num_transfers[phase]; i++) {
            const PlanTransfer *x = &a->transfers[phase][i];
            const PlanTransfer *y = &b->transfers[phase][i];
            assert_int_equal(compare_transfers(x, y), 0);
            assert_memory_equal(&x->box, &y->box, sizeof x->box);
            assert_int_equal(x->from.offset, y->from.offset);
            assert_int_equal(x->to.offset, y->to.offset);
            assert_int_equal(x->count, y->count);
            assert_int_equal(x->accumulates, y->accumulates);
        }
    }
}

/* Groups apart, both replicated: the way back crosses the same elements between the same ranks.
 * Elements that only one side holds have no way back. Returns whether it applied. */
static bool check_transpose(const Simulation *there, Simulation *back, Plan *plan)
{
    for (int rank = 0; rank < TESTING_RANKS_MAX; rank++) {
        if (there->from.is_in_group[rank] && there->to.is_in_group[rank]) {
            return false;
        }
    }
    if (there->source->copies != LAYOUT_COPIES_REPLICATE || !is_held(&there->to, &there->from)) {
        return false;
    }
    assert_int_equal(plan_make(there->destination, there->source, plan), STATUS_OK);
    prepare(back, there->destination, there->source, plan);
    simulate(back);
    for (int e = 0; e < there->to.num_elements; e++) {
        assert_int_equal(there->crossed_from[e], back->crossed_to[e]);
        assert_int_equal(there->crossed_to[e], back->crossed_from[e]);
    }
    return true;
}

static void test_random_pairs(void **state)
{
    (void)state;
    print_message("seed %d\n", SEED);
    Simulation *sims = NULL;
    assert_int_equal(MEMORY_NEW(&sims, 2), STATUS_OK);
    assert_non_null(sims);
    Plan reused = {0};
    Plan back = {0};
    Layout source = {0};
    Layout destination = {0};
    int num_valid = 0;
    int num_transposed = 0;
    for (int i = 0; i < NUM_PAIRS; i++) {
        TestingRng random = {.rng = {.seed = SEED, .stream = (uint64_t)i}};
        testing_pair(&random, TESTING_RANKS_MAX, &source, &destination);
        Status status = plan_make(&source, &destination, &reused);
        prepare(&sims[0], &source, &destination, &reused);
        if (!is_held(&sims[0].from, &sims[0].to)) {
            assert_int_equal(status, STATUS_INVALID);
            continue;
        }
        assert_int_equal(status, STATUS_OK);
        num_valid++;
        simulate(&sims[0]);
        Plan fresh = {0};
        assert_int_equal(plan_make(&source, &destination, &fresh), STATUS_OK);
        assert_plans_equal(&reused, &fresh);
        plan_done(&fresh);
        num_transposed += check_transpose(&sims[0], &sims[1], &back);
    }
    print_message("%d pairs, %d valid, %d transposed\n", NUM_PAIRS, num_valid, num_transposed);
    assert_true(num_valid > NUM_PAIRS * 6 / 10);
    assert_true(num_transposed > NUM_PAIRS / 8);
    plan_done(&reused);
    plan_done(&back);
    layout_done(&source);
    layout_done(&destination);
    memory_free(sims);
}

static void assert_transfer(const PlanTransfer *t, int source, int destination, Range rows)
{
    assert_int_equal(t->source, source);
    assert_int_equal(t->destination, destination);
    assert_int_equal(t->box.ranges[0].begin, rows.begin);
    assert_int_equal(t->box.ranges[0].end, rows.end);
}

/* Two encoder ranks with the same rows, two LLM ranks that need them: halves cross, then change
 * sides. Three items, one transfer each. */
static void test_halves(void **state)
{
    (void)state;
    const int64_t dims[] = {13, 8};
    Layout source;
    Layout destination;
    layout_init(&source, 2, dims, LAYOUT_COPIES_REPLICATE);
    layout_init(&destination, 2, dims, LAYOUT_COPIES_REPLICATE);
    static const Range items[] = {{0, 5}, {5, 6}, {6, 13}};
    for (int i = 0; i < 3; i++) {
        for (int rank = 0; rank < 2; rank++) {
            assert_int_equal(layout_add_rows(&source, rank, items[i]), STATUS_OK);
            assert_int_equal(layout_add_rows(&destination, rank + 2, items[i]), STATUS_OK);
        }
    }
    Plan plan = {0};
    assert_int_equal(plan_make(&source, &destination, &plan), STATUS_OK);
    assert_int_equal(plan.num_transfers[PLAN_PHASE_REDUCE], 0);
    assert_int_equal(plan.num_transfers[PLAN_PHASE_WITHIN], 0);
    assert_int_equal(plan.num_transfers[PLAN_PHASE_CROSS], 2);
    assert_int_equal(plan.num_transfers[PLAN_PHASE_SPREAD], 2);
    assert_transfer(&plan.transfers[PLAN_PHASE_CROSS][0], 0, 2, (Range){0, 7});
    assert_transfer(&plan.transfers[PLAN_PHASE_CROSS][1], 1, 3, (Range){7, 13});
    assert_transfer(&plan.transfers[PLAN_PHASE_SPREAD][0], 2, 3, (Range){0, 7});
    assert_transfer(&plan.transfers[PLAN_PHASE_SPREAD][1], 3, 2, (Range){7, 13});
    plan_done(&plan);
    layout_done(&source);
    layout_done(&destination);
}

static void test_empty_and_wrong(void **state)
{
    (void)state;
    const int64_t none[] = {0, 8};
    const int64_t dims[] = {4, 8};
    Layout a;
    Layout b;
    layout_init(&a, 2, none, LAYOUT_COPIES_REPLICATE);
    layout_init(&b, 2, none, LAYOUT_COPIES_REPLICATE);
    assert_int_equal(layout_add_rows(&a, 0, (Range){0, 0}), STATUS_OK);
    Plan plan = {0};
    assert_int_equal(plan_make(&a, &b, &plan), STATUS_OK);
    for (int phase = 0; phase < PLAN_PHASE_COUNT; phase++) {
        assert_int_equal(plan.num_transfers[phase], 0);
    }
    assert_int_equal(plan_minimum_count(&a, &b), 0);

    layout_reset(&a, 2, dims, LAYOUT_COPIES_REPLICATE);
    assert_int_equal(plan_make(&a, &b, &plan), STATUS_INVALID);
    assert_non_null(strstr(status_message(), "dim 0"));
    layout_reset(&b, 2, dims, LAYOUT_COPIES_REPLICATE);
    assert_int_equal(layout_add_rows(&a, 0, (Range){0, 2}), STATUS_OK);
    assert_int_equal(layout_add_rows(&b, 5, (Range){1, 4}), STATUS_OK);
    assert_int_equal(plan_make(&a, &b, &plan), STATUS_INVALID);
    assert_non_null(strstr(status_message(), "[2:4, 0:8] is needed by rank 5"));
    assert_int_equal(layout_add_rows(&a, 0, (Range){1, 4}), STATUS_OK);
    assert_int_equal(plan_make(&a, &b, &plan), STATUS_INVALID);
    assert_non_null(strstr(status_message(), "overlap"));
    layout_reset(&b, 2, dims, LAYOUT_COPIES_PARTIAL);
    assert_int_equal(plan_make(&a, &b, &plan), STATUS_INVALID);
    assert_non_null(strstr(status_message(), "PARTIAL"));
    layout_reset(&b, 1, dims, LAYOUT_COPIES_REPLICATE);
    assert_int_equal(plan_make(&a, &b, &plan), STATUS_INVALID);
    plan_done(&plan);
    layout_done(&a);
    layout_done(&b);
}

/* A boundary of 64 items: encoder ranks 0..7, LLM ranks 8..15. Items have 49 rows or so; the
 * LLM's order is another. */
static void make_boundary(Layout *source, Layout *destination, int encoder_tp, int llm_tp, int step)
{
    enum {
        ITEMS = 64
    };
    int64_t begins[ITEMS + 1] = {0};
    for (int i = 0; i < ITEMS; i++) {
        begins[i + 1] = begins[i] + 40 + (i * 7 + step) % 19;
    }
    const int64_t dims[] = {begins[ITEMS], 512};
    layout_reset(source, 2, dims, LAYOUT_COPIES_REPLICATE);
    layout_reset(destination, 2, dims, LAYOUT_COPIES_REPLICATE);
    for (int i = 0; i < ITEMS; i++) {
        int other = (i * 29 + step) % ITEMS;
        for (int t = 0; t < encoder_tp; t++) {
            int rank = i * encoder_tp % 8 + t;
            assert_int_equal(layout_add_rows(source, rank, (Range){begins[i], begins[i + 1]}),
                             STATUS_OK);
        }
        for (int t = 0; t < llm_tp; t++) {
            int rank = 8 + (other / 4 * llm_tp) % 8 + t;
            assert_int_equal(
                layout_add_rows(destination, rank, (Range){begins[other], begins[other + 1]}),
                STATUS_OK);
        }
    }
}

static void test_time_and_memory(void **state)
{
    (void)state;
    static const int widths[][2] = {{1, 1}, {1, 4}, {2, 4}, {8, 8}};
    Layout source = {0};
    Layout destination = {0};
    Plan plan = {0};
    for (int w = 0; w < 4; w++) {
        size_t used = 0;
        int64_t build_ns = INT64_MAX;
        int64_t best_ns = INT64_MAX;
        int64_t bound_ns = INT64_MAX;
        for (int step = 0; step < 60; step++) {
            int64_t begin = clock_now_ns();
            make_boundary(&source, &destination, widths[w][0], widths[w][1], step);
            int64_t built = clock_now_ns();
            assert_int_equal(plan_make(&source, &destination, &plan), STATUS_OK);
            int64_t end = clock_now_ns();
            int64_t minimum = plan_minimum_count(&source, &destination);
            int64_t bounded = clock_now_ns();
            assert_int_equal(minimum, plan_moved_count(&plan, PLAN_PHASE_CROSS));
            build_ns = built - begin < build_ns ? built - begin : build_ns;
            best_ns = end - built < best_ns ? end - built : best_ns;
            bound_ns = bounded - end < bound_ns ? bounded - end : bound_ns;
            if (step == 40) {
                used = mallinfo2().uordblks;
            }
        }
        assert_int_equal(mallinfo2().uordblks, used); /* nothing allocated once warm */
        print_message(
            "64 items, encoder tp %d x dp %d, llm tp %d x dp %d: layouts %lld us, plan %lld us, "
            "bound %lld us; transfers: cross %d, spread %d\n",
            widths[w][0], 8 / widths[w][0], widths[w][1], 8 / widths[w][1],
            (long long)build_ns / 1000, (long long)best_ns / 1000, (long long)bound_ns / 1000,
            plan.num_transfers[PLAN_PHASE_CROSS], plan.num_transfers[PLAN_PHASE_SPREAD]);
    }
    plan_done(&plan);
    layout_done(&source);
    layout_done(&destination);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_halves),
        cmocka_unit_test(test_empty_and_wrong),
        cmocka_unit_test(test_random_pairs),
        cmocka_unit_test(test_time_and_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
