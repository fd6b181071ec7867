#include "tensor/tensor.h"

/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

static void test_views(void **state)
{
    (void)state;
    float data[12] = {0};
    Tensor tensor = tensor_2d(data, 4, 3);
    assert_int_equal(tensor_count(&tensor), 12);
    assert_int_equal(tensor_bytes(&tensor), 48);
    Tensor rows = tensor_rows(&tensor, 1, 3);
    assert_ptr_equal(tensor_f32(&rows), data + 3);
    assert_int_equal(tensor_count(&rows), 6);
    Tensor none = tensor_rows(&tensor, 4, 4);
    assert_int_equal(tensor_count(&none), 0);
    Tensor scalar = {.data = data, .dtype = DTYPE_F64};
    assert_int_equal(tensor_count(&scalar), 1);
    assert_int_equal(tensor_bytes(&scalar), 8);
    assert_string_equal(dtype_name(DTYPE_BF16), "BF16");
    assert_int_equal(dtype_bytes(DTYPE_BF16), 2);
}

static void test_carving(void **state)
{
    (void)state;
    Arena arena;
    arena_init_measure(&arena);
    Tensor tensor = tensor_take_2d(&arena, 5, 7);
    assert_null(tensor.data);
    Tensor rows = tensor_rows(&tensor, 2, 4);
    assert_null(rows.data); /* nothing to point into while measuring */
    tensor_take_1d(&arena, 1);
    assert_int_equal(arena.used, 192 + 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_views),
        cmocka_unit_test(test_carving),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
