#include "base/clock.h"
#include "base/memory.h"
#include "rpc/rpc_call.h"

#include <grpc/grpc_security.h>
#include <string.h>

enum {
    /* Slots that wait for calls of one method. More calls at once stay in gRPC's queue until the
     * loop has taken the earlier ones; a few slots keep it from waiting for the loop between two.
     */
    SLOTS_PER_METHOD = 4,
    MESSAGE_BYTES_DEFAULT = 4 << 20,
    MESSAGE_BYTES_LIMIT = 1 << 30,
    LINGER_TICK_MS = 1000,
    PING_MS = 20000, /* finds clients that died without closing their connection */
    PING_TIMEOUT_MS = 10000,
    PING_INTERVAL_MIN_MS = 10000, /* clients that ping more often are cut off */
    HANDSHAKE_TIMEOUT_MS = 10000,
    STREAMS_PER_CONNECTION_MAX = 4096,
    RETRY_AFTER_SHUTDOWN_MS = 1000,
};

struct RpcServer {
    Rpc *rpc;
    grpc_server *server;
    int port;
    RpcEntry *entries; /* the last one stands for all unknown methods */
    int num_entries;
    RpcCall *calls; /* live ones, not the slots that wait */
    int num_slots;  /* waiting or live */
    RpcEvent shutdown_event;
    bool is_shutting_down;
    bool is_drained; /* gRPC has ended all its calls */
    uv_timer_t grace;
    uv_timer_t linger;
    int num_timers; /* open handles */
    void (*done)(void *context);
    void *done_context;
};

static void on_arrived(RpcEvent *event, bool ok);

/* Offers the object to gRPC as a slot for the next call of its entry. */
static void offer(RpcCall *call, RpcServer *server, RpcEntry *entry)
{
    rpc_call_init(call, server, entry);
    call->arrived = (RpcEvent){.done = on_arrived, .owner = call};
    grpc_completion_queue *queue = rpc_queue(server->rpc);
    grpc_call_error error;
    rpc_publish(server->rpc);
    if (entry->method != NULL) {
        error = grpc_server_request_registered_call(server->server, entry->handle, &call->call,
                                                    &call->deadline, &call->metadata,
                                                    &call->payload, queue, queue, &call->arrived);
    } else {
        error = grpc_server_request_call(server->server, &call->call, &call->details,
                                         &call->metadata, queue, queue, &call->arrived);
    }
    CHECK(error == GRPC_CALL_OK);
    entry->num_waiting++;
}

/* The memory of a slot, chained into `slots` until it is offered. */
static Status add_slot(RpcServer *server, RpcCall **slots)
{
    RpcCall *call = NULL;
    TRY(MEMORY_NEW(&call, 1));
    server->num_slots++;
    call->next = *slots;
    *slots = call;
    return STATUS_OK;
}

static void close_timers(RpcServer *server);

static void free_slot(RpcServer *server, RpcCall *call)
{
    memory_free(call);
    server->num_slots--;
    if (server->is_drained && server->num_slots == 0) {
        close_timers(server);
    }
}

static RpcError shutdown_error(void)
{
    RpcError error = rpc_error(RPC_CODE_UNAVAILABLE, "SHUTTING_DOWN", "the server is stopping");
    error.retry_after_ms = RETRY_AFTER_SHUTDOWN_MS;
    return error;
}

static void on_arrived(RpcEvent *event, bool ok)
{
    RpcCall *call = event->owner;
    RpcServer *server = call->server;
    call->entry->num_waiting--;
    if (!ok) {
        rpc_call_done(call);
        free_slot(server, call);
        return;
    }
    call->next = server->calls;
    if (call->next != NULL) {
        call->next->previous = call;
    }
    server->calls = call;
    if (server->is_shutting_down) {
        RpcError error = shutdown_error();
        rpc_call_run(call, &error);
        return;
    }
    RpcCall *slot = NULL;
    if (add_slot(server, &slot) == STATUS_OK && slot != NULL) {
        offer(slot, server, call->entry);
    }
    /* Without memory for one, this call's own object becomes the slot again when it is over. */
    rpc_call_run(call, NULL);
}

void rpc_server_release_call(RpcServer *server, RpcCall *call)
{
    if (call->previous != NULL) {
        call->previous->next = call->next;
    } else {
        server->calls = call->next;
    }
    if (call->next != NULL) {
        call->next->previous = call->previous;
    }
    RpcEntry *entry = call->entry;
    rpc_call_done(call);
    if (!server->is_shutting_down && entry->num_waiting < SLOTS_PER_METHOD) {
        offer(call, server, entry);
    } else {
        free_slot(server, call);
    }
}

