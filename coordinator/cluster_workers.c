/* The half of cluster.h that workers' calls drive. */
#include "coordinator/cluster.h"
#include "coordinator/refusal.h"
#include "job/message.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* The job that a worker serves now, in its present epoch; NULL: none, or it is over. */
static ClusterJob *live_job(Cluster *cluster, const WorkerRecord *worker)
{
    ClusterJob *job = worker->job ? cluster_find_serial(cluster, worker->job) : NULL;
    bool is_live = job && worker->epoch == job->epoch && !worker->releasing &&
                   (job->state == JOB_STATE(STARTING) || job->state == JOB_STATE(RUNNING));
    return is_live ? job : NULL;
}

bool cluster_register(Cluster *cluster, const Viaduct__V1__RegisterWorkerRequest *request,
                      int64_t now_ms, int *slot_out, RpcError *error_out)
{
    if (!request->worker) {
        return refusal_set(error_out, RPC_CODE_INVALID_ARGUMENT, "FIELD_INVALID",
                           "worker: is missing");
    }
    bool replaced = false;
    if (!cluster_reserve(cluster, error_out) ||
        !membership_register(&cluster->membership, request->worker, now_ms, slot_out, &replaced,
                             error_out)) {
        return false;
    }
    if (replaced) {
        cluster_lose_worker(cluster, *slot_out, "WORKER_LOST", "a new process took its name",
                            now_ms);
    }
    cluster->placement_due = true;
    cluster_settle(cluster, now_ms);
    return true;
}

static void copy_progress(WorkerRecord *worker, const Viaduct__V1__HeartbeatRequest *request)
{
    if (request->epoch == worker->epoch && worker->epoch != 0) {
        worker->step = request->step;
        worker->progress = request->progress_counter;
        snprintf(worker->operation, sizeof worker->operation, "%s", request->operation);
    }
}

bool cluster_heartbeat(Cluster *cluster, const Viaduct__V1__HeartbeatRequest *request,
                       int64_t now_ms, Viaduct__V1__HeartbeatResponse *response_out,
                       RpcError *error_out)
{
    int slot = membership_find_lease(&cluster->membership, request->lease_id, error_out);
    if (slot < 0 || !cluster_reserve(cluster, error_out)) {
        return false;
    }
    WorkerRecord *worker = &cluster->membership.workers[slot];
    membership_renew(&cluster->membership, slot, now_ms);
    copy_progress(worker, request);
    response_out->directive = VIADUCT__V1__HEARTBEAT_RESPONSE__DIRECTIVE__CONTINUE;
    response_out->epoch = worker->epoch;
    if (request->epoch != 0 && (request->epoch != worker->epoch || worker->releasing)) {
        response_out->directive = VIADUCT__V1__HEARTBEAT_RESPONSE__DIRECTIVE__ABORT_EPOCH;
        response_out->epoch = request->epoch;
    }
    return true;
}

/* Root causes lie with the member itself; these only say that another one is gone. */
static bool only_noticed(const char *code)
{
    static const char *const codes[] = {"PEER_LOST", "ABORTED", "TIMEOUT", "UNAVAILABLE"};
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
        if (strcmp(code, codes[i]) == 0) {
            return true;
        }
    }
    return false;
}

/* A member whose stream has ended although it never said good-bye: its process is gone. -1:
 * none. */
static int find_dead_member(const Cluster *cluster, const ClusterJob *job)
{
    for (int rank = 0; rank < job->num_members; rank++) {
        const WorkerRecord *worker = &cluster->membership.workers[job->members[rank]];
        if (worker->job == job->serial && worker->epoch == job->epoch && !worker->stream_open &&
            !worker->finished) {
            return job->members[rank];
        }
    }
    return -1;
}

static void lose_dead_member(Cluster *cluster, ClusterJob *job, int64_t now_ms)
{
    int dead = find_dead_member(cluster, job);
    if (job->failure.is_set && dead >= 0) {
        membership_end(&cluster->membership, dead, WORKER_STATE(LOST));
        cluster_lose_worker(cluster, dead, "WORKER_LOST", "its process ended without a good-bye",
                            now_ms);
    }
}

