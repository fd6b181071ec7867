/* Rpc: gRPC for C programs on a libuv loop: calls arrive and answers come back as callbacks of the
 * loop thread.
 *
 * A thread of its own drains gRPC's completion queue (of the "next" kind) and hands events over
 * through a queue and uv_async_send, which coalesces: the callback drains all. Messages are
 * protobuf-c messages; services and methods are named by protobuf-c's generated descriptors
 * (viaduct__v1__job_service__descriptor, ...).
 * This folder is the only includer of grpc headers.
 *
 * Threading: everything here belongs to the loop thread, callbacks run there.
 */
#ifndef RPC_RPC_H
#define RPC_RPC_H

#include "base/status.h"

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

/* One completion-queue thread bound to one loop; servers and clients are made on it. */
typedef struct Rpc Rpc;

Status rpc_create(uv_loop_t *loop, Rpc **rpc_out) STATUS_CHECKED;
/* Servers and clients first (rpc_server_shutdown's callback done, clients destroyed). Joins the
 * thread. */
void rpc_destroy(Rpc *rpc);

/* ---------------------------------------------------------------- errors */
/* Canonical gRPC codes (google.rpc.Code). */
typedef enum RpcCode {
    RPC_CODE_OK = 0,
    RPC_CODE_CANCELLED = 1,
    RPC_CODE_UNKNOWN = 2,
    RPC_CODE_INVALID_ARGUMENT = 3,
    RPC_CODE_DEADLINE_EXCEEDED = 4,
    RPC_CODE_NOT_FOUND = 5,
    RPC_CODE_ALREADY_EXISTS = 6,
    RPC_CODE_PERMISSION_DENIED = 7,
    RPC_CODE_RESOURCE_EXHAUSTED = 8,
    RPC_CODE_FAILED_PRECONDITION = 9,
    RPC_CODE_ABORTED = 10,
    RPC_CODE_OUT_OF_RANGE = 11,
    RPC_CODE_UNIMPLEMENTED = 12,
    RPC_CODE_INTERNAL = 13,
    RPC_CODE_UNAVAILABLE = 14,
    RPC_CODE_DATA_LOSS = 15,
    RPC_CODE_UNAUTHENTICATED = 16,
} RpcCode;

/* How a call ended. On the wire: grpc-status, grpc-message, and google.rpc.Status with exactly one
 * ErrorInfo {reason, domain "viaduct.dev"} in grpc-status-details-bin (AIP-193), and RetryInfo when
 * retry_after_ms > 0. */
typedef struct RpcError {
    RpcCode code;
    char reason[64]; /* UPPER_SNAKE, stable: "JOB_EXISTS"; "" when the peer sent none */
    char message[1024];
    int64_t retry_after_ms; /* 0: none */
} RpcError;

