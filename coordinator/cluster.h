/* Cluster: all jobs and workers that the coordinator knows, and how they change: the heart of the
 * control plane.
 *
 * Data flows one way: an event (a call by a user or worker, a stream that opened or closed, time
 * that passed) changes this state and appends effects; the caller carries the effects out (saves
 * and shows jobs, sends assignments) and clears them. Nothing here reads a clock, a socket or a
 * random device, so that tests drive whole histories by seed and virtual clock.
 *
 * A job's way: PENDING until its workers are there (placement.h); STARTING: each member got PREPARE
 * with a new epoch, opens its links and acks; RUNNING after COMMIT to all; then SUCCEEDED, FAILED
 * or CANCELLED. A member of a job that ended gets ABORT and belongs to it (`releasing`) until it
 * acks, so no worker is ever in two jobs. When several members fail, the cause is looked for: a
 * lost worker or a member's own fault wins over those that only noticed; their reports wait
 * `settle_ms` for it. Times are milliseconds of a monotonic clock. Threading: one owner.
 */
#ifndef COORDINATOR_CLUSTER_H
#define COORDINATOR_CLUSTER_H

#include "coordinator/job_state.h"
#include "coordinator/membership.h"
#include "coordinator/placement.h"

enum {
    CLUSTER_JOBS_MAX = 10000,
    CLUSTER_MESSAGE_BYTES = 1024
};

typedef Viaduct__V1__StepMetrics StepMetrics;
typedef Viaduct__V1__WatchAssignmentResponse__Phase AssignmentPhase;
#define ASSIGNMENT_PHASE(name) VIADUCT__V1__WATCH_ASSIGNMENT_RESPONSE__PHASE__##name

/* What the first member that only noticed a failure had to say. */
typedef struct ClusterFailure {
    bool is_set;
    int rank;
    int64_t deadline_ms; /* until then a cause is waited for */
    char text[512];
} ClusterFailure;

typedef struct ClusterJob {
    int64_t serial; /* never reused */
    char id[64];
    char uid[40];
    char request_id[64];
    uint64_t request_hash;
    char resume_from[512];
    Viaduct__V1__Job *submitted; /* owned: spec (resolved) and labels */
    JobState state;
    JobState logged_state; /* the caller's note: the last state that its log tells */
    char reason[48];
    char message[CLUSTER_MESSAGE_BYTES];
    int64_t revision;
    int64_t epoch;
    int64_t committed_step;
    int64_t samples_committed;
    int64_t create_ms, update_ms, start_ms, end_ms, progress_ms; /* 0: not yet */
    int64_t deadline_ms;                                         /* of the present state; 0: none */
    ClusterFailure failure;
    StepMetrics latest;
    StepMetrics totals;
    Viaduct__V1__EvaluationReport *evaluation; /* owned; NULL: none yet */
    char checkpoint[512];
    int *members; /* [num_members] worker slots by rank; owned */
    int num_members;
} ClusterJob;

typedef enum ClusterEffectKind {
    CLUSTER_EFFECT_SEND,        /* an assignment message to a worker */
    CLUSTER_EFFECT_JOB_CHANGED, /* save it, tell watchers */
    CLUSTER_EFFECT_JOB_DELETED,
} ClusterEffectKind;

typedef struct ClusterEffect {
    ClusterEffectKind kind;
    int64_t job; /* serial */
    bool is_new; /* JOB_CHANGED: the job was just created */
    int slot;    /* SEND: to whom */
    AssignmentPhase phase;
    int64_t epoch;
    int64_t revision;
    char job_id[64];
    char uid[40];
    char text[256]; /* SEND of ABORT: why */
} ClusterEffect;

typedef struct ClusterOptions {
    int64_t lease_ms;
    int64_t heartbeat_ms;
    int64_t settle_ms;
    int64_t wall_offset_ms; /* wall clock less the monotonic clock, for records that people read */
    uint64_t seed;
} ClusterOptions;

typedef struct Cluster {
    ClusterOptions options;
    Membership membership;
    ClusterJob **jobs; /* in order of creation */
    size_t jobs_capacity;
    int num_jobs;
    int64_t serials;
    int64_t epochs;
    int64_t revision;
    bool placement_due; /* workers or jobs came or went */
    ClusterEffect *effects;
    size_t effects_capacity;
    int num_effects;
} Cluster;

