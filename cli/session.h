/* Session: one coordinator as a command sees it: calls that wait for their answer, and the watch of
 * one job, on a loop of their own.
 * Threading: main thread.
 */
#ifndef CLI_SESSION_H
#define CLI_SESSION_H

#include "cli/verbs.h"
#include "viaduct/v1/viaduct.pb-c.h"

typedef struct Session {
    const char *coordinator;
    uv_loop_t loop;
    Rpc *rpc;
    RpcClient *client;
    RpcRequest *watch;
    /* of the watch */
    void (*on_job)(void *context, const Viaduct__V1__Job *job);
    void (*on_watch_ended)(void *context, const RpcError *error);
    void *watch_context;
} Session;

#define SESSION_JOBS    (&viaduct__v1__job_service__descriptor)
#define SESSION_WORKERS (&viaduct__v1__worker_service__descriptor)

/* The flag that all verbs with a coordinator share; default 127.0.0.1:7070. */
#define SESSION_FLAG(value)                                                              \
    {                                                                                    \
        "coordinator", 0, CONFIG_KIND_TEXT, (value), "HOST:PORT", "VIADUCT_COORDINATOR", \
            "the coordinator to ask (default 127.0.0.1:7070)"                            \
    }
#define SESSION_DEFAULT "127.0.0.1:7070"

/* Only the loop: `train` needs it before there is a coordinator. */
void session_init(Session *session);
Status session_connect(Session *session, const char *coordinator) STATUS_CHECKED;
/* Closes everything; handles that the caller put on the loop must be closing. */
void session_close(Session *session);

/* One call, waited for. On OK *response_out is owned by the caller
 * (protobuf_c_message_free_unpacked); else NULL. */
RpcError session_call(Session *session, const ProtobufCServiceDescriptor *service,
                      const char *method, const ProtobufCMessage *request,
                      ProtobufCMessage **response_out);

/* Calls on_job for the job as it is now and after each change, until session_unwatch or the
 * stream's end. */
Status session_watch(Session *session, const char *name,
                     void (*on_job)(void *context, const Viaduct__V1__Job *job),
                     void (*on_ended)(void *context, const RpcError *error),
                     void *context) STATUS_CHECKED;
void session_unwatch(Session *session);

bool session_is_terminal(const Viaduct__V1__Job *job);

#endif
