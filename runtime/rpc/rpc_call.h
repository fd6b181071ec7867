/* RpcCall, inside: one call on the server, from the slot that waits for it to its end.
 *
 * A call is over when gRPC has reported its close and no batch is under way, and its owner has
 * ended it or will be told by the closed callback. Until then a late rpc_call_reply finds the
 * object alive and does nothing.
 *
 * Threading: the loop thread.
 */
#ifndef RPC_RPC_CALL_H
#define RPC_RPC_CALL_H

#include "rpc/rpc_internal.h"

/* A method of a server, with the slots that wait for calls of it. */
typedef struct RpcEntry {
    const RpcMethod *method; /* NULL in the entry of all calls that no method matches */
    const ProtobufCMethodDescriptor *descriptor;
    void *context;
    void *handle; /* gRPC's */
    int num_waiting;
} RpcEntry;

typedef struct RpcOutgoing RpcOutgoing; /* a message of a stream that waits for its turn */

struct RpcCall {
    RpcServer *server;
    RpcEntry *entry;
    RpcCall *previous; /* among the server's live calls */
    RpcCall *next;
    /* Filled by gRPC when a call takes the slot. */
    RpcEvent arrived;
    grpc_call *call;
    grpc_call_details details; /* of calls that no method matches */
    grpc_metadata_array metadata;
    gpr_timespec deadline;
    grpc_byte_buffer *payload;
    /* Its life. */
    RpcEvent close_event;
    int cancelled;
    char *peer;
    void (*on_closed)(void *context, RpcCall *call);
    void *closed_context;
    bool is_closed;         /* gRPC has reported the close */
    bool is_ended;          /* the status is decided */
    bool is_ended_by_owner; /* ... by the handler, not by the server's shutdown */
    bool is_over;           /* the closed callback is running or has run */
    /* What goes out: one batch at a time. */
    RpcEvent sent;
    bool is_sending;
    bool is_metadata_sent;
    bool is_status_sent;
    bool is_broken; /* nothing more can be written */
    grpc_byte_buffer *in_flight;
    RpcOutgoing *first;
    RpcOutgoing **last;
    int num_queued;
    grpc_status_code status;
    grpc_slice status_message;
    grpc_metadata status_details;
    bool has_details;
    int64_t give_up_ns; /* clock_now_ns() at which a failed call is cut off; 0: never */
};

/* Makes the object a slot that can wait for a call. */
void rpc_call_init(RpcCall *call, RpcServer *server, RpcEntry *entry);

/* Gives back what belongs to the call, not the object. */
void rpc_call_done(RpcCall *call);

/* A call has taken the slot: watches for its close, then runs the handler, or refuses with
 * `refusal` if not NULL. */
void rpc_call_run(RpcCall *call, const RpcError *refusal);

/* Ends a call in place of its owner, who still has to end it or to be told. Nothing when it is
 * ended already. */
void rpc_call_refuse(RpcCall *call, const RpcError *error);

/* Cancels calls that were failed long ago and whose client does not read. True while some are left
 * to look at. */
bool rpc_call_cut_off(RpcCall *call, int64_t now_ns);

/* Reports the call to its server when it is over; `is_forced`: even if its owner never ended it. */
void rpc_call_try_finish(RpcCall *call, bool is_forced);

/* Of the server: what it was made on. */
Rpc *rpc_server_rpc(const RpcServer *server);

/* Of the server: the call is over, its object can be used again. */
void rpc_server_release_call(RpcServer *server, RpcCall *call);

/* Of the server: a failed call waits behind a message in flight. */
void rpc_server_start_linger(RpcServer *server);

#endif
