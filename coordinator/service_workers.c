/* WorkerService: the handlers of workers' calls. */
#include "base/log.h"
#include "base/memory.h"
#include "coordinator/refusal.h"
#include "coordinator/service_internal.h"
#include "job/message.h"

#include <stdio.h>
#include <string.h>

#define WORKERS (&viaduct__v1__worker_service__descriptor)

static Status fill_registered(const Service *service, int slot,
                              Viaduct__V1__RegisterWorkerResponse *response)
{
    const Cluster *cluster = &service->cluster;
    TRY(cluster_render_worker(cluster, slot, &response->worker));
    TRY(message_set_text(&response->lease_id, cluster->membership.workers[slot].lease_id));
    TRY(message_set_duration(&response->lease_ttl, cluster->options.lease_ms));
    TRY(message_set_duration(&response->heartbeat_interval, cluster->options.heartbeat_ms));
    return message_set_text(&response->coordinator_boot_id, service->boot_id);
}

static void on_register(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    Service *service = context;
    int slot = -1;
    RpcError error;
    bool done =
        cluster_register(&service->cluster, (const Viaduct__V1__RegisterWorkerRequest *)message,
                         service_now_ms(), &slot, &error);
    service_carry(service);
    if (!done) {
        log_warn("registration refused: %s", error.message);
        rpc_call_fail(call, &error);
        return;
    }
    ProtobufCMessage *response = NULL;
    Status status = message_create(&viaduct__v1__register_worker_response__descriptor, &response);
    if (status == STATUS_OK) {
        status = fill_registered(service, slot, (Viaduct__V1__RegisterWorkerResponse *)response);
    }
    if (status == STATUS_OK) {
        log_info("worker %s registered from %s", service->cluster.membership.workers[slot].name,
                 rpc_call_peer(call));
        rpc_call_reply(call, response);
    } else {
        service_fail_status(call, status);
    }
    if (response) {
        protobuf_c_message_free_unpacked(response, NULL);
    }
}

static void on_heartbeat(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    Service *service = context;
    Viaduct__V1__HeartbeatResponse response = VIADUCT__V1__HEARTBEAT_RESPONSE__INIT;
    RpcError error;
    bool done = cluster_heartbeat(&service->cluster, (const Viaduct__V1__HeartbeatRequest *)message,
                                  service_now_ms(), &response, &error);
    service_carry(service);
    if (done) {
        response.coordinator_boot_id = service->boot_id;
        rpc_call_reply(call, &response.base);
    } else {
        rpc_call_fail(call, &error);
    }
}

static void on_stream_closed(void *context, RpcCall *call)
{
    (void)call;
    ServiceStream *stream = context;
    Service *service = stream->service;
    ServiceStream **link = &service->assignments;
    while (*link != stream) {
        link = &(*link)->next;
    }
    *link = stream->next;
    int slot = stream->slot;
    memory_free(stream);
    if (slot >= 0) {
        cluster_close_stream(&service->cluster, slot, service_now_ms());
        service_carry(service);
    }
}

/* A worker has one stream: an older one no longer counts, and its end says nothing about the
 * worker. */
static void retire_streams(Service *service, int slot)
{
    ServiceStream *stream = service->assignments;
    while (stream) {
        ServiceStream *next = stream->next;
        if (stream->slot == slot) {
            stream->slot = -1;
            rpc_call_end(stream->call);
        }
        stream = next;
    }
}

static void on_watch_assignment(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    Service *service = context;
    const Viaduct__V1__WatchAssignmentRequest *request =
        (const Viaduct__V1__WatchAssignmentRequest *)message;
    RpcError error;
    ServiceStream *stream = NULL;
    int slot = membership_find_lease(&service->cluster.membership, request->lease_id, &error);
    if (slot < 0) {
        rpc_call_fail(call, &error);
        return;
    }
    Status status = MEMORY_NEW(&stream, 1);
    if (status != STATUS_OK) {
        service_fail_status(call, status);
        return;
    }
    retire_streams(service, slot);
    *stream = (ServiceStream){
        .service = service, .call = call, .slot = slot, .next = service->assignments};
    service->assignments = stream;
    rpc_call_on_closed(call, on_stream_closed, stream);
    /* The stream is in its place before the cluster sends the first message on it. */
    if (!cluster_open_stream(&service->cluster, request->lease_id, service_now_ms(), &slot,
                             &error)) {
        rpc_call_fail(call, &error);
    }
    service_carry(service);
}

