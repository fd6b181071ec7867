/* A simulator runs the lists of all modules of random graphs, one action at a time in random order,
 * with the blocking rules of the executor: a receive waits for its message, everything else goes
 * on. No list may get stuck, out of order, or hold more than its window. */
#include "base/rng.h"
#include "train/schedule.h"

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
    MICROBATCHES_MAX = 12,
    SEED = 11
};

/* How far a microbatch is at one module. */
typedef enum Stage {
    STAGE_NEW,
    STAGE_FORWARD_DONE,
    STAGE_HAS_GRADIENT,
    STAGE_BACKWARD_DONE,
} Stage;

typedef struct Simulation {
    ScheduleOptions options;
    ScheduleGraph graph;
    Schedule schedules[SCHEDULE_MODULES_MAX];
    int next[SCHEDULE_MODULES_MAX];
    Stage stages[SCHEDULE_MODULES_MAX][MICROBATCHES_MAX];
    bool rows_sent[SCHEDULE_MODULES_MAX][MICROBATCHES_MAX];
    bool rows_received[SCHEDULE_MODULES_MAX][MICROBATCHES_MAX];
    bool grads_sent[SCHEDULE_MODULES_MAX][MICROBATCHES_MAX];
    int in_flight[SCHEDULE_MODULES_MAX];
    int voted;
    bool reduced[SCHEDULE_MODULES_MAX];
    bool has_voted[SCHEDULE_MODULES_MAX];
    bool updated[SCHEDULE_MODULES_MAX];
} Simulation;

static uint64_t draw(int test, uint64_t what, uint64_t bound)
{
    return rng_below((Rng){SEED, (uint64_t)test}, what, bound);
}

static void make(int test, Simulation *s)
{
    memset(s, 0, sizeof *s);
    int encoders = 1 + (int)draw(test, 0, 3);
    s->graph.num_modules = encoders + 1;
    for (int e = 0; e < encoders; e++) {
        s->graph.modules[e] =
            (ScheduleModule){.feeds = encoders, .is_trained = draw(test, 10 + (uint64_t)e, 3) > 0};
    }
    s->graph.modules[encoders] = (ScheduleModule){.feeds = -1, .is_trained = true};
    s->options = (ScheduleOptions){.graph = &s->graph,
                                   .microbatches = 1 + (int)draw(test, 1, MICROBATCHES_MAX),
                                   .window = 1 + (int)draw(test, 2, 6),
                                   .is_training = draw(test, 3, 4) > 0};
    for (int m = 0; m <= encoders; m++) {
        assert_int_equal(schedule_make(&s->options, m, &s->schedules[m]), STATUS_OK);
    }
}

static bool needs_gradient(const Simulation *s, int module)
{
    return s->options.is_training && s->graph.modules[module].is_trained;
}

static void check_decoder_inputs(const Simulation *s, int module, int m)
{
    for (int e = 0; e < s->graph.num_modules; e++) {
        if (s->graph.modules[e].feeds == module) {
            assert_true(s->rows_received[e][m]);
        }
    }
}

static bool act_encoder(Simulation *s, int module, const Action *action)
{
    int m = action->microbatch;
    Stage *stage = &s->stages[module][m];
    switch (action->kind) {
    case ACTION_ENCODE:
        assert_int_equal(*stage, STAGE_NEW);
        *stage = STAGE_FORWARD_DONE;
        if (needs_gradient(s, module)) {
            s->in_flight[module]++;
            assert_true(s->in_flight[module] <= s->options.window);
        }
        break;
    case ACTION_SEND:
        assert_int_equal(action->module, module);
        assert_true(*stage == STAGE_FORWARD_DONE && !s->rows_sent[module][m]);
        s->rows_sent[module][m] = true;
        break;
    case ACTION_RECV_GRAD:
        if (!s->grads_sent[action->module][m]) {
            return false;
        }
        assert_int_equal(*stage, STAGE_FORWARD_DONE);
        *stage = STAGE_HAS_GRADIENT;
        break;
    case ACTION_ENCODE_BACKWARD:
        assert_int_equal(*stage, STAGE_HAS_GRADIENT);
        *stage = STAGE_BACKWARD_DONE;
        s->in_flight[module]--;
        break;
    default:
        fail_msg("%s is no encoder's action", schedule_action_name(action->kind));
    }
    return true;
}

static bool act_decoder(Simulation *s, int module, const Action *action)
{
    int m = action->microbatch;
    int of = action->module;
    Stage *stage = &s->stages[module][m];
    switch (action->kind) {
    case ACTION_RECV:
        if (!s->rows_sent[of][m]) {
            return false;
        }
        assert_false(s->rows_received[of][m]);
        s->rows_received[of][m] = true;
        break;
    case ACTION_FORWARD:
        assert_int_equal(*stage, STAGE_NEW);
        check_decoder_inputs(s, module, m);
        *stage = STAGE_FORWARD_DONE;
        s->in_flight[module]++;
        assert_int_equal(s->in_flight[module], 1);
        s->in_flight[module] -= !s->options.is_training;
        break;
    case ACTION_BACKWARD:
        assert_int_equal(*stage, STAGE_FORWARD_DONE);
        *stage = STAGE_BACKWARD_DONE;
        s->in_flight[module]--;
        break;
    case ACTION_SEND_GRAD:
        assert_true(s->graph.modules[of].feeds == module && s->graph.modules[of].is_trained);
        assert_true(*stage == STAGE_BACKWARD_DONE && !s->grads_sent[of][m]);
        s->grads_sent[of][m] = true;
        break;
    default:
        fail_msg("%s is no decoder's action", schedule_action_name(action->kind));
    }
    return true;
}

