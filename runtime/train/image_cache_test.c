#include "train/image_cache.h"

#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    IMAGE_BYTES = 5
};

static const StepSample samples[] = {{2, 0, 0}, {0, 0, 0}, {1, 0, 0}, {3, 0, 0}};

static void fill(uint8_t *pixels, const LoaderItem *item)
{
    memset(pixels, (int)(10 * item->sample + item->image), IMAGE_BYTES);
}

/* Each image comes back as it was put, whatever came after it. */
static void test_keeps(void **state)
{
    (void)state;
    static const LoaderItem items[] = {{3, 2}, {0, 0}, {2, 0}, {0, 1}, {3, 0}};
    ImageCache cache;
    uint8_t pixels[IMAGE_BYTES];
    assert_int_equal(image_cache_init(&cache, samples, 4, IMAGE_BYTES, (int64_t)6 * IMAGE_BYTES),
                     STATUS_OK);
    for (int i = 0; i < 5; i++) {
        assert_null(image_cache_find(&cache, &items[i]));
        fill(pixels, &items[i]);
        image_cache_put(&cache, &items[i], pixels);
    }
    for (int i = 0; i < 5; i++) {
        fill(pixels, &items[i]);
        assert_non_null(image_cache_find(&cache, &items[i]));
        assert_memory_equal(image_cache_find(&cache, &items[i]), pixels, IMAGE_BYTES);
    }
    assert_null(image_cache_find(&cache, &(LoaderItem){3, 1}));
    image_cache_done(&cache);
}

static void test_too_large(void **state)
{
    (void)state;
    const LoaderItem item = {0, 1};
    ImageCache cache;
    assert_int_equal(
        image_cache_init(&cache, samples, 4, IMAGE_BYTES, (int64_t)6 * IMAGE_BYTES - 1), STATUS_OK);
    image_cache_put(&cache, &item, (const uint8_t *)"12345");
    assert_null(image_cache_find(&cache, &item));
    image_cache_done(&cache);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_keeps),
        cmocka_unit_test(test_too_large),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
