#include "cli/session.h"

#include "job/message.h"

#include <string.h>

enum {
    CALL_MS = 10000
};

void session_init(Session *session)
{
    memset(session, 0, sizeof *session);
    CHECK(uv_loop_init(&session->loop) == 0);
}

Status session_connect(Session *session, const char *coordinator)
{
    session->coordinator = coordinator;
    TRY(rpc_create(&session->loop, &session->rpc));
    return rpc_client_create(session->rpc, coordinator, &session->client);
}

void session_close(Session *session)
{
    if (session->client) {
        rpc_client_destroy(session->client);
    }
    if (session->rpc) {
        rpc_destroy(session->rpc);
    }
    uv_run(&session->loop, UV_RUN_DEFAULT);
    CHECK(uv_loop_close(&session->loop) == 0);
}

typedef struct Answer {
    bool is_done;
    RpcError error;
    ProtobufCMessage *message;
} Answer;

static void on_answer(void *context, const ProtobufCMessage *response, const RpcError *error)
{
    Answer *answer = context;
    answer->is_done = true;
    answer->error = *error;
    if (error->code == RPC_CODE_OK && message_copy(response, &answer->message) != STATUS_OK) {
        answer->error = rpc_error(RPC_CODE_RESOURCE_EXHAUSTED, "NO_MEMORY", "%s", status_message());
    }
}

RpcError session_call(Session *session, const ProtobufCServiceDescriptor *service,
                      const char *method, const ProtobufCMessage *request,
                      ProtobufCMessage **response_out)
{
    Answer answer = {0};
    *response_out = NULL;
    if (rpc_client_call(session->client, service, method, request, CALL_MS, on_answer, &answer,
                        NULL) != STATUS_OK) {
        return rpc_error(RPC_CODE_INTERNAL, "INTERNAL", "%s", status_message());
    }
    while (!answer.is_done) {
        uv_run(&session->loop, UV_RUN_ONCE);
    }
    *response_out = answer.message;
    return answer.error;
}

static void on_message(void *context, const ProtobufCMessage *base)
{
    Session *session = context;
    const Viaduct__V1__WatchJobsResponse *message = (const Viaduct__V1__WatchJobsResponse *)base;
    bool has_job = message->type == VIADUCT__V1__WATCH_JOBS_RESPONSE__TYPE__ADDED ||
                   message->type == VIADUCT__V1__WATCH_JOBS_RESPONSE__TYPE__MODIFIED;
    if (has_job && message->job && message->job->status && message->job->spec) {
        session->on_job(session->watch_context, message->job);
    }
}

static void on_ended(void *context, const RpcError *error)
{
    Session *session = context;
    session->watch = NULL;
    session->on_watch_ended(session->watch_context, error);
}

Status session_watch(Session *session, const char *name,
                     void (*on_job)(void *context, const Viaduct__V1__Job *job),
                     void (*on_watch_ended)(void *context, const RpcError *error), void *context)
{
    Viaduct__V1__WatchJobsRequest request = VIADUCT__V1__WATCH_JOBS_REQUEST__INIT;
    request.name = (char *)name;
    session->on_job = on_job;
    session->on_watch_ended = on_watch_ended;
    session->watch_context = context;
    return rpc_client_stream(session->client, SESSION_JOBS, "WatchJobs", &request.base, on_message,
                             on_ended, session, &session->watch);
}

void session_unwatch(Session *session)
{
    if (session->watch) {
        rpc_request_cancel(session->watch);
    }
}

bool session_is_terminal(const Viaduct__V1__Job *job)
{
    return job->status->state == VIADUCT__V1__JOB_STATUS__STATE__SUCCEEDED ||
           job->status->state == VIADUCT__V1__JOB_STATUS__STATE__FAILED ||
           job->status->state == VIADUCT__V1__JOB_STATUS__STATE__CANCELLED;
}
