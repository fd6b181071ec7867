/* The lists of random graphs, of pipelines whose idle time is known, and broken lists, which must
 * be caught. */
#include "base/memory.h"
#include "base/rng.h"
#include "train/simulator.h"

#include <math.h>
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
    CASES = 2000,
    BROKEN_CASES = 700,
    SEED = 11,
    RANKS_MAX = 48,
};

/* Numbers for one test case, drawn one after another. */
typedef struct Dice {
    Rng rng;
    uint64_t next;
} Dice;

static int draw(Dice *dice, int begin, int end)
{
    return begin + (int)rng_below(dice->rng, dice->next++, (uint64_t)(end - begin));
}

/* ---------------------------------------------------------------- random graphs */

typedef struct Case {
    ScheduleGraph graph;
    ScheduleOptions options;
    int num_ranks;
} Case;

static void draw_grid(Dice *dice, ScheduleModule *module)
{
    int *sizes = module->grid.sizes;
    int pp = draw(dice, 1, 5);
    int left = 8 / pp;
    sizes[GRID_AXIS_PP] = pp;
    sizes[GRID_AXIS_TP] = draw(dice, 1, left + 1);
    left /= sizes[GRID_AXIS_TP];
    sizes[GRID_AXIS_CP] = draw(dice, 1, left + 1);
    left /= sizes[GRID_AXIS_CP];
    sizes[GRID_AXIS_DP] = draw(dice, 1, left + 1);
    module->chunks = pp > 1 ? draw(dice, 1, 4) : 1;
}

static double draw_cost(Dice *dice)
{
    return draw(dice, 0, 2) ? draw(dice, 1, 4) : 0.1 + rng_uniform(dice->rng, dice->next++);
}

static void draw_module(Dice *dice, ScheduleModule *module, int decoder)
{
    draw_grid(dice, module);
    int parts = module->grid.sizes[GRID_AXIS_PP] * module->chunks;
    static const int trained[] = {0, 0, 1};
    module->feeds = decoder;
    module->backward_begin = trained[draw(dice, 0, 3)] * draw(dice, 0, parts + 1);
    module->is_trained = module->backward_begin < parts && draw(dice, 0, 4) > 0;
    module->forward_cost = draw_cost(dice);
    module->backward_cost = draw(dice, 0, 2) ? 2 * module->forward_cost : draw_cost(dice);
}

/* Pools of their own one after another, all from rank 0, or anywhere. */
static void place(Dice *dice, Case *test)
{
    int kind = draw(dice, 0, 3);
    int next = 0;
    for (int m = 0; m < test->graph.num_modules; m++) {
        ScheduleModule *module = &test->graph.modules[m];
        int size = grid_size(&module->grid);
        module->grid.first_rank = kind == 0 ? next : kind == 1 ? 0 : draw(dice, 0, 9);
        next += size;
        int end = module->grid.first_rank + size;
        test->num_ranks = end > test->num_ranks ? end : test->num_ranks;
    }
    test->num_ranks += draw(dice, 0, 8) == 0; /* a rank without a module */
    assert_true(test->num_ranks <= RANKS_MAX);
}

static void draw_case(int number, Case *test)
{
    Dice dice = {{SEED, (uint64_t)number}, 0};
    memset(test, 0, sizeof *test);
    test->graph.num_modules = draw(&dice, 2, SCHEDULE_MODULES_MAX + 1);
    int decoder = draw(&dice, 0, test->graph.num_modules);
    bool is_training = draw(&dice, 0, 4) > 0;
    bool any_gradient = false;
    for (int m = 0; m < test->graph.num_modules; m++) {
        ScheduleModule *module = &test->graph.modules[m];
        draw_module(&dice, module, m == decoder ? -1 : decoder);
        any_gradient |= m != decoder &&
                        module->backward_begin < module->grid.sizes[GRID_AXIS_PP] * module->chunks;
    }
    if (any_gradient) {
        test->graph.modules[decoder].backward_begin = 0;
    }
    place(&dice, test);
    test->options = (ScheduleOptions){.graph = &test->graph,
                                      .microbatches = draw(&dice, 1, 21),
                                      .window = draw(&dice, 1, 5),
                                      .is_training = is_training};
}

