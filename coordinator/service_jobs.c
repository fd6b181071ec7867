/* JobService: the handlers of users' calls. */
#include "base/memory.h"
#include "coordinator/refusal.h"
#include "coordinator/service_internal.h"
#include "job/message.h"

#include <stdio.h>
#include <string.h>

#define JOBS (&viaduct__v1__job_service__descriptor)

static void reply_job(Service *service, RpcCall *call, const ClusterJob *job)
{
    Viaduct__V1__Job *message = NULL;
    Status status = cluster_render_job(&service->cluster, job, &message);
    if (status != STATUS_OK) {
        service_fail_status(call, status);
        return;
    }
    rpc_call_reply(call, &message->base);
    viaduct__v1__job__free_unpacked(message, NULL);
}

static void on_create(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    Service *service = context;
    const Viaduct__V1__CreateJobRequest *request = (const Viaduct__V1__CreateJobRequest *)message;
    ClusterJob *job = NULL;
    RpcError error;
    bool done = cluster_create_job(&service->cluster, request, service_now_ms(), &job, &error);
    service_carry(service);
    if (!done) {
        rpc_call_fail(call, &error);
    } else if (job) {
        reply_job(service, call, job);
    } else {
        rpc_call_reply(call, &request->job->base); /* validate_only */
    }
}

static ClusterJob *find_or_fail(Service *service, RpcCall *call, const char *name)
{
    ClusterJob *job = cluster_find_job(&service->cluster, name);
    if (!job) {
        RpcError error;
        refusal_set(&error, RPC_CODE_NOT_FOUND, "JOB_NOT_FOUND", "there is no job \"%.80s\"", name);
        rpc_call_fail(call, &error);
    }
    return job;
}

static void on_get(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    const Viaduct__V1__GetJobRequest *request = (const Viaduct__V1__GetJobRequest *)message;
    ClusterJob *job = find_or_fail(context, call, request->name);
    if (job) {
        reply_job(context, call, job);
    }
}

static Status fill_list(const Cluster *cluster, int begin, int end,
                        Viaduct__V1__ListJobsResponse *response)
{
    const ProtobufCFieldDescriptor *field =
        protobuf_c_message_descriptor_get_field_by_name(response->base.descriptor, "jobs");
    response->revision = cluster->revision;
    for (int i = begin; i < end; i++) {
        Viaduct__V1__Job *job = NULL;
        TRY(cluster_render_job(cluster, cluster->jobs[i], &job));
        Status status = message_append(&response->base, field, &job);
        if (status != STATUS_OK) {
            viaduct__v1__job__free_unpacked(job, NULL);
            return status;
        }
    }
    if (end < cluster->num_jobs) {
        char token[16];
        snprintf(token, sizeof token, "%d", end);
        TRY(message_set_text(&response->next_page_token, token));
    }
    return STATUS_OK;
}

