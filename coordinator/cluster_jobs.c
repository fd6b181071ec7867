/* The half of cluster.h that users' calls drive. */
#include "base/hash.h"
#include "base/memory.h"
#include "coordinator/cluster.h"
#include "coordinator/refusal.h"
#include "job/message.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum {
    PROBLEMS_SHOWN = 32,
    RANKS_MAX = 65536,
    CANCEL_MS = 30000 /* longest wait for the members to let go */
};

/* ^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$ */
static bool is_job_id(const char *id)
{
    size_t length = strlen(id);
    return length >= 1 && length <= 63 && id[0] >= 'a' && id[0] <= 'z' &&
           strspn(id, "abcdefghijklmnopqrstuvwxyz0123456789-") == length && id[length - 1] != '-';
}

static Rng ids_of(const Cluster *cluster)
{
    return (Rng){cluster->options.seed, hash_text("jobs")};
}

/* All problems, one a line, as many as fit. */
static bool refuse_problems(const JobProblem *problems, int count, RpcError *error_out)
{
    refusal_set(error_out, RPC_CODE_INVALID_ARGUMENT, "FIELD_INVALID",
                "the job has %d problem%s:", count, count == 1 ? "" : "s");
    size_t used = strlen(error_out->message);
    for (int i = 0; i < count && i < PROBLEMS_SHOWN; i++) {
        char line[sizeof problems->field + sizeof problems->message + 8];
        int length =
            snprintf(line, sizeof line, "\n%s: %s", problems[i].field, problems[i].message);
        if (used + (size_t)length + 32 > sizeof error_out->message) {
            snprintf(error_out->message + used, sizeof error_out->message - used, "\nand %d more",
                     count - i);
            return false;
        }
        memcpy(error_out->message + used, line, (size_t)length + 1);
        used += (size_t)length;
    }
    return false;
}

static bool check_spec(JobSpec *spec, RpcError *error_out)
{
    if (job_spec_resolve(spec) != STATUS_OK) {
        return refusal_set(error_out, RPC_CODE_RESOURCE_EXHAUSTED, "NO_MEMORY", "%s",
                           status_message());
    }
    JobProblem problems[PROBLEMS_SHOWN];
    int count = job_spec_check(spec, problems, PROBLEMS_SHOWN);
    if (count > 0) {
        return refuse_problems(problems, count, error_out);
    }
    if (placement_ranks(spec) > RANKS_MAX) {
        return refusal_set(error_out, RPC_CODE_INVALID_ARGUMENT, "FIELD_INVALID",
                           "modules: ask for %d workers, expected at most %d",
                           placement_ranks(spec), RANKS_MAX);
    }
    return true;
}

static bool check_request(const Viaduct__V1__CreateJobRequest *request, RpcError *error_out)
{
    const ClusterJob *job = NULL;
    if (request->job_id[0] && !is_job_id(request->job_id)) {
        return refusal_set(error_out, RPC_CODE_INVALID_ARGUMENT, "FIELD_INVALID",
                           "job_id: is \"%.80s\", expected 1 to 63 lower-case letters, digits and "
                           "'-', beginning with a letter",
                           request->job_id);
    }
    if (strlen(request->request_id) >= sizeof job->request_id) {
        return refusal_set(error_out, RPC_CODE_INVALID_ARGUMENT, "FIELD_INVALID",
                           "request_id: expected a UUID");
    }
    if (strlen(request->resume_from) >= sizeof job->resume_from) {
        return refusal_set(error_out, RPC_CODE_INVALID_ARGUMENT, "FIELD_INVALID",
                           "resume_from: expected at most %zu bytes", sizeof job->resume_from - 1);
    }
    if (!request->job || !request->job->spec) {
        return refusal_set(error_out, RPC_CODE_INVALID_ARGUMENT, "FIELD_INVALID",
                           "job.spec: is missing");
    }
    return true;
}

