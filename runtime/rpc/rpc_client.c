#include "base/memory.h"
#include "rpc/rpc_internal.h"

#include <grpc/grpc_security.h>
#include <stdio.h>
#include <string.h>

enum {
    PING_MS = 20000,
    PING_TIMEOUT_MS = 10000,
    BACKOFF_FIRST_MS = 200,
    BACKOFF_MAX_MS = 5000,
    CONNECT_TIMEOUT_MS = 5000,
    DNS_INTERVAL_MIN_MS = 1000, /* pods change their addresses; gRPC's default is 30 s */
    RESPONSE_BYTES_MAX = 64 << 20,
    PATH_BYTES_MAX = 256, /* "/package.Service/Method" */
};

struct RpcClient {
    Rpc *rpc;
    grpc_channel *channel;
    RpcRequest *requests; /* whose last callback is still to come */
    bool is_ending;
};

struct RpcRequest {
    Rpc *rpc;
    RpcClient *client; /* NULL once the last callback has begun */
    RpcRequest *previous;
    RpcRequest *next;
    const ProtobufCMessageDescriptor *output;
    RpcResponse response;     /* of a unary call, or */
    RpcStreamMessage message; /* of a stream */
    RpcStreamEnded ended;
    void *context;
    /* Of gRPC. */
    grpc_call *call;
    RpcEvent started;
    RpcEvent received;
    RpcEvent finished;
    int num_pending;
    bool is_receiving;
    bool is_finished;
    bool is_cancelled; /* by rpc_request_cancel */
    grpc_byte_buffer *outgoing;
    grpc_byte_buffer *incoming;
    grpc_metadata_array headers;
    grpc_metadata_array trailers;
    grpc_status_code status;
    grpc_slice status_message;
};

static void free_if_idle(RpcRequest *request)
{
    if (request->num_pending > 0 || request->client != NULL) {
        return;
    }
    grpc_byte_buffer_destroy(request->outgoing);
    grpc_byte_buffer_destroy(request->incoming);
    grpc_metadata_array_destroy(&request->headers);
    grpc_metadata_array_destroy(&request->trailers);
    grpc_slice_unref(request->status_message);
    grpc_call_unref(request->call);
    memory_free(request);
}

/* Leaves the client's list; the last callback comes right after. */
static void detach(RpcRequest *request)
{
    CHECK(request->client != NULL);
    if (request->previous != NULL) {
        request->previous->next = request->next;
    } else {
        request->client->requests = request->next;
    }
    if (request->next != NULL) {
        request->next->previous = request->previous;
    }
    request->client = NULL;
}

/* The last callback, for unary calls and streams. */
static void tell_end(RpcRequest *request, const ProtobufCMessage *response, const RpcError *error)
{
    detach(request);
    if (request->response != NULL) {
        request->response(request->context, response, error);
    } else {
        request->ended(request->context, error);
    }
}

/* Decodes what has come in and lets go of its bytes. A response we cannot read is an error of the
 * server's. */
static ProtobufCMessage *take_incoming(RpcRequest *request, RpcError *error)
{
    ProtobufCMessage *message = NULL;
    if (request->incoming == NULL) {
        *error = rpc_error(RPC_CODE_INTERNAL, "RESPONSE_MISSING",
                           "the server answered without a %s", request->output->name);
    } else if (rpc_message_decode(request->incoming, request->output, &message) != STATUS_OK) {
        *error = rpc_error(RPC_CODE_INTERNAL, "RESPONSE_UNDECODABLE", "the server's answer: %s",
                           status_message());
    }
    grpc_byte_buffer_destroy(request->incoming);
    request->incoming = NULL;
    return message;
}

/* How gRPC says that the call ended. */
static RpcError read_status(const RpcRequest *request)
{
    RpcError error;
    rpc_error_decode(request->status, request->status_message, &request->trailers, &error);
    /* A call that reaches a server in the moment of its shutdown is reset by gRPC, which reads as a
     * cancellation here, though nobody asked for one. */
    if (error.code == RPC_CODE_CANCELLED && !request->is_cancelled && error.reason[0] == '\0') {
        return rpc_error(RPC_CODE_UNAVAILABLE, "", "the server dropped the call");
    }
    return error;
}

static void finish_unary(RpcRequest *request)
{
    RpcError error = read_status(request);
    ProtobufCMessage *message = NULL;
    if (error.code == RPC_CODE_OK) {
        message = take_incoming(request, &error);
    }
    tell_end(request, message, &error);
    rpc_message_free(message);
}

static void finish_stream(RpcRequest *request)
{
    if (request->is_receiving || !request->is_finished || request->client == NULL) {
        return;
    }
    RpcError error = read_status(request);
    tell_end(request, NULL, &error);
}

static void on_started(RpcEvent *event, bool ok)
{
    (void)ok; /* the status says why */
    RpcRequest *request = event->owner;
    request->num_pending--;
    free_if_idle(request);
}