static void run(const Case *test, int number, SimulatorResult *result)
{
    Status status = simulator_run(&test->options, test->num_ranks, result);
    if (status != STATUS_OK) {
        fail_msg("case %d: %s", number, status_message());
    }
}

static int parts_of(const ScheduleModule *module)
{
    return module->grid.sizes[GRID_AXIS_PP] * module->chunks;
}

/* The most that a chunk may hold, whatever the number of microbatches. */
static int bound(const Case *test, int m)
{
    const ScheduleModule *module = &test->graph.modules[m];
    int stages = module->grid.sizes[GRID_AXIS_PP];
    int ahead = stages > 2 ? stages : 2; /* of a part without a backward */
    int held = 0;
    if (test->options.is_training && module->backward_begin < parts_of(module)) {
        held = stages;
        if (module->feeds >= 0) {
            held = test->options.window;
        } else if (module->chunks > 1) {
            held = 2 * (stages - 1) + (module->chunks - 1) * stages + 1;
        }
    }
    return held > ahead ? held : ahead;
}

static double expected_busy(const Case *test, int m)
{
    const ScheduleModule *module = &test->graph.modules[m];
    int parts = parts_of(module);
    int backwards = test->options.is_training ? parts - module->backward_begin : 0;
    int ranks = grid_size(&module->grid) / module->grid.sizes[GRID_AXIS_PP];
    return (double)ranks * test->options.microbatches *
           (parts * module->forward_cost + backwards * module->backward_cost);
}

static void check_result(const Case *test, int number, const SimulatorResult *result)
{
    for (int m = 0; m < test->graph.num_modules; m++) {
        double busy = expected_busy(test, m);
        /* Sums of at most some ten thousand costs, each off by 1e-16 of the sum. */
        assert_true(fabs(result->modules[m].busy - busy) <= 1e-9 * busy);
        if (result->modules[m].in_flight > bound(test, m)) {
            fail_msg("case %d: module %d has %d in flight, at most %d", number, m,
                     result->modules[m].in_flight, bound(test, m));
        }
    }
}

static void check_slots(const Case *test, int number, const ScheduleSlots *slots)
{
    const ScheduleOptions *options = &test->options;
    for (int m = 0; m < test->graph.num_modules; m++) {
        const ScheduleModule *module = &test->graph.modules[m];
        int microbatches = parts_of(module) * bound(test, m);
        if (module->feeds >= 0) {
            microbatches = options->window;
        }
        bool is_good = slots[m].microbatches <= microbatches && slots[m].rows <= options->window;
        for (int c = 0; c < module->chunks; c++) {
            is_good = is_good && slots[m].chunks[c] <= bound(test, m);
        }
        if (!is_good) {
            fail_msg("case %d: too many slots of module %d", number, m);
        }
    }
}

static Schedule *make_lists(const Case *test)
{
    Schedule *schedules = NULL;
    assert_int_equal(MEMORY_NEW(&schedules, test->num_ranks), STATUS_OK);
    assert_int_equal(schedule_make_all(&test->options, test->num_ranks, schedules), STATUS_OK);
    return schedules;
}

static void free_lists(const Case *test, Schedule *schedules)
{
    for (int r = 0; r < test->num_ranks; r++) {
        schedule_done(&schedules[r]);
    }
    memory_free(schedules);
}

/* With four times the microbatches the same bounds hold. */
static void test_random_graphs(void **state)
{
    (void)state;
    for (int number = 0; number < CASES; number++) {
        Case test;
        draw_case(number, &test);
        for (int i = 0; i < 2; i++) {
            SimulatorResult result;
            run(&test, number, &result);
            check_result(&test, number, &result);
            Schedule *schedules = make_lists(&test);
            for (int r = 0; r < test.num_ranks; r++) {
                check_slots(&test, number, schedules[r].slots);
            }
            free_lists(&test, schedules);
            test.options.microbatches *= 4;
        }
    }
}

