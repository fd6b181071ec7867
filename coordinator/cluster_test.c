#include "base/hash.h"
#include "base/memory.h"
#include "coordinator/cluster.h"
#include "job/job_file.h"
#include "job/message.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

static const char spec_text[] =
    "model:\n"
    "  vision: {image_size: 64, patch_size: 16, width: 128, layers: 3, heads: 4}\n"
    "  llm: {width: 128, layers: 3, heads: 4, mlp_width: 384}\n"
    "data: {train: [a.tar]}\n"
    "modules: [{name: vision, pool: e, dp: 2}, {name: llm, pool: l, tp: 2}]\n"
    "pools: [{name: e, role: encoder}, {name: l, role: llm}]\n"
    "training: {steps: 300, global_batch: 32}\n"
    "optimizer: {learning_rate: 0.001}\n";

enum {
    LEASE_MS = 10000,
    HEARTBEAT_MS = 1000,
    SETTLE_MS = 1500
};

/* A cluster with its clock and the last messages sent to each worker. */
typedef struct World {
    Cluster cluster;
    int64_t now_ms;
    RpcError error;
} World;

static void world_init(World *world, uint64_t seed)
{
    *world = (World){.now_ms = 5000};
    cluster_init(&world->cluster, &(ClusterOptions){.lease_ms = LEASE_MS,
                                                    .heartbeat_ms = HEARTBEAT_MS,
                                                    .settle_ms = SETTLE_MS,
                                                    .seed = seed});
}

static Viaduct__V1__CreateJobRequest make_request(const char *id, const char *assignment)
{
    Viaduct__V1__CreateJobRequest request = VIADUCT__V1__CREATE_JOB_REQUEST__INIT;
    ProtobufCMessage *job = NULL;
    assert_int_equal(message_create(&viaduct__v1__job__descriptor, &job), STATUS_OK);
    request.job = (Viaduct__V1__Job *)job;
    assert_int_equal(job_file_parse("job.yaml", spec_text, strlen(spec_text), &request.job->spec),
                     STATUS_OK);
    if (assignment) {
        assert_int_equal(job_file_set(request.job->spec, assignment), STATUS_OK);
    }
    request.job_id = (char *)(uintptr_t)id;
    return request;
}

static ClusterJob *create(World *world, const char *id, const char *assignment)
{
    Viaduct__V1__CreateJobRequest request = make_request(id, assignment);
    ClusterJob *job = NULL;
    if (!cluster_create_job(&world->cluster, &request, world->now_ms, &job, &world->error)) {
        fail_msg("%s", world->error.message);
    }
    viaduct__v1__job__free_unpacked(request.job, NULL);
    return job;
}

static int enter_as(World *world, const char *name, const char *role, const char *incarnation)
{
    Viaduct__V1__RegisterWorkerRequest request = VIADUCT__V1__REGISTER_WORKER_REQUEST__INIT;
    Viaduct__V1__Worker worker = VIADUCT__V1__WORKER__INIT;
    worker.name = (char *)(uintptr_t)name;
    worker.role = (char *)(uintptr_t)role;
    worker.incarnation = (char *)(uintptr_t)incarnation;
    worker.data_address = (char *)(uintptr_t) "127.0.0.1:1";
    worker.protocol_version = MEMBERSHIP_PROTOCOL;
    request.worker = &worker;
    int slot = -1;
    return cluster_register(&world->cluster, &request, world->now_ms, &slot, &world->error) ? slot
                                                                                            : -1;
}

static const char *lease_of(const World *world, int slot)
{
    return world->cluster.membership.workers[slot].lease_id;
}

static int enter(World *world, const char *name, const char *role)
{
    int slot = enter_as(world, name, role, name);
    assert_true(slot >= 0);
    int again = -1;
    assert_true(cluster_open_stream(&world->cluster, lease_of(world, slot), world->now_ms, &again,
                                    &world->error));
    assert_int_equal(again, slot);
    return slot;
}

static bool acknowledge(World *world, int slot, int64_t epoch, AssignmentPhase phase, bool ok)
{
    Viaduct__V1__AckAssignmentRequest request = VIADUCT__V1__ACK_ASSIGNMENT_REQUEST__INIT;
    request.lease_id = (char *)(uintptr_t)lease_of(world, slot);
    request.epoch = epoch;
    request.phase = phase;
    request.ok = ok;
    request.error = (char *)(uintptr_t)(ok ? "" : "timed out: rank 1 is missing");
    return cluster_acknowledge(&world->cluster, &request, world->now_ms, &world->error);
}

static bool beat(World *world, int slot, int64_t epoch, int64_t step, const char *operation)
{
    Viaduct__V1__HeartbeatRequest request = VIADUCT__V1__HEARTBEAT_REQUEST__INIT;
    Viaduct__V1__HeartbeatResponse response = VIADUCT__V1__HEARTBEAT_RESPONSE__INIT;
    request.lease_id = (char *)(uintptr_t)lease_of(world, slot);
    request.epoch = epoch;
    request.step = step;
    request.operation = (char *)(uintptr_t)operation;
    bool done =
        cluster_heartbeat(&world->cluster, &request, world->now_ms, &response, &world->error);
    return done && response.directive == VIADUCT__V1__HEARTBEAT_RESPONSE__DIRECTIVE__CONTINUE;
}

