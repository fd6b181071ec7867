#include "reshard/layout.h"
#include "reshard/testing.h"
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

static void test_offsets_follow_order(void **state)
{
    (void)state;
    Layout layout;
    layout_init(&layout, 2, (const int64_t[]){10, 3}, LAYOUT_COPIES_REPLICATE);
    assert_int_equal(layout_add_rows(&layout, 2, (Range){6, 10}), STATUS_OK);
    assert_int_equal(layout_add_rows(&layout, 0, (Range){4, 4}), STATUS_OK);
    assert_int_equal(layout_add_rows(&layout, 2, (Range){0, 1}), STATUS_OK);
    assert_int_equal(layout_add(&layout, 1, (Box){.ranges = {{0, 5}, {1, 3}}}), STATUS_OK);
    assert_int_equal(layout.num_pieces, 3); /* the empty one is left out */
    assert_int_equal(layout.pieces[0].offset, 0);
    assert_int_equal(layout.pieces[1].offset, 12);
    assert_int_equal(layout.pieces[2].offset, 0);
    assert_int_equal(layout_rank_count(&layout, 0), 0);
    assert_int_equal(layout_rank_count(&layout, 1), 10);
    assert_int_equal(layout_rank_count(&layout, 2), 15);
    assert_int_equal(layout_rank_count(&layout, 7), 0);
    assert_int_equal(layout_rank_count(&layout, -1), 0);
    layout_done(&layout);
}

static uint64_t digest_of(LayoutCopies copies, int first_rank, int second_rank, int64_t cut)
{
    Layout layout;
    layout_init(&layout, 1, (const int64_t[]){8}, copies);
    assert_int_equal(layout_add_rows(&layout, first_rank, (Range){0, cut}), STATUS_OK);
    assert_int_equal(layout_add_rows(&layout, second_rank, (Range){cut, 8}), STATUS_OK);
    uint64_t digest = layout.digest;
    layout_done(&layout);
    return digest;
}

static void test_digest_tells_layouts_apart(void **state)
{
    (void)state;
    uint64_t digest = digest_of(LAYOUT_COPIES_REPLICATE, 0, 1, 4);
    assert_true(digest == digest_of(LAYOUT_COPIES_REPLICATE, 0, 1, 4));
    assert_true(digest != digest_of(LAYOUT_COPIES_PARTIAL, 0, 1, 4));
    assert_true(digest != digest_of(LAYOUT_COPIES_REPLICATE, 1, 0, 4));
    assert_true(digest != digest_of(LAYOUT_COPIES_REPLICATE, 0, 1, 5));
}

static void test_reset_keeps_memory(void **state)
{
    (void)state;
    Layout layout;
    layout_init(&layout, 1, (const int64_t[]){100}, LAYOUT_COPIES_REPLICATE);
    for (int i = 0; i < 100; i++) {
        assert_int_equal(layout_add_rows(&layout, i % 5, (Range){i, i + 1}), STATUS_OK);
    }
    const LayoutPiece *pieces = layout.pieces;
    layout_reset(&layout, 2, (const int64_t[]){4, 2}, LAYOUT_COPIES_PARTIAL);
    assert_int_equal(layout.num_pieces, 0);
    assert_int_equal(layout_rank_count(&layout, 3), 0);
    assert_int_equal(layout_add_rows(&layout, 3, (Range){1, 3}), STATUS_OK);
    assert_int_equal(layout_rank_count(&layout, 3), 4);
    assert_int_equal(layout_rank_count(&layout, 2), 0);
    assert_ptr_equal(pieces, layout.pieces);
    layout_done(&layout);
}

/* box_offset and box_is_contiguous against enumeration of every inner box of an outer one. */
static void test_boxes_by_enumeration(void **state)
{
    (void)state;
    TestingRng random = {.rng = {.seed = 11}};
    print_message("seed 11\n");
    int32_t outer_elements[TESTING_ELEMENTS_MAX];
    int32_t inner_elements[TESTING_ELEMENTS_MAX];
    for (int trial = 0; trial < 2000; trial++) {
        Layout layout;
        layout_init(&layout, 4, (const int64_t[]){4, 3, 4, 3}, LAYOUT_COPIES_REPLICATE);
        Box outer;
        Box inner;
        for (int d = 0; d < LAYOUT_DIMS_MAX; d++) {
            int begin = testing_pick(&random, 0, (int)layout.dims[d] - 1);
            int end = testing_pick(&random, begin + 1, (int)layout.dims[d]);
            outer.ranges[d] = (Range){begin, end};
            int inner_begin = testing_pick(&random, begin, end - 1);
            inner.ranges[d] = (Range){inner_begin, testing_pick(&random, inner_begin + 1, end)};
        }
        int num_outer = testing_enumerate(&layout, &outer, outer_elements);
        int num_inner = testing_enumerate(&layout, &inner, inner_elements);
        assert_int_equal(num_inner, box_count(&inner, 4));
        int at = 0;
        while (outer_elements[at] != inner_elements[0]) {
            at++;
        }
        assert_int_equal(box_offset(&outer, &inner), at);
        bool is_run =
            at + num_inner <= num_outer && memcmp(outer_elements + at, inner_elements,
                                                  (size_t)num_inner * sizeof *inner_elements) == 0;
        assert_int_equal(box_is_contiguous(&outer, &inner), is_run);
        Box common = box_intersect(&outer, &inner);
        assert_memory_equal(&common, &inner, sizeof inner);
        layout_done(&layout);
    }
}

static void test_print(void **state)
{
    (void)state;
    char text[BOX_TEXT_BYTES];
    Box box = {.ranges = {{0, 4}, {8, 16}}};
    assert_string_equal(box_print(&box, 2, text), "[0:4, 8:16]");
    for (int d = 0; d < LAYOUT_DIMS_MAX; d++) {
        box.ranges[d] = (Range){INT64_MIN, INT64_MIN};
    }
    assert_int_equal(strlen(box_print(&box, 4, text)), 4 * 41 + 3 * 2 + 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_offsets_follow_order),
        cmocka_unit_test(test_digest_tells_layouts_apart),
        cmocka_unit_test(test_reset_keeps_memory),
        cmocka_unit_test(test_boxes_by_enumeration),
        cmocka_unit_test(test_print),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
