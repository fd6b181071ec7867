#include "coordinator/cluster.h"

#include "base/memory.h"
#include "coordinator/refusal.h"
#include "job/message.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum {
    SUSPECT_HEARTBEATS = 3 /* missed ones after which a worker without a stream is lost */
};

void cluster_init(Cluster *cluster, const ClusterOptions *options)
{
    *cluster = (Cluster){.options = *options};
    membership_init(&cluster->membership, options->lease_ms, options->heartbeat_ms, options->seed);
}

void cluster_free_job(ClusterJob *job)
{
    viaduct__v1__job__free_unpacked(job->submitted, NULL);
    viaduct__v1__evaluation_report__free_unpacked(job->evaluation, NULL);
    memory_free(job->members);
    memory_free(job);
}

void cluster_done(Cluster *cluster)
{
    for (int i = 0; i < cluster->num_jobs; i++) {
        cluster_free_job(cluster->jobs[i]);
    }
    memory_free(cluster->jobs);
    memory_free(cluster->effects);
    membership_done(&cluster->membership);
}

void cluster_clear_effects(Cluster *cluster)
{
    cluster->num_effects = 0;
}

ClusterJob *cluster_find_job(Cluster *cluster, const char *name)
{
    const char *id = strncmp(name, "jobs/", 5) == 0 ? name + 5 : name;
    for (int i = 0; i < cluster->num_jobs; i++) {
        if (strcmp(cluster->jobs[i]->id, id) == 0) {
            return cluster->jobs[i];
        }
    }
    return NULL;
}

ClusterJob *cluster_find_serial(Cluster *cluster, int64_t serial)
{
    for (int i = cluster->num_jobs - 1; i >= 0; i--) {
        if (cluster->jobs[i]->serial == serial) {
            return cluster->jobs[i];
        }
    }
    return NULL;
}

/* One event may send two messages to each worker and change each job a few times. */
bool cluster_reserve(Cluster *cluster, RpcError *error_out)
{
    size_t needed = (size_t)cluster->num_effects + 2 * (size_t)cluster->membership.count +
                    4 * (size_t)cluster->num_jobs + 16;
    void *effects = cluster->effects;
    Status status =
        memory_grow(&effects, &cluster->effects_capacity, needed, sizeof *cluster->effects);
    cluster->effects = effects;
    if (status != STATUS_OK) {
        return refusal_set(error_out, RPC_CODE_RESOURCE_EXHAUSTED, "NO_MEMORY", "out of memory");
    }
    return true;
}

static ClusterEffect *push(Cluster *cluster, ClusterEffectKind kind, const ClusterJob *job)
{
    CHECK((size_t)cluster->num_effects < cluster->effects_capacity);
    ClusterEffect *effect = &cluster->effects[cluster->num_effects++];
    *effect = (ClusterEffect){
        .kind = kind, .job = job->serial, .epoch = job->epoch, .revision = job->revision};
    memcpy(effect->job_id, job->id, sizeof effect->job_id);
    memcpy(effect->uid, job->uid, sizeof effect->uid);
    return effect;
}

void cluster_change(Cluster *cluster, ClusterJob *job, int64_t now_ms)
{
    bool is_new = job->revision == 0;
    job->revision = ++cluster->revision;
    job->update_ms = now_ms;
    push(cluster, CLUSTER_EFFECT_JOB_CHANGED, job)->is_new = is_new;
}

void cluster_transition(Cluster *cluster, ClusterJob *job, JobState state, const char *reason,
                        const char *message, int64_t now_ms)
{
    CHECK(job_state_allows(job->state, state));
    job->state = state;
    job->deadline_ms = 0;
    snprintf(job->reason, sizeof job->reason, "%s", reason);
    snprintf(job->message, sizeof job->message, "%s", message);
    if (job_state_is_terminal(state)) {
        job->end_ms = now_ms;
    }
    cluster_change(cluster, job, now_ms);
}

