/* Lists word for word, where they are known by heart; what holds for all lists is checked in
 * simulator_test.c. */
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

static const ScheduleGraph two_pools = {2,
                                        {{.grid = {0, {1, 1, 1, 1}},
                                          .chunks = 1,
                                          .feeds = 1,
                                          .is_trained = true,
                                          .forward_cost = 1,
                                          .backward_cost = 2},
                                         {.grid = {1, {1, 1, 1, 1}},
                                          .chunks = 1,
                                          .feeds = -1,
                                          .is_trained = true,
                                          .forward_cost = 1,
                                          .backward_cost = 2}}};

/* "FORWARD 0", of another chunk than the first "FORWARD 1.0"; with more than one module the module
 * first: "m1 FORWARD 0". */
static void check_list(const ScheduleOptions *options, int rank, bool has_modules,
                       const char *expected)
{
    char text[2048] = "";
    size_t used = 0;
    Schedule schedule;
    assert_int_equal(schedule_make(options, rank, &schedule), STATUS_OK);
    for (int i = 0; i < schedule.num_actions; i++) {
        const Action *action = &schedule.actions[i];
        char module[16] = "";
        char chunk[16] = "";
        snprintf(module, sizeof module, "m%d ", action->module);
        snprintf(chunk, sizeof chunk, "%d.", action->chunk);
        int written = snprintf(text + used, sizeof text - used, "%s%s%s %s%d", i > 0 ? ", " : "",
                               has_modules ? module : "", schedule_action_name(action->kind),
                               action->chunk > 0 ? chunk : "", action->microbatch);
        used += (size_t)written;
        assert_true(used < sizeof text);
    }
    assert_string_equal(text, expected);
    schedule_done(&schedule);
}

static void test_two_pools(void **state)
{
    (void)state;
    ScheduleOptions options = {&two_pools, 3, 2, true};
    check_list(&options, 0, false,
               "ENCODE 0, SEND 0, ENCODE 1, SEND 1, RECV_GRAD 0, ENCODE_BACKWARD 0, ENCODE 2, "
               "SEND 2, RECV_GRAD 1, ENCODE_BACKWARD 1, RECV_GRAD 2, ENCODE_BACKWARD 2, "
               "REDUCE -1, VOTE -1, UPDATE -1");
    options.microbatches = 1;
    check_list(&options, 1, false,
               "RECV 0, FORWARD 0, BACKWARD 0, SEND_GRAD 0, REDUCE -1, VOTE -1, UPDATE -1");
    check_list(&options, 2, false, "VOTE -1");
    options.is_training = false;
    check_list(&options, 0, false, "ENCODE 0, SEND 0");
    check_list(&options, 1, false, "RECV 0, FORWARD 0");
    check_list(&options, 2, false, "");
}

/* Nothing comes back to a frozen encoder, and it runs ahead of the decoder by the window. */
static void test_frozen_encoder(void **state)
{
    (void)state;
    ScheduleGraph graph = two_pools;
    graph.modules[0].is_trained = false;
    graph.modules[0].backward_begin = 1;
    ScheduleOptions options = {&graph, 2, 1, true};
    check_list(&options, 0, false, "ENCODE 0, SEND 0, ENCODE 1, SEND 1, VOTE -1");
    check_list(&options, 1, false,
               "RECV 0, FORWARD 0, BACKWARD 0, RECV 1, FORWARD 1, BACKWARD 1, REDUCE -1, VOTE -1, "
               "UPDATE -1");
    Schedule schedule;
    assert_int_equal(schedule_make(&options, 1, &schedule), STATUS_OK);
    assert_int_equal(schedule.slots[0].rows, 1);
    assert_int_equal(schedule.slots[0].chunks[0], 0);
    assert_int_equal(schedule.slots[0].microbatches, 0);
    assert_int_equal(schedule.slots[1].chunks[0], 1);
    assert_int_equal(schedule.slots[1].microbatches, 1);
    schedule_done(&schedule);
}

/* One rank with both modules: each microbatch goes through before the next begins. */
static void test_colocated(void **state)
{
    (void)state;
    ScheduleGraph graph = two_pools;
    graph.modules[1].grid.first_rank = 0;
    ScheduleOptions options = {&graph, 2, 2, true};
    check_list(&options, 0, true,
               "m0 ENCODE 0, m0 SEND 0, m0 RECV 0, m1 FORWARD 0, m1 BACKWARD 0, m0 SEND_GRAD 0, "
               "m0 RECV_GRAD 0, m0 ENCODE_BACKWARD 0, "
               "m0 ENCODE 1, m0 SEND 1, m0 RECV 1, m1 FORWARD 1, m1 BACKWARD 1, m0 SEND_GRAD 1, "
               "m0 RECV_GRAD 1, m0 ENCODE_BACKWARD 1, "
               "m0 REDUCE -1, m1 REDUCE -1, m-1 VOTE -1, m0 UPDATE -1, m1 UPDATE -1");
}