RpcError rpc_error(RpcCode code, const char *reason, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
const char *rpc_code_name(RpcCode code); /* "NOT_FOUND" */

/* ---------------------------------------------------------------- server */
typedef struct RpcServer RpcServer;
/* One call on the server. With a `closed` callback it is alive until that returns, and need not be
 * ended after it. Without one it is alive until it is ended, even if the client has gone away by
 * then, or until the server's shutdown is done. */
typedef struct RpcCall RpcCall;

/* One method's handler. `request` is borrowed for the time of the callback. The handler (or
 * something later on the loop) must end the call exactly once: rpc_call_reply for unary calls,
 * rpc_call_send any number of times then rpc_call_end for server streams, or rpc_call_fail for
 * either. */
typedef void (*RpcHandler)(void *context, RpcCall *call, const ProtobufCMessage *request);

typedef struct RpcMethod {
    const ProtobufCServiceDescriptor *service;
    const char *name;   /* "CreateJob", as in the descriptor */
    RpcHandler handler; /* NULL answers UNIMPLEMENTED, as do methods not listed */
    bool server_stream; /* the response is a stream */
} RpcMethod;

/* Methods that share a context of their own, when it is not the server's: health_service(). */
typedef struct RpcService {
    const RpcMethod *methods; /* borrowed for the life of the server */
    int num_methods;
    void *context;
} RpcService;

/* Who is at the other end of a call. Texts are borrowed for the time of the callback. */
typedef struct RpcPeer {
    const char *address; /* "ipv4:127.0.0.1:52000" */
    bool is_loopback;    /* by its address; a socket of the same machine */
    bool is_encrypted;   /* over TLS */
    const char *token;   /* of "authorization: Bearer ..."; NULL: none was sent */
    /* What the verified certificate says: its DNS names, then its common name. 0 of them without
     * one. */
    const char *const *names;
    int num_names;
} RpcPeer;

/* May this peer call this method? False ends the call with `error_out`, which the callback fills. */
typedef bool (*RpcAuthorize)(void *context, const RpcPeer *peer, const char *service,
                             const char *method, RpcError *error_out);

/* TLS of a server: PEM files, read again when they change. Texts are borrowed for the server's
 * life; "" is none. */
typedef struct RpcServerSecurity {
    const char *certificate_file; /* chain; with key_file: TLS */
    const char *key_file;
    const char *client_ca_file; /* who must have signed a client's certificate; "": none is asked */
} RpcServerSecurity;

typedef struct RpcServerOptions {
    const char *address;      /* "127.0.0.1:0", "[::1]:7070": port 0 picks one */
    const RpcMethod *methods; /* borrowed for the life of the server */
    int num_methods;
    void *context;             /* given to handlers */
    int64_t message_bytes_max; /* larger requests get RESOURCE_EXHAUSTED; 0: 4 MiB; at most 1 GiB */
    const RpcService *services; /* further methods; the array is read by rpc_server_create only */
    int num_services;
    const RpcServerSecurity *security; /* NULL: plaintext */
    RpcAuthorize authorize;            /* NULL: everybody may call everything */
    void *authorize_context;
} RpcServerOptions;

/* Listens and takes calls when it returns. STATUS_CONFLICT when the address cannot be bound,
 * STATUS_INVALID when it names no port. */
Status rpc_server_create(Rpc *rpc, const RpcServerOptions *options,
                         RpcServer **server_out) STATUS_CHECKED;
int rpc_server_port(const RpcServer *server);
/* Stops accepting, ends open streams with UNAVAILABLE, waits up to grace_ms for unary calls, then
 * cancels; `done` (may be NULL) is called once, on the loop, after all `closed` callbacks; by then
 * the server is freed. */
void rpc_server_shutdown(RpcServer *server, int64_t grace_ms, void (*done)(void *context),
                         void *context);

/* Ends a unary call with a message (encoded at once). */
void rpc_call_reply(RpcCall *call, const ProtobufCMessage *response);
/* Ends any call with an error. Messages of a stream that still wait are dropped: a reader that is
 * too slow must not hold them. */
void rpc_call_fail(RpcCall *call, const RpcError *error);
/* One more message of a stream; queued, encoded at once. Returns how many messages wait to be
 * written (0 once the client is gone), so that a slow reader can be dropped. */
int rpc_call_send(RpcCall *call, const ProtobufCMessage *message);
/* Ends a stream with OK after what is queued. */
void rpc_call_end(RpcCall *call);
/* Called once when the client went away or the call ended (any way), on the loop; the RpcCall is
 * invalid after it returns. To be set in the handler: set later, on a call whose client has gone by
 * then, it runs before this returns. */
void rpc_call_on_closed(RpcCall *call, void (*closed)(void *context, RpcCall *call), void *context);
const char *rpc_call_peer(const RpcCall *call); /* "ipv4:127.0.0.1:52000" */
/* The whole of it; in the handler only. */
void rpc_call_describe_peer(const RpcCall *call, RpcPeer *peer_out);

enum {
    RPC_LATENCY_BOUNDS_NUM = 12,
    RPC_CODES_NUM = 17
};
/* Upper ends of the latency buckets, inclusive, seconds. */
extern const double RPC_LATENCY_BOUNDS[RPC_LATENCY_BOUNDS_NUM];

/* What a server has counted of one method since it began. */
typedef struct RpcMethodStats {
    const char *service; /* "viaduct.v1.JobService" */
    const char *method;  /* "CreateJob" */
    bool server_stream;
    uint64_t started;
    uint64_t handled[RPC_CODES_NUM]; /* ended, by RpcCode */
    /* Ended calls by how long they took: bucket i holds those above bound i-1 and up to bound i, the
     * last those above all bounds. */
    uint64_t latency_counts[RPC_LATENCY_BOUNDS_NUM + 1];
    double latency_seconds; /* the sum */
} RpcMethodStats;

typedef void (*RpcVisitStats)(void *context, const RpcMethodStats *stats);
/* Each listed method, in the order of the options. */
void rpc_server_visit_stats(const RpcServer *server, RpcVisitStats visit, void *context);

/* ---------------------------------------------------------------- client */
typedef struct RpcClient RpcClient;   /* a channel to one target */
typedef struct RpcRequest RpcRequest; /* a call under way */

/* Dials lazily and again after failures (back-off at most 5 s), pings every 20 s. `target` is
 * host:port. STATUS_INVALID when it names no port. */
Status rpc_client_create(Rpc *rpc, const char *target, RpcClient **client_out) STATUS_CHECKED;
/* Cancels calls under way (their last callbacks run with CANCELLED before this returns), then
 * frees. May be called in a callback of the client's own calls. */
void rpc_client_destroy(RpcClient *client);

/* `response` is borrowed for the callback and NULL unless error->code is RPC_CODE_OK. Called
 * exactly once. */
typedef void (*RpcResponse)(void *context, const ProtobufCMessage *response, const RpcError *error);

/* A unary call; the request is encoded at once. timeout_ms > 0. The returned handle (may be passed
 * as NULL out) is valid until the callback. */
Status rpc_client_call(RpcClient *client, const ProtobufCServiceDescriptor *service,
                       const char *method, const ProtobufCMessage *request, int64_t timeout_ms,
                       RpcResponse response, void *context,
                       RpcRequest **request_out) STATUS_CHECKED;

/* A server stream: `message` for each message, then `ended` exactly once. No deadline: keepalive
 * finds dead peers. */
typedef void (*RpcStreamMessage)(void *context, const ProtobufCMessage *message);
typedef void (*RpcStreamEnded)(void *context, const RpcError *error);
Status rpc_client_stream(RpcClient *client, const ProtobufCServiceDescriptor *service,
                         const char *method, const ProtobufCMessage *request,
                         RpcStreamMessage message, RpcStreamEnded ended, void *context,
                         RpcRequest **request_out) STATUS_CHECKED;
void rpc_request_cancel(RpcRequest *request);

#endif
