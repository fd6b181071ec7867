#include "base/status.h"

#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

/* cmocka has a fail() of its own; this is the one under test. */
#undef fail
#define fail(code, ...) status_fail((code), __FILE__, __LINE__, __VA_ARGS__)

static Status find(const char *name)
{
    return fail(STATUS_NOT_FOUND, "%s: no such thing", name);
}

static Status look_up(const char *name)
{
    TRY(find(name));
    return STATUS_OK;
}

static void test_message_and_trail(void **state)
{
    (void)state;
    assert_int_equal(look_up("key"), STATUS_NOT_FOUND);
    assert_string_equal(status_message(), "key: no such thing");
    assert_non_null(strstr(status_trail(), "status_test.c:"));
    assert_non_null(strstr(status_trail(), " < status_test.c:"));
    /* A message may be wrapped into its successor. */
    Status status = fail(STATUS_IO, "loading: %s", status_message());
    assert_int_equal(status, STATUS_IO);
    assert_string_equal(status_message(), "loading: key: no such thing");
    assert_null(strstr(status_trail(), " < "));
    status_clear();
    assert_string_equal(status_message(), "");
}

static void test_long_messages_are_cut(void **state)
{
    (void)state;
    char text[5000];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    assert_int_equal(fail(STATUS_INVALID, "%s", text), STATUS_INVALID);
    assert_in_range(strlen(status_message()), 500, sizeof text - 2);
    for (int i = 0; i < 1000; i++) {
        assert_int_equal(status_trace(STATUS_INVALID, "some_file.c", i), STATUS_INVALID);
    }
    assert_in_range(strlen(status_trail()), 100, 1000);
}

static void *fail_elsewhere(void *argument)
{
    (void)argument;
    return fail(STATUS_IO, "in the other thread") == STATUS_IO ? NULL : fail_elsewhere;
}

static void test_threads_have_their_own(void **state)
{
    (void)state;
    assert_int_equal(fail(STATUS_INVALID, "mine"), STATUS_INVALID);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, fail_elsewhere, NULL), 0);
    void *failed = NULL;
    pthread_join(thread, &failed);
    assert_null(failed);
    assert_string_equal(status_message(), "mine");
}

static void test_names(void **state)
{
    (void)state;
    for (int code = 0; code < STATUS_COUNT; code++) {
        assert_non_null(status_name((Status)code));
        assert_true(strlen(status_name((Status)code)) > 1);
    }
    assert_string_equal(status_name((Status)1000), "unknown status");
}

static void test_check_ends_the_process(void **state)
{
    (void)state;
    pid_t child = fork();
    if (child == 0) {
        close(STDERR_FILENO);
        CHECK(1 + 1 == 3);
        _exit(0);
    }
    int how = 0;
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFSIGNALED(how));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_message_and_trail),      cmocka_unit_test(test_long_messages_are_cut),
        cmocka_unit_test(test_threads_have_their_own), cmocka_unit_test(test_names),
        cmocka_unit_test(test_check_ends_the_process),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