/* The list of one rank is that of all ranks' lists. */
static void test_one_rank(void **state)
{
    (void)state;
    for (int number = 0; number < 50; number++) {
        Case test;
        draw_case(number, &test);
        Schedule *schedules = make_lists(&test);
        Schedule schedule;
        int rank = number % test.num_ranks;
        assert_int_equal(schedule_make(&test.options, rank, &schedule), STATUS_OK);
        assert_int_equal(schedule.num_actions, schedules[rank].num_actions);
        for (int i = 0; i < schedule.num_actions; i++) {
            assert_memory_equal(&schedule.actions[i], &schedules[rank].actions[i], sizeof(Action));
        }
        assert_memory_equal(schedule.slots, schedules[rank].slots, sizeof schedule.slots);
        schedule_done(&schedule);
        free_lists(&test, schedules);
    }
}

/* ---------------------------------------------------------------- known idle times */

static void pipeline(Case *test, int stages, int chunks, int microbatches)
{
    memset(test, 0, sizeof *test);
    test->graph.num_modules = 1;
    test->graph.modules[0] = (ScheduleModule){.grid = {0, {1, 1, 1, stages}},
                                              .chunks = chunks,
                                              .feeds = -1,
                                              .is_trained = true,
                                              .forward_cost = 1,
                                              .backward_cost = 2};
    test->options = (ScheduleOptions){&test->graph, microbatches, 1, true};
    test->num_ranks = stages;
}

/* Stage 0 does the same work as all others and waits for the last backward: (stages - 1) * (forward
 * + backward) idle, the least that there can be. So the bubble is (S - 1) / (V M + S - 1).
 * Interleaved with M not a multiple of S, the last group waits at most for what it lacks, in all
 * chunks but one. */
static void test_bubble(void **state)
{
    (void)state;
    for (int i = 0; i < 8 * 4 * 40; i++) {
        int stages = 1 + i / 160;
        int chunks = 1 + i / 40 % 4;
        int microbatches = 1 + i % 40;
        if (stages == 1 && chunks > 1) {
            continue;
        }
        Case test;
        SimulatorResult result;
        pipeline(&test, stages, chunks, microbatches);
        run(&test, i, &result);
        int lacking = (stages - microbatches % stages) % stages;
        double work = chunks * microbatches;
        double least = stages - 1;
        double most = least + (chunks - 1) * lacking;
        /* The costs are whole numbers: rounding is all that may differ. */
        assert_true(result.bubble >= least / (work + least) - 1e-12);
        if (result.bubble > most / (work + most) + 1e-12) {
            fail_msg("S %d V %d M %d: bubble %.6f, expected %.6f to %.6f", stages, chunks,
                     microbatches, result.bubble, least / (work + least), most / (work + most));
        }
    }
}

/* A decoder of `stages` and an encoder whose one stage lies across all of them. */
static void wide_encoder(Case *test, int stages, int microbatches)
{
    pipeline(test, stages, 1, microbatches);
    test->graph.num_modules = 2;
    test->graph.modules[1] = (ScheduleModule){.grid = {0, {1, 1, stages, 1}},
                                              .chunks = 1,
                                              .feeds = 0,
                                              .is_trained = true,
                                              .forward_cost = 1,
                                              .backward_cost = 2};
    test->options.window = stages;
}

/* The decoder still runs as a pipeline: its ranks do 8 * (1 + 2) for the encoder and 8 * (4 + 8)
 * for the decoder; one microbatch at a time would take 8 * (3 + 48). */
static void test_wide_encoder(void **state)
{
    (void)state;
    Case test;
    SimulatorResult result;
    wide_encoder(&test, 4, 8);
    test.graph.modules[0].forward_cost = 4;
    test.graph.modules[0].backward_cost = 8;
    run(&test, 0, &result);
    assert_int_equal(result.modules[1].in_flight, 4);
    printf("trained encoder across a pipeline: %g\n", result.makespan);
    assert_true(result.makespan < 0.5 * 8 * (3 + 48));
}