static bool report(World *world, int slot, int64_t step, bool finished, const char *code,
                   const char *failure)
{
    Viaduct__V1__ReportStepsRequest request = VIADUCT__V1__REPORT_STEPS_REQUEST__INIT;
    Viaduct__V1__StepRecord record = VIADUCT__V1__STEP_RECORD__INIT;
    Viaduct__V1__StepRecord *records[] = {&record};
    StepMetrics metrics = VIADUCT__V1__STEP_METRICS__INIT;
    metrics.tokens = 100;
    metrics.samples = 32;
    metrics.loss = 2.5;
    record.metrics = &metrics;
    record.committed = true;
    record.step = step;
    record.epoch = world->cluster.membership.workers[slot].epoch;
    request.lease_id = (char *)(uintptr_t)lease_of(world, slot);
    request.epoch = record.epoch;
    request.n_records = step > 0;
    request.records = records;
    request.finished = finished;
    request.failure_code = (char *)(uintptr_t)(code ? code : "");
    request.failure = (char *)(uintptr_t)(failure ? failure : "");
    int64_t acknowledged = 0;
    return cluster_report(&world->cluster, &request, world->now_ms, &acknowledged, &world->error);
}

static int count_sent(const World *world, int slot, AssignmentPhase phase)
{
    int count = 0;
    for (int i = 0; i < world->cluster.num_effects; i++) {
        const ClusterEffect *effect = &world->cluster.effects[i];
        count +=
            effect->kind == CLUSTER_EFFECT_SEND && effect->slot == slot && effect->phase == phase;
    }
    return count;
}

/* Two encoders and two llm workers, entered out of order: slots by rank in slots[]. */
static void enter_four(World *world, int slots[4])
{
    slots[3] = enter(world, "llm-10", "llm");
    slots[1] = enter(world, "encoder-1", "encoder");
    slots[2] = enter(world, "llm-2", "llm");
    slots[0] = enter(world, "encoder-0", "encoder");
}

/* A job that runs on four workers. */
static ClusterJob *run_job(World *world, int slots[4])
{
    enter_four(world, slots);
    ClusterJob *job = create(world, "one", NULL);
    assert_int_equal(job->state, JOB_STATE(STARTING));
    for (int rank = 0; rank < 4; rank++) {
        assert_int_equal(job->members[rank], slots[rank]);
        assert_int_equal(count_sent(world, slots[rank], ASSIGNMENT_PHASE(PREPARE)), 1);
        assert_int_equal(job->state, JOB_STATE(STARTING));
        assert_true(acknowledge(world, slots[rank], job->epoch, ASSIGNMENT_PHASE(PREPARE), true));
    }
    assert_int_equal(job->state, JOB_STATE(RUNNING));
    for (int rank = 0; rank < 4; rank++) {
        assert_int_equal(count_sent(world, slots[rank], ASSIGNMENT_PHASE(COMMIT)), 1);
    }
    cluster_clear_effects(&world->cluster);
    return job;
}

static void expect_text(const char *text, const char *part)
{
    if (!strstr(text, part)) {
        fail_msg("\"%s\" does not say \"%s\"", text, part);
    }
}

static void a_job_runs_from_pending_to_succeeded(void **state)
{
    (void)state;
    World world;
    world_init(&world, 1);
    ClusterJob *job = create(&world, "one", NULL);
    assert_int_equal(job->state, JOB_STATE(PENDING));
    assert_string_equal(job->message, "needs 2 encoder workers, 0 present; "
                                      "needs 2 llm workers, 0 present");
    int slots[4];
    enter_four(&world, slots);
    assert_int_equal(job->state, JOB_STATE(STARTING));
    for (int rank = 0; rank < 4; rank++) {
        assert_true(acknowledge(&world, slots[rank], job->epoch, ASSIGNMENT_PHASE(PREPARE), true));
    }
    assert_true(report(&world, slots[2], 1, false, NULL, NULL));
    assert_true(report(&world, slots[2], 2, false, NULL, NULL));
    assert_true(report(&world, slots[2], 2, false, NULL, NULL)); /* sent again */
    assert_int_equal(job->committed_step, 2);
    assert_int_equal(job->totals.tokens, 200);
    for (int rank = 0; rank < 4; rank++) {
        assert_int_equal(job->state, JOB_STATE(RUNNING));
        assert_true(report(&world, slots[rank], 0, true, NULL, NULL));
    }
    assert_int_equal(job->state, JOB_STATE(SUCCEEDED));
    for (int rank = 0; rank < 4; rank++) {
        assert_int_equal(count_sent(&world, slots[rank], ASSIGNMENT_PHASE(ABORT)), 1);
        assert_true(acknowledge(&world, slots[rank], job->epoch, ASSIGNMENT_PHASE(ABORT), true));
        assert_int_equal(world.cluster.membership.workers[slots[rank]].state,
                         WORKER_STATE(STANDBY));
    }
    Viaduct__V1__Job *message = NULL;
    assert_int_equal(cluster_render_job(&world.cluster, job, &message), STATUS_OK);
    assert_string_equal(message->name, "jobs/one");
    assert_int_equal(message->status->state, JOB_STATE(SUCCEEDED));
    assert_int_equal(message->status->totals->samples, 64);
    viaduct__v1__job__free_unpacked(message, NULL);
    cluster_done(&world.cluster);
}

