/* A worker's loop against a coordinator that the test plays, with a stand-in for the trainer. */
#include "base/clock.h"
#include "base/memory.h"
#include "job/job_file.h"
#include "job/message.h"
#include "rpc/rpc.h"
#include "train/worker_loop.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

#define WORKERS  (&viaduct__v1__worker_service__descriptor)
#define PHASE(x) VIADUCT__V1__WATCH_ASSIGNMENT_RESPONSE__PHASE__##x

enum {
    TIMEOUT_MS = 20000
};

/* ---------------------------------------------------------------- the stand-in trainer */
struct Trainer {
    TrainerOptions options;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool is_stopped;
};

static Status open_world(CommEndpoint *endpoint, const CommHostWorld *world, Comm **comm_out)
{
    (void)endpoint;
    *comm_out = NULL;
    if (world->size != 2 || world->rank != 1 || strcmp(world->addresses[0], "h:1") != 0) {
        return status_fail(STATUS_INVALID, __FILE__, __LINE__, "not the world that was sent");
    }
    return STATUS_OK;
}

static Status stand_in_create(const TrainerOptions *options, Trainer **trainer_out)
{
    Trainer *trainer = NULL;
    TRY(MEMORY_NEW(&trainer, 1));
    trainer->options = *options;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&trainer->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&trainer->lock, NULL);
    *trainer_out = trainer;
    return STATUS_OK;
}

static void stand_in_stop(Trainer *trainer, const char *reason)
{
    (void)reason;
    pthread_mutex_lock(&trainer->lock);
    trainer->is_stopped = true;
    pthread_cond_broadcast(&trainer->changed);
    pthread_mutex_unlock(&trainer->lock);
}

static void stand_in_destroy(Trainer *trainer)
{
    pthread_cond_destroy(&trainer->changed);
    pthread_mutex_destroy(&trainer->lock);
    memory_free(trainer);
}

static Status wait_for_stop(Trainer *trainer)
{
    struct timespec until = clock_timespec(clock_deadline_in_ms(TIMEOUT_MS));
    pthread_mutex_lock(&trainer->lock);
    int waited = 0;
    while (!trainer->is_stopped && waited == 0) {
        waited = pthread_cond_timedwait(&trainer->changed, &trainer->lock, &until);
    }
    pthread_mutex_unlock(&trainer->lock);
    return status_fail(STATUS_ABORTED, __FILE__, __LINE__, "stopped");
}

/* The number of steps says what to do: -1 blocks, -2 fails, else so many steps, an evaluation and a
 * checkpoint. */
static Status stand_in_run(Trainer *trainer)
{
    const TrainerEvents *events = &trainer->options.events;
    int64_t steps = trainer->options.spec->training->steps;
    events->progress(events->context, "FORWARD", 7, 3);
    if (steps == -1) {
        return wait_for_stop(trainer);
    }
    if (steps == -2) {
        return status_fail(STATUS_PEER_LOST, __FILE__, __LINE__, "rank 0 is gone");
    }
    for (int64_t i = 1; i <= steps; i++) {
        TrainerStep step = {.step = i, .committed = true, .loss = 1.0 / (double)i, .tokens = 10};
        events->step(events->context, &step);
    }
    char sample[] = "s1";
    char truth[] = "a cat";
    char generated[] = "a hat";
    TrainerCaption caption = {sample, truth, generated};
    TrainerEvaluation evaluation = {steps, 0.5, 1.5, 10, 1, &caption};
    events->evaluation(events->context, &evaluation);
    events->checkpoint(events->context, steps, "/c/step-3");
    return STATUS_OK;
}

static const WorkerEngine stand_in = {open_world, stand_in_create, stand_in_run, stand_in_stop,
                                      stand_in_destroy};

/* ---------------------------------------------------------------- the coordinator that the test
 * plays */