static void on_linger(uv_timer_t *timer)
{
    RpcServer *server = timer->data;
    int64_t now_ns = clock_now_ns();
    bool is_needed = false;
    for (RpcCall *call = server->calls; call != NULL; call = call->next) {
        is_needed |= rpc_call_cut_off(call, now_ns);
    }
    if (!is_needed) {
        uv_timer_stop(timer);
    }
}

void rpc_server_start_linger(RpcServer *server)
{
    if (!uv_is_active((const uv_handle_t *)&server->linger)) {
        uv_timer_start(&server->linger, on_linger, LINGER_TICK_MS, LINGER_TICK_MS);
    }
}

static void free_server(RpcServer *server)
{
    rpc_release(server->rpc);
    memory_free(server->entries);
    memory_free(server);
}

static void on_timer_closed(uv_handle_t *handle)
{
    RpcServer *server = handle->data;
    if (--server->num_timers > 0) {
        return;
    }
    void (*done)(void *context) = server->done;
    void *context = server->done_context;
    free_server(server);
    if (done != NULL) {
        done(context);
    }
}

static void close_timers(RpcServer *server)
{
    grpc_server_destroy(server->server);
    uv_close((uv_handle_t *)&server->grace, on_timer_closed);
    uv_close((uv_handle_t *)&server->linger, on_timer_closed);
}

/* gRPC has ended every call and connection. Calls that their owners never ended, nor asked to be
 * told about, end here. */
static void on_shutdown(RpcEvent *event, bool ok)
{
    (void)ok;
    RpcServer *server = event->owner;
    server->is_drained = true;
    if (server->num_slots == 0) {
        close_timers(server);
        return;
    }
    RpcCall *next = NULL;
    for (RpcCall *call = server->calls; call != NULL; call = next) {
        next = call->next;
        rpc_call_try_finish(call, true);
    }
}

static void on_grace(uv_timer_t *timer)
{
    RpcServer *server = timer->data;
    grpc_server_cancel_all_calls(server->server);
}

void rpc_server_shutdown(RpcServer *server, int64_t grace_ms, void (*done)(void *context),
                         void *context)
{
    CHECK(!server->is_shutting_down && grace_ms >= 0);
    server->is_shutting_down = true;
    server->done = done;
    server->done_context = context;
    server->shutdown_event = (RpcEvent){.done = on_shutdown, .owner = server};
    rpc_publish(server->rpc);
    grpc_server_shutdown_and_notify(server->server, rpc_queue(server->rpc),
                                    &server->shutdown_event);
    RpcError error = shutdown_error();
    for (RpcCall *call = server->calls; call != NULL; call = call->next) {
        if (call->entry->method != NULL && call->entry->method->server_stream) {
            rpc_call_refuse(call, &error);
        }
    }
    /* With no grace at all, cancelling still waits for the loop's next round. */
    uv_update_time(rpc_loop(server->rpc));
    uv_timer_start(&server->grace, on_grace, (uint64_t)grace_ms, 0);
}

/* Registers the methods that have a handler; all others are unknown to gRPC and get UNIMPLEMENTED.
 */
static Status register_methods(RpcServer *server, const RpcService *service)
{
    for (int i = 0; i < service->num_methods; i++) {
        const RpcMethod *method = &service->methods[i];
        if (method->handler == NULL) {
            continue;
        }
        RpcEntry *entry = &server->entries[server->num_entries];
        entry->method = method;
        entry->context = service->context;
        entry->descriptor =
            protobuf_c_service_descriptor_get_method_by_name(method->service, method->name);
        CHECK(entry->descriptor != NULL);
        char *path = NULL;
        TRY(memory_format(&path, "/%s/%s", method->service->name, method->name));
        entry->handle = grpc_server_register_method(server->server, path, NULL,
                                                    GRPC_SRM_PAYLOAD_READ_INITIAL_BYTE_BUFFER, 0);
        memory_free(path);
        CHECK(entry->handle != NULL); /* the same method twice */
        server->num_entries++;
    }
    return STATUS_OK;
}

static Status add_methods(RpcServer *server, const RpcServerOptions *options)
{
    int num_entries = options->num_methods + 1;
    for (int i = 0; i < options->num_services; i++) {
        num_entries += options->services[i].num_methods;
    }
    TRY(MEMORY_NEW(&server->entries, num_entries));
    RpcService own = {options->methods, options->num_methods, options->context};
    TRY(register_methods(server, &own));
    for (int i = 0; i < options->num_services; i++) {
        TRY(register_methods(server, &options->services[i]));
    }
    server->num_entries++; /* the unknown methods, all zero */
    return STATUS_OK;
}