/* Vision moves to the pool of the llm, whose two workers then serve both. */
static void a_job_of_one_shared_pool_runs_on_llm_workers(void **state)
{
    (void)state;
    World world;
    world_init(&world, 17);
    Viaduct__V1__CreateJobRequest request = make_request("one", "modules.vision.pool=l");
    JobSpec *spec = request.job->spec;
    viaduct__v1__pool_spec__free_unpacked(spec->pools[0], NULL);
    spec->pools[0] = spec->pools[--spec->n_pools];
    ClusterJob *job = NULL;
    if (!cluster_create_job(&world.cluster, &request, world.now_ms, &job, &world.error)) {
        fail_msg("%s", world.error.message);
    }
    viaduct__v1__job__free_unpacked(request.job, NULL);
    assert_string_equal(job->message, "needs 2 llm workers, 0 present");
    enter(&world, "encoder-0", "encoder");
    int slots[2];
    slots[1] = enter(&world, "llm-1", "llm");
    assert_string_equal(job->message, "needs 2 llm workers, 1 present");
    slots[0] = enter(&world, "llm-0", "llm");
    assert_int_equal(job->state, JOB_STATE(STARTING));
    assert_int_equal(job->num_members, 2);
    for (int rank = 0; rank < 2; rank++) {
        assert_int_equal(job->members[rank], slots[rank]);
        assert_true(acknowledge(&world, slots[rank], job->epoch, ASSIGNMENT_PHASE(PREPARE), true));
    }
    assert_int_equal(job->state, JOB_STATE(RUNNING));
    Viaduct__V1__Job *message = NULL;
    assert_int_equal(cluster_render_job(&world.cluster, job, &message), STATUS_OK);
    assert_int_equal(message->status->current_encoder_groups, 0);
    viaduct__v1__job__free_unpacked(message, NULL);
    cluster_done(&world.cluster);
}

static void a_prepare_message_says_all_that_a_worker_needs(void **state)
{
    (void)state;
    World world;
    world_init(&world, 2);
    int slots[4];
    enter_four(&world, slots);
    ClusterJob *job = create(&world, "one", NULL);
    const ClusterEffect *found = NULL;
    for (int i = 0; i < world.cluster.num_effects; i++) {
        if (world.cluster.effects[i].kind == CLUSTER_EFFECT_SEND &&
            world.cluster.effects[i].slot == slots[2]) {
            found = &world.cluster.effects[i];
        }
    }
    assert_non_null(found);
    Viaduct__V1__WatchAssignmentResponse *message = NULL;
    assert_int_equal(cluster_render_assignment(&world.cluster, found, &message), STATUS_OK);
    assert_int_equal(message->rank, 2);
    assert_int_equal(message->epoch, job->epoch);
    assert_int_equal(message->n_members, 4);
    assert_string_equal(message->members[0]->name, "workers/encoder-0");
    assert_string_equal(message->members[3]->name, "workers/llm-10");
    assert_int_equal(message->comm_id.len, 8);
    assert_int_equal(message->spec->training->steps, 300);
    viaduct__v1__watch_assignment_response__free_unpacked(message, NULL);
    cluster_done(&world.cluster);
}

static void a_silent_worker_fails_the_job_within_the_lease(void **state)
{
    (void)state;
    World world;
    world_init(&world, 3);
    int slots[4];
    ClusterJob *job = run_job(&world, slots);
    assert_true(beat(&world, slots[1], job->epoch, 12, "ENCODE microbatch 0"));
    int64_t silent_since_ms = world.now_ms;
    while (job->state == JOB_STATE(RUNNING)) {
        world.now_ms += 100;
        for (int rank = 0; rank < 4; rank++) {
            if (rank != 1) {
                assert_true(beat(&world, slots[rank], job->epoch, 12, "RECV microbatch 0"));
            }
        }
        cluster_tick(&world.cluster, world.now_ms);
    }
    assert_int_equal(world.now_ms - silent_since_ms, LEASE_MS);
    assert_int_equal(job->state, JOB_STATE(FAILED));
    assert_string_equal(job->reason, "WORKER_LOST");
    expect_text(job->message,
                "worker encoder-1 (rank 1) was lost at step 12 in ENCODE microbatch 0");
    for (int rank = 0; rank < 4; rank++) {
        assert_int_equal(count_sent(&world, slots[rank], ASSIGNMENT_PHASE(ABORT)), rank != 1);
    }
    cluster_done(&world.cluster);
}

/* The survivors' reports come before or after the dead worker's stream ends: both times the dead
 * one is the cause. */