typedef struct Fake {
    uv_loop_t loop;
    Rpc *rpc;
    RpcServer *server;
    uv_timer_t watchdog;
    pthread_t worker;
    char address[32];
    char label[64];
    RpcCall *stream;
    bool refuse_heartbeats;
    int registrations, streams, heartbeats, deregistrations;
    int64_t heartbeat_epoch, heartbeat_step, progress;
    char operation[96];
    int64_t acked[5]; /* by phase: the last epoch */
    bool ack_ok;
    int64_t last_step;
    int records;
    bool finished, has_evaluation;
    char checkpoint[64], failure[128], failure_code[32], failure_operation[96];
    int64_t failure_step;
    Status worker_result;
    bool is_server_done;
    int is_worker_done; /* atomic */
} Fake;

static void on_register(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    Fake *fake = context;
    const Viaduct__V1__RegisterWorkerRequest *request =
        (const Viaduct__V1__RegisterWorkerRequest *)message;
    fake->registrations++;
    if (request->worker->n_labels == 1) {
        snprintf(fake->label, sizeof fake->label, "%s:%s", request->worker->labels[0]->key,
                 request->worker->labels[0]->value);
    }
    Viaduct__V1__RegisterWorkerResponse response = VIADUCT__V1__REGISTER_WORKER_RESPONSE__INIT;
    Google__Protobuf__Duration interval = GOOGLE__PROTOBUF__DURATION__INIT;
    char lease[32];
    snprintf(lease, sizeof lease, "lease-%d", fake->registrations);
    interval.nanos = 50000000;
    response.lease_id = lease;
    response.heartbeat_interval = &interval;
    rpc_call_reply(call, &response.base);
}

static void on_heartbeat(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    Fake *fake = context;
    const Viaduct__V1__HeartbeatRequest *request = (const Viaduct__V1__HeartbeatRequest *)message;
    fake->heartbeats++;
    fake->heartbeat_epoch = request->epoch;
    fake->heartbeat_step = request->step;
    fake->progress = request->progress_counter;
    snprintf(fake->operation, sizeof fake->operation, "%s", request->operation);
    if (fake->refuse_heartbeats) {
        fake->refuse_heartbeats = false;
        RpcError error = rpc_error(RPC_CODE_NOT_FOUND, "LEASE_EXPIRED", "over");
        rpc_call_fail(call, &error);
        return;
    }
    Viaduct__V1__HeartbeatResponse response = VIADUCT__V1__HEARTBEAT_RESPONSE__INIT;
    response.directive = VIADUCT__V1__HEARTBEAT_RESPONSE__DIRECTIVE__CONTINUE;
    rpc_call_reply(call, &response.base);
}

static void on_stream_closed(void *context, RpcCall *call)
{
    Fake *fake = context;
    if (fake->stream == call) {
        fake->stream = NULL;
    }
}

static void on_watch(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    (void)message;
    Fake *fake = context;
    fake->stream = call;
    fake->streams++;
    rpc_call_on_closed(call, on_stream_closed, fake);
}

static void on_ack(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    Fake *fake = context;
    const Viaduct__V1__AckAssignmentRequest *request =
        (const Viaduct__V1__AckAssignmentRequest *)message;
    fake->acked[request->phase] = request->epoch;
    fake->ack_ok = request->ok;
    Viaduct__V1__AckAssignmentResponse response = VIADUCT__V1__ACK_ASSIGNMENT_RESPONSE__INIT;
    rpc_call_reply(call, &response.base);
}

static void on_report(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    Fake *fake = context;
    const Viaduct__V1__ReportStepsRequest *request =
        (const Viaduct__V1__ReportStepsRequest *)message;
    for (size_t i = 0; i < request->n_records; i++) {
        assert_int_equal(request->records[i]->step, fake->last_step + 1);
        fake->last_step = request->records[i]->step;
        fake->records++;
    }
    fake->finished = fake->finished || request->finished;
    fake->has_evaluation =
        fake->has_evaluation || (request->evaluation && request->evaluation->n_captions == 1);
    if (request->checkpoint[0]) {
        snprintf(fake->checkpoint, sizeof fake->checkpoint, "%s", request->checkpoint);
    }
    if (request->failure[0]) {
        snprintf(fake->failure, sizeof fake->failure, "%s", request->failure);
        snprintf(fake->failure_code, sizeof fake->failure_code, "%s", request->failure_code);
        snprintf(fake->failure_operation, sizeof fake->failure_operation, "%s",
                 request->failure_operation);
        fake->failure_step = request->failure_step;
    }
    Viaduct__V1__ReportStepsResponse response = VIADUCT__V1__REPORT_STEPS_RESPONSE__INIT;
    rpc_call_reply(call, &response.base);
}