void cluster_send(Cluster *cluster, const ClusterJob *job, int slot, AssignmentPhase phase)
{
    ClusterEffect *effect = push(cluster, CLUSTER_EFFECT_SEND, job);
    effect->slot = slot;
    effect->phase = phase;
    if (phase == ASSIGNMENT_PHASE(ABORT)) {
        snprintf(effect->text, sizeof effect->text, "%s: %.200s", job_state_name(job->state),
                 job->message);
    }
}

void cluster_free_worker(Cluster *cluster, int slot)
{
    WorkerRecord *worker = &cluster->membership.workers[slot];
    worker->job = 0;
    worker->epoch = 0;
    worker->rank = 0;
    worker->acked = false;
    worker->finished = false;
    worker->releasing = false;
    worker->step = 0;
    worker->progress = 0;
    worker->operation[0] = '\0';
    if (membership_is_present(worker)) {
        worker->state = WORKER_STATE(STANDBY);
    }
    cluster->placement_due = true;
}

void cluster_release_members(Cluster *cluster, ClusterJob *job)
{
    for (int rank = 0; rank < job->num_members; rank++) {
        int slot = job->members[rank];
        WorkerRecord *worker = &cluster->membership.workers[slot];
        if (worker->job != job->serial || worker->epoch != job->epoch || worker->releasing) {
            continue;
        }
        worker->releasing = true;
        cluster_send(cluster, job, slot, ASSIGNMENT_PHASE(ABORT));
    }
}

void cluster_fail_job(Cluster *cluster, ClusterJob *job, const char *reason, const char *message,
                      int64_t now_ms)
{
    cluster_transition(cluster, job, JOB_STATE(FAILED), reason, message, now_ms);
    cluster_release_members(cluster, job);
}

/* "worker encoder-1 (rank 1) was lost at step 12 in ENCODE microbatch 0: ..." */
static void describe_loss(const Cluster *cluster, const ClusterJob *job, const WorkerRecord *worker,
                          const char *how, char *text, size_t size)
{
    char where[160] = "while it opened its links";
    if (job->state != JOB_STATE(STARTING)) {
        int64_t step = worker->step > job->committed_step ? worker->step : job->committed_step + 1;
        snprintf(where, sizeof where, "at step %" PRId64 " in %s", step,
                 worker->operation[0] ? worker->operation : "its start");
    }
    int used = snprintf(text, size, "worker %s (rank %d) was lost %s: %s", worker->name,
                        worker->rank, where, how);
    if (job->failure.is_set && job->failure.rank != worker->rank && used > 0 &&
        (size_t)used < size) {
        const WorkerRecord *other = &cluster->membership.workers[job->members[job->failure.rank]];
        snprintf(text + used, size - (size_t)used, "; first noticed by worker %s (rank %d): %s",
                 other->name, job->failure.rank, job->failure.text);
    }
}

void cluster_lose_worker(Cluster *cluster, int slot, const char *reason, const char *how,
                         int64_t now_ms)
{
    WorkerRecord *worker = &cluster->membership.workers[slot];
    ClusterJob *job = worker->job ? cluster_find_serial(cluster, worker->job) : NULL;
    bool is_needed = job && worker->epoch == job->epoch && !worker->finished &&
                     (job->state == JOB_STATE(STARTING) || job->state == JOB_STATE(RUNNING));
    if (is_needed) {
        char text[CLUSTER_MESSAGE_BYTES];
        describe_loss(cluster, job, worker, how, text, sizeof text);
        /* Before the job fails, so that it gets no ABORT. */
        cluster_free_worker(cluster, slot);
        cluster_fail_job(cluster, job, reason, text, now_ms);
        return;
    }
    cluster_free_worker(cluster, slot);
}

/* ---------------------------------------------------------------- what follows */