static void the_dead_worker_is_the_cause_not_those_who_noticed(void **state)
{
    (void)state;
    for (int order = 0; order < 2; order++) {
        World world;
        world_init(&world, 4);
        int slots[4];
        ClusterJob *job = run_job(&world, slots);
        assert_true(beat(&world, slots[3], job->epoch, 7, "FORWARD microbatch 1"));
        if (order == 0) {
            cluster_close_stream(&world.cluster, slots[3], world.now_ms);
            assert_int_equal(job->state, JOB_STATE(RUNNING)); /* it may dial again */
        }
        world.now_ms += 20;
        assert_true(report(&world, slots[0], 0, false, "PEER_LOST",
                           "step 7, microbatch 1, SEND: rank 3 is gone"));
        if (order == 1) {
            assert_int_equal(job->state, JOB_STATE(RUNNING));
            cluster_close_stream(&world.cluster, slots[3], world.now_ms);
        }
        assert_int_equal(job->state, JOB_STATE(FAILED));
        assert_string_equal(job->reason, "WORKER_LOST");
        expect_text(job->message, "worker llm-10 (rank 3) was lost at step 7 in FORWARD");
        expect_text(job->message, "first noticed by worker encoder-0 (rank 0): step 7");
        cluster_done(&world.cluster);
    }
}

static void a_fault_of_its_own_beats_the_reports_that_follow(void **state)
{
    (void)state;
    World world;
    world_init(&world, 5);
    int slots[4];
    ClusterJob *job = run_job(&world, slots);
    assert_true(report(&world, slots[0], 0, false, "ABORTED", "rank 2 aborted"));
    assert_true(report(&world, slots[2], 0, false, "CORRUPT", "step 3, LOAD: a.tar: bad header"));
    assert_int_equal(job->state, JOB_STATE(FAILED));
    expect_text(job->message, "worker llm-2 (rank 2) failed: step 3, LOAD: a.tar: bad header");
    cluster_done(&world.cluster);
}

static void a_report_without_a_cause_fails_the_job_after_a_while(void **state)
{
    (void)state;
    World world;
    world_init(&world, 6);
    int slots[4];
    ClusterJob *job = run_job(&world, slots);
    assert_true(report(&world, slots[0], 0, false, "TIMEOUT", "step 3, RECV: nothing came"));
    world.now_ms += SETTLE_MS - 1;
    cluster_tick(&world.cluster, world.now_ms);
    assert_int_equal(job->state, JOB_STATE(RUNNING));
    world.now_ms += 1;
    cluster_tick(&world.cluster, world.now_ms);
    assert_int_equal(job->state, JOB_STATE(FAILED));
    expect_text(job->message, "encoder-0 (rank 0) could not go on: step 3, RECV: nothing came");
    cluster_done(&world.cluster);
}

static void cancel_works_in_every_state(void **state)
{
    (void)state;
    World world;
    world_init(&world, 7);
    Viaduct__V1__CancelJobRequest request = VIADUCT__V1__CANCEL_JOB_REQUEST__INIT;
    request.name = (char *)(uintptr_t) "jobs/one";
    ClusterJob *job = NULL;
    assert_false(cluster_cancel_job(&world.cluster, &request, world.now_ms, &job, &world.error));
    assert_int_equal(world.error.code, RPC_CODE_NOT_FOUND);
    job = create(&world, "one", NULL);
    assert_true(cluster_cancel_job(&world.cluster, &request, world.now_ms, &job, &world.error));
    assert_int_equal(job->state, JOB_STATE(CANCELLED));
    assert_true(cluster_cancel_job(&world.cluster, &request, world.now_ms, &job, &world.error));
    cluster_done(&world.cluster);

    for (int starting = 0; starting < 2; starting++) {
        world_init(&world, 8);
        int slots[4];
        if (starting) {
            enter_four(&world, slots);
            job = create(&world, "one", NULL);
        } else {
            job = run_job(&world, slots);
        }
        assert_true(cluster_cancel_job(&world.cluster, &request, world.now_ms, &job, &world.error));
        for (int rank = 0; rank < 4; rank++) {
            assert_int_equal(job->state, JOB_STATE(CANCELLING));
            assert_int_equal(count_sent(&world, slots[rank], ASSIGNMENT_PHASE(ABORT)), 1);
            assert_true(
                acknowledge(&world, slots[rank], job->epoch, ASSIGNMENT_PHASE(ABORT), true));
        }
        assert_int_equal(job->state, JOB_STATE(CANCELLED));
        cluster_done(&world.cluster);
    }
    world_init(&world, 9);
    int slots[4];
    job = run_job(&world, slots);
    assert_true(report(&world, slots[2], 0, false, "CORRUPT", "bad"));
    assert_false(cluster_cancel_job(&world.cluster, &request, world.now_ms, &job, &world.error));
    assert_string_equal(world.error.reason, "JOB_STATE");
    cluster_done(&world.cluster);
}