static void on_deregister(void *context, RpcCall *call, const ProtobufCMessage *message)
{
    (void)message;
    ((Fake *)context)->deregistrations++;
    Google__Protobuf__Empty response = GOOGLE__PROTOBUF__EMPTY__INIT;
    rpc_call_reply(call, &response.base);
}

static const RpcMethod methods[] = {
    {WORKERS, "RegisterWorker", on_register, false},
    {WORKERS, "Heartbeat", on_heartbeat, false},
    {WORKERS, "WatchAssignment", on_watch, true},
    {WORKERS, "AckAssignment", on_ack, false},
    {WORKERS, "ReportSteps", on_report, false},
    {WORKERS, "DeregisterWorker", on_deregister, false},
};

static void on_watchdog(uv_timer_t *timer)
{
    (void)timer;
    fprintf(stderr, "worker_loop_test: nothing happened for %d ms\n", TIMEOUT_MS);
    abort();
}

static void on_poll(uv_timer_t *timer)
{
    (void)timer; /* wakes the loop, so that the other thread's end is seen */
}

#define RUN_UNTIL(fake, condition)                                     \
    do {                                                               \
        uv_update_time(&(fake)->loop);                                 \
        uv_timer_start(&(fake)->watchdog, on_watchdog, TIMEOUT_MS, 0); \
        while (!(condition)) {                                         \
            uv_run(&(fake)->loop, UV_RUN_ONCE);                        \
        }                                                              \
        uv_timer_stop(&(fake)->watchdog);                              \
    } while (0)