/* Of the whole request as it is on the wire: the same request_id must bring the same bytes. */
static bool hash_request(const Viaduct__V1__CreateJobRequest *request, uint64_t *hash_out)
{
    size_t size = protobuf_c_message_get_packed_size(&request->base);
    uint8_t *bytes = NULL;
    if (MEMORY_NEW(&bytes, size + 1) != STATUS_OK) {
        return false;
    }
    protobuf_c_message_pack(&request->base, bytes);
    *hash_out = hash_bytes(HASH_SEED, bytes, size);
    memory_free(bytes);
    return true;
}

static ClusterJob *find_request(const Cluster *cluster, const char *request_id)
{
    for (int i = 0; i < cluster->num_jobs && request_id[0]; i++) {
        if (strcmp(cluster->jobs[i]->request_id, request_id) == 0) {
            return cluster->jobs[i];
        }
    }
    return NULL;
}

static bool add_job(Cluster *cluster, const Viaduct__V1__CreateJobRequest *request, uint64_t hash,
                    Viaduct__V1__Job *submitted, ClusterJob **job_out)
{
    void *jobs = cluster->jobs;
    Status status =
        memory_grow(&jobs, &cluster->jobs_capacity, (size_t)cluster->num_jobs + 1, sizeof(void *));
    cluster->jobs = jobs;
    ClusterJob *job = NULL;
    if (status != STATUS_OK || MEMORY_NEW(&job, 1) != STATUS_OK) {
        return false;
    }
    job->serial = ++cluster->serials;
    Rng ids = ids_of(cluster);
    uint64_t index = 2 * (uint64_t)job->serial;
    snprintf(job->uid, sizeof job->uid, "%016" PRIx64 "%016" PRIx64, rng_bits64(ids, index),
             rng_bits64(ids, index + 1));
    if (request->job_id[0]) {
        snprintf(job->id, sizeof job->id, "%s", request->job_id);
    } else {
        snprintf(job->id, sizeof job->id, "job-%.8s", job->uid);
    }
    snprintf(job->request_id, sizeof job->request_id, "%s", request->request_id);
    snprintf(job->resume_from, sizeof job->resume_from, "%s", request->resume_from);
    job->request_hash = hash;
    job->submitted = submitted;
    viaduct__v1__step_metrics__init(&job->latest);
    viaduct__v1__step_metrics__init(&job->totals);
    cluster->jobs[cluster->num_jobs++] = job;
    *job_out = job;
    return true;
}

static bool admit(Cluster *cluster, const Viaduct__V1__CreateJobRequest *request, uint64_t hash,
                  Viaduct__V1__Job *submitted, int64_t now_ms, ClusterJob **job_out,
                  RpcError *error_out)
{
    if (request->job_id[0] && cluster_find_job(cluster, request->job_id)) {
        return refusal_set(error_out, RPC_CODE_ALREADY_EXISTS, "JOB_EXISTS",
                           "there is a job \"%s\" already", request->job_id);
    }
    if (cluster->num_jobs == CLUSTER_JOBS_MAX) {
        return refusal_set(error_out, RPC_CODE_RESOURCE_EXHAUSTED, "QUEUE_FULL",
                           "%d jobs are stored: delete some", cluster->num_jobs);
    }
    if (request->validate_only) {
        return true;
    }
    ClusterJob *job = NULL;
    if (!add_job(cluster, request, hash, submitted, &job)) {
        return refusal_set(error_out, RPC_CODE_RESOURCE_EXHAUSTED, "NO_MEMORY", "out of memory");
    }
    job->create_ms = now_ms;
    cluster_transition(cluster, job, JOB_STATE(PENDING), "WAITING_FOR_WORKERS",
                       "waiting to be placed", now_ms);
    job->deadline_ms = now_ms + message_duration_ms(submitted->spec->timeouts->start);
    cluster->placement_due = true;
    cluster_settle(cluster, now_ms);
    *job_out = job;
    return true;
}

