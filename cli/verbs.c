#include "cli/verbs.h"

#include "viaduct/v1/viaduct.pb-c.h"

#include <stdio.h>

static ExitCode code_of_status(Status status)
{
    switch (status) {
    case STATUS_OK:
        return EXIT_CODE_OK;
    case STATUS_INVALID:
    case STATUS_UNSUPPORTED:
        return EXIT_CODE_USAGE;
    case STATUS_NOT_FOUND:
        return EXIT_CODE_NOT_FOUND;
    case STATUS_CONFLICT:
        return EXIT_CODE_CONFLICT;
    case STATUS_UNAVAILABLE:
        return EXIT_CODE_UNAVAILABLE;
    case STATUS_TIMEOUT:
        return EXIT_CODE_TIMED_OUT;
    default:
        return EXIT_CODE_FAILED;
    }
}

ExitCode verbs_fail_status(Status status)
{
    fprintf(stderr, "viaduct: %s\n", status_message());
    return code_of_status(status);
}

ExitCode verbs_fail_call(const char *coordinator, const RpcError *error)
{
    switch (error->code) {
    case RPC_CODE_UNAVAILABLE:
        fprintf(stderr,
                "viaduct: the coordinator at %s cannot be reached: %s\n"
                "Start viaduct-coordinator, or name another with --coordinator.\n",
                coordinator, error->message);
        return EXIT_CODE_UNAVAILABLE;
    case RPC_CODE_INVALID_ARGUMENT:
    case RPC_CODE_UNIMPLEMENTED:
    case RPC_CODE_OUT_OF_RANGE:
        fprintf(stderr, "viaduct: %s\n", error->message);
        return EXIT_CODE_USAGE;
    case RPC_CODE_NOT_FOUND:
        fprintf(stderr, "viaduct: %s\n", error->message);
        return EXIT_CODE_NOT_FOUND;
    case RPC_CODE_ALREADY_EXISTS:
    case RPC_CODE_FAILED_PRECONDITION:
    case RPC_CODE_ABORTED:
        fprintf(stderr, "viaduct: %s\n", error->message);
        return EXIT_CODE_CONFLICT;
    case RPC_CODE_DEADLINE_EXCEEDED:
        fprintf(stderr, "viaduct: the coordinator at %s did not answer in time\n", coordinator);
        return EXIT_CODE_TIMED_OUT;
    default:
        fprintf(stderr, "viaduct: %s: %s\n", rpc_code_name(error->code), error->message);
        return EXIT_CODE_FAILED;
    }
}

ExitCode verbs_code_of_state(int state)
{
    switch (state) {
    case VIADUCT__V1__JOB_STATUS__STATE__SUCCEEDED:
        return EXIT_CODE_OK;
    case VIADUCT__V1__JOB_STATUS__STATE__CANCELLED:
        return EXIT_CODE_CANCELLED;
    default:
        return EXIT_CODE_FAILED;
    }
}
