#include "base/arena.h"
#include "base/hash.h"
#include "base/memory.h"
#include "base/range.h"

#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

static void test_heap(void **state)
{
    (void)state;
    int *numbers = NULL;
    assert_int_equal(MEMORY_NEW(&numbers, 100), STATUS_OK);
    for (int i = 0; i < 100; i++) {
        assert_int_equal(numbers[i], 0);
    }
    size_t capacity = 100;
    numbers[99] = 7;
    assert_int_equal(memory_grow((void **)&numbers, &capacity, 101, sizeof *numbers), STATUS_OK);
    assert_int_equal(capacity, 200);
    assert_int_equal(numbers[99], 7);
    memory_free(numbers);
    numbers = (int *)state;
    assert_int_equal(MEMORY_NEW(&numbers, 0), STATUS_OK);
    assert_null(numbers);
    char *text = NULL;
    assert_int_equal(memory_format(&text, "%d-%s", 3, "x"), STATUS_OK);
    assert_string_equal(text, "3-x");
    memory_free(text);
    assert_int_equal(memory_copy_text("abc", &text), STATUS_OK);
    assert_string_equal(text, "abc");
    memory_free(text);
    memory_free(NULL);
}

/* Sizes that overflow are refused, and what was there stays. */
static void test_heap_refuses_overflow(void **state)
{
    (void)state;
    void *memory = NULL;
    assert_int_equal(memory_alloc(SIZE_MAX / 2, 8, &memory), STATUS_NO_MEMORY);
    size_t capacity = 0;
    assert_int_equal(memory_grow(&memory, &capacity, SIZE_MAX, 1), STATUS_NO_MEMORY);
    assert_int_equal(memory_grow(&memory, &capacity, SIZE_MAX / 4, 16), STATUS_NO_MEMORY);
    assert_null(memory);
    assert_int_equal(capacity, 0);
}

static void *carve(Arena *arena)
{
    arena_take(arena, 1);
    arena_take(arena, 0);
    return arena_take(arena, 1000);
}

/* The function that carves also tells the size. */
static void test_arena_measures_what_it_carves(void **state)
{
    (void)state;
    Arena measure;
    arena_init_measure(&measure);
    assert_true(arena_is_measuring(&measure));
    assert_null(carve(&measure));
    assert_int_equal(measure.used, ARENA_ALIGNMENT + 1000);
    _Alignas(ARENA_ALIGNMENT) static char block[ARENA_ALIGNMENT + 1000];
    Arena arena;
    arena_init(&arena, block, measure.used);
    assert_ptr_equal(carve(&arena), block + ARENA_ALIGNMENT);
    assert_int_equal(arena.used, measure.used);
    arena_rewind(&arena, 0);
    assert_int_equal(arena.used, 0);
    assert_int_equal(arena.peak, measure.used);
}

static void test_parts_cover_a_length(void **state)
{
    (void)state;
    for (int64_t length = 0; length < 40; length++) {
        for (int64_t parts = 1; parts < 12; parts++) {
            int64_t at = 0;
            for (int64_t i = 0; i < parts; i++) {
                Range part = range_part(length, parts, i);
                assert_int_equal(part.begin, at);
                assert_in_range(range_count(part), length / parts, (length + parts - 1) / parts);
                at = part.end;
            }
            assert_int_equal(at, length);
        }
    }
    Range common = range_intersect((Range){2, 5}, (Range){4, 9});
    assert_int_equal(common.begin, 4);
    assert_int_equal(common.end, 5);
    assert_int_equal(range_count(range_intersect((Range){0, 2}, (Range){3, 9})), 0);
}

/* FNV-1a's published 64-bit values, before our final mix. */
static void test_hash(void **state)
{
    (void)state;
    assert_int_equal(hash_bytes(HASH_SEED, "", 0), UINT64_C(0xcbf29ce484222325));
    assert_int_equal(hash_bytes(HASH_SEED, "a", 1), UINT64_C(0xaf63dc4c8601ec8c));
    assert_int_equal(hash_bytes(HASH_SEED, "foobar", 6), UINT64_C(0x85944171f73967e8));
    assert_int_equal(hash_bytes(hash_bytes(HASH_SEED, "foo", 3), "bar", 3),
                     UINT64_C(0x85944171f73967e8));
    assert_true(hash_text("a") != hash_text("b"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_heap),
        cmocka_unit_test(test_heap_refuses_overflow),
        cmocka_unit_test(test_arena_measures_what_it_carves),
        cmocka_unit_test(test_parts_cover_a_length),
        cmocka_unit_test(test_hash),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