bool cluster_create_job(Cluster *cluster, const Viaduct__V1__CreateJobRequest *request,
                        int64_t now_ms, ClusterJob **job_out, RpcError *error_out)
{
    *job_out = NULL;
    uint64_t hash = 0;
    ProtobufCMessage *copy = NULL;
    if (!cluster_reserve(cluster, error_out) || !check_request(request, error_out)) {
        return false;
    }
    if (!hash_request(request, &hash) || message_copy(&request->job->base, &copy) != STATUS_OK) {
        return refusal_set(error_out, RPC_CODE_RESOURCE_EXHAUSTED, "NO_MEMORY", "out of memory");
    }
    Viaduct__V1__Job *submitted = (Viaduct__V1__Job *)copy;
    ClusterJob *earlier = find_request(cluster, request->request_id);
    bool done = false;
    if (earlier && earlier->request_hash == hash) {
        *job_out = earlier;
        done = true;
    } else if (earlier) {
        refusal_set(error_out, RPC_CODE_INVALID_ARGUMENT, "REQUEST_ID_REUSED",
                    "request_id \"%s\" made job \"%s\" from another request", request->request_id,
                    earlier->id);
    } else {
        done = check_spec(submitted->spec, error_out) &&
               admit(cluster, request, hash, submitted, now_ms, job_out, error_out);
    }
    if (!*job_out || (*job_out)->submitted != submitted) {
        viaduct__v1__job__free_unpacked(submitted, NULL);
    }
    return done;
}

static ClusterJob *find_or_refuse(Cluster *cluster, const char *name, RpcError *error_out)
{
    ClusterJob *job = cluster_find_job(cluster, name);
    if (!job) {
        refusal_set(error_out, RPC_CODE_NOT_FOUND, "JOB_NOT_FOUND", "there is no job \"%.80s\"",
                    name);
    }
    return job;
}

bool cluster_cancel_job(Cluster *cluster, const Viaduct__V1__CancelJobRequest *request,
                        int64_t now_ms, ClusterJob **job_out, RpcError *error_out)
{
    ClusterJob *job = find_or_refuse(cluster, request->name, error_out);
    if (!job || !cluster_reserve(cluster, error_out)) {
        return false;
    }
    *job_out = job;
    switch (job->state) {
    case JOB_STATE(CANCELLING):
    case JOB_STATE(CANCELLED):
        return true;
    case JOB_STATE(SUCCEEDED):
    case JOB_STATE(FAILED):
        return refusal_set(error_out, RPC_CODE_FAILED_PRECONDITION, "JOB_STATE",
                           "job \"%s\" is %s, it cannot be cancelled any more", job->id,
                           job_state_name(job->state));
    case JOB_STATE(PENDING):
    case JOB_STATE(SUSPENDED):
        cluster_transition(cluster, job, JOB_STATE(CANCELLED), "CANCELLED", "cancelled by request",
                           now_ms);
        break;
    default: {
        int64_t grace_ms = message_duration_ms(request->grace);
        cluster_transition(cluster, job, JOB_STATE(CANCELLING), "CANCELLING",
                           "cancelled by request; its workers stop", now_ms);
        job->deadline_ms =
            now_ms + (grace_ms > 0 && grace_ms < CANCEL_MS ? grace_ms : (int64_t)CANCEL_MS);
        cluster_release_members(cluster, job);
        break;
    }
    }
    cluster->placement_due = true;
    cluster_settle(cluster, now_ms);
    return true;
}

bool cluster_delete_job(Cluster *cluster, const Viaduct__V1__DeleteJobRequest *request,
                        int64_t now_ms, RpcError *error_out)
{
    ClusterJob *job = find_or_refuse(cluster, request->name, error_out);
    if (!job) {
        return request->allow_missing;
    }
    if (!job_state_is_terminal(job->state)) {
        return refusal_set(error_out, RPC_CODE_FAILED_PRECONDITION, "JOB_STATE",
                           "job \"%s\" is %s: cancel it before", job->id,
                           job_state_name(job->state));
    }
    if (!cluster_reserve(cluster, error_out)) {
        return false;
    }
    cluster_change(cluster, job, now_ms);
    ClusterEffect *effect = &cluster->effects[cluster->num_effects - 1];
    effect->kind = CLUSTER_EFFECT_JOB_DELETED;
    int index = 0;
    while (cluster->jobs[index] != job) {
        index++;
    }
    memmove(&cluster->jobs[index], &cluster->jobs[index + 1],
            (size_t)(cluster->num_jobs - index - 1) * sizeof(void *));
    cluster->num_jobs--;
    cluster_free_job(job);
    return true;
}