static void creating_is_idempotent_by_request_id(void **state)
{
    (void)state;
    World world;
    world_init(&world, 10);
    Viaduct__V1__CreateJobRequest request = make_request("one", NULL);
    request.request_id = (char *)(uintptr_t) "5f2b";
    ClusterJob *first = NULL;
    ClusterJob *again = NULL;
    assert_true(cluster_create_job(&world.cluster, &request, world.now_ms, &first, &world.error));
    assert_true(cluster_create_job(&world.cluster, &request, world.now_ms, &again, &world.error));
    assert_ptr_equal(first, again);
    assert_int_equal(world.cluster.num_jobs, 1);
    request.job->spec->training->steps = 301;
    assert_false(cluster_create_job(&world.cluster, &request, world.now_ms, &again, &world.error));
    assert_string_equal(world.error.reason, "REQUEST_ID_REUSED");
    request.request_id = (char *)(uintptr_t) "6a";
    assert_false(cluster_create_job(&world.cluster, &request, world.now_ms, &again, &world.error));
    assert_string_equal(world.error.reason, "JOB_EXISTS");
    request.job_id = (char *)(uintptr_t) "Not_an_id";
    assert_false(cluster_create_job(&world.cluster, &request, world.now_ms, &again, &world.error));
    expect_text(world.error.message, "job_id: is \"Not_an_id\"");
    viaduct__v1__job__free_unpacked(request.job, NULL);
    cluster_done(&world.cluster);
}

static void a_bad_job_is_refused_with_every_problem(void **state)
{
    (void)state;
    World world;
    world_init(&world, 11);
    Viaduct__V1__CreateJobRequest request = make_request("one", "training.steps=-1");
    assert_int_equal(job_file_set(request.job->spec, "modules.llm.pp=4"), STATUS_OK);
    request.validate_only = true;
    ClusterJob *job = NULL;
    assert_false(cluster_create_job(&world.cluster, &request, world.now_ms, &job, &world.error));
    assert_int_equal(world.error.code, RPC_CODE_INVALID_ARGUMENT);
    expect_text(world.error.message, "training.steps: is -1");
    expect_text(world.error.message,
                "modules[1].pp: is 4 with virtual_stages 1: 4 parts, expected");
    request.job->spec->training->steps = 10;
    assert_int_equal(job_file_set(request.job->spec, "modules.llm.pp=1"), STATUS_OK);
    assert_true(cluster_create_job(&world.cluster, &request, world.now_ms, &job, &world.error));
    assert_null(job);
    assert_int_equal(world.cluster.num_jobs, 0);
    viaduct__v1__job__free_unpacked(request.job, NULL);
    cluster_done(&world.cluster);
}

static void a_new_process_fences_the_old_one(void **state)
{
    (void)state;
    World world;
    world_init(&world, 12);
    int slots[4];
    ClusterJob *job = run_job(&world, slots);
    char old_lease[48];
    snprintf(old_lease, sizeof old_lease, "%s", lease_of(&world, slots[0]));
    assert_int_equal(enter_as(&world, "encoder-0", "encoder", "second"), slots[0]);
    assert_int_equal(job->state, JOB_STATE(FAILED));
    expect_text(job->message, "encoder-0 (rank 0) was lost");
    assert_int_equal(membership_find_lease(&world.cluster.membership, old_lease, &world.error), -1);
    assert_string_equal(world.error.reason, "LEASE_EXPIRED");
    /* The old process asks for its name again. */
    assert_int_equal(enter_as(&world, "encoder-0", "encoder", "encoder-0"), -1);
    assert_string_equal(world.error.reason, "FENCED");
    /* The same process again only renews. */
    assert_int_equal(enter_as(&world, "encoder-0", "encoder", "second"), slots[0]);
    cluster_done(&world.cluster);
}

static void stale_epochs_do_no_harm(void **state)
{
    (void)state;
    World world;
    world_init(&world, 13);
    int slots[4];
    ClusterJob *job = run_job(&world, slots);
    assert_false(acknowledge(&world, slots[0], job->epoch - 1, ASSIGNMENT_PHASE(ABORT), true));
    assert_string_equal(world.error.reason, "STALE_EPOCH");
    Viaduct__V1__ReportStepsRequest stale = VIADUCT__V1__REPORT_STEPS_REQUEST__INIT;
    int64_t acknowledged = 0;
    stale.lease_id = (char *)(uintptr_t)lease_of(&world, slots[0]);
    stale.epoch = job->epoch + 7;
    stale.finished = true;
    stale.failure = (char *)(uintptr_t) "bad";
    assert_true(cluster_report(&world.cluster, &stale, world.now_ms, &acknowledged, &world.error));
    assert_int_equal(job->state, JOB_STATE(RUNNING));
    assert_false(world.cluster.membership.workers[slots[0]].finished);
    assert_true(beat(&world, slots[0], job->epoch, 1, ""));
    assert_false(beat(&world, slots[0], job->epoch + 7, 1, "")); /* told to abort that epoch */
    assert_true(report(&world, slots[2], 0, false, "CORRUPT", "bad"));
    assert_false(beat(&world, slots[0], job->epoch, 1, ""));
    assert_true(report(&world, slots[2], 9, true, NULL, NULL));
    assert_int_equal(job->committed_step, 0);
    cluster_done(&world.cluster);
}