static Status create_grpc_server(RpcServer *server, const RpcServerOptions *options)
{
    int64_t bytes_max = options->message_bytes_max;
    CHECK(bytes_max >= 0 && bytes_max <= MESSAGE_BYTES_LIMIT);
    struct {
        const char *key;
        int value;
    } settings[] = {
        {GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH,
         bytes_max > 0 ? (int)bytes_max : MESSAGE_BYTES_DEFAULT},
        /* Otherwise two servers share a port, and each gets half of the connections. */
        {GRPC_ARG_ALLOW_REUSEPORT, 0},
        /* Only uncompressed messages: a small compressed one may grow without bound. */
        {GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1 << GRPC_COMPRESS_NONE},
        {GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, PING_INTERVAL_MIN_MS},
        {GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1},
        {GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0},
        {GRPC_ARG_KEEPALIVE_TIME_MS, PING_MS},
        {GRPC_ARG_KEEPALIVE_TIMEOUT_MS, PING_TIMEOUT_MS},
        {GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, HANDSHAKE_TIMEOUT_MS},
        {GRPC_ARG_MAX_CONCURRENT_STREAMS, STREAMS_PER_CONNECTION_MAX},
        /* Messages are small: fixed windows do, and the probes would cost a tenth of each call. */
        {GRPC_ARG_HTTP2_BDP_PROBE, 0},
        {GRPC_ARG_ENABLE_CHANNELZ, 0},
    };
    enum {
        NUM_SETTINGS = sizeof settings / sizeof settings[0]
    };
    grpc_arg values[NUM_SETTINGS];
    for (int i = 0; i < NUM_SETTINGS; i++) {
        values[i] = (grpc_arg){.type = GRPC_ARG_INTEGER,
                               .key = (char *)settings[i].key,
                               .value.integer = settings[i].value};
    }
    grpc_channel_args arguments = {.num_args = NUM_SETTINGS, .args = values};
    server->server = grpc_server_create(&arguments, NULL);
    grpc_server_register_completion_queue(server->server, rpc_queue(server->rpc), NULL);
    return add_methods(server, options);
}

static Status listen_at(RpcServer *server, const char *address)
{
    /* gRPC would take 443 for a port that is missing. */
    if (strchr(address, ':') == NULL) {
        return fail(STATUS_INVALID, "cannot listen at \"%s\": give host:port", address);
    }
    grpc_server_credentials *credentials = grpc_insecure_server_credentials_create();
    server->port = grpc_server_add_http2_port(server->server, address, credentials);
    grpc_server_credentials_release(credentials);
    if (server->port <= 0) {
        return fail(STATUS_CONFLICT,
                    "cannot listen at %s: the port is taken, or the address is not one of this "
                    "machine (give host:port; port 0 picks a free one)",
                    address);
    }
    return STATUS_OK;
}

static void start(RpcServer *server, RpcCall *slots)
{
    CHECK(uv_timer_init(rpc_loop(server->rpc), &server->grace) == 0);
    CHECK(uv_timer_init(rpc_loop(server->rpc), &server->linger) == 0);
    server->grace.data = server;
    server->linger.data = server;
    server->num_timers = 2;
    grpc_server_start(server->server);
    for (int i = 0; i < server->num_entries * SLOTS_PER_METHOD; i++) {
        RpcCall *slot = slots;
        CHECK(slot != NULL);
        slots = slot->next;
        offer(slot, server, &server->entries[i % server->num_entries]);
    }
}

Status rpc_server_create(Rpc *rpc, const RpcServerOptions *options, RpcServer **server_out)
{
    RpcServer *server = NULL;
    RpcCall *slots = NULL;
    TRY(MEMORY_NEW(&server, 1));
    server->rpc = rpc;
    rpc_retain(rpc);
    Status status = create_grpc_server(server, options);
    for (int i = 0; status == STATUS_OK && i < server->num_entries * SLOTS_PER_METHOD; i++) {
        status = add_slot(server, &slots);
    }
    if (status == STATUS_OK) {
        status = listen_at(server, options->address);
    }
    if (status == STATUS_OK) {
        start(server, slots);
        *server_out = server;
        return STATUS_OK;
    }
    /* A server without a listener needs no shutdown. */
    grpc_server_destroy(server->server);
    while (slots != NULL) {
        RpcCall *slot = slots;
        slots = slot->next;
        memory_free(slot);
    }
    free_server(server);
    return status_trace(status, __FILE__, __LINE__);
}

Rpc *rpc_server_rpc(const RpcServer *server)
{
    return server->rpc;
}

int rpc_server_port(const RpcServer *server)
{
    return server->port;
}
