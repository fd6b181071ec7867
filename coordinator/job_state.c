#include "coordinator/job_state.h"

#include "base/status.h"
#include "job/message.h"

enum {
    STATE_COUNT = JOB_STATE(FAILED) + 1
};

#define BIT(name) (1U << JOB_STATE(name))

/* Where a job may go from each state. Failing and cancelling are possible from every state that is
 * not terminal; PENDING and SUSPENDED hold no workers and so cancel at once. */
static const unsigned next_states[STATE_COUNT] = {
    [JOB_STATE(STATE_UNSPECIFIED)] = BIT(PENDING),
    [JOB_STATE(PENDING)] = BIT(STARTING) | BIT(SUSPENDING) | BIT(CANCELLED) | BIT(FAILED),
    [JOB_STATE(STARTING)] = BIT(RUNNING) | BIT(SUSPENDING) | BIT(CANCELLING) | BIT(FAILED),
    [JOB_STATE(RUNNING)] =
        BIT(RECONFIGURING) | BIT(SUSPENDING) | BIT(CANCELLING) | BIT(SUCCEEDED) | BIT(FAILED),
    [JOB_STATE(RECONFIGURING)] = BIT(RUNNING) | BIT(SUSPENDING) | BIT(CANCELLING) | BIT(FAILED),
    [JOB_STATE(SUSPENDING)] = BIT(SUSPENDED) | BIT(CANCELLING) | BIT(FAILED),
    [JOB_STATE(SUSPENDED)] = BIT(PENDING) | BIT(CANCELLED) | BIT(FAILED),
    [JOB_STATE(CANCELLING)] = BIT(CANCELLED) | BIT(FAILED),
};

bool job_state_allows(JobState from, JobState to)
{
    CHECK((unsigned)from < STATE_COUNT && (unsigned)to < STATE_COUNT);
    return (next_states[from] & (1U << to)) != 0;
}

bool job_state_is_terminal(JobState state)
{
    return next_states[state] == 0;
}

const char *job_state_name(JobState state)
{
    return message_enum_name(&viaduct__v1__job_status__state__descriptor, (int)state);
}
