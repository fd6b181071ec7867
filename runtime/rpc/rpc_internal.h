/* Rpc, inside: the way from gRPC's completion queue to the loop, and messages and errors in gRPC's
 * terms.
 *
 * Each batch of operations carries an RpcEvent as its tag. The queue's thread links finished events
 * into a list, the loop thread runs them in order; an event is under way at most once at a time.
 *
 * Threading: the loop thread, except rpc_post.
 */
#ifndef RPC_RPC_INTERNAL_H
#define RPC_RPC_INTERNAL_H

#include "rpc/rpc.h"

#include <grpc/grpc.h>

typedef struct RpcEvent RpcEvent;
struct RpcEvent {
    RpcEvent *next;
    /* On the loop thread; `ok` is what gRPC said of the batch. The event may be freed or used again
     * in it. */
    void (*done)(RpcEvent *event, bool ok);
    void *owner;
    bool ok;
};

grpc_completion_queue *rpc_queue(const Rpc *rpc);
uv_loop_t *rpc_loop(const Rpc *rpc);

/* Servers and clients count themselves in and out, so that rpc_destroy can check the order. */
void rpc_retain(Rpc *rpc);
void rpc_release(Rpc *rpc);

/* Runs event->done on the loop thread, after this call. Any thread. */
void rpc_post(Rpc *rpc, RpcEvent *event, bool ok);

/* Starts a batch with `event` as its tag; a refusal by gRPC is our own bug. */
void rpc_start(Rpc *rpc, grpc_call *call, const grpc_op *ops, size_t num_ops, RpcEvent *event);

/* To be called before an event is given to gRPC by other means. gRPC orders that before the event's
 * end by ways of its own, which no tool for races can see; passing through our lock here is as good
 * and costs some nanoseconds. */
void rpc_publish(Rpc *rpc);

/* The bytes of `message`; owned: grpc_byte_buffer_destroy. */
grpc_byte_buffer *rpc_message_encode(const ProtobufCMessage *message);

/* Decodes bytes from outside: STATUS_CORRUPT when they break protobuf's format, a string is not
 * UTF-8 or holds a NUL, or the decoded message would be larger than 64 MiB. Owned:
 * rpc_message_free. */
Status rpc_message_decode(grpc_byte_buffer *bytes, const ProtobufCMessageDescriptor *descriptor,
                          ProtobufCMessage **message_out) STATUS_CHECKED;
void rpc_message_free(ProtobufCMessage *message);

/* The length of the longest prefix of `text` that is UTF-8 without a NUL. */
size_t rpc_message_utf8_prefix(const uint8_t *text, size_t num_bytes);

/* The value of grpc-status-details-bin; the caller unrefs it. */
grpc_slice rpc_error_encode(const RpcError *error);

/* What the trailers of a finished call say. */
void rpc_error_decode(grpc_status_code code, grpc_slice message,
                      const grpc_metadata_array *trailers, RpcError *error_out);

extern const char rpc_error_details_key[]; /* "grpc-status-details-bin" */

#endif
