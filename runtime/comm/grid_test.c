#include "comm/grid.h"

/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

/* Four loops in the order of the definition, tp innermost, number the ranks. */
static void test_order(void **state)
{
    (void)state;
    Grid grid = {.first_rank = 7, .sizes = {3, 2, 4, 2}};
    assert_int_equal(grid_size(&grid), 48);
    int rank = 7;
    for (int pp = 0; pp < 2; pp++) {
        for (int dp = 0; dp < 4; dp++) {
            for (int cp = 0; cp < 2; cp++) {
                for (int tp = 0; tp < 3; tp++) {
                    GridCoords coords = {.at = {tp, cp, dp, pp}};
                    assert_int_equal(grid_rank(&grid, coords), rank);
                    GridCoords back = grid_coords(&grid, rank);
                    assert_memory_equal(&back, &coords, sizeof coords);
                    rank++;
                }
            }
        }
    }
}

static void test_contains(void **state)
{
    (void)state;
    Grid grid = {.first_rank = 2, .sizes = {1, 1, 3, 1}};
    assert_false(grid_contains(&grid, 1));
    assert_true(grid_contains(&grid, 2));
    assert_true(grid_contains(&grid, 4));
    assert_false(grid_contains(&grid, 5));
    assert_false(grid_contains(&grid, -1));
}

static void test_axis_ranks(void **state)
{
    (void)state;
    Grid grid = {.first_rank = 10, .sizes = {2, 1, 3, 2}};
    int ranks[3];
    /* Rank 15 is tp 1, dp 2, pp 0. */
    assert_int_equal(grid_axis_ranks(&grid, 15, GRID_AXIS_TP, ranks), 2);
    assert_int_equal(ranks[0], 14);
    assert_int_equal(ranks[1], 15);
    assert_int_equal(grid_axis_ranks(&grid, 15, GRID_AXIS_CP, ranks), 1);
    assert_int_equal(ranks[0], 15);
    assert_int_equal(grid_axis_ranks(&grid, 15, GRID_AXIS_DP, ranks), 3);
    assert_int_equal(ranks[0], 11);
    assert_int_equal(ranks[1], 13);
    assert_int_equal(ranks[2], 15);
    assert_int_equal(grid_axis_ranks(&grid, 15, GRID_AXIS_PP, ranks), 2);
    assert_int_equal(ranks[0], 15);
    assert_int_equal(ranks[1], 21);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_contains),
        cmocka_unit_test(test_axis_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
