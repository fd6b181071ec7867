#include "base/config.h"
#include "base/memory.h"

#include <stdlib.h>
#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

typedef struct Values {
    const char *address;
    int64_t count;
    bool verbose;
    ConfigList labels;
} Values;

static Status parse(Values *values, int argc, const char *const *argv, ConfigList *rest, bool *help)
{
    const ConfigFlag flags[] = {
        {"address", 'a', CONFIG_KIND_TEXT, &values->address, "HOST:PORT", "CONFIG_TEST_ADDRESS",
         "where"},
        {"count", 0, CONFIG_KIND_INTEGER, &values->count, "N", NULL, "how many"},
        {"verbose", 'v', CONFIG_KIND_SWITCH, &values->verbose, NULL, NULL, "say more"},
        {"label", 'l', CONFIG_KIND_LIST, &values->labels, "K=V", NULL, "labels"},
    };
    const ConfigCommand command = {"tool [FILE]", "About.", flags, 4, 0, 1};
    return config_parse(&command, argc, argv, rest, help);
}

#define PARSE(...)                                      \
    const char *argv[] = {"tool", __VA_ARGS__};         \
    Values values = {.address = "default", .count = 7}; \
    ConfigList rest;                                    \
    bool help;                                          \
    Status status = parse(&values, (int)(sizeof argv / sizeof *argv), argv, &rest, &help)

static void all_forms_of_flags_are_read(void **state)
{
    (void)state;
    PARSE("--address=h:1", "--count", "-12", "file", "-v", "-l", "a=b", "-lc=d", "--label=e=f");
    assert_int_equal(status, STATUS_OK);
    assert_string_equal(values.address, "h:1");
    assert_int_equal(values.count, -12);
    assert_true(values.verbose);
    assert_int_equal(values.labels.count, 3);
    assert_string_equal(values.labels.items[1], "c=d");
    assert_string_equal(values.labels.items[2], "e=f");
    assert_int_equal(rest.count, 1);
    assert_string_equal(rest.items[0], "file");
    assert_false(help);
}

static void absent_flags_keep_defaults_and_two_dashes_end_flags(void **state)
{
    (void)state;
    PARSE("--", "--verbose");
    assert_int_equal(status, STATUS_OK);
    assert_string_equal(values.address, "default");
    assert_int_equal(values.count, 7);
    assert_false(values.verbose);
    assert_string_equal(rest.items[0], "--verbose");
}

static void environment_stands_in_and_flag_wins(void **state)
{
    (void)state;
    setenv("CONFIG_TEST_ADDRESS", "env:1", 1);
    {
        PARSE("-v");
        assert_int_equal(status, STATUS_OK);
        assert_string_equal(values.address, "env:1");
    }
    {
        PARSE("-a", "flag:2");
        assert_int_equal(status, STATUS_OK);
        assert_string_equal(values.address, "flag:2");
    }
    unsetenv("CONFIG_TEST_ADDRESS");
}

static void expect_refused(const char *a, const char *b, const char *part)
{
    const char *argv[] = {"tool", a, b};
    Values values = {0};
    ConfigList rest;
    bool help;
    assert_int_equal(parse(&values, b ? 3 : 2, argv, &rest, &help), STATUS_INVALID);
    if (!strstr(status_message(), part)) {
        fail_msg("\"%s\" does not say \"%s\"", status_message(), part);
    }
}

static void wrong_use_is_explained(void **state)
{
    (void)state;
    expect_refused("--adress", "x", "did you mean --address?");
    expect_refused("--zzzzzzzzz", NULL, "unknown flag");
    expect_refused("-x", NULL, "unknown flag -x");
    expect_refused("--count", "many", "expected a whole number, got \"many\"");
    expect_refused("--count", "99999999999999999999", "expected a whole number");
    expect_refused("--count", NULL, "expected a value (N)");
    expect_refused("--verbose=1", NULL, "takes no value");
    expect_refused("one", "two", "unexpected argument \"two\"");
}

static void help_is_found_and_lists_flags(void **state)
{
    (void)state;
    PARSE("--help", "--nonsense");
    assert_int_equal(status, STATUS_OK);
    assert_true(help);
    bool verbose = false;
    const ConfigFlag flags[] = {
        {"verbose", 'v', CONFIG_KIND_SWITCH, &verbose, NULL, NULL, "say more"}};
    const ConfigCommand command = {"tool", "About.", flags, 1, 0, 0};
    char *text = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    config_print_help(&command, file);
    fclose(file);
    assert_non_null(strstr(text, "Usage: tool"));
    assert_non_null(strstr(text, "-v, --verbose"));
    assert_non_null(strstr(text, "say more"));
    memory_free(text);
}

static void distance_counts_edits(void **state)
{
    (void)state;
    assert_int_equal(config_edit_distance("step", "steps"), 1);
    assert_int_equal(config_edit_distance("kitten", "sitting"), 3);
    assert_int_equal(config_edit_distance("", "abc"), 3);
    assert_int_equal(config_edit_distance("same", "same"), 0);
}

static void added_variable_does_not_replace_a_set_one(void **state)
{
    (void)state;
    char **environment = NULL;
    setenv("CONFIG_TEST_SET", "old", 1);
    assert_int_equal(config_environment_with("CONFIG_TEST_SET", "new", &environment), STATUS_OK);
    int found = 0;
    for (int i = 0; environment[i]; i++) {
        found += strcmp(environment[i], "CONFIG_TEST_SET=old") == 0;
        assert_string_not_equal(environment[i], "CONFIG_TEST_SET=new");
    }
    assert_int_equal(found, 1);
    memory_free(environment);
    assert_int_equal(config_environment_with("CONFIG_TEST_UNSET", "new", &environment), STATUS_OK);
    int last = 0;
    while (environment[last + 1]) {
        last++;
    }
    assert_string_equal(environment[last], "CONFIG_TEST_UNSET=new");
    memory_free(environment);
    unsetenv("CONFIG_TEST_SET");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_forms_of_flags_are_read),
        cmocka_unit_test(absent_flags_keep_defaults_and_two_dashes_end_flags),
        cmocka_unit_test(environment_stands_in_and_flag_wins),
        cmocka_unit_test(wrong_use_is_explained),
        cmocka_unit_test(help_is_found_and_lists_flags),
        cmocka_unit_test(distance_counts_edits),
        cmocka_unit_test(added_variable_does_not_replace_a_set_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
