#include "coordinator/service.h"

#include "base/clock.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/memory.h"
#include "coordinator/refusal.h"
#include "coordinator/service_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum {
    TICK_MS = 100,
    BOOKMARK_MS = 15000,
    BACKLOG_MAX = 256, /* messages that may wait for a slow watcher */
    PAGE_DEFAULT = 50,
    PAGE_MAX = 1000
};

int64_t service_now_ms(void)
{
    return clock_now_ns() / CLOCK_NS_PER_MS;
}

void service_fail_status(RpcCall *call, Status status)
{
    RpcError error;
    RpcCode code = status == STATUS_NO_MEMORY ? RPC_CODE_RESOURCE_EXHAUSTED : RPC_CODE_INTERNAL;
    refusal_set(&error, code, code == RPC_CODE_INTERNAL ? "INTERNAL" : "NO_MEMORY", "%s: %s",
                status_name(status), status_message());
    log_error("%s [%s]", error.message, status_trail());
    rpc_call_fail(call, &error);
}

bool service_page(int32_t page_size, const char *token, int count, int *begin_out, int *end_out,
                  RpcError *error_out)
{
    if (page_size < 0) {
        return refusal_set(error_out, RPC_CODE_INVALID_ARGUMENT, "FIELD_INVALID",
                           "page_size: is %d, expected 0 or more", page_size);
    }
    int begin = 0;
    char after = 0;
    if (token[0] && (sscanf(token, "%9d%c", &begin, &after) != 1 || begin < 0)) {
        return refusal_set(error_out, RPC_CODE_INVALID_ARGUMENT, "FIELD_INVALID",
                           "page_token: is not one that a list returned");
    }
    int size = page_size == 0 ? PAGE_DEFAULT : page_size > PAGE_MAX ? PAGE_MAX : page_size;
    *begin_out = begin < count ? begin : count;
    *end_out = count - *begin_out < size ? count : *begin_out + size;
    return true;
}

/* ---------------------------------------------------------------- effects */

void service_tell_watch(ServiceStream *stream, Viaduct__V1__WatchJobsResponse__Type type,
                        int64_t revision, Viaduct__V1__Job *job)
{
    Viaduct__V1__WatchJobsResponse message = VIADUCT__V1__WATCH_JOBS_RESPONSE__INIT;
    message.type = type;
    message.revision = revision;
    message.job = job;
    if (rpc_call_send(stream->call, &message.base) > BACKLOG_MAX) {
        RpcError error;
        refusal_set(&error, RPC_CODE_RESOURCE_EXHAUSTED, "SLOW_WATCH",
                    "the watch fell %d messages behind: watch again", BACKLOG_MAX);
        rpc_call_fail(stream->call, &error);
    }
}

/* Telling may close a stream, whose callback takes it out of the list: `next` is read before. */
static void tell_watches(Service *service, const ClusterEffect *effect,
                         Viaduct__V1__WatchJobsResponse__Type type, Viaduct__V1__Job *job)
{
    ServiceStream *stream = service->watches;
    while (stream) {
        ServiceStream *next = stream->next;
        if (!stream->job[0] || strcmp(stream->job, effect->job_id) == 0) {
            service_tell_watch(stream, type, effect->revision, job);
        }
        stream = next;
    }
}

static Status save_job(Service *service, const ClusterEffect *effect)
{
    const ClusterJob *job = cluster_find_serial(&service->cluster, effect->job);
    if (!job) {
        return STATUS_OK; /* deleted by the same event */
    }
    Viaduct__V1__Job *message = NULL;
    TRY(cluster_render_job(&service->cluster, job, &message));
    StoreRecord record = {message, job->request_id, job->request_hash};
    Status status = store_put(service->store, &record);
    if (status == STATUS_OK) {
        tell_watches(service, effect,
                     effect->is_new ? VIADUCT__V1__WATCH_JOBS_RESPONSE__TYPE__ADDED
                                    : VIADUCT__V1__WATCH_JOBS_RESPONSE__TYPE__MODIFIED,
                     message);
    }
    viaduct__v1__job__free_unpacked(message, NULL);
    return status;
}

static Status forget_job(Service *service, const ClusterEffect *effect)
{
    char name[80];
    snprintf(name, sizeof name, "jobs/%s", effect->job_id);
    Viaduct__V1__Job message = VIADUCT__V1__JOB__INIT;
    message.name = name;
    tell_watches(service, effect, VIADUCT__V1__WATCH_JOBS_RESPONSE__TYPE__DELETED, &message);
    return store_remove(service->store, effect->uid);
}

static Status send_assignment(Service *service, const ClusterEffect *effect)
{
    for (ServiceStream *stream = service->assignments; stream; stream = stream->next) {
        if (stream->slot != effect->slot) {
            continue;
        }
        Viaduct__V1__WatchAssignmentResponse *message = NULL;
        TRY(cluster_render_assignment(&service->cluster, effect, &message));
        (void)rpc_call_send(stream->call, &message->base);
        viaduct__v1__watch_assignment_response__free_unpacked(message, NULL);
        return STATUS_OK;
    }
    return STATUS_OK; /* it is sent again when the worker opens its stream */
}