static void start_job(Cluster *cluster, ClusterJob *job, int *members, int num_members,
                      int64_t now_ms)
{
    memory_free(job->members);
    job->members = members;
    job->num_members = num_members;
    job->epoch = ++cluster->epochs;
    char text[96];
    snprintf(text, sizeof text, "%d workers open their links", num_members);
    cluster_transition(cluster, job, JOB_STATE(STARTING), "PLACED", text, now_ms);
    job->deadline_ms = now_ms + message_duration_ms(job->submitted->spec->timeouts->start);
    for (int rank = 0; rank < num_members; rank++) {
        WorkerRecord *worker = &cluster->membership.workers[members[rank]];
        CHECK(worker->job == 0 && membership_is_present(worker));
        worker->job = job->serial;
        worker->epoch = job->epoch;
        worker->rank = rank;
        worker->acked = false;
        worker->finished = false;
        worker->releasing = false;
        worker->state = WORKER_STATE(JOINING);
        cluster_send(cluster, job, members[rank], ASSIGNMENT_PHASE(PREPARE));
    }
}

/* Places a waiting job if its workers are there. Returns whether jobs behind it may be placed: not
 * when this one only waits for workers that are busy, or a large job would starve behind small
 * ones. */
static bool place_job(Cluster *cluster, ClusterJob *job, int64_t now_ms)
{
    const JobSpec *spec = job->submitted->spec;
    int ranks = placement_ranks(spec);
    int *members = NULL;
    if (MEMORY_NEW(&members, ranks) != STATUS_OK) {
        return false; /* the next tick tries again */
    }
    Placement placement = placement_choose(spec, &cluster->membership, members);
    if (placement.is_complete) {
        start_job(cluster, job, members, ranks, now_ms);
        return true;
    }
    memory_free(members);
    if (!placement.is_short) {
        /* Enough workers exist: waiting in the queue does not run into the start timeout. */
        job->deadline_ms = now_ms + message_duration_ms(spec->timeouts->start);
    }
    if (strcmp(job->message, placement.reason) != 0) {
        snprintf(job->reason, sizeof job->reason, "%s",
                 placement.is_short ? "WAITING_FOR_WORKERS" : "QUEUED");
        snprintf(job->message, sizeof job->message, "%s", placement.reason);
        cluster_change(cluster, job, now_ms);
    }
    return placement.is_short;
}

/* The waiting job that comes after `last` by priority, then age; NULL: none. */
static ClusterJob *next_pending(const Cluster *cluster, const ClusterJob *last)
{
    ClusterJob *best = NULL;
    for (int i = 0; i < cluster->num_jobs; i++) {
        ClusterJob *job = cluster->jobs[i];
        int priority = job->submitted->spec->priority;
        bool is_after = !last || priority < last->submitted->spec->priority ||
                        (priority == last->submitted->spec->priority && job->serial > last->serial);
        if (job->state == JOB_STATE(PENDING) && is_after &&
            (!best || priority > best->submitted->spec->priority)) {
            best = job;
        }
    }
    return best;
}

static void place_jobs(Cluster *cluster, int64_t now_ms)
{
    if (!cluster->placement_due) {
        return;
    }
    cluster->placement_due = false;
    ClusterJob *job = next_pending(cluster, NULL);
    while (job && place_job(cluster, job, now_ms)) {
        job = next_pending(cluster, job);
    }
}

typedef struct MemberCounts {
    int present; /* still members */
    int acked;
    int finished;
} MemberCounts;

static MemberCounts count_members(const Cluster *cluster, const ClusterJob *job)
{
    MemberCounts counts = {0};
    for (int rank = 0; rank < job->num_members; rank++) {
        const WorkerRecord *worker = &cluster->membership.workers[job->members[rank]];
        if (worker->job == job->serial && worker->epoch == job->epoch) {
            counts.present++;
            counts.acked += worker->acked;
            counts.finished += worker->finished;
        }
    }
    return counts;
}

static void commit_job(Cluster *cluster, ClusterJob *job, int64_t now_ms)
{
    cluster_transition(cluster, job, JOB_STATE(RUNNING), "RUNNING", "all workers are linked",
                       now_ms);
    job->start_ms = now_ms;
    for (int rank = 0; rank < job->num_members; rank++) {
        cluster->membership.workers[job->members[rank]].state = WORKER_STATE(ACTIVE);
        cluster_send(cluster, job, job->members[rank], ASSIGNMENT_PHASE(COMMIT));
    }
}