/* A member says that it cannot go on. */
static void take_failure(Cluster *cluster, ClusterJob *job, WorkerRecord *worker, const char *code,
                         const char *text, int64_t now_ms)
{
    ClusterFailure *failure = &job->failure;
    if (!only_noticed(code)) {
        char message[CLUSTER_MESSAGE_BYTES];
        snprintf(message, sizeof message, "worker %s (rank %d) failed: %.800s", worker->name,
                 worker->rank, text);
        cluster_fail_job(cluster, job, "WORKER_FAILED", message, now_ms);
        return;
    }
    if (!failure->is_set) {
        failure->is_set = true;
        failure->rank = worker->rank;
        failure->deadline_ms = now_ms + cluster->options.settle_ms;
        snprintf(failure->text, sizeof failure->text, "%s", text);
    }
    lose_dead_member(cluster, job, now_ms);
}

static void take_prepared(Cluster *cluster, WorkerRecord *worker,
                          const Viaduct__V1__AckAssignmentRequest *request, int64_t now_ms)
{
    ClusterJob *job = live_job(cluster, worker);
    if (!job || job->state != JOB_STATE(STARTING)) {
        return;
    }
    if (request->ok) {
        worker->acked = true;
        return;
    }
    char text[512];
    snprintf(text, sizeof text, "opening its links: %.400s", request->error);
    take_failure(cluster, job, worker, "UNAVAILABLE", text, now_ms);
}

bool cluster_acknowledge(Cluster *cluster, const Viaduct__V1__AckAssignmentRequest *request,
                         int64_t now_ms, RpcError *error_out)
{
    int slot = membership_find_lease(&cluster->membership, request->lease_id, error_out);
    if (slot < 0 || !cluster_reserve(cluster, error_out)) {
        return false;
    }
    WorkerRecord *worker = &cluster->membership.workers[slot];
    if (request->epoch != worker->epoch) {
        return refusal_set(error_out, RPC_CODE_ABORTED, "STALE_EPOCH",
                           "epoch %" PRId64 " is over; worker \"%s\" is in epoch %" PRId64,
                           request->epoch, worker->name, worker->epoch);
    }
    if (request->phase == ASSIGNMENT_PHASE(PREPARE)) {
        take_prepared(cluster, worker, request, now_ms);
    } else if (request->phase == ASSIGNMENT_PHASE(ABORT) && worker->releasing) {
        cluster_free_worker(cluster, slot);
    }
    cluster_settle(cluster, now_ms);
    return true;
}

static void add_totals(StepMetrics *totals, const StepMetrics *step)
{
    totals->step_seconds += step->step_seconds;
    totals->compute_seconds += step->compute_seconds;
    totals->boundary_wait_seconds += step->boundary_wait_seconds;
    totals->transfer_seconds += step->transfer_seconds;
    totals->bytes_sent += step->bytes_sent;
    totals->bytes_received += step->bytes_received;
    totals->tokens += step->tokens;
    totals->samples += step->samples;
    totals->flops += step->flops;
    totals->encoder_wait_seconds += step->encoder_wait_seconds;
    totals->llm_wait_seconds += step->llm_wait_seconds;
    totals->boundary_bytes += step->boundary_bytes;
    totals->boundary_bytes_min += step->boundary_bytes_min;
}

/* The scalars of a message that came over the wire, without its unknown fields, which die with the
 * request. */
static StepMetrics copy_metrics(const StepMetrics *from)
{
    StepMetrics copy = *from;
    copy.base.n_unknown_fields = 0;
    copy.base.unknown_fields = NULL;
    return copy;
}

static void take_steps(Cluster *cluster, ClusterJob *job, const WorkerRecord *worker,
                       const Viaduct__V1__ReportStepsRequest *request, int64_t now_ms)
{
    bool changed = false;
    for (size_t i = 0; i < request->n_records; i++) {
        const Viaduct__V1__StepRecord *record = request->records[i];
        bool is_news = record->epoch == worker->epoch && record->committed && record->metrics &&
                       record->step > job->committed_step;
        if (!is_news) {
            continue; /* of an old epoch, sent again, or a discarded step */
        }
        job->committed_step = record->step;
        job->samples_committed += record->metrics->samples;
        job->progress_ms = now_ms;
        job->latest = copy_metrics(record->metrics);
        add_totals(&job->totals, record->metrics);
        changed = true;
    }
    ProtobufCMessage *copy = NULL;
    if (request->evaluation && message_copy(&request->evaluation->base, &copy) == STATUS_OK) {
        viaduct__v1__evaluation_report__free_unpacked(job->evaluation, NULL);
        job->evaluation = (Viaduct__V1__EvaluationReport *)copy;
        changed = true;
    }
    if (request->checkpoint[0]) {
        snprintf(job->checkpoint, sizeof job->checkpoint, "%s", request->checkpoint);
        changed = true;
    }
    if (changed) {
        cluster_change(cluster, job, now_ms);
    }
}