static void waiting_ends_after_the_start_timeout_only_when_workers_are_missing(void **state)
{
    (void)state;
    World world;
    world_init(&world, 14);
    int slots[4];
    ClusterJob *first = run_job(&world, slots);
    ClusterJob *queued = create(&world, "two", "timeouts.start=60s");
    ClusterJob *wanting = create(&world, "three", "modules.llm.tp=3");
    assert_string_equal(queued->reason, "QUEUED");
    assert_string_equal(queued->message, "needs 2 encoder workers, 2 present, 0 free; "
                                         "needs 2 llm workers, 2 present, 0 free");
    for (int second = 0; second < 620; second++) {
        world.now_ms += 1000;
        for (int rank = 0; rank < 4; rank++) {
            assert_true(beat(&world, slots[rank], first->epoch, 1, "x"));
        }
        world.cluster.placement_due = true;
        cluster_tick(&world.cluster, world.now_ms);
    }
    assert_int_equal(first->state, JOB_STATE(RUNNING));
    assert_int_equal(queued->state, JOB_STATE(PENDING));
    assert_int_equal(wanting->state, JOB_STATE(FAILED));
    assert_string_equal(wanting->reason, "START_TIMEOUT");
    cluster_done(&world.cluster);
}

static void freed_workers_serve_the_next_job_by_priority(void **state)
{
    (void)state;
    World world;
    world_init(&world, 15);
    int slots[4];
    ClusterJob *first = run_job(&world, slots);
    ClusterJob *low = create(&world, "low", NULL);
    ClusterJob *high = create(&world, "high", "priority=5");
    for (int rank = 0; rank < 4; rank++) {
        assert_true(report(&world, slots[rank], 0, true, NULL, NULL));
    }
    assert_int_equal(first->state, JOB_STATE(SUCCEEDED));
    assert_int_equal(high->state, JOB_STATE(PENDING));
    for (int rank = 0; rank < 4; rank++) {
        assert_true(acknowledge(&world, slots[rank], first->epoch, ASSIGNMENT_PHASE(ABORT), true));
    }
    assert_int_equal(high->state, JOB_STATE(STARTING));
    assert_int_equal(low->state, JOB_STATE(PENDING));
    assert_true(high->epoch > first->epoch);
    Viaduct__V1__DeleteJobRequest request = VIADUCT__V1__DELETE_JOB_REQUEST__INIT;
    request.name = (char *)(uintptr_t) "one";
    assert_true(cluster_delete_job(&world.cluster, &request, world.now_ms, &world.error));
    assert_null(cluster_find_job(&world.cluster, "jobs/one"));
    request.name = (char *)(uintptr_t) "high";
    assert_false(cluster_delete_job(&world.cluster, &request, world.now_ms, &world.error));
    assert_string_equal(world.error.reason, "JOB_STATE");
    cluster_done(&world.cluster);
}

static void an_old_protocol_and_bad_records_are_refused(void **state)
{
    (void)state;
    World world;
    world_init(&world, 16);
    assert_int_equal(enter_as(&world, "bad name", "llm", "x"), -1);
    expect_text(world.error.message, "worker.name");
    assert_int_equal(enter_as(&world, "a", "gpu", "x"), -1);
    expect_text(world.error.message, "worker.role");
    assert_int_equal(enter_as(&world, "a", "llm", ""), -1);
    expect_text(world.error.message, "worker.incarnation");
    cluster_done(&world.cluster);
}

/* ---------------------------------------------------------------- simulation */

enum {
    SIM_WORKERS = 7,
    SIM_JOBS = 6,
    SIM_EVENTS = 400,
    SIM_HISTORIES = 300,
    SIM_INBOX = 64
};

/* A worker process as the simulation sees it: only what the real one would know. */
typedef struct SimWorker {
    char name[16];
    int incarnation;
    bool alive;
    bool stalled; /* sends nothing for a while */
    int slot;     /* -1: not registered */
    char lease[48];
    int64_t epoch; /* in which it is; 0: none */
    bool running;
    AssignmentPhase inbox[SIM_INBOX];
    int64_t inbox_epoch[SIM_INBOX];
    int inbox_count;
} SimWorker;

typedef struct Sim {
    World world;
    SimWorker workers[SIM_WORKERS];
    JobState seen[SIM_JOBS * 2];
    uint64_t draws;
    Rng rng;
    int jobs_made;
    int assignments, failures, successes;
} Sim;

static int draw(Sim *sim, int bound)
{
    return (int)rng_below(sim->rng, sim->draws++, (uint64_t)bound);
}

static void sim_enter(Sim *sim, int index)
{
    SimWorker *worker = &sim->workers[index];
    char incarnation[32];
    snprintf(incarnation, sizeof incarnation, "i%d", worker->incarnation);
    worker->slot = enter_as(&sim->world, worker->name, index < 3 ? "encoder" : "llm", incarnation);
    assert_true(worker->slot >= 0);
    snprintf(worker->lease, sizeof worker->lease, "%s", lease_of(&sim->world, worker->slot));
    int again = -1;
    assert_true(cluster_open_stream(&sim->world.cluster, worker->lease, sim->world.now_ms, &again,
                                    &sim->world.error));
}

