#include "base/config.h"
#include "cli/session.h"
#include "job/message.h"

#include <stdio.h>

ExitCode cancel_verb(int argc, const char *const *argv)
{
    const char *coordinator = SESSION_DEFAULT;
    const ConfigFlag flags[] = {SESSION_FLAG(&coordinator)};
    const ConfigCommand command = {"viaduct cancel NAME [flags]",
                                   "Cancels a job: its workers stop and become free.",
                                   flags,
                                   1,
                                   1,
                                   1};
    ConfigList rest;
    bool help = false;
    Status status = config_parse(&command, argc, argv, &rest, &help);
    if (status != STATUS_OK) {
        return verbs_fail_status(status);
    }
    if (help) {
        config_print_help(&command, stdout);
        return EXIT_CODE_OK;
    }
    Session session;
    session_init(&session);
    ExitCode code = EXIT_CODE_OK;
    status = session_connect(&session, coordinator);
    if (status != STATUS_OK) {
        code = verbs_fail_status(status);
    } else {
        Viaduct__V1__CancelJobRequest request = VIADUCT__V1__CANCEL_JOB_REQUEST__INIT;
        request.name = (char *)rest.items[0];
        ProtobufCMessage *response = NULL;
        RpcError error =
            session_call(&session, SESSION_JOBS, "CancelJob", &request.base, &response);
        if (error.code != RPC_CODE_OK) {
            code = verbs_fail_call(coordinator, &error);
        } else {
            const Viaduct__V1__Job *job = (const Viaduct__V1__Job *)response;
            printf("%s %s\n", job->name,
                   message_enum_name(&viaduct__v1__job_status__state__descriptor,
                                     (int)job->status->state));
            protobuf_c_message_free_unpacked(response, NULL);
        }
    }
    session_close(&session);
    return code;
}
