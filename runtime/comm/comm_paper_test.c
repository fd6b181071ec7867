/* Ranks and sizes as a real world's splits give them, and no peers. */
#include "comm/comm_paper.h"
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

static void test_splits(void **state)
{
    (void)state;
    static const int ranks[] = {7, 4, 1};
    Comm *world = NULL;
    Comm *group = NULL;
    Comm *alone = NULL;
    assert_int_equal(comm_paper_create(9, 4, "world", &world), STATUS_OK);
    assert_int_equal(comm_split(world, ranks, 3, "llm tp", &group), STATUS_OK);
    assert_int_equal(group->size, 3);
    assert_int_equal(group->rank, 1);
    assert_string_equal(group->label, "llm tp");
    assert_int_equal(comm_split(group, &(int){1}, 1, "alone", &alone), STATUS_OK);
    assert_int_equal(alone->size, 1);
    assert_int_equal(alone->rank, 0);
    comm_destroy(alone);
    comm_destroy(group);
    comm_destroy(world);
}

static void test_no_peers(void **state)
{
    (void)state;
    Comm *world = NULL;
    CommRequest request;
    float value = 3;
    CommTransfer transfer = {.peer = 1, .is_send = true, .data = &value, .size_bytes = 4};
    assert_int_equal(comm_paper_create(2, 0, "world", &world), STATUS_OK);
    assert_int_equal(comm_all_reduce(world, &value, 1, DTYPE_F32, COMM_REDUCE_SUM, NULL),
                     STATUS_OK);
    assert_true(value == 3);
    assert_int_equal(comm_start(world, &transfer, 1, NULL, &request), STATUS_UNSUPPORTED);
    comm_destroy(world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_splits),
        cmocka_unit_test(test_no_peers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