static void fail_by_report(Cluster *cluster, ClusterJob *job, int64_t now_ms)
{
    char text[CLUSTER_MESSAGE_BYTES];
    const WorkerRecord *worker = &cluster->membership.workers[job->members[job->failure.rank]];
    snprintf(text, sizeof text, "worker %s (rank %d) could not go on: %s", worker->name,
             job->failure.rank, job->failure.text);
    cluster_fail_job(cluster, job, "WORKER_FAILED", text, now_ms);
}

static void advance_job(Cluster *cluster, ClusterJob *job, int64_t now_ms)
{
    MemberCounts counts = count_members(cluster, job);
    bool is_late = job->deadline_ms != 0 && now_ms >= job->deadline_ms;
    char text[CLUSTER_MESSAGE_BYTES];
    switch (job->state) {
    case JOB_STATE(PENDING):
        if (is_late) {
            snprintf(text, sizeof text, "%.800s for all of timeouts.start, %" PRId64 " s",
                     job->message,
                     message_duration_ms(job->submitted->spec->timeouts->start) / 1000);
            cluster_fail_job(cluster, job, "START_TIMEOUT", text, now_ms);
        }
        break;
    case JOB_STATE(STARTING):
        if (job->failure.is_set && now_ms >= job->failure.deadline_ms) {
            fail_by_report(cluster, job, now_ms);
        } else if (counts.acked == job->num_members && !job->failure.is_set) {
            commit_job(cluster, job, now_ms);
        } else if (is_late) {
            snprintf(text, sizeof text, "%d of %d workers opened their links within timeouts.start",
                     counts.acked, job->num_members);
            cluster_fail_job(cluster, job, "START_TIMEOUT", text, now_ms);
        }
        break;
    case JOB_STATE(RUNNING):
        if (job->failure.is_set && now_ms >= job->failure.deadline_ms) {
            fail_by_report(cluster, job, now_ms);
        } else if (counts.finished == counts.present && !job->failure.is_set) {
            /* A member that is gone had finished, or its loss had failed the job. */
            cluster_transition(cluster, job, JOB_STATE(SUCCEEDED), "FINISHED", "all steps are done",
                               now_ms);
            cluster_release_members(cluster, job);
        }
        break;
    case JOB_STATE(CANCELLING):
        if (counts.present == 0 || is_late) {
            cluster_transition(cluster, job, JOB_STATE(CANCELLED), "CANCELLED",
                               "cancelled by request", now_ms);
        }
        break;
    default:
        break;
    }
}

void cluster_settle(Cluster *cluster, int64_t now_ms)
{
    for (int i = 0; i < cluster->num_jobs; i++) {
        if (!job_state_is_terminal(cluster->jobs[i]->state)) {
            advance_job(cluster, cluster->jobs[i], now_ms);
        }
    }
    place_jobs(cluster, now_ms);
}

/* Workers whose stream has ended and that are silent since: their process is gone. */
static void lose_silent(Cluster *cluster, int64_t now_ms)
{
    int64_t limit_ms = SUSPECT_HEARTBEATS * cluster->options.heartbeat_ms;
    for (int i = 0; i < cluster->membership.count; i++) {
        const WorkerRecord *worker = &cluster->membership.workers[i];
        if (membership_is_present(worker) && !worker->stream_open &&
            now_ms - worker->last_heartbeat_ms >= limit_ms) {
            membership_end(&cluster->membership, i, WORKER_STATE(LOST));
            cluster_lose_worker(cluster, i, "WORKER_LOST",
                                "its connection ended and no heartbeat came since", now_ms);
        }
    }
}

void cluster_tick(Cluster *cluster, int64_t now_ms)
{
    RpcError error;
    if (!cluster_reserve(cluster, &error)) {
        return;
    }
    lose_silent(cluster, now_ms);
    int slot = membership_expire(&cluster->membership, now_ms);
    while (slot >= 0) {
        char how[96];
        snprintf(how, sizeof how, "no heartbeat came within its lease of %" PRId64 " ms",
                 cluster->options.lease_ms);
        cluster_lose_worker(cluster, slot, "WORKER_LOST", how, now_ms);
        slot = membership_expire(&cluster->membership, now_ms);
    }
    cluster_settle(cluster, now_ms);
}
