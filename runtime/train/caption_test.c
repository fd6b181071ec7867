#include "base/memory.h"
#include "train/caption.h"
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

static void check(const char *bytes, int num, const char *expected)
{
    int32_t ids[64] = {0};
    for (int i = 0; i < num; i++) {
        ids[i] = (uint8_t)bytes[i];
    }
    char *text = NULL;
    assert_int_equal(caption_text(ids, num, &text), STATUS_OK);
    assert_string_equal(text, expected);
    memory_free(text);
}

static void test_text(void **state)
{
    (void)state;
    check("", 0, "");
    check("red heart", 9, "red heart");
    check("pi\xC3\xB1"
          "ata",
          7,
          "pi\xC3\xB1"
          "ata");
    check("\xE2\x9D\xA4", 3, "\xE2\x9D\xA4");
    check("\xF0\x9F\x98\x80", 4, "\xF0\x9F\x98\x80");
    /* cut off, continuation alone, overlong, surrogate, past the last code point, zero byte */
    check("a\xE2\x9D", 3, "a\xEF\xBF\xBD\xEF\xBF\xBD");
    check("\x9D"
          "b",
          2,
          "\xEF\xBF\xBD"
          "b");
    check("\xC0\xAF", 2, "\xEF\xBF\xBD\xEF\xBF\xBD");
    check("\xED\xA0\x80", 3, "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");
    check("\xF4\x90\x80\x80", 4, "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");
    check("a\0b", 3,
          "a\xEF\xBF\xBD"
          "b");
}

static void test_other_ids(void **state)
{
    (void)state;
    static const int32_t ids[] = {TOKEN_BOS, 'h', TOKEN_IMAGE, 'i', -1, TOKEN_BYTES_VOCABULARY};
    char *text = NULL;
    assert_int_equal(caption_text(ids, 6, &text), STATUS_OK);
    assert_string_equal(text, "hi");
    memory_free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_other_ids),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