/* Delivers effects and checks what must always hold. */
static void sim_deliver(Sim *sim)
{
    Cluster *cluster = &sim->world.cluster;
    for (int i = 0; i < cluster->num_effects; i++) {
        const ClusterEffect *effect = &cluster->effects[i];
        for (int w = 0; effect->kind == CLUSTER_EFFECT_SEND && w < SIM_WORKERS; w++) {
            SimWorker *worker = &sim->workers[w];
            bool is_his = worker->alive && worker->slot == effect->slot &&
                          strcmp(worker->lease, lease_of(&sim->world, effect->slot)) == 0;
            if (is_his && worker->inbox_count < SIM_INBOX) {
                worker->inbox[worker->inbox_count] = effect->phase;
                worker->inbox_epoch[worker->inbox_count++] = effect->epoch;
            }
        }
    }
    cluster_clear_effects(cluster);
    int owner[SIM_WORKERS * 8] = {0};
    for (int j = 0; j < cluster->num_jobs; j++) {
        const ClusterJob *job = cluster->jobs[j];
        JobState before = sim->seen[job->serial - 1];
        assert_true(!job_state_is_terminal(before) || before == job->state);
        assert_true(before == 0 || job->state >= before || job_state_allows(before, job->state));
        sim->seen[job->serial - 1] = job->state;
        bool holds = job->state == JOB_STATE(STARTING) || job->state == JOB_STATE(RUNNING) ||
                     job->state == JOB_STATE(CANCELLING);
        for (int rank = 0; holds && rank < job->num_members; rank++) {
            const WorkerRecord *worker = &cluster->membership.workers[job->members[rank]];
            if (worker->job != job->serial) {
                assert_true(job->state == JOB_STATE(CANCELLING) || worker->job == 0);
                continue;
            }
            assert_int_equal(worker->rank, rank);
            assert_int_equal(owner[job->members[rank]], 0); /* in one job only, once */
            owner[job->members[rank]] = (int)job->serial;
        }
    }
}

static void sim_read_message(Sim *sim, SimWorker *worker)
{
    AssignmentPhase phase = worker->inbox[0];
    int64_t epoch = worker->inbox_epoch[0];
    worker->inbox_count--;
    memmove(worker->inbox, worker->inbox + 1, sizeof worker->inbox - sizeof *worker->inbox);
    memmove(worker->inbox_epoch, worker->inbox_epoch + 1,
            sizeof worker->inbox_epoch - sizeof *worker->inbox_epoch);
    World *world = &sim->world;
    bool is_current = strcmp(worker->lease, lease_of(world, worker->slot)) == 0;
    if (phase == ASSIGNMENT_PHASE(PREPARE)) {
        assert_true(worker->epoch == 0 || worker->epoch == epoch || !is_current);
        sim->assignments += worker->epoch == 0;
        worker->epoch = epoch;
        if (is_current) {
            (void)acknowledge(world, worker->slot, epoch, phase, draw(sim, 20) != 0);
        }
    } else if (phase == ASSIGNMENT_PHASE(COMMIT)) {
        worker->running = worker->epoch == epoch;
    } else {
        worker->epoch = worker->epoch == epoch ? 0 : worker->epoch;
        worker->running = worker->running && worker->epoch != 0;
        if (is_current) {
            (void)acknowledge(world, worker->slot, epoch, phase, true);
        }
    }
}

/* A heartbeat as the worker's program does it: a lost lease makes it register again. */
static void sim_beat(Sim *sim, int index)
{
    SimWorker *worker = &sim->workers[index];
    World *world = &sim->world;
    bool is_current =
        worker->slot >= 0 && strcmp(worker->lease, lease_of(world, worker->slot)) == 0;
    if (!is_current || !beat(world, worker->slot, worker->epoch, 1, "x")) {
        bool is_lost = !is_current || strcmp(world->error.reason, "LEASE_EXPIRED") == 0;
        world->error.reason[0] = '\0';
        worker->epoch = 0; /* the epoch is aborted in both cases */
        worker->running = false;
        if (is_lost) {
            worker->inbox_count = 0;
            sim_enter(sim, index);
        }
    }
}

static void sim_worker_event(Sim *sim, int index)
{
    SimWorker *worker = &sim->workers[index];
    World *world = &sim->world;
    if (!worker->alive) {
        if (draw(sim, 8) == 0) {
            *worker = (SimWorker){.incarnation = worker->incarnation + 1, .alive = true};
            snprintf(worker->name, sizeof worker->name, "w-%d", index);
            sim_enter(sim, index);
        }
        return;
    }
    int event = draw(sim, 100);
    bool is_current = strcmp(worker->lease, lease_of(world, worker->slot)) == 0;
    if (event < 3) {
        worker->alive = false; /* kill -9: sometimes the connection tells, sometimes not */
        if (is_current && draw(sim, 2)) {
            cluster_close_stream(&world->cluster, worker->slot, world->now_ms);
        }
    } else if (event < 5) {
        worker->stalled = true;
    } else if (event < 10) {
        worker->stalled = false;
    } else if (!worker->stalled && event < 50 && worker->inbox_count > 0) {
        sim_read_message(sim, worker);
    } else if (!worker->stalled && worker->running && is_current && event < 54) {
        (void)report(world, worker->slot, 0, false, event < 52 ? "PEER_LOST" : "CORRUPT", "step 1");
    } else if (!worker->stalled && worker->running && is_current && event < 75) {
        (void)report(world, worker->slot, 1 + draw(sim, 5), event > 62, NULL, NULL);
    } else if (!worker->stalled) {
        sim_beat(sim, index);
    }
}