static void *worker_thread(void *context)
{
    Fake *fake = context;
    WorkerOptions options = {.role = "llm",
                             .name = "llm-0",
                             .coordinator = fake->address,
                             .data_address = "h:2",
                             .device = "cpu",
                             .labels = {{"zone=north"}, 1},
                             .engine = &stand_in};
    fake->worker_result = worker_loop_run(&options);
    __atomic_store_n(&fake->is_worker_done, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void send_phase(Fake *fake, int64_t epoch, Viaduct__V1__WatchAssignmentResponse__Phase phase,
                       int64_t steps)
{
    Viaduct__V1__WatchAssignmentResponse message = VIADUCT__V1__WATCH_ASSIGNMENT_RESPONSE__INIT;
    Viaduct__V1__Worker members[2] = {VIADUCT__V1__WORKER__INIT, VIADUCT__V1__WORKER__INIT};
    Viaduct__V1__Worker *pointers[] = {&members[0], &members[1]};
    static const char job[] = "modules: [{name: vision, pool: e}, {name: llm, pool: l}]\n"
                              "pools: [{name: e, role: encoder}, {name: l, role: llm}]\n";
    assert_int_equal(job_file_parse("job", job, sizeof job - 1, &message.spec), STATUS_OK);
    assert_int_equal(job_spec_resolve(message.spec), STATUS_OK);
    message.spec->training->steps = steps;
    members[0].data_address = (char *)(uintptr_t) "h:1";
    members[1].data_address = (char *)(uintptr_t) "h:2";
    uint8_t key[8] = {1};
    message.phase = phase;
    message.epoch = epoch;
    message.rank = 1;
    if (phase == PHASE(PREPARE)) {
        message.members = pointers;
        message.n_members = 2;
        message.comm_id.data = key;
        message.comm_id.len = sizeof key;
    }
    assert_non_null(fake->stream);
    (void)rpc_call_send(fake->stream, &message.base);
    viaduct__v1__job_spec__free_unpacked(message.spec, NULL);
}

static void on_server_done(void *context)
{
    ((Fake *)context)->is_server_done = true;
}

static void run_epoch(Fake *fake, int64_t epoch, int64_t steps)
{
    send_phase(fake, epoch, PHASE(PREPARE), steps);
    RUN_UNTIL(fake, fake->acked[PHASE(PREPARE)] == epoch);
    assert_true(fake->ack_ok);
    send_phase(fake, epoch, PHASE(COMMIT), steps);
}

static void end_epoch(Fake *fake, int64_t epoch)
{
    send_phase(fake, epoch, PHASE(ABORT), 0);
    RUN_UNTIL(fake, fake->acked[PHASE(ABORT)] == epoch);
}

static void a_worker_lives_through_jobs_failures_and_lost_leases(void **state)
{
    (void)state;
    Fake *fake = NULL;
    uv_timer_t poll;
    assert_int_equal(MEMORY_NEW(&fake, 1), STATUS_OK);
    assert_int_equal(uv_loop_init(&fake->loop), 0);
    assert_int_equal(uv_timer_init(&fake->loop, &fake->watchdog), 0);
    assert_int_equal(uv_timer_init(&fake->loop, &poll), 0);
    assert_int_equal(uv_timer_start(&poll, on_poll, 20, 20), 0);
    assert_int_equal(rpc_create(&fake->loop, &fake->rpc), STATUS_OK);
    const RpcServerOptions options = {.address = "127.0.0.1:0",
                                      .methods = methods,
                                      .num_methods = sizeof methods / sizeof *methods,
                                      .context = fake};
    assert_int_equal(rpc_server_create(fake->rpc, &options, &fake->server), STATUS_OK);
    snprintf(fake->address, sizeof fake->address, "127.0.0.1:%d", rpc_server_port(fake->server));
    assert_int_equal(pthread_create(&fake->worker, NULL, worker_thread, fake), 0);
    RUN_UNTIL(fake, fake->stream && fake->heartbeats > 0);
    assert_string_equal(fake->label, "zone:north");
    assert_int_equal(fake->heartbeat_epoch, 0);

    run_epoch(fake, 1, 3); /* runs to its end */
    RUN_UNTIL(fake, fake->finished);
    assert_int_equal(fake->records, 3);
    assert_true(fake->has_evaluation);
    assert_string_equal(fake->checkpoint, "/c/step-3");
    end_epoch(fake, 1);

    run_epoch(fake, 2, -1); /* is aborted in the midst of a step */
    RUN_UNTIL(fake, fake->heartbeat_epoch == 2 && fake->heartbeat_step == 7);
    assert_string_equal(fake->operation, "FORWARD of microbatch 3");
    assert_true(fake->progress > 0);
    end_epoch(fake, 2);

    run_epoch(fake, 3, -2); /* fails */
    RUN_UNTIL(fake, fake->failure[0]);
    assert_string_equal(fake->failure_code, "PEER_LOST");
    assert_non_null(strstr(fake->failure, "rank 0 is gone"));
    assert_int_equal(fake->failure_step, 7);
    assert_string_equal(fake->failure_operation, "FORWARD of microbatch 3");
    end_epoch(fake, 3);

    run_epoch(fake, 4, -1); /* a new epoch comes before the old one's end */
    send_phase(fake, 5, PHASE(PREPARE), -1);
    RUN_UNTIL(fake, fake->acked[PHASE(PREPARE)] == 5);
    end_epoch(fake, 4); /* unknown by now: acknowledged at once */

    int streams = fake->streams; /* the lease is lost: it registers again and keeps its epoch */
    fake->refuse_heartbeats = true;
    RUN_UNTIL(fake, fake->registrations == 2 && fake->streams > streams && fake->stream);
    fake->heartbeat_epoch = 0;
    RUN_UNTIL(fake, fake->heartbeat_epoch == 5);

    assert_int_equal(kill(getpid(), SIGTERM), 0); /* the worker's loop takes it */
    RUN_UNTIL(fake, __atomic_load_n(&fake->is_worker_done, __ATOMIC_ACQUIRE));
    pthread_join(fake->worker, NULL);
    assert_int_equal(fake->worker_result, STATUS_OK);
    assert_int_equal(fake->deregistrations, 1);

    rpc_server_shutdown(fake->server, 1000, on_server_done, fake);
    RUN_UNTIL(fake, fake->is_server_done);
    uv_close((uv_handle_t *)&fake->watchdog, NULL);
    uv_close((uv_handle_t *)&poll, NULL);
    rpc_destroy(fake->rpc);
    uv_run(&fake->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&fake->loop), 0);
    memory_free(fake);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_worker_lives_through_jobs_failures_and_lost_leases),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