/* A frozen one, whose ranks are kept free for the rows that the decoder waits for, does not make
 * the pipeline idle any longer than it is anyway: (stages - 1) * (1 + 2). */
static void test_wide_frozen_encoder(void **state)
{
    (void)state;
    Case test;
    SimulatorResult result;
    wide_encoder(&test, 2, 32);
    test.graph.modules[1].is_trained = false;
    test.graph.modules[1].backward_begin = 1;
    run(&test, 0, &result);
    printf("frozen encoder across a pipeline: %g\n", result.makespan);
    assert_true(result.makespan <= 32 * (1 + 3) + 3);
}

/* ---------------------------------------------------------------- broken lists */

static void remove_action(Schedule *schedule, int at)
{
    schedule->num_actions--;
    memmove(&schedule->actions[at], &schedule->actions[at + 1],
            (size_t)(schedule->num_actions - at) * sizeof(Action));
}

/* The next action of the same kind, module and chunk; -1: none. */
static int find_like(const Schedule *schedule, int at)
{
    const Action *action = &schedule->actions[at];
    for (int i = at + 1; i < schedule->num_actions; i++) {
        const Action *other = &schedule->actions[i];
        if (other->kind == action->kind && other->module == action->module &&
            other->chunk == action->chunk) {
            return i;
        }
    }
    return -1;
}

static void swap_actions(Schedule *schedule, int a, int b)
{
    Action action = schedule->actions[a];
    schedule->actions[a] = schedule->actions[b];
    schedule->actions[b] = action;
}

/* One slot less for every chunk and everywhere; false: a chunk has but one. */
static bool take_slots(const Case *test, Schedule *schedules, int m)
{
    const ScheduleModule *module = &test->graph.modules[m];
    for (int i = 0; i < grid_size(&module->grid); i++) {
        Schedule *schedule = &schedules[module->grid.first_rank + i];
        for (int c = 0; c < module->chunks; c++) {
            if (--schedule->slots[m].chunks[c] < 1) {
                return false;
            }
        }
        for (int a = 0; a < schedule->num_actions; a++) {
            Action *action = &schedule->actions[a];
            bool is_inner = action->kind != ACTION_SEND && action->kind != ACTION_RECV &&
                            action->kind != ACTION_SEND_GRAD && action->kind != ACTION_RECV_GRAD;
            if (is_inner && action->module == m && action->microbatch >= 0) {
                action->slot = action->microbatch % schedule->slots[m].chunks[action->chunk];
            }
        }
    }
    return true;
}

/* Breaks the lists; false: this fault is not possible there. */
static bool break_lists(const Case *test, Dice *dice, int fault, Schedule *schedules)
{
    int rank = draw(dice, 0, test->num_ranks);
    Schedule *schedule = &schedules[rank];
    if (schedule->num_actions == 0) {
        return false;
    }
    int at = draw(dice, 0, schedule->num_actions);
    Action *action = &schedule->actions[at];
    int like = find_like(schedule, at);
    int m = draw(dice, 0, test->graph.num_modules);
    switch (fault) {
    case 0: /* a send and all else that others wait for, too */
        remove_action(schedule, at);
        return true;
    case 1:
        if (like >= 0) {
            swap_actions(schedule, at, like);
        }
        return like >= 0;
    case 2: /* a work before what it needs, or after what needs it */
        if (at + 1 < schedule->num_actions && action[0].module == action[1].module &&
            action[0].microbatch == action[1].microbatch && action[0].chunk == action[1].chunk) {
            swap_actions(schedule, at, at + 1);
            return true;
        }
        return false;
    case 3:
        action->microbatch++;
        return true;
    case 4: /* all held until their backward: one slot less is one too few */
        return test->options.is_training && test->graph.modules[m].backward_begin == 0 &&
               take_slots(test, schedules, m);
    case 5: /* and so of the inputs */
        return schedule->slots[m].microbatches-- > 1;
    default:
        action->slot++;
        return action->microbatch >= 0;
    }
}