static void sim_user_event(Sim *sim)
{
    World *world = &sim->world;
    char id[16];
    if (sim->jobs_made < SIM_JOBS) {
        snprintf(id, sizeof id, "j-%d", sim->jobs_made++);
        (void)create(world, id, draw(sim, 3) ? NULL : "modules.vision.dp=3");
    } else if (draw(sim, 6) == 0) {
        Viaduct__V1__CancelJobRequest request = VIADUCT__V1__CANCEL_JOB_REQUEST__INIT;
        snprintf(id, sizeof id, "j-%d", draw(sim, SIM_JOBS));
        request.name = id;
        ClusterJob *job = NULL;
        (void)cluster_cancel_job(&world->cluster, &request, world->now_ms, &job, &world->error);
    }
}

/* Everyone alive and honest: every job must come to an end. */
static void sim_calm_down(Sim *sim)
{
    Cluster *cluster = &sim->world.cluster;
    bool all_ended = false;
    for (int round = 0; round < 2000 && !all_ended; round++) {
        sim->world.now_ms += 500;
        for (int i = 0; i < SIM_WORKERS; i++) {
            SimWorker *worker = &sim->workers[i];
            worker->stalled = false;
            if (!worker->alive) {
                *worker = (SimWorker){.incarnation = worker->incarnation + 1, .alive = true};
                snprintf(worker->name, sizeof worker->name, "w-%d", i);
                sim_enter(sim, i);
                sim_deliver(sim);
            }
            while (worker->inbox_count > 0) {
                sim_read_message(sim, worker);
                sim_deliver(sim);
            }
            sim_beat(sim, i);
            sim_deliver(sim);
            if (worker->running) {
                (void)report(&sim->world, worker->slot, 0, true, NULL, NULL);
                sim_deliver(sim);
            }
        }
        cluster_tick(cluster, sim->world.now_ms);
        sim_deliver(sim);
        all_ended = true;
        for (int j = 0; j < cluster->num_jobs; j++) {
            all_ended = all_ended && job_state_is_terminal(cluster->jobs[j]->state);
        }
    }
    assert_true(all_ended);
    for (int j = 0; j < cluster->num_jobs; j++) {
        sim->failures += cluster->jobs[j]->state == JOB_STATE(FAILED);
        sim->successes += cluster->jobs[j]->state == JOB_STATE(SUCCEEDED);
    }
}

static void random_histories_keep_the_rules(void **state)
{
    (void)state;
    int assignments = 0;
    int failures = 0;
    int successes = 0;
    for (uint64_t seed = 0; seed < SIM_HISTORIES; seed++) {
        Sim sim = {.rng = {seed, hash_text("simulation")}};
        world_init(&sim.world, seed);
        for (int i = 0; i < SIM_WORKERS; i++) {
            snprintf(sim.workers[i].name, sizeof sim.workers[i].name, "w-%d", i);
        }
        for (int event = 0; event < SIM_EVENTS; event++) {
            sim.world.now_ms += draw(&sim, 120);
            int kind = draw(&sim, 20);
            if (kind == 0) {
                sim_user_event(&sim);
            } else if (kind < 3) {
                cluster_tick(&sim.world.cluster, sim.world.now_ms);
            } else {
                sim_worker_event(&sim, draw(&sim, SIM_WORKERS));
            }
            sim_deliver(&sim);
        }
        sim_calm_down(&sim);
        assignments += sim.assignments;
        failures += sim.failures;
        successes += sim.successes;
        cluster_done(&sim.world.cluster);
    }
    print_message("seeds 0 to %d: %d assignments, %d jobs failed, %d succeeded\n",
                  SIM_HISTORIES - 1, assignments, failures, successes);
    /* Histories in which nothing happens prove nothing. */
    assert_true(failures > SIM_HISTORIES / 2 && successes > SIM_HISTORIES);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_job_runs_from_pending_to_succeeded),
        cmocka_unit_test(a_job_of_one_shared_pool_runs_on_llm_workers),
        cmocka_unit_test(a_prepare_message_says_all_that_a_worker_needs),
        cmocka_unit_test(a_silent_worker_fails_the_job_within_the_lease),
        cmocka_unit_test(the_dead_worker_is_the_cause_not_those_who_noticed),
        cmocka_unit_test(a_fault_of_its_own_beats_the_reports_that_follow),
        cmocka_unit_test(a_report_without_a_cause_fails_the_job_after_a_while),
        cmocka_unit_test(cancel_works_in_every_state),
        cmocka_unit_test(creating_is_idempotent_by_request_id),
        cmocka_unit_test(a_bad_job_is_refused_with_every_problem),
        cmocka_unit_test(a_new_process_fences_the_old_one),
        cmocka_unit_test(stale_epochs_do_no_harm),
        cmocka_unit_test(waiting_ends_after_the_start_timeout_only_when_workers_are_missing),
        cmocka_unit_test(freed_workers_serve_the_next_job_by_priority),
        cmocka_unit_test(an_old_protocol_and_bad_records_are_refused),
        cmocka_unit_test(random_histories_keep_the_rules),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