static void log_change(Service *service, const ClusterEffect *effect)
{
    ClusterJob *job = cluster_find_serial(&service->cluster, effect->job);
    if (job && job->logged_state != job->state) {
        job->logged_state = job->state;
        log_info("job %s is %s: %s", job->id, job_state_name(job->state), job->message);
    }
}

void service_carry(Service *service)
{
    /* The list may not change while it is walked: carrying out calls no event of the cluster.
     * Closed streams tell the cluster later, from the loop. */
    for (int i = 0; i < service->cluster.num_effects; i++) {
        const ClusterEffect *effect = &service->cluster.effects[i];
        Status status = STATUS_OK;
        if (effect->kind == CLUSTER_EFFECT_SEND) {
            status = send_assignment(service, effect);
        } else if (effect->kind == CLUSTER_EFFECT_JOB_CHANGED) {
            log_change(service, effect);
            status = save_job(service, effect);
        } else {
            status = forget_job(service, effect);
        }
        if (status != STATUS_OK) {
            log_error("job %s: %s: %s [%s]", effect->job_id, status_name(status), status_message(),
                      status_trail());
        }
    }
    cluster_clear_effects(&service->cluster);
}

/* ---------------------------------------------------------------- time */

static void on_tick(uv_timer_t *timer)
{
    Service *service = timer->data;
    int64_t now_ms = service_now_ms();
    cluster_tick(&service->cluster, now_ms);
    service_carry(service);
    if (now_ms >= service->next_bookmark_ms) {
        service->next_bookmark_ms = now_ms + BOOKMARK_MS;
        ServiceStream *stream = service->watches;
        while (stream) {
            ServiceStream *next = stream->next;
            service_tell_watch(stream, VIADUCT__V1__WATCH_JOBS_RESPONSE__TYPE__BOOKMARK,
                               service->cluster.revision, NULL);
            stream = next;
        }
    }
}

/* ---------------------------------------------------------------- life */

static Status listen_on(Service *service, Rpc *rpc, const ServiceOptions *options)
{
    TRY(health_create(&service->health));
    TRY(health_set(service->health, "", true));
    TRY(health_set(service->health, "viaduct.v1.JobService", true));
    TRY(health_set(service->health, "viaduct.v1.WorkerService", true));
    const RpcService services[] = {
        {service_job_methods, service_num_job_methods, service},
        {service_worker_methods, service_num_worker_methods, service},
        health_service(service->health),
    };
    const RpcServerOptions server = {
        .address = options->address,
        .context = service,
        .services = services,
        .num_services = sizeof services / sizeof *services,
    };
    return rpc_server_create(rpc, &server, &service->server);
}

Status service_create(uv_loop_t *loop, Rpc *rpc, const ServiceOptions *options,
                      Service **service_out)
{
    Service *service = NULL;
    TRY(MEMORY_NEW(&service, 1));
    cluster_init(&service->cluster, &options->cluster);
    service->store = options->store;
    Rng rng = {options->cluster.seed, hash_text("boot")};
    snprintf(service->boot_id, sizeof service->boot_id, "%016" PRIx64 "%016" PRIx64,
             rng_bits64(rng, 0), rng_bits64(rng, 1));
    Status status = listen_on(service, rpc, options);
    if (status != STATUS_OK) {
        health_destroy(service->health);
        cluster_done(&service->cluster);
        memory_free(service);
        return status_trace(status, __FILE__, __LINE__);
    }
    service->timer.data = service;
    CHECK(uv_timer_init(loop, &service->timer) == 0);
    CHECK(uv_timer_start(&service->timer, on_tick, TICK_MS, TICK_MS) == 0);
    service->next_bookmark_ms = service_now_ms() + BOOKMARK_MS;
    *service_out = service;
    return STATUS_OK;
}

int service_port(const Service *service)
{
    return rpc_server_port(service->server);
}

static void on_part_closed(Service *service)
{
    if (--service->num_open > 0) {
        return;
    }
    void (*done)(void *context) = service->done;
    void *context = service->done_context;
    health_destroy(service->health);
    cluster_done(&service->cluster);
    memory_free(service);
    done(context);
}

static void on_timer_closed(uv_handle_t *handle)
{
    on_part_closed(handle->data);
}

static void on_server_done(void *context)
{
    on_part_closed(context);
}

void service_shutdown(Service *service, int64_t grace_ms, void (*done)(void *context),
                      void *context)
{
    CHECK(!service->is_closing);
    service->is_closing = true;
    service->done = done;
    service->done_context = context;
    service->num_open = 2;
    uv_close((uv_handle_t *)&service->timer, on_timer_closed);
    rpc_server_shutdown(service->server, grace_ms, on_server_done, service);
}
