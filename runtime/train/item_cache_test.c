#include "train/item_cache.h"

#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    ITEM_BYTES = 5,
    ROW_BYTES = 2,
    CLIPS_BYTES = 4 * ITEM_BYTES + (1 + 7 + 3 + 2) * ROW_BYTES
};

/* Clips among images, of uneven lengths. */
static const SampleItem first[] = {{SAMPLE_MEDIA_IMAGE, 0, 9, 0}, {SAMPLE_MEDIA_AUDIO, 0, 1, 9}};
static const SampleItem third[] = {{SAMPLE_MEDIA_AUDIO, 0, 7, 0},
                                   {SAMPLE_MEDIA_AUDIO, 1, 3, 7},
                                   {SAMPLE_MEDIA_IMAGE, 0, 9, 10},
                                   {SAMPLE_MEDIA_AUDIO, 2, 2, 19}};
static const StepSample samples[] = {
    {.num_items = 2, .items = first}, {.num_items = 0}, {.num_items = 4, .items = third}};

static size_t fill(uint8_t *data, const LoaderItem *item)
{
    size_t bytes = ITEM_BYTES + (size_t)item->rows * ROW_BYTES;
    memset(data, (int)(10 * item->sample + item->index), bytes);
    return bytes;
}

/* Each item comes back as it was put, whatever came after it. */
static void test_keeps(void **state)
{
    (void)state;
    static const LoaderItem items[] = {{2, 2, 2}, {0, 0, 1}, {2, 0, 7}, {2, 1, 3}};
    ItemCache cache;
    uint8_t data[64];
    assert_int_equal(
        item_cache_init(&cache, samples, 3, SAMPLE_MEDIA_AUDIO, ITEM_BYTES, ROW_BYTES, CLIPS_BYTES),
        STATUS_OK);
    for (int i = 0; i < 3; i++) {
        assert_null(item_cache_find(&cache, &items[i]));
        fill(data, &items[i]);
        item_cache_put(&cache, &items[i], data);
    }
    for (int i = 0; i < 3; i++) {
        size_t bytes = fill(data, &items[i]);
        assert_non_null(item_cache_find(&cache, &items[i]));
        assert_memory_equal(item_cache_find(&cache, &items[i]), data, bytes);
    }
    assert_null(item_cache_find(&cache, &items[3]));
    item_cache_done(&cache);
}

static void test_too_large(void **state)
{
    (void)state;
    const LoaderItem item = {0, 0, 1};
    ItemCache cache;
    assert_int_equal(item_cache_init(&cache, samples, 3, SAMPLE_MEDIA_AUDIO, ITEM_BYTES, ROW_BYTES,
                                     CLIPS_BYTES - 1),
                     STATUS_OK);
    item_cache_put(&cache, &item, (const uint8_t *)"1234567");
    assert_null(item_cache_find(&cache, &item));
    item_cache_done(&cache);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_keeps),
        cmocka_unit_test(test_too_large),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