static void test_broken_lists(void **state)
{
    (void)state;
    enum {
        FAULTS = 7
    };
    int caught[FAULTS] = {0};
    for (int number = 0; number < BROKEN_CASES; number++) {
        Case test;
        SimulatorResult result;
        Dice dice = {{SEED + 1, (uint64_t)number}, 0};
        int fault = number % FAULTS;
        draw_case(number, &test);
        Schedule *schedules = make_lists(&test);
        assert_int_equal(simulator_run_lists(&test.options, schedules, test.num_ranks, &result),
                         STATUS_OK);
        if (break_lists(&test, &dice, fault, schedules)) {
            if (simulator_run_lists(&test.options, schedules, test.num_ranks, &result) !=
                STATUS_CONFLICT) {
                fail_msg("case %d: fault %d has not been noticed", number, fault);
            }
            caught[fault]++;
        }
        free_lists(&test, schedules);
    }
    for (int f = 0; f < FAULTS; f++) {
        printf("fault %d: %d caught\n", f, caught[f]);
        assert_true(caught[f] >= 10);
    }
}

/* Two encoders with tp 2 on the same ranks, and a decoder on a third. */
static void two_encoders(Case *test)
{
    memset(test, 0, sizeof *test);
    ScheduleModule encoder = {.grid = {0, {2, 1, 1, 1}},
                              .chunks = 1,
                              .feeds = 2,
                              .is_trained = true,
                              .forward_cost = 1,
                              .backward_cost = 2};
    test->graph.num_modules = 3;
    test->graph.modules[0] = encoder;
    test->graph.modules[1] = encoder;
    test->graph.modules[2] = encoder;
    test->graph.modules[2].grid = (Grid){2, {1, 1, 1, 1}};
    test->graph.modules[2].feeds = -1;
    test->options = (ScheduleOptions){&test->graph, 4, 3, true};
    test->num_ranks = 3;
}

/* Two ranks that take the work of two modules in different orders wait for each other. */
static void test_crossed_order(void **state)
{
    (void)state;
    Case test;
    SimulatorResult result;
    two_encoders(&test);
    Schedule *schedules = make_lists(&test);
    const Action *actions = schedules[1].actions;
    assert_true(actions[0].kind == ACTION_ENCODE && actions[0].module == 0);
    assert_true(actions[2].kind == ACTION_ENCODE && actions[2].module == 1);
    swap_actions(&schedules[1], 0, 2);
    swap_actions(&schedules[1], 1, 3);
    assert_int_equal(simulator_run_lists(&test.options, schedules, 3, &result), STATUS_CONFLICT);
    assert_non_null(strstr(status_message(), "rank 0"));
    assert_non_null(strstr(status_message(), "waits for ever"));
    free_lists(&test, schedules);
}

/* Lists that were made for a larger window hold more than a smaller one allows. */
static void test_too_much_in_flight(void **state)
{
    (void)state;
    Case test;
    SimulatorResult result;
    two_encoders(&test);
    Schedule *schedules = make_lists(&test);
    test.options.window = 1;
    assert_int_equal(simulator_run_lists(&test.options, schedules, 3, &result), STATUS_CONFLICT);
    assert_non_null(strstr(status_message(), "more microbatches in flight"));
    free_lists(&test, schedules);
}

int main(void)
{
    printf("seed %d\n", SEED);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_graphs),
        cmocka_unit_test(test_one_rank),
        cmocka_unit_test(test_bubble),
        cmocka_unit_test(test_wide_encoder),
        cmocka_unit_test(test_wide_frozen_encoder),
        cmocka_unit_test(test_broken_lists),
        cmocka_unit_test(test_crossed_order),
        cmocka_unit_test(test_too_much_in_flight),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
