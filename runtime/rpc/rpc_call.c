#include "rpc/rpc_call.h"

#include "base/clock.h"
#include "base/memory.h"

#include <grpc/support/alloc.h>
#include <stdio.h>
#include <string.h>

/* How long a failed call may wait for its reader to take the message in flight, before it is cut
 * off without details. */
enum {
    GIVE_UP_MS = 3000
};

struct RpcOutgoing {
    RpcOutgoing *next;
    grpc_byte_buffer *bytes;
};

static void on_sent(RpcEvent *event, bool ok);
static void on_close(RpcEvent *event, bool ok);

void rpc_call_init(RpcCall *call, RpcServer *server, RpcEntry *entry)
{
    memset(call, 0, sizeof *call);
    call->server = server;
    call->entry = entry;
    call->last = &call->first;
    call->status_message = grpc_empty_slice();
    call->close_event = (RpcEvent){.done = on_close, .owner = call};
    call->sent = (RpcEvent){.done = on_sent, .owner = call};
    grpc_call_details_init(&call->details);
    grpc_metadata_array_init(&call->metadata);
}

static void drop_queue(RpcCall *call)
{
    while (call->first != NULL) {
        RpcOutgoing *outgoing = call->first;
        call->first = outgoing->next;
        grpc_byte_buffer_destroy(outgoing->bytes);
        memory_free(outgoing);
    }
    call->last = &call->first;
    call->num_queued = 0;
}

void rpc_call_done(RpcCall *call)
{
    drop_queue(call);
    grpc_byte_buffer_destroy(call->in_flight);
    grpc_byte_buffer_destroy(call->payload);
    grpc_metadata_array_destroy(&call->metadata);
    grpc_call_details_destroy(&call->details);
    grpc_slice_unref(call->status_message);
    if (call->has_details) {
        grpc_slice_unref(call->status_details.key);
        grpc_slice_unref(call->status_details.value);
    }
    gpr_free(call->peer);
    if (call->call != NULL) {
        grpc_call_unref(call->call);
    }
}

/* Moves the first queued message into flight. */
static grpc_byte_buffer *take_message(RpcCall *call)
{
    RpcOutgoing *outgoing = call->first;
    call->first = outgoing->next;
    if (call->first == NULL) {
        call->last = &call->first;
    }
    call->num_queued--;
    grpc_byte_buffer *bytes = outgoing->bytes;
    memory_free(outgoing);
    return bytes;
}

/* Starts the next batch when none is under way: the headers once, one message, and the status
 * behind the last. */
static void pump(RpcCall *call)
{
    if (call->is_sending || call->is_broken || call->is_status_sent) {
        return;
    }
    grpc_op ops[3];
    memset(ops, 0, sizeof ops);
    size_t num_ops = 0;
    if (!call->is_metadata_sent) {
        ops[num_ops++].op = GRPC_OP_SEND_INITIAL_METADATA;
    }
    if (call->first != NULL) {
        call->in_flight = take_message(call);
        ops[num_ops].op = GRPC_OP_SEND_MESSAGE;
        /* With more to come at once, gRPC may gather writes. */
        ops[num_ops].flags = call->first != NULL ? GRPC_WRITE_BUFFER_HINT : 0;
        ops[num_ops++].data.send_message.send_message = call->in_flight;
    }
    if (call->is_ended && call->first == NULL) {
        grpc_op *op = &ops[num_ops++];
        op->op = GRPC_OP_SEND_STATUS_FROM_SERVER;
        op->data.send_status_from_server.status = call->status;
        op->data.send_status_from_server.status_details = &call->status_message;
        op->data.send_status_from_server.trailing_metadata = &call->status_details;
        op->data.send_status_from_server.trailing_metadata_count = call->has_details ? 1 : 0;
        call->is_status_sent = true;
    }
    if (call->in_flight == NULL && !call->is_status_sent) {
        return;
    }
    call->is_metadata_sent = true;
    call->is_sending = true;
    rpc_start(rpc_server_rpc(call->server), call->call, ops, num_ops, &call->sent);
}

void rpc_call_try_finish(RpcCall *call, bool is_forced)
{
    bool is_released = is_forced || call->is_ended_by_owner || call->on_closed != NULL;
    if (!call->is_closed || call->is_sending || !is_released || call->is_over) {
        return;
    }
    call->is_over = true;
    if (call->on_closed != NULL) {
        call->on_closed(call->closed_context, call);
    }
    rpc_server_release_call(call->server, call);
}

static void on_sent(RpcEvent *event, bool ok)
{
    RpcCall *call = event->owner;
    call->is_sending = false;
    grpc_byte_buffer_destroy(call->in_flight);
    call->in_flight = NULL;
    if (!ok) {
        call->is_broken = true;
        drop_queue(call);
    }
    pump(call);
    rpc_call_try_finish(call, false);
}

/* The client went away, or everything was written. */
static void on_close(RpcEvent *event, bool ok)
{
    (void)ok;
    RpcCall *call = event->owner;
    call->is_closed = true;
    call->is_broken = true;
    drop_queue(call);
    rpc_call_try_finish(call, false);
}

static void set_status(RpcCall *call, const RpcError *error)
{
    call->is_ended = true;
    call->status = (grpc_status_code)error->code;
    if (error->code == RPC_CODE_OK) {
        return;
    }
    call->status_message = grpc_slice_from_copied_string(error->message);
    call->status_details.key = grpc_slice_from_static_string(rpc_error_details_key);
    call->status_details.value = rpc_error_encode(error);
    call->has_details = true;
}