static void on_finished(RpcEvent *event, bool ok)
{
    (void)ok; /* receiving the status always succeeds */
    RpcRequest *request = event->owner;
    request->num_pending--;
    request->is_finished = true;
    if (request->client != NULL) {
        if (request->response != NULL) {
            finish_unary(request);
        } else {
            finish_stream(request);
        }
    }
    free_if_idle(request);
}

static void receive(RpcRequest *request)
{
    grpc_op op;
    memset(&op, 0, sizeof op);
    op.op = GRPC_OP_RECV_MESSAGE;
    op.data.recv_message.recv_message = &request->incoming;
    request->num_pending++;
    request->is_receiving = true;
    rpc_start(request->rpc, request->call, &op, 1, &request->received);
}

/* One message of a stream, or its end: no message, whether the server is done or dead; the status
 * tells which. */
static void on_received(RpcEvent *event, bool ok)
{
    RpcRequest *request = event->owner;
    request->num_pending--;
    request->is_receiving = false;
    if (ok && request->incoming != NULL && request->client != NULL) {
        RpcError error;
        ProtobufCMessage *message = take_incoming(request, &error);
        if (message != NULL) {
            /* num_pending keeps the request alive should the callback destroy the client. */
            request->num_pending++;
            request->message(request->context, message);
            request->num_pending--;
            rpc_message_free(message);
        } else {
            grpc_call_cancel(request->call, NULL);
            tell_end(request, NULL, &error);
        }
        if (request->client != NULL) {
            receive(request);
        }
    } else {
        finish_stream(request);
    }
    free_if_idle(request);
}

static void init_event(RpcRequest *request, RpcEvent *event, void (*done)(RpcEvent *, bool))
{
    *event = (RpcEvent){.done = done, .owner = request};
}

/* A request with its gRPC call, in the client's list, nothing started. */
static Status create_request(RpcClient *client, const ProtobufCServiceDescriptor *service,
                             const char *method, const ProtobufCMessage *message,
                             gpr_timespec deadline, RpcRequest **request_out)
{
    const ProtobufCMethodDescriptor *descriptor =
        protobuf_c_service_descriptor_get_method_by_name(service, method);
    CHECK(descriptor != NULL && message->descriptor == descriptor->input);
    if (client->is_ending) {
        return fail(STATUS_ABORTED, "%s.%s: the client is being destroyed", service->name, method);
    }
    RpcRequest *request = NULL;
    TRY(MEMORY_NEW(&request, 1));
    request->rpc = client->rpc;
    request->client = client;
    request->output = descriptor->output;
    request->status_message = grpc_empty_slice();
    grpc_metadata_array_init(&request->headers);
    grpc_metadata_array_init(&request->trailers);
    init_event(request, &request->started, on_started);
    init_event(request, &request->received, on_received);
    init_event(request, &request->finished, on_finished);
    request->outgoing = rpc_message_encode(message);
    char path_text[PATH_BYTES_MAX];
    int length = snprintf(path_text, sizeof path_text, "/%s/%s", service->name, method);
    CHECK(length > 0 && length < PATH_BYTES_MAX);
    grpc_slice path = grpc_slice_from_copied_buffer(path_text, (size_t)length);
    request->call = grpc_channel_create_call(client->channel, NULL, GRPC_PROPAGATE_DEFAULTS,
                                             rpc_queue(client->rpc), path, NULL, deadline, NULL);
    grpc_slice_unref(path);
    CHECK(request->call != NULL);
    request->next = client->requests;
    if (request->next != NULL) {
        request->next->previous = request;
    }
    client->requests = request;
    *request_out = request;
    return STATUS_OK;
}

/* What every call sends and receives besides messages: four operations at `ops`. */
static void fill_common_ops(RpcRequest *request, grpc_op *ops)
{
    ops[0].op = GRPC_OP_SEND_INITIAL_METADATA;
    ops[1].op = GRPC_OP_SEND_MESSAGE;
    ops[1].data.send_message.send_message = request->outgoing;
    ops[2].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    ops[3].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[3].data.recv_initial_metadata.recv_initial_metadata = &request->headers;
}

static void fill_status_op(RpcRequest *request, grpc_op *op)
{
    op->op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    op->data.recv_status_on_client.trailing_metadata = &request->trailers;
    op->data.recv_status_on_client.status = &request->status;
    op->data.recv_status_on_client.status_details = &request->status_message;
}