static void on_acknowledge(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    Service *service = context;
    RpcError error;
    bool done =
        cluster_acknowledge(&service->cluster, (const Viaduct__V1__AckAssignmentRequest *)message,
                            service_now_ms(), &error);
    service_carry(service);
    if (done) {
        Viaduct__V1__AckAssignmentResponse response = VIADUCT__V1__ACK_ASSIGNMENT_RESPONSE__INIT;
        rpc_call_reply(call, &response.base);
    } else {
        rpc_call_fail(call, &error);
    }
}

static void on_report(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    Service *service = context;
    Viaduct__V1__ReportStepsResponse response = VIADUCT__V1__REPORT_STEPS_RESPONSE__INIT;
    RpcError error;
    bool done = cluster_report(&service->cluster, (const Viaduct__V1__ReportStepsRequest *)message,
                               service_now_ms(), &response.acknowledged_step, &error);
    service_carry(service);
    if (done) {
        rpc_call_reply(call, &response.base);
    } else {
        rpc_call_fail(call, &error);
    }
}

static void on_deregister(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    Service *service = context;
    RpcError error;
    bool done =
        cluster_deregister(&service->cluster, (const Viaduct__V1__DeregisterWorkerRequest *)message,
                           service_now_ms(), &error);
    service_carry(service);
    if (done) {
        Google__Protobuf__Empty empty = GOOGLE__PROTOBUF__EMPTY__INIT;
        rpc_call_reply(call, &empty.base);
    } else {
        rpc_call_fail(call, &error);
    }
}

static void on_get_worker(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    Service *service = context;
    const Viaduct__V1__GetWorkerRequest *request = (const Viaduct__V1__GetWorkerRequest *)message;
    int slot = membership_find_name(&service->cluster.membership, request->name);
    if (slot < 0) {
        RpcError error;
        refusal_set(&error, RPC_CODE_NOT_FOUND, "WORKER_NOT_FOUND", "there is no worker \"%.80s\"",
                    request->name);
        rpc_call_fail(call, &error);
        return;
    }
    Viaduct__V1__Worker *worker = NULL;
    Status status = cluster_render_worker(&service->cluster, slot, &worker);
    if (status != STATUS_OK) {
        service_fail_status(call, status);
        return;
    }
    rpc_call_reply(call, &worker->base);
    viaduct__v1__worker__free_unpacked(worker, NULL);
}

static Status fill_workers(const Cluster *cluster, int begin, int end,
                           Viaduct__V1__ListWorkersResponse *response)
{
    const ProtobufCFieldDescriptor *field =
        protobuf_c_message_descriptor_get_field_by_name(response->base.descriptor, "workers");
    for (int i = begin; i < end; i++) {
        Viaduct__V1__Worker *worker = NULL;
        TRY(cluster_render_worker(cluster, i, &worker));
        Status status = message_append(&response->base, field, &worker);
        if (status != STATUS_OK) {
            viaduct__v1__worker__free_unpacked(worker, NULL);
            return status;
        }
    }
    if (end < cluster->membership.count) {
        char token[16];
        snprintf(token, sizeof token, "%d", end);
        TRY(message_set_text(&response->next_page_token, token));
    }
    return STATUS_OK;
}

static void on_list_workers(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    Service *service = context;
    const Viaduct__V1__ListWorkersRequest *request =
        (const Viaduct__V1__ListWorkersRequest *)message;
    RpcError error;
    int begin = 0;
    int end = 0;
    if (!service_page(request->page_size, request->page_token, service->cluster.membership.count,
                      &begin, &end, &error)) {
        rpc_call_fail(call, &error);
        return;
    }
    ProtobufCMessage *response = NULL;
    Status status = message_create(&viaduct__v1__list_workers_response__descriptor, &response);
    if (status == STATUS_OK) {
        status = fill_workers(&service->cluster, begin, end,
                              (Viaduct__V1__ListWorkersResponse *)response);
    }
    if (status == STATUS_OK) {
        rpc_call_reply(call, response);
    } else {
        service_fail_status(call, status);
    }
    if (response) {
        protobuf_c_message_free_unpacked(response, NULL);
    }
}

const RpcMethod service_worker_methods[] = {
    {WORKERS, "RegisterWorker", on_register, false},
    {WORKERS, "Heartbeat", on_heartbeat, false},
    {WORKERS, "WatchAssignment", on_watch_assignment, true},
    {WORKERS, "AckAssignment", on_acknowledge, false},
    {WORKERS, "ReportSteps", on_report, false},
    {WORKERS, "DeregisterWorker", on_deregister, false},
    {WORKERS, "GetWorker", on_get_worker, false},
    {WORKERS, "ListWorkers", on_list_workers, false},
};
const int service_num_worker_methods =
    sizeof service_worker_methods / sizeof *service_worker_methods;