static void describe_failure(const Viaduct__V1__ReportStepsRequest *request, char *text,
                             size_t size)
{
    char where[160] = "";
    bool is_told = strstr(request->failure, "step") != NULL;
    if (request->failure_step > 0 && !is_told) {
        snprintf(where, sizeof where, "at step %" PRId64 " in %.100s: ", request->failure_step,
                 request->failure_operation[0] ? request->failure_operation : "its start");
    }
    snprintf(text, size, "%s%s", where, request->failure);
}

bool cluster_report(Cluster *cluster, const Viaduct__V1__ReportStepsRequest *request,
                    int64_t now_ms, int64_t *acknowledged_out, RpcError *error_out)
{
    int slot = membership_find_lease(&cluster->membership, request->lease_id, error_out);
    if (slot < 0 || !cluster_reserve(cluster, error_out)) {
        return false;
    }
    *acknowledged_out = request->n_records ? request->records[request->n_records - 1]->step : 0;
    WorkerRecord *worker = &cluster->membership.workers[slot];
    membership_renew(&cluster->membership, slot, now_ms);
    ClusterJob *job = live_job(cluster, worker);
    if (!job || request->epoch != worker->epoch) {
        return true; /* of a job that is over: nothing to learn, nothing to send again */
    }
    if (job->state == JOB_STATE(RUNNING)) {
        take_steps(cluster, job, worker, request, now_ms);
        worker->finished = worker->finished || request->finished;
    }
    if (request->failure[0]) {
        char text[512];
        describe_failure(request, text, sizeof text);
        take_failure(cluster, job, worker, request->failure_code, text, now_ms);
    }
    cluster_settle(cluster, now_ms);
    return true;
}

bool cluster_deregister(Cluster *cluster, const Viaduct__V1__DeregisterWorkerRequest *request,
                        int64_t now_ms, RpcError *error_out)
{
    int slot = membership_find_lease(&cluster->membership, request->lease_id, error_out);
    if (slot < 0 || !cluster_reserve(cluster, error_out)) {
        return false;
    }
    membership_end(&cluster->membership, slot, WORKER_STATE(LEFT));
    cluster_lose_worker(cluster, slot, "WORKER_LEFT", "it was told to stop", now_ms);
    cluster_settle(cluster, now_ms);
    return true;
}

bool cluster_open_stream(Cluster *cluster, const char *lease_id, int64_t now_ms, int *slot_out,
                         RpcError *error_out)
{
    int slot = membership_find_lease(&cluster->membership, lease_id, error_out);
    if (slot < 0 || !cluster_reserve(cluster, error_out)) {
        return false;
    }
    WorkerRecord *worker = &cluster->membership.workers[slot];
    worker->stream_open = true;
    *slot_out = slot;
    ClusterJob *job = worker->job ? cluster_find_serial(cluster, worker->job) : NULL;
    if (worker->releasing && job) {
        cluster_send(cluster, job, slot, ASSIGNMENT_PHASE(ABORT));
    } else if (worker->releasing) {
        /* The job was deleted since; the heartbeat's ABORT_EPOCH ends whatever still runs. */
        cluster_free_worker(cluster, slot);
    } else if (job && job->state == JOB_STATE(STARTING)) {
        cluster_send(cluster, job, slot, ASSIGNMENT_PHASE(PREPARE));
    } else if (job && job->state == JOB_STATE(RUNNING)) {
        cluster_send(cluster, job, slot, ASSIGNMENT_PHASE(COMMIT));
    }
    cluster->placement_due = true;
    cluster_settle(cluster, now_ms);
    return true;
}

void cluster_close_stream(Cluster *cluster, int slot, int64_t now_ms)
{
    RpcError error;
    WorkerRecord *worker = &cluster->membership.workers[slot];
    worker->stream_open = false;
    if (!cluster_reserve(cluster, &error)) {
        return; /* the tick finds the silent worker */
    }
    ClusterJob *job = live_job(cluster, worker);
    if (job) {
        lose_dead_member(cluster, job, now_ms);
    }
    cluster_settle(cluster, now_ms);
}