static bool act_step(Simulation *s, int module, const Action *action)
{
    switch (action->kind) {
    case ACTION_REDUCE:
        s->reduced[module] = true;
        break;
    case ACTION_VOTE:
        if (!s->has_voted[module]) {
            s->has_voted[module] = true;
            s->voted++;
        }
        return s->voted == s->graph.num_modules;
    case ACTION_UPDATE:
        assert_true(s->reduced[module] && s->voted == s->graph.num_modules);
        s->updated[module] = true;
        break;
    default:
        fail_msg("%s is no step's action", schedule_action_name(action->kind));
    }
    return true;
}

/* Does one action, or returns false: it has to wait. */
static bool act(Simulation *s, int module, const Action *action)
{
    if (action->microbatch < 0) {
        return act_step(s, module, action);
    }
    if (s->graph.modules[module].feeds >= 0) {
        return act_encoder(s, module, action);
    }
    return act_decoder(s, module, action);
}

static void check_end(const Simulation *s)
{
    for (int module = 0; module < s->graph.num_modules; module++) {
        bool gradient = needs_gradient(s, module);
        for (int m = 0; m < s->options.microbatches; m++) {
            assert_int_equal(s->stages[module][m],
                             gradient ? STAGE_BACKWARD_DONE : STAGE_FORWARD_DONE);
            if (s->graph.modules[module].feeds >= 0) {
                assert_true(s->rows_received[module][m]);
                assert_int_equal(s->grads_sent[module][m], gradient);
            }
        }
        assert_int_equal(s->updated[module], gradient);
        assert_int_equal(s->has_voted[module], s->options.is_training);
        if (gradient) {
            assert_int_equal(s->in_flight[module], 0);
        }
    }
}

/* Random order: a module drawn at a time; stuck when none of them can go on. */
static void simulate(int test, Simulation *s)
{
    int stuck = 0;
    int left = 0;
    for (int m = 0; m < s->graph.num_modules; m++) {
        left += s->schedules[m].num_actions;
    }
    for (uint64_t tick = 0; left > 0; tick++) {
        int start = (int)draw(test, 1000 + tick, (uint64_t)s->graph.num_modules);
        for (stuck = 0; stuck < s->graph.num_modules; stuck++) {
            int m = (start + stuck) % s->graph.num_modules;
            const Schedule *schedule = &s->schedules[m];
            if (s->next[m] < schedule->num_actions && act(s, m, &schedule->actions[s->next[m]])) {
                s->next[m]++;
                left--;
                break;
            }
        }
        if (stuck == s->graph.num_modules) {
            fail_msg("case %d: deadlock with %d actions left", test, left);
        }
    }
}

static void test_random_graphs(void **state)
{
    (void)state;
    static Simulation s;
    for (int test = 0; test < CASES; test++) {
        make(test, &s);
        simulate(test, &s);
        check_end(&s);
        for (int m = 0; m < s.graph.num_modules; m++) {
            schedule_done(&s.schedules[m]);
        }
    }
}

static void check_list(const Schedule *schedule, const char *expected)
{
    char text[512] = "";
    size_t used = 0;
    for (int i = 0; i < schedule->num_actions; i++) {
        const Action *action = &schedule->actions[i];
        int written = snprintf(text + used, sizeof text - used, "%s%s %d", i > 0 ? ", " : "",
                               schedule_action_name(action->kind), action->microbatch);
        used += (size_t)written;
        assert_true(used < sizeof text);
    }
    assert_string_equal(text, expected);
}

/* The lists of a job with an encoder and a decoder, word for word. */
static void test_lists(void **state)
{
    (void)state;
    static const ScheduleGraph graph = {2, {{1, true}, {-1, true}}};
    ScheduleOptions options = {&graph, 3, 2, true};
    Schedule schedule;
    assert_int_equal(schedule_make(&options, 0, &schedule), STATUS_OK);
    check_list(&schedule,
               "ENCODE 0, SEND 0, ENCODE 1, SEND 1, RECV_GRAD 0, ENCODE_BACKWARD 0, ENCODE 2, "
               "SEND 2, RECV_GRAD 1, ENCODE_BACKWARD 1, RECV_GRAD 2, ENCODE_BACKWARD 2, "
               "REDUCE -1, VOTE -1, UPDATE -1");
    schedule_done(&schedule);
    options.microbatches = 1;
    assert_int_equal(schedule_make(&options, 1, &schedule), STATUS_OK);
    check_list(&schedule,
               "RECV 0, FORWARD 0, BACKWARD 0, SEND_GRAD 0, REDUCE -1, VOTE -1, UPDATE -1");
    schedule_done(&schedule);
    options.is_training = false;
    assert_int_equal(schedule_make(&options, 0, &schedule), STATUS_OK);
    check_list(&schedule, "ENCODE 0, SEND 0");
    schedule_done(&schedule);
}

int main(void)
{
    printf("seed %d\n", SEED);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_graphs),
        cmocka_unit_test(test_lists),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
