#include "rpc/health.h"

#include "base/memory.h"
#include "grpc/health/v1/health.pb-c.h"

#include <string.h>

typedef Grpc__Health__V1__HealthCheckResponse__ServingStatus ServingStatus;
#define HEALTH_SERVING     GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
#define HEALTH_NOT_SERVING GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING
#define HEALTH_SERVICE_UNKNOWN \
    GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN

enum {
    SERVICE_BYTES_MAX = 256, /* longer names are no service of anybody's */
    WATCHERS_MAX = 1024,
    /* States that a watcher may leave unread before it is dropped. */
    UNREAD_MAX = 16,
};

typedef struct Service {
    char *name;
    ServingStatus status;
} Service;

typedef struct Watcher Watcher;
struct Watcher {
    Health *health;
    Watcher *previous;
    Watcher *next;
    RpcCall *call;
    bool is_dropped; /* its call is failed, the closed callback still to come */
    char service[SERVICE_BYTES_MAX];
};

struct Health {
    Service *services; /* the first is "" */
    size_t num_services;
    size_t capacity;
    Watcher *watchers;
    int num_watchers;
};

static Service *find_service(const Health *health, const char *name)
{
    for (size_t i = 0; i < health->num_services; i++) {
        if (strcmp(health->services[i].name, name) == 0) {
            return &health->services[i];
        }
    }
    return NULL;
}

static Grpc__Health__V1__HealthCheckResponse response_of(const Health *health, const char *name)
{
    Grpc__Health__V1__HealthCheckResponse response = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    const Service *service = find_service(health, name);
    response.status = service != NULL ? service->status : HEALTH_SERVICE_UNKNOWN;
    return response;
}

static void on_check(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    const Health *health = context;
    const Grpc__Health__V1__HealthCheckRequest *request =
        (const Grpc__Health__V1__HealthCheckRequest *)message;
    if (find_service(health, request->service) == NULL) {
        RpcError error = rpc_error(RPC_CODE_NOT_FOUND, "SERVICE_UNKNOWN",
                                   "this server has no service \"%s\"", request->service);
        rpc_call_fail(call, &error);
        return;
    }
    Grpc__Health__V1__HealthCheckResponse response = response_of(health, request->service);
    rpc_call_reply(call, &response.base);
}

static void on_watcher_closed(void *context, RpcCall *call)
{
    (void)call;
    Watcher *watcher = context;
    Health *health = watcher->health;
    if (watcher->previous != NULL) {
        watcher->previous->next = watcher->next;
    } else {
        health->watchers = watcher->next;
    }
    if (watcher->next != NULL) {
        watcher->next->previous = watcher->previous;
    }
    health->num_watchers--;
    memory_free(watcher);
}

static void send_state(Watcher *watcher)
{
    if (watcher->is_dropped) {
        return;
    }
    Grpc__Health__V1__HealthCheckResponse response = response_of(watcher->health, watcher->service);
    if (rpc_call_send(watcher->call, &response.base) > UNREAD_MAX) {
        RpcError error = rpc_error(RPC_CODE_RESOURCE_EXHAUSTED, "WATCHER_TOO_SLOW",
                                   "the client has left %d states unread", (int)UNREAD_MAX);
        watcher->is_dropped = true;
        rpc_call_fail(watcher->call, &error);
    }
}

static void on_watch(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    Health *health = context;
    const Grpc__Health__V1__HealthCheckRequest *request =
        (const Grpc__Health__V1__HealthCheckRequest *)message;
    size_t length = strlen(request->service);
    RpcError error;
    Watcher *watcher = NULL;
    if (length >= SERVICE_BYTES_MAX) {
        error = rpc_error(RPC_CODE_INVALID_ARGUMENT, "FIELD_INVALID",
                          "service: %zu bytes, at most %d are a name", length,
                          (int)SERVICE_BYTES_MAX - 1);
    } else if (health->num_watchers == WATCHERS_MAX) {
        error = rpc_error(RPC_CODE_RESOURCE_EXHAUSTED, "TOO_MANY_WATCHERS",
                          "%d clients watch already", (int)WATCHERS_MAX);
    } else if (MEMORY_NEW(&watcher, 1) != STATUS_OK) {
        error = rpc_error(RPC_CODE_RESOURCE_EXHAUSTED, "OUT_OF_MEMORY", "%s", status_message());
    }
    if (watcher == NULL) {
        rpc_call_fail(call, &error);
        return;
    }
    watcher->health = health;
    watcher->call = call;
    memcpy(watcher->service, request->service, length + 1);
    watcher->next = health->watchers;
    if (watcher->next != NULL) {
        watcher->next->previous = watcher;
    }
    health->watchers = watcher;
    health->num_watchers++;
    rpc_call_on_closed(call, on_watcher_closed, watcher);
    send_state(watcher);
}

static Status add_service(Health *health, const char *name)
{
    TRY(memory_grow((void **)&health->services, &health->capacity, health->num_services + 1,
                    sizeof *health->services));
    Service *service = &health->services[health->num_services];
    TRY(memory_copy_text(name, &service->name));
    service->status = HEALTH_SERVICE_UNKNOWN;
    health->num_services++;
    return STATUS_OK;
}

Status health_set(Health *health, const char *name, bool is_serving)
{
    CHECK(strlen(name) < SERVICE_BYTES_MAX);
    if (find_service(health, name) == NULL) {
        TRY(add_service(health, name));
    }
    Service *service = find_service(health, name);
    ServingStatus status = is_serving ? HEALTH_SERVING : HEALTH_NOT_SERVING;
    if (service->status == status) {
        return STATUS_OK;
    }
    service->status = status;
    for (Watcher *watcher = health->watchers; watcher != NULL; watcher = watcher->next) {
        if (strcmp(watcher->service, name) == 0) {
            send_state(watcher);
        }
    }
    return STATUS_OK;
}

Status health_create(Health **health_out)
{
    Health *health = NULL;
    TRY(MEMORY_NEW(&health, 1));
    Status status = health_set(health, "", false);
    if (status != STATUS_OK) {
        health_destroy(health);
        return status_trace(status, __FILE__, __LINE__);
    }
    *health_out = health;
    return STATUS_OK;
}

void health_destroy(Health *health)
{
    if (health == NULL) {
        return;
    }
    CHECK(health->watchers == NULL);
    for (size_t i = 0; i < health->num_services; i++) {
        memory_free(health->services[i].name);
    }
    memory_free(health->services);
    memory_free(health);
}

RpcService health_service(Health *health)
{
    static const RpcMethod METHODS[] = {
        {&grpc__health__v1__health__descriptor, "Check", on_check, false},
        {&grpc__health__v1__health__descriptor, "Watch", on_watch, true},
    };
    return (RpcService){METHODS, sizeof METHODS / sizeof METHODS[0], health};
}