void cluster_init(Cluster *cluster, const ClusterOptions *options);
void cluster_done(Cluster *cluster);
void cluster_clear_effects(Cluster *cluster);

ClusterJob *cluster_find_job(Cluster *cluster,
                             const char *name); /* "jobs/ID" or "ID"; NULL: none */
ClusterJob *cluster_find_serial(Cluster *cluster, int64_t serial);

/* ---- users (cluster_jobs.c): false with *error_out when refused */
/* With validate_only, *job_out is NULL. The same request_id again gives the job that it made. */
bool cluster_create_job(Cluster *cluster, const Viaduct__V1__CreateJobRequest *request,
                        int64_t now_ms, ClusterJob **job_out, RpcError *error_out);
bool cluster_cancel_job(Cluster *cluster, const Viaduct__V1__CancelJobRequest *request,
                        int64_t now_ms, ClusterJob **job_out, RpcError *error_out);
bool cluster_delete_job(Cluster *cluster, const Viaduct__V1__DeleteJobRequest *request,
                        int64_t now_ms, RpcError *error_out);

/* ---- workers (cluster_workers.c) */
bool cluster_register(Cluster *cluster, const Viaduct__V1__RegisterWorkerRequest *request,
                      int64_t now_ms, int *slot_out, RpcError *error_out);
bool cluster_heartbeat(Cluster *cluster, const Viaduct__V1__HeartbeatRequest *request,
                       int64_t now_ms, Viaduct__V1__HeartbeatResponse *response_out,
                       RpcError *error_out);
bool cluster_acknowledge(Cluster *cluster, const Viaduct__V1__AckAssignmentRequest *request,
                         int64_t now_ms, RpcError *error_out);
bool cluster_report(Cluster *cluster, const Viaduct__V1__ReportStepsRequest *request,
                    int64_t now_ms, int64_t *acknowledged_out, RpcError *error_out);
bool cluster_deregister(Cluster *cluster, const Viaduct__V1__DeregisterWorkerRequest *request,
                        int64_t now_ms, RpcError *error_out);
/* The worker's assignment stream: opened (its present assignment is sent again), closed. */
bool cluster_open_stream(Cluster *cluster, const char *lease_id, int64_t now_ms, int *slot_out,
                         RpcError *error_out);
void cluster_close_stream(Cluster *cluster, int slot, int64_t now_ms);

/* ---- time: call it a few times a second */
void cluster_tick(Cluster *cluster, int64_t now_ms);

/* ---- messages (cluster_render.c): freed by protobuf_c_message_free_unpacked */
Status cluster_render_job(const Cluster *cluster, const ClusterJob *job,
                          Viaduct__V1__Job **message_out) STATUS_CHECKED;
Status cluster_render_worker(const Cluster *cluster, int slot,
                             Viaduct__V1__Worker **message_out) STATUS_CHECKED;
/* Of a SEND effect. */
Status cluster_render_assignment(Cluster *cluster, const ClusterEffect *effect,
                                 Viaduct__V1__WatchAssignmentResponse **message_out) STATUS_CHECKED;

/* ---- between the cluster_* files */
bool cluster_reserve(Cluster *cluster, RpcError *error_out); /* room for the effects of one event */
void cluster_change(Cluster *cluster, ClusterJob *job, int64_t now_ms);
void cluster_transition(Cluster *cluster, ClusterJob *job, JobState state, const char *reason,
                        const char *message, int64_t now_ms);
void cluster_send(Cluster *cluster, const ClusterJob *job, int slot, AssignmentPhase phase);
void cluster_fail_job(Cluster *cluster, ClusterJob *job, const char *reason, const char *message,
                      int64_t now_ms);
void cluster_release_members(Cluster *cluster, ClusterJob *job);
void cluster_free_worker(Cluster *cluster, int slot);
/* A worker that is no longer there, and how that showed. */
void cluster_lose_worker(Cluster *cluster, int slot, const char *reason, const char *how,
                         int64_t now_ms);
/* Everything that follows from the state as it is now: placements, ends. */
void cluster_settle(Cluster *cluster, int64_t now_ms);
void cluster_free_job(ClusterJob *job);

#endif
