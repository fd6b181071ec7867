#include "coordinator/job_state.h"

#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

/* The contract's sentence, written out pair by pair. */
static bool expected(JobState from, JobState to)
{
    bool from_is_over =
        from == JOB_STATE(SUCCEEDED) || from == JOB_STATE(FAILED) || from == JOB_STATE(CANCELLED);
    if (from_is_over) {
        return false;
    }
    if (from == JOB_STATE(STATE_UNSPECIFIED)) {
        return to == JOB_STATE(PENDING);
    }
    bool at_rest = from == JOB_STATE(PENDING) || from == JOB_STATE(SUSPENDED);
    switch (to) {
    case JOB_STATE(FAILED):
        return true;
    case JOB_STATE(CANCELLED):
        return at_rest || from == JOB_STATE(CANCELLING);
    case JOB_STATE(CANCELLING):
        return !at_rest && from != JOB_STATE(CANCELLING);
    case JOB_STATE(SUSPENDING):
        return from == JOB_STATE(PENDING) || from == JOB_STATE(STARTING) ||
               from == JOB_STATE(RUNNING) || from == JOB_STATE(RECONFIGURING);
    case JOB_STATE(SUSPENDED):
        return from == JOB_STATE(SUSPENDING);
    case JOB_STATE(PENDING):
        return from == JOB_STATE(SUSPENDED);
    case JOB_STATE(STARTING):
        return from == JOB_STATE(PENDING);
    case JOB_STATE(RUNNING):
        return from == JOB_STATE(STARTING) || from == JOB_STATE(RECONFIGURING);
    case JOB_STATE(RECONFIGURING):
    case JOB_STATE(SUCCEEDED):
        return from == JOB_STATE(RUNNING);
    default:
        return false;
    }
}

static void the_table_is_the_contract(void **state)
{
    (void)state;
    for (int from = 0; from <= JOB_STATE(FAILED); from++) {
        for (int to = 0; to <= JOB_STATE(FAILED); to++) {
            if (job_state_allows((JobState)from, (JobState)to) !=
                expected((JobState)from, (JobState)to)) {
                fail_msg("%s to %s", job_state_name((JobState)from), job_state_name((JobState)to));
            }
        }
    }
    assert_true(job_state_is_terminal(JOB_STATE(CANCELLED)));
    assert_false(job_state_is_terminal(JOB_STATE(SUSPENDED)));
    assert_string_equal(job_state_name(JOB_STATE(RECONFIGURING)), "RECONFIGURING");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_table_is_the_contract),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