static void on_list(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    Service *service = context;
    const Viaduct__V1__ListJobsRequest *request = (const Viaduct__V1__ListJobsRequest *)message;
    RpcError error;
    int begin = 0;
    int end = 0;
    if (!service_page(request->page_size, request->page_token, service->cluster.num_jobs, &begin,
                      &end, &error)) {
        rpc_call_fail(call, &error);
        return;
    }
    ProtobufCMessage *response = NULL;
    Status status = message_create(&viaduct__v1__list_jobs_response__descriptor, &response);
    if (status == STATUS_OK) {
        status =
            fill_list(&service->cluster, begin, end, (Viaduct__V1__ListJobsResponse *)response);
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

static void on_watch_closed(void *context, RpcCall *call)
{
    (void)call;
    ServiceStream *stream = context;
    ServiceStream **link = &stream->service->watches;
    while (*link != stream) {
        link = &(*link)->next;
    }
    *link = stream->next;
    memory_free(stream);
}

/* Everything there is, then a bookmark with the revision from which changes follow. */
static Status send_snapshot(ServiceStream *stream)
{
    const Cluster *cluster = &stream->service->cluster;
    for (int i = 0; i < cluster->num_jobs; i++) {
        const ClusterJob *job = cluster->jobs[i];
        if (stream->job[0] && strcmp(stream->job, job->id) != 0) {
            continue;
        }
        Viaduct__V1__WatchJobsResponse message = VIADUCT__V1__WATCH_JOBS_RESPONSE__INIT;
        message.type = VIADUCT__V1__WATCH_JOBS_RESPONSE__TYPE__ADDED;
        message.revision = job->revision;
        TRY(cluster_render_job(cluster, job, &message.job));
        (void)rpc_call_send(stream->call, &message.base);
        viaduct__v1__job__free_unpacked(message.job, NULL);
    }
    service_tell_watch(stream, VIADUCT__V1__WATCH_JOBS_RESPONSE__TYPE__BOOKMARK, cluster->revision,
                       NULL);
    return STATUS_OK;
}

static bool check_watch(Service *service, const Viaduct__V1__WatchJobsRequest *request,
                        RpcError *error_out)
{
    int64_t revision = service->cluster.revision;
    if (request->from_revision != 0 && request->from_revision != revision) {
        return refusal_set(error_out, RPC_CODE_OUT_OF_RANGE, "REVISION_COMPACTED",
                           "from_revision: %lld is not kept, the present one is %lld: watch from 0",
                           (long long)request->from_revision, (long long)revision);
    }
    if (service->is_closing) {
        return refusal_set(error_out, RPC_CODE_UNAVAILABLE, "DRAINING", "the coordinator stops");
    }
    return true;
}

static void on_watch(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    Service *service = context;
    const Viaduct__V1__WatchJobsRequest *request = (const Viaduct__V1__WatchJobsRequest *)message;
    RpcError error;
    if (!check_watch(service, request, &error)) {
        rpc_call_fail(call, &error);
        return;
    }
    ClusterJob *job = request->name[0] ? find_or_fail(service, call, request->name) : NULL;
    if (request->name[0] && !job) {
        return;
    }
    ServiceStream *stream = NULL;
    Status status = MEMORY_NEW(&stream, 1);
    if (status != STATUS_OK) {
        service_fail_status(call, status);
        return;
    }
    *stream =
        (ServiceStream){.service = service, .call = call, .slot = -1, .next = service->watches};
    snprintf(stream->job, sizeof stream->job, "%s", job ? job->id : "");
    service->watches = stream;
    rpc_call_on_closed(call, on_watch_closed, stream);
    if (request->from_revision == 0) {
        status = send_snapshot(stream);
        if (status != STATUS_OK) {
            service_fail_status(call, status);
        }
    }
}

static void on_cancel(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    Service *service = context;
    ClusterJob *job = NULL;
    RpcError error;
    bool done =
        cluster_cancel_job(&service->cluster, (const Viaduct__V1__CancelJobRequest *)message,
                           service_now_ms(), &job, &error);
    service_carry(service);
    if (done) {
        reply_job(service, call, job);
    } else {
        rpc_call_fail(call, &error);
    }
}

static void on_delete(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    Service *service = context;
    RpcError error;
    bool done =
        cluster_delete_job(&service->cluster, (const Viaduct__V1__DeleteJobRequest *)message,
                           service_now_ms(), &error);
    service_carry(service);
    if (done) {
        Google__Protobuf__Empty empty = GOOGLE__PROTOBUF__EMPTY__INIT;
        rpc_call_reply(call, &empty.base);
    } else {
        rpc_call_fail(call, &error);
    }
}

const RpcMethod service_job_methods[] = {
    {JOBS, "CreateJob", on_create, false}, {JOBS, "GetJob", on_get, false},
    {JOBS, "ListJobs", on_list, false},    {JOBS, "WatchJobs", on_watch, true},
    {JOBS, "CancelJob", on_cancel, false}, {JOBS, "DeleteJob", on_delete, false},
};
const int service_num_job_methods = sizeof service_job_methods / sizeof *service_job_methods;
