/* Verbs: what `viaduct` can do, one file each, and what they share: exit codes and the error line.
 * Threading: main thread.
 */
#ifndef CLI_VERBS_H
#define CLI_VERBS_H

#include "rpc/rpc.h"

typedef enum ExitCode {
    EXIT_CODE_OK = 0,
    EXIT_CODE_FAILED = 1, /* the job FAILED, or this program did */
    EXIT_CODE_USAGE = 2,  /* wrong flags, a wrong job */
    EXIT_CODE_UNAVAILABLE = 3,
    EXIT_CODE_NOT_FOUND = 4,
    EXIT_CODE_CONFLICT = 5,
    EXIT_CODE_TIMED_OUT = 6,
    EXIT_CODE_CANCELLED = 7,
    EXIT_CODE_INTERRUPTED = 130, /* killed by a second Ctrl-C */
} ExitCode;

/* argv[0] is the verb. */
ExitCode train_verb(int argc, const char *const *argv);
ExitCode plan_verb(int argc, const char *const *argv);
ExitCode verify_verb(int argc, const char *const *argv);
ExitCode submit_verb(int argc, const char *const *argv);
ExitCode get_verb(int argc, const char *const *argv);
ExitCode watch_verb(int argc, const char *const *argv);
ExitCode cancel_verb(int argc, const char *const *argv);
ExitCode version_verb(int argc, const char *const *argv);

/* Prints "viaduct: MESSAGE" and gives the exit code that goes with it. */
ExitCode verbs_fail_status(Status status);
ExitCode verbs_fail_call(const char *coordinator, const RpcError *error);

/* The exit code of a job's end. */
ExitCode verbs_code_of_state(int state);

#endif