void rpc_call_refuse(RpcCall *call, const RpcError *error)
{
    if (call->is_ended) {
        return;
    }
    drop_queue(call);
    set_status(call, error);
    if (call->is_sending) {
        call->give_up_ns = clock_deadline_in_ms(GIVE_UP_MS);
        rpc_server_start_linger(call->server);
    }
    pump(call);
}

bool rpc_call_cut_off(RpcCall *call, int64_t now_ns)
{
    if (call->give_up_ns == 0 || call->is_closed) {
        return false;
    }
    if (now_ns < call->give_up_ns) {
        return true;
    }
    char message[] = "the client did not read";
    (void)grpc_call_cancel_with_status(call->call, call->status, message, NULL);
    call->give_up_ns = 0;
    return false;
}

static void refuse_unmatched(RpcCall *call)
{
    char name[256];
    snprintf(name, sizeof name, "%.*s", (int)GRPC_SLICE_LENGTH(call->details.method),
             (const char *)GRPC_SLICE_START_PTR(call->details.method));
    RpcError error =
        rpc_error(RPC_CODE_UNIMPLEMENTED, "METHOD_UNKNOWN", "this server has no method %s", name);
    rpc_call_fail(call, &error);
}

static void run_handler(RpcCall *call)
{
    const RpcMethod *method = call->entry->method;
    const ProtobufCMessageDescriptor *input = call->entry->descriptor->input;
    ProtobufCMessage *request = NULL;
    if (call->payload == NULL) {
        RpcError error = rpc_error(RPC_CODE_INVALID_ARGUMENT, "REQUEST_MISSING",
                                   "the call came without a %s", input->name);
        rpc_call_fail(call, &error);
        return;
    }
    if (rpc_message_decode(call->payload, input, &request) != STATUS_OK) {
        RpcError error =
            rpc_error(RPC_CODE_INVALID_ARGUMENT, "REQUEST_UNDECODABLE", "%s", status_message());
        rpc_call_fail(call, &error);
        return;
    }
    grpc_byte_buffer_destroy(call->payload);
    call->payload = NULL;
    method->handler(call->entry->context, call, request);
    rpc_message_free(request);
}

void rpc_call_run(RpcCall *call, const RpcError *refusal)
{
    call->peer = grpc_call_get_peer(call->call);
    grpc_op op;
    memset(&op, 0, sizeof op);
    op.op = GRPC_OP_RECV_CLOSE_ON_SERVER;
    op.data.recv_close_on_server.cancelled = &call->cancelled;
    rpc_start(rpc_server_rpc(call->server), call->call, &op, 1, &call->close_event);
    if (refusal != NULL) {
        rpc_call_fail(call, refusal);
    } else if (call->entry->method == NULL) {
        refuse_unmatched(call);
    } else {
        run_handler(call);
    }
}

/* The handler has ended the call; a second time would be its bug. */
static void end_by_owner(RpcCall *call)
{
    CHECK(!call->is_ended_by_owner);
    call->is_ended_by_owner = true;
}

/* Queues the message; without memory the client learns of it instead of missing one. */
static void enqueue(RpcCall *call, const ProtobufCMessage *message)
{
    RpcOutgoing *outgoing = NULL;
    if (MEMORY_NEW(&outgoing, 1) != STATUS_OK) {
        RpcError error = rpc_error(RPC_CODE_RESOURCE_EXHAUSTED, "OUT_OF_MEMORY",
                                   "the server has no memory left");
        rpc_call_refuse(call, &error);
        return;
    }
    outgoing->bytes = rpc_message_encode(message);
    *call->last = outgoing;
    call->last = &outgoing->next;
    call->num_queued++;
}

void rpc_call_reply(RpcCall *call, const ProtobufCMessage *response)
{
    CHECK(!call->entry->method->server_stream);
    CHECK(response->descriptor == call->entry->descriptor->output);
    end_by_owner(call);
    if (!call->is_ended && !call->is_closed) {
        enqueue(call, response);
        call->is_ended = true;
        pump(call);
    }
    rpc_call_try_finish(call, false);
}

void rpc_call_fail(RpcCall *call, const RpcError *error)
{
    CHECK(error->code != RPC_CODE_OK);
    end_by_owner(call);
    rpc_call_refuse(call, error);
    rpc_call_try_finish(call, false);
}

int rpc_call_send(RpcCall *call, const ProtobufCMessage *message)
{
    CHECK(call->entry->method->server_stream && !call->is_ended_by_owner);
    CHECK(message->descriptor == call->entry->descriptor->output);
    if (call->is_ended || call->is_broken) {
        return 0;
    }
    enqueue(call, message);
    pump(call);
    return call->num_queued + (call->in_flight != NULL ? 1 : 0);
}

void rpc_call_end(RpcCall *call)
{
    CHECK(call->entry->method->server_stream);
    end_by_owner(call);
    call->is_ended = true;
    pump(call);
    rpc_call_try_finish(call, false);
}

void rpc_call_on_closed(RpcCall *call, void (*closed)(void *context, RpcCall *call), void *context)
{
    CHECK(call->on_closed == NULL && closed != NULL);
    call->on_closed = closed;
    call->closed_context = context;
    rpc_call_try_finish(call, false);
}

const char *rpc_call_peer(const RpcCall *call)
{
    return call->peer != NULL ? call->peer : "unknown";
}