/* 1F1B of three stages as in the textbook: 2, 1, 0 forwards ahead, then in turns. */
static void test_pipeline(void **state)
{
    (void)state;
    static const ScheduleGraph graph = {1,
                                        {{.grid = {0, {1, 1, 1, 3}},
                                          .chunks = 1,
                                          .feeds = -1,
                                          .is_trained = false,
                                          .forward_cost = 1,
                                          .backward_cost = 2}}};
    ScheduleOptions options = {&graph, 4, 1, true};
    check_list(&options, 0, false,
               "FORWARD 0, SEND_ACTIVATIONS 0, FORWARD 1, SEND_ACTIVATIONS 1, FORWARD 2, "
               "SEND_ACTIVATIONS 2, RECV_ACTIVATIONS_GRAD 0, BACKWARD 0, FORWARD 3, "
               "SEND_ACTIVATIONS 3, RECV_ACTIVATIONS_GRAD 1, BACKWARD 1, RECV_ACTIVATIONS_GRAD 2, "
               "BACKWARD 2, RECV_ACTIVATIONS_GRAD 3, BACKWARD 3, VOTE -1");
    check_list(&options, 1, false,
               "RECV_ACTIVATIONS 0, FORWARD 0, SEND_ACTIVATIONS 0, RECV_ACTIVATIONS 1, FORWARD 1, "
               "SEND_ACTIVATIONS 1, RECV_ACTIVATIONS_GRAD 0, BACKWARD 0, SEND_ACTIVATIONS_GRAD 0, "
               "RECV_ACTIVATIONS 2, FORWARD 2, SEND_ACTIVATIONS 2, RECV_ACTIVATIONS_GRAD 1, "
               "BACKWARD 1, SEND_ACTIVATIONS_GRAD 1, RECV_ACTIVATIONS 3, FORWARD 3, "
               "SEND_ACTIVATIONS 3, RECV_ACTIVATIONS_GRAD 2, BACKWARD 2, SEND_ACTIVATIONS_GRAD 2, "
               "RECV_ACTIVATIONS_GRAD 3, BACKWARD 3, SEND_ACTIVATIONS_GRAD 3, VOTE -1");
    check_list(&options, 2, false,
               "RECV_ACTIVATIONS 0, FORWARD 0, BACKWARD 0, SEND_ACTIVATIONS_GRAD 0, "
               "RECV_ACTIVATIONS 1, FORWARD 1, BACKWARD 1, SEND_ACTIVATIONS_GRAD 1, "
               "RECV_ACTIVATIONS 2, FORWARD 2, BACKWARD 2, SEND_ACTIVATIONS_GRAD 2, "
               "RECV_ACTIVATIONS 3, FORWARD 3, BACKWARD 3, SEND_ACTIVATIONS_GRAD 3, VOTE -1");
    for (int rank = 0; rank < 3; rank++) {
        Schedule schedule;
        assert_int_equal(schedule_make(&options, rank, &schedule), STATUS_OK);
        assert_int_equal(schedule.slots[0].chunks[0], 3 - rank);
        assert_int_equal(schedule.slots[0].microbatches, 3 - rank);
        assert_int_equal(schedule.slots[0].rows, 0);
        schedule_done(&schedule);
    }
}

/* Work of a list only: "F0.1 B0.1" is forward and backward of chunk 0, microbatch 1. */
static void check_work(const ScheduleOptions *options, int rank, const char *expected)
{
    char text[1024] = "";
    size_t used = 0;
    Schedule schedule;
    assert_int_equal(schedule_make(options, rank, &schedule), STATUS_OK);
    for (int i = 0; i < schedule.num_actions; i++) {
        const Action *action = &schedule.actions[i];
        if (action->kind == ACTION_FORWARD || action->kind == ACTION_BACKWARD) {
            int written = snprintf(text + used, sizeof text - used, "%s%c%d.%d",
                                   used > 0 ? " " : "", action->kind == ACTION_FORWARD ? 'F' : 'B',
                                   action->chunk, action->microbatch);
            used += (size_t)written;
            assert_true(used < sizeof text);
        }
    }
    assert_string_equal(text, expected);
    schedule_done(&schedule);
}

/* Two stages of two chunks, four microbatches: warm-up of 4 and 2 forwards, groups of two. */
static void test_interleaved(void **state)
{
    (void)state;
    static const ScheduleGraph graph = {1,
                                        {{.grid = {0, {1, 1, 1, 2}},
                                          .chunks = 2,
                                          .feeds = -1,
                                          .is_trained = true,
                                          .forward_cost = 1,
                                          .backward_cost = 2}}};
    ScheduleOptions options = {&graph, 4, 1, true};
    check_work(&options, 0,
               "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 B1.2 B1.3 B0.2 B0.3");
    check_work(&options, 1,
               "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 B0.2 B0.3");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_two_pools),   cmocka_unit_test(test_frozen_encoder),
        cmocka_unit_test(test_colocated),   cmocka_unit_test(test_pipeline),
        cmocka_unit_test(test_interleaved),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