Status rpc_client_call(RpcClient *client, const ProtobufCServiceDescriptor *service,
                       const char *method, const ProtobufCMessage *request, int64_t timeout_ms,
                       RpcResponse response, void *context, RpcRequest **request_out)
{
    CHECK(timeout_ms > 0 && response != NULL);
    RpcRequest *made = NULL;
    gpr_timespec deadline =
        gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(timeout_ms, GPR_TIMESPAN));
    TRY(create_request(client, service, method, request, deadline, &made));
    CHECK(made != NULL);
    made->response = response;
    made->context = context;
    grpc_op ops[6];
    memset(ops, 0, sizeof ops);
    fill_common_ops(made, ops);
    fill_status_op(made, &ops[4]);
    ops[5].op = GRPC_OP_RECV_MESSAGE;
    ops[5].data.recv_message.recv_message = &made->incoming;
    made->num_pending = 1;
    rpc_start(made->rpc, made->call, ops, 6, &made->finished);
    if (request_out != NULL) {
        *request_out = made;
    }
    return STATUS_OK;
}

Status rpc_client_stream(RpcClient *client, const ProtobufCServiceDescriptor *service,
                         const char *method, const ProtobufCMessage *request,
                         RpcStreamMessage message, RpcStreamEnded ended, void *context,
                         RpcRequest **request_out)
{
    CHECK(message != NULL && ended != NULL);
    RpcRequest *made = NULL;
    TRY(create_request(client, service, method, request, gpr_inf_future(GPR_CLOCK_MONOTONIC),
                       &made));
    CHECK(made != NULL);
    made->message = message;
    made->ended = ended;
    made->context = context;
    grpc_op ops[4];
    memset(ops, 0, sizeof ops);
    fill_common_ops(made, ops);
    grpc_op status_op;
    memset(&status_op, 0, sizeof status_op);
    fill_status_op(made, &status_op);
    made->num_pending = 2;
    rpc_start(made->rpc, made->call, ops, 4, &made->started);
    rpc_start(made->rpc, made->call, &status_op, 1, &made->finished);
    receive(made);
    if (request_out != NULL) {
        *request_out = made;
    }
    return STATUS_OK;
}

void rpc_request_cancel(RpcRequest *request)
{
    CHECK(request->client != NULL);
    request->is_cancelled = true;
    (void)grpc_call_cancel(request->call, NULL);
}

Status rpc_client_create(Rpc *rpc, const char *target, RpcClient **client_out)
{
    static const struct {
        const char *key;
        int value;
    } SETTINGS[] = {
        {GRPC_ARG_KEEPALIVE_TIME_MS, PING_MS},
        {GRPC_ARG_KEEPALIVE_TIMEOUT_MS, PING_TIMEOUT_MS},
        {GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1},
        {GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0},
        {GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, BACKOFF_FIRST_MS},
        {GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, CONNECT_TIMEOUT_MS},
        {GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, BACKOFF_MAX_MS},
        {GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, DNS_INTERVAL_MIN_MS},
        {GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, RESPONSE_BYTES_MAX},
        /* The peers are ours and near: no proxy, no configuration from DNS, no connection shared
           with other clients. */
        {GRPC_ARG_ENABLE_HTTP_PROXY, 0},
        {GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1},
        {GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1},
        /* Callers try again themselves; without these a call is a tenth cheaper. */
        {GRPC_ARG_ENABLE_RETRIES, 0},
        {GRPC_ARG_ENABLE_CHANNELZ, 0},
        {GRPC_ARG_HTTP2_BDP_PROBE, 0},
    };
    enum {
        NUM_SETTINGS = sizeof SETTINGS / sizeof SETTINGS[0]
    };
    grpc_arg values[NUM_SETTINGS];
    for (int i = 0; i < NUM_SETTINGS; i++) {
        values[i] = (grpc_arg){.type = GRPC_ARG_INTEGER,
                               .key = (char *)SETTINGS[i].key,
                               .value.integer = SETTINGS[i].value};
    }
    grpc_channel_args arguments = {.num_args = NUM_SETTINGS, .args = values};
    if (strchr(target, ':') == NULL) {
        return fail(STATUS_INVALID, "cannot dial \"%s\": give host:port", target);
    }
    RpcClient *client = NULL;
    TRY(MEMORY_NEW(&client, 1));
    grpc_channel_credentials *credentials = grpc_insecure_credentials_create();
    client->channel = grpc_channel_create(target, credentials, &arguments);
    grpc_channel_credentials_release(credentials);
    if (client->channel == NULL) {
        memory_free(client);
        return fail(STATUS_INVALID, "cannot dial %s: give host:port", target);
    }
    client->rpc = rpc;
    rpc_retain(rpc);
    *client_out = client;
    return STATUS_OK;
}

void rpc_client_destroy(RpcClient *client)
{
    if (client == NULL) {
        return;
    }
    CHECK(!client->is_ending);
    client->is_ending = true;
    RpcError error = rpc_error(RPC_CODE_CANCELLED, "CLIENT_CLOSED", "this side closed the client");
    while (client->requests != NULL) {
        RpcRequest *request = client->requests;
        (void)grpc_call_cancel(request->call, NULL);
        tell_end(request, NULL, &error);
        /* gRPC's last events free it, all of them still to come. */
        CHECK(request->num_pending > 0);
    }
    grpc_channel_destroy(client->channel);
    rpc_release(client->rpc);
    memory_free(client);
}
