#include "train/worker_loop.h"

#include "base/clock.h"
#include "base/log.h"
#include "base/memory.h"
#include "job/job_layout.h"
#include "job/message.h"
#include "rpc/rpc.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#define WORKERS (&viaduct__v1__worker_service__descriptor)

enum {
    PROTOCOL_VERSION = 1,
    CALL_MS = 10000,
    HEARTBEAT_CALL_MS = 2000,
    REPORT_MS = 200, /* five reports a second at most */
    RETRY_FIRST_MS = 200,
    RETRY_MAX_MS = 5000,
    WATCHDOG_MS = 15000,  /* less than timeouts.transfer */
    DEREGISTER_MS = 2000, /* at most so long a stopping worker waits for the coordinator */
    MISSED_MAX = 3,       /* failed heartbeats before it dials anew */
    TIMER_COUNT = 4,
    EVENTS_MAX = 1024,
    BATCH_MAX = 500,     /* step records of one report */
    BACKLOG_MAX = 100000 /* step records kept while the coordinator is away */
};

/* Room for the messages of one report. */
typedef struct ReportBatch {
    Viaduct__V1__StepRecord records[BATCH_MAX];
    Viaduct__V1__StepMetrics metrics[BATCH_MAX];
    Viaduct__V1__StepRecord *pointers[BATCH_MAX];
} ReportBatch;

typedef struct WorkerLoop {
    const WorkerOptions *options;
    uv_loop_t loop;
    uv_async_t wake;
    uv_timer_t heartbeat_timer, report_timer, retry_timer, watchdog;
    uv_signal_t signals[2];
    Rpc *rpc;
    RpcClient *client;
    char incarnation[40];
    char lease_id[64]; /* "": not registered */
    RpcRequest *stream;
    bool heartbeat_busy, report_busy, register_busy;
    int missed;
    int64_t retry_ms;
    bool is_stopping, is_deregistering, is_closed;
    Status result;
    /* the epoch */
    Queue *events;
    WorkerStep *step;
    Viaduct__V1__WatchAssignmentResponse *assignment; /* of `step` */
    Viaduct__V1__WatchAssignmentResponse *next;       /* waits for `step` to end */
    bool is_linked;
    bool is_aborted;
    bool release_asked; /* the coordinator waits for the ack of its ABORT */
    /* what is to be reported */
    TrainerStep *records;
    size_t records_capacity;
    size_t num_records, num_sent;
    Viaduct__V1__EvaluationReport *evaluation;
    char *checkpoint;
    bool is_finished;
    char *failure;
    Status failure_code;
    WorkerProgress failure_at;
    bool sent_final; /* the report under way carries the end: finished or failure */
    bool sent_evaluation, sent_checkpoint;
    ReportBatch batch;
} WorkerLoop;

static void register_worker(WorkerLoop *self);
static void open_stream(WorkerLoop *self);
static void proceed_stop(WorkerLoop *self);
static void begin_stop(WorkerLoop *self, Status result);

static void on_watchdog(uv_timer_t *timer)
{
    (void)timer;
    log_error("an aborted epoch did not end within %d ms; exiting with %d", WATCHDOG_MS,
              WORKER_EXIT_STUCK);
    _exit(WORKER_EXIT_STUCK);
}

static void abort_epoch(WorkerLoop *self, const char *reason)
{
    self->is_aborted = true;
    worker_step_abort(self->step, reason);
    if (!uv_is_active((uv_handle_t *)&self->watchdog)) {
        uv_timer_start(&self->watchdog, on_watchdog, WATCHDOG_MS, 0);
    }
}

/* ---------------------------------------------------------------- who this is */

static Status make_incarnation(char *text, size_t size)
{
    uint64_t random[2];
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random) {
        return fail(STATUS_IO, "the system gives no random numbers");
    }
    snprintf(text, size, "%016" PRIx64 "%016" PRIx64, random[0], random[1]);
    return STATUS_OK;
}

static Status append_label(Viaduct__V1__Worker *worker, const char *label)
{
    const char *equals = strchr(label, '=');
    if (!equals || equals == label) {
        return fail(STATUS_INVALID, "--label %s: expected KEY=VALUE", label);
    }
    const ProtobufCFieldDescriptor *field =
        protobuf_c_message_descriptor_get_field_by_name(worker->base.descriptor, "labels");
    ProtobufCMessage *entry = NULL;
    TRY(message_create(field->descriptor, &entry));
    Viaduct__V1__Worker__LabelsEntry *pair = (Viaduct__V1__Worker__LabelsEntry *)entry;
    char key[64];
    snprintf(key, sizeof key, "%.*s", (int)(equals - label), label);
    Status status = message_set_text(&pair->key, key);
    if (status == STATUS_OK) {
        status = message_set_text(&pair->value, equals + 1);
    }
    if (status == STATUS_OK) {
        status = message_append(&worker->base, field, &entry);
    }
    if (status != STATUS_OK) {
        protobuf_c_message_free_unpacked(entry, NULL);
    }
    return status;
}

static Status fill_record(const WorkerLoop *self, Viaduct__V1__Worker *worker)
{
    const WorkerOptions *options = self->options;
    TRY(message_set_text(&worker->name, options->name));
    TRY(message_set_text(&worker->incarnation, self->incarnation));
    TRY(message_set_text(&worker->role, options->role));
    TRY(message_set_text(&worker->data_address, options->data_address));
    TRY(message_set_text(&worker->software_version, VIADUCT_VERSION));
    worker->protocol_version = PROTOCOL_VERSION;
    for (int i = 0; i < options->labels.count; i++) {
        TRY(append_label(worker, options->labels.items[i]));
    }
    return STATUS_OK;
}

static Status make_record(const WorkerLoop *self, Viaduct__V1__Worker **worker_out)
{
    ProtobufCMessage *message = NULL;
    TRY(message_create(&viaduct__v1__worker__descriptor, &message));
    Status status = fill_record(self, (Viaduct__V1__Worker *)message);
    if (status != STATUS_OK) {
        protobuf_c_message_free_unpacked(message, NULL);
        return status_trace(status, __FILE__, __LINE__);
    }
    *worker_out = (Viaduct__V1__Worker *)message;
    return STATUS_OK;
}

static Status call(WorkerLoop *self, const char *method, const ProtobufCMessage *request,
                   int64_t timeout_ms, RpcResponse response)
{
    return rpc_client_call(self->client, WORKERS, method, request, timeout_ms, response, self,
                           NULL);
}

/* ---------------------------------------------------------------- registration */

static void on_retry(uv_timer_t *timer)
{
    WorkerLoop *self = timer->data;
    if (self->is_stopping) {
        return;
    }
    if (!self->lease_id[0]) {
        register_worker(self);
    } else if (!self->stream) {
        open_stream(self);
    }
}

static void retry_later(WorkerLoop *self)
{
    if (self->is_stopping || uv_is_active((uv_handle_t *)&self->retry_timer)) {
        return;
    }
    uv_timer_start(&self->retry_timer, on_retry, (uint64_t)self->retry_ms, 0);
    self->retry_ms = self->retry_ms * 2 < RETRY_MAX_MS ? self->retry_ms * 2 : RETRY_MAX_MS;
}

static void lose_lease(WorkerLoop *self, const char *why)
{
    if (self->lease_id[0]) {
        log_warn("the lease is over: %s; registering again", why);
        self->lease_id[0] = '\0';
    }
    uv_timer_stop(&self->heartbeat_timer);
    if (self->stream) {
        rpc_request_cancel(self->stream);
    }
    retry_later(self);
}

/* Refused for good: trying again cannot help. */
static bool is_final(const RpcError *error)
{
    return error->code == RPC_CODE_ABORTED || error->code == RPC_CODE_INVALID_ARGUMENT ||
           error->code == RPC_CODE_FAILED_PRECONDITION ||
           error->code == RPC_CODE_PERMISSION_DENIED || error->code == RPC_CODE_UNAUTHENTICATED;
}

static void refuse_for_good(WorkerLoop *self, const RpcError *error)
{
    begin_stop(self, fail(STATUS_DENIED, "the coordinator refused this worker: %s (%s)",
                          error->message, error->reason));
}

static void on_heartbeat_done(void *context, const ProtobufCMessage *message, const RpcError *error)
{
    WorkerLoop *self = context;
    self->heartbeat_busy = false;
    if (self->is_stopping) {
        return;
    }
    if (error->code == RPC_CODE_OK) {
        const Viaduct__V1__HeartbeatResponse *response =
            (const Viaduct__V1__HeartbeatResponse *)message;
        self->missed = 0;
        if (response->directive == VIADUCT__V1__HEARTBEAT_RESPONSE__DIRECTIVE__ABORT_EPOCH &&
            self->step && self->assignment->epoch == response->epoch) {
            abort_epoch(self, "the coordinator ended the epoch");
        } else if (response->directive == VIADUCT__V1__HEARTBEAT_RESPONSE__DIRECTIVE__REREGISTER) {
            lose_lease(self, "told to register again");
        } else if (response->directive == VIADUCT__V1__HEARTBEAT_RESPONSE__DIRECTIVE__EXIT) {
            begin_stop(self, STATUS_OK);
        }
    } else if (error->code == RPC_CODE_NOT_FOUND) {
        lose_lease(self, error->message);
    } else if (is_final(error)) {
        refuse_for_good(self, error);
    } else if (++self->missed >= MISSED_MAX) {
        /* The name may lead to another address by now. */
        self->missed = 0;
        lose_lease(self, "three heartbeats failed");
        rpc_client_destroy(self->client);
        self->client = NULL;
        if (rpc_client_create(self->rpc, self->options->coordinator, &self->client) != STATUS_OK) {
            begin_stop(self, STATUS_INTERNAL);
        }
    }
}

static void send_heartbeat(uv_timer_t *timer)
{
    WorkerLoop *self = timer->data;
    if (self->heartbeat_busy || !self->lease_id[0] || self->is_stopping) {
        return;
    }
    Viaduct__V1__HeartbeatRequest request = VIADUCT__V1__HEARTBEAT_REQUEST__INIT;
    WorkerProgress progress = {0};
    if (self->step) {
        worker_step_progress(self->step, &progress);
        request.epoch = self->assignment->epoch;
    }
    request.lease_id = self->lease_id;
    request.step = progress.step;
    request.progress_counter = progress.counter;
    request.operation = progress.operation;
    Status status = make_record(self, &request.worker);
    if (status == STATUS_OK) {
        status = call(self, "Heartbeat", &request.base, HEARTBEAT_CALL_MS, on_heartbeat_done);
        viaduct__v1__worker__free_unpacked(request.worker, NULL);
    }
    if (status == STATUS_OK) {
        self->heartbeat_busy = true;
    } else {
        log_warn("no heartbeat sent: %s", status_message());
    }
}

static void on_registered(void *context, const ProtobufCMessage *message, const RpcError *error)
{
    WorkerLoop *self = context;
    self->register_busy = false;
    if (self->is_stopping) {
        return;
    }
    if (error->code != RPC_CODE_OK) {
        if (is_final(error)) {
            refuse_for_good(self, error);
            return;
        }
        log_at(self->retry_ms > (int64_t)RETRY_FIRST_MS * 8 ? LOG_LEVEL_WARN : LOG_LEVEL_DEBUG,
               "not registered yet with %s: %s: %s", self->options->coordinator,
               rpc_code_name(error->code), error->message);
        retry_later(self);
        return;
    }
    const Viaduct__V1__RegisterWorkerResponse *response =
        (const Viaduct__V1__RegisterWorkerResponse *)message;
    snprintf(self->lease_id, sizeof self->lease_id, "%s", response->lease_id);
    int64_t heartbeat_ms = message_duration_ms(response->heartbeat_interval);
    heartbeat_ms = heartbeat_ms < 10 ? 10 : heartbeat_ms > 60000 ? 60000 : heartbeat_ms;
    log_info("registered with %s as %s", self->options->coordinator, self->options->name);
    self->missed = 0;
    self->retry_ms = RETRY_FIRST_MS;
    uv_timer_start(&self->heartbeat_timer, send_heartbeat, (uint64_t)heartbeat_ms,
                   (uint64_t)heartbeat_ms);
    if (!self->stream) {
        open_stream(self);
    }
}

static void register_worker(WorkerLoop *self)
{
    if (self->register_busy) {
        return;
    }
    Viaduct__V1__RegisterWorkerRequest request = VIADUCT__V1__REGISTER_WORKER_REQUEST__INIT;
    Status status = make_record(self, &request.worker);
    if (status == STATUS_OK) {
        status = call(self, "RegisterWorker", &request.base, CALL_MS, on_registered);
        viaduct__v1__worker__free_unpacked(request.worker, NULL);
    }
    if (status == STATUS_OK) {
        self->register_busy = true;
    } else if (status == STATUS_INVALID) {
        begin_stop(self, status);
    } else {
        log_warn("cannot register: %s", status_message());
        retry_later(self);
    }
}

/* ---------------------------------------------------------------- assignments */

static void on_acknowledged(void *context, const ProtobufCMessage *message, const RpcError *error)
{
    WorkerLoop *self = context;
    (void)message;
    bool is_settled = error->code == RPC_CODE_OK || error->code == RPC_CODE_ABORTED ||
                      error->code == RPC_CODE_NOT_FOUND || error->code == RPC_CODE_CANCELLED;
    if (!is_settled && self->stream && !self->is_stopping) {
        /* A new stream brings the assignment again, and with it another ack. */
        rpc_request_cancel(self->stream);
    }
}

static void acknowledge(WorkerLoop *self, int64_t epoch,
                        Viaduct__V1__WatchAssignmentResponse__Phase phase, const char *error)
{
    if (!self->lease_id[0] || !self->client) {
        return; /* what is not acknowledged comes again with the next stream */
    }
    Viaduct__V1__AckAssignmentRequest request = VIADUCT__V1__ACK_ASSIGNMENT_REQUEST__INIT;
    request.lease_id = self->lease_id;
    request.epoch = epoch;
    request.phase = phase;
    request.ok = error == NULL;
    request.error = (char *)(error ? error : "");
    if (call(self, "AckAssignment", &request.base, CALL_MS, on_acknowledged) != STATUS_OK) {
        log_warn("no ack sent: %s", status_message());
    }
}

static void wake(void *context)
{
    WorkerLoop *self = context;
    uv_async_send(&self->wake);
}

/* Takes the assignment. */
static void start_epoch(WorkerLoop *self, Viaduct__V1__WatchAssignmentResponse *assignment)
{
    const WorkerStepOptions options = {
        .engine = self->options->engine,
        .endpoint = self->options->endpoint,
        .device = self->options->device,
        .modules = self->options->modules,
        .num_modules = self->options->num_modules,
        .assignment = assignment,
        .events = self->events,
        .wake = wake,
        .wake_context = self,
    };
    Status status = worker_step_start(&options, &self->step);
    if (status != STATUS_OK) {
        log_error("epoch %" PRId64 " of %s: %s", assignment->epoch, assignment->job,
                  status_message());
        acknowledge(self, assignment->epoch, VIADUCT__V1__WATCH_ASSIGNMENT_RESPONSE__PHASE__PREPARE,
                    status_message());
        viaduct__v1__watch_assignment_response__free_unpacked(assignment, NULL);
        return;
    }
    log_info("epoch %" PRId64 " of %s: rank %d of %zu", assignment->epoch, assignment->job,
             assignment->rank, assignment->n_members);
    self->assignment = assignment;
    self->is_linked = false;
    self->is_aborted = false;
    self->release_asked = false;
}

static void drop_next(WorkerLoop *self)
{
    viaduct__v1__watch_assignment_response__free_unpacked(self->next, NULL);
    self->next = NULL;
}

static void take_prepare(WorkerLoop *self, const Viaduct__V1__WatchAssignmentResponse *message)
{
    if (self->step && message->epoch == self->assignment->epoch) {
        if (self->is_linked) {
            acknowledge(self, message->epoch, message->phase, NULL);
        }
        return;
    }
    if (self->step && message->epoch < self->assignment->epoch) {
        return;
    }
    ProtobufCMessage *copy = NULL;
    if (message_copy(&message->base, &copy) != STATUS_OK) {
        acknowledge(self, message->epoch, message->phase, status_message());
        return;
    }
    if (!self->step) {
        start_epoch(self, (Viaduct__V1__WatchAssignmentResponse *)copy);
        return;
    }
    drop_next(self);
    self->next = (Viaduct__V1__WatchAssignmentResponse *)copy;
    abort_epoch(self, "another epoch begins");
}

static void take_abort(WorkerLoop *self, const Viaduct__V1__WatchAssignmentResponse *message)
{
    if (self->next && self->next->epoch == message->epoch) {
        drop_next(self);
    }
    if (self->step && self->assignment->epoch == message->epoch) {
        log_info("epoch %" PRId64 " is over: %s", message->epoch, message->reason);
        self->release_asked = true;
        abort_epoch(self, message->reason);
        return;
    }
    acknowledge(self, message->epoch, message->phase, NULL);
}

static void on_assignment(void *context, const ProtobufCMessage *base)
{
    WorkerLoop *self = context;
    const Viaduct__V1__WatchAssignmentResponse *message =
        (const Viaduct__V1__WatchAssignmentResponse *)base;
    if (self->is_stopping) {
        return;
    }
    switch (message->phase) {
    case VIADUCT__V1__WATCH_ASSIGNMENT_RESPONSE__PHASE__PREPARE:
        take_prepare(self, message);
        break;
    case VIADUCT__V1__WATCH_ASSIGNMENT_RESPONSE__PHASE__COMMIT:
        if (self->step && self->assignment->epoch == message->epoch) {
            worker_step_commit(self->step);
        }
        break;
    case VIADUCT__V1__WATCH_ASSIGNMENT_RESPONSE__PHASE__ROLLBACK:
    case VIADUCT__V1__WATCH_ASSIGNMENT_RESPONSE__PHASE__ABORT:
        take_abort(self, message);
        break;
    default:
        break;
    }
}

static void on_stream_ended(void *context, const RpcError *error)
{
    WorkerLoop *self = context;
    self->stream = NULL;
    if (self->is_stopping) {
        return;
    }
    if (error->code == RPC_CODE_NOT_FOUND) {
        lose_lease(self, error->message);
    } else {
        log_debug("the assignment stream ended: %s", error->message);
        retry_later(self);
    }
}

static void open_stream(WorkerLoop *self)
{
    Viaduct__V1__WatchAssignmentRequest request = VIADUCT__V1__WATCH_ASSIGNMENT_REQUEST__INIT;
    request.lease_id = self->lease_id;
    if (rpc_client_stream(self->client, WORKERS, "WatchAssignment", &request.base, on_assignment,
                          on_stream_ended, self, &self->stream) != STATUS_OK) {
        log_warn("no assignment stream: %s", status_message());
        self->stream = NULL;
        retry_later(self);
    }
}

/* ---------------------------------------------------------------- reports */

static bool is_leader(const WorkerLoop *self)
{
    CHECK(self->assignment);
    JobLayout layout = job_layout_make(self->assignment->spec);
    return self->assignment->rank == layout.modules[layout.num_modules - 1].first_rank;
}

static bool has_news(const WorkerLoop *self)
{
    return self->num_records > 0 || self->evaluation || self->checkpoint || self->is_finished ||
           self->failure;
}

static void on_reported(void *context, const ProtobufCMessage *message, const RpcError *error)
{
    WorkerLoop *self = context;
    (void)message;
    self->report_busy = false;
    if (error->code == RPC_CODE_NOT_FOUND && !self->is_stopping) {
        lose_lease(self, error->message);
    }
    if (error->code != RPC_CODE_OK) {
        return; /* the next tick sends it again */
    }
    if (self->num_sent > 0) {
        memmove(self->records, self->records + self->num_sent,
                (self->num_records - self->num_sent) * sizeof *self->records);
    }
    self->num_records -= self->num_sent;
    self->num_sent = 0;
    if (self->sent_evaluation) {
        viaduct__v1__evaluation_report__free_unpacked(self->evaluation, NULL);
        self->evaluation = NULL;
    }
    if (self->sent_checkpoint) {
        memory_free(self->checkpoint);
        self->checkpoint = NULL;
    }
    if (self->sent_final) {
        self->is_finished = false;
        memory_free(self->failure);
        self->failure = NULL;
    }
}

static void fill_metrics(const TrainerStep *step, Viaduct__V1__StepMetrics *metrics)
{
    viaduct__v1__step_metrics__init(metrics);
    metrics->step_seconds = step->step_seconds;
    metrics->tokens = step->tokens;
    metrics->samples = step->samples;
    metrics->loss = step->loss;
    metrics->grad_norm = step->grad_norm;
    metrics->learning_rate = step->learning_rate;
    metrics->encoder_wait_seconds = step->encoder_wait_seconds;
    metrics->llm_wait_seconds = step->llm_wait_seconds;
    metrics->boundary_bytes = step->boundary_bytes;
    metrics->boundary_bytes_min = step->boundary_bytes_min;
}

static void send_records(WorkerLoop *self, Viaduct__V1__ReportStepsRequest *request)
{
    Viaduct__V1__StepRecord *records = self->batch.records;
    Viaduct__V1__StepMetrics *metrics = self->batch.metrics;
    size_t count = self->num_records < BATCH_MAX ? self->num_records : BATCH_MAX;
    for (size_t i = 0; i < count; i++) {
        TrainerStep *step = &self->records[i];
        viaduct__v1__step_record__init(&records[i]);
        fill_metrics(step, &metrics[i]);
        records[i].epoch = self->assignment->epoch;
        records[i].step = step->step;
        records[i].committed = step->committed;
        records[i].discard_reason =
            step->committed ? (char *)protobuf_c_empty_string : step->module;
        records[i].metrics = &metrics[i];
        self->batch.pointers[i] = &records[i];
    }
    request->records = self->batch.pointers;
    request->n_records = count;
    Status status = call(self, "ReportSteps", &request->base, CALL_MS, on_reported);
    if (status != STATUS_OK) {
        log_warn("no report sent: %s", status_message());
        return;
    }
    self->report_busy = true;
    self->num_sent = count;
}

static void send_report(uv_timer_t *timer)
{
    WorkerLoop *self = timer->data;
    bool can_send = !self->report_busy && self->lease_id[0] && self->step && !self->is_stopping;
    if (!can_send || !has_news(self)) {
        return;
    }
    Viaduct__V1__ReportStepsRequest request = VIADUCT__V1__REPORT_STEPS_REQUEST__INIT;
    request.lease_id = self->lease_id;
    request.epoch = self->assignment->epoch;
    self->sent_final = self->num_records <= BATCH_MAX && (self->is_finished || self->failure);
    self->sent_evaluation = self->evaluation != NULL;
    self->sent_checkpoint = self->checkpoint != NULL;
    request.evaluation = self->evaluation;
    if (self->checkpoint) {
        request.checkpoint = self->checkpoint;
    }
    if (self->sent_final) {
        request.finished = self->is_finished;
    }
    if (self->sent_final && self->failure) {
        request.failure = self->failure;
        request.failure_code = (char *)worker_step_code(self->failure_code);
        request.failure_step = self->failure_at.step;
        request.failure_operation = self->failure_at.operation;
    }
    send_records(self, &request);
}

static void forget_reports(WorkerLoop *self)
{
    self->num_records = 0;
    self->num_sent = 0;
    self->is_finished = false;
    viaduct__v1__evaluation_report__free_unpacked(self->evaluation, NULL);
    self->evaluation = NULL;
    memory_free(self->checkpoint);
    self->checkpoint = NULL;
    memory_free(self->failure);
    self->failure = NULL;
}

static void keep_record(WorkerLoop *self, const TrainerStep *step)
{
    if (!is_leader(self)) {
        return;
    }
    log_debug("step %" PRId64 ": loss %.4f", step->step, step->loss);
    void *records = self->records;
    Status status = memory_grow(&records, &self->records_capacity, self->num_records + 1,
                                sizeof *self->records);
    self->records = records;
    if (status == STATUS_OK && self->num_records < BACKLOG_MAX) {
        self->records[self->num_records++] = *step;
    }
}

/* ---------------------------------------------------------------- events of the step thread */

static void end_epoch(WorkerLoop *self)
{
    worker_step_join(self->step);
    self->step = NULL;
    uv_timer_stop(&self->watchdog);
    forget_reports(self);
    if (self->release_asked) {
        acknowledge(self, self->assignment->epoch,
                    VIADUCT__V1__WATCH_ASSIGNMENT_RESPONSE__PHASE__ABORT, NULL);
    }
    viaduct__v1__watch_assignment_response__free_unpacked(self->assignment, NULL);
    self->assignment = NULL;
    if (self->is_stopping) {
        drop_next(self);
        proceed_stop(self);
    } else if (self->next) {
        Viaduct__V1__WatchAssignmentResponse *next = self->next;
        self->next = NULL;
        start_epoch(self, next);
    }
}

static void take_failure(WorkerLoop *self, WorkerEvent *event)
{
    if (self->is_aborted) {
        return; /* whoever ended the epoch knows */
    }
    memory_free(self->failure);
    self->failure = event->text;
    event->text = NULL;
    self->failure_code = event->code;
    worker_step_progress(self->step, &self->failure_at);
    if (!self->failure && memory_copy_text("out of memory", &self->failure) != STATUS_OK) {
        log_error("no memory to report a failure");
    }
    send_report(&self->report_timer); /* at once: others wait */
}

static void take_event(WorkerLoop *self, WorkerEvent *event)
{
    CHECK(self->step && self->assignment);
    Viaduct__V1__WatchAssignmentResponse__Phase prepare =
        VIADUCT__V1__WATCH_ASSIGNMENT_RESPONSE__PHASE__PREPARE;
    switch (event->kind) {
    case WORKER_EVENT_LINKED:
        self->is_linked = true;
        acknowledge(self, self->assignment->epoch, prepare, NULL);
        break;
    case WORKER_EVENT_LINK_FAILED:
        acknowledge(self, self->assignment->epoch, prepare, event->text ? event->text : "");
        break;
    case WORKER_EVENT_STEP:
        keep_record(self, &event->step);
        break;
    case WORKER_EVENT_EVALUATION:
        viaduct__v1__evaluation_report__free_unpacked(self->evaluation, NULL);
        self->evaluation = event->evaluation;
        self->sent_evaluation = false; /* a report under way carries an older one */
        event->evaluation = NULL;
        break;
    case WORKER_EVENT_CHECKPOINT:
        memory_free(self->checkpoint);
        self->checkpoint = event->text;
        self->sent_checkpoint = false;
        event->text = NULL;
        break;
    case WORKER_EVENT_FINISHED:
        log_info("all steps are done");
        self->is_finished = true;
        self->sent_final = false;
        break;
    case WORKER_EVENT_FAILED:
        self->sent_final = false;
        take_failure(self, event);
        break;
    case WORKER_EVENT_ENDED:
        end_epoch(self);
        break;
    }
    worker_event_free(event);
}

/* Wake-ups coalesce: all that is there is taken. */
static void on_wake(uv_async_t *handle)
{
    WorkerLoop *self = handle->data;
    WorkerEvent event;
    while (queue_pop(self->events, &event, 0) == STATUS_OK) {
        take_event(self, &event);
    }
}

/* ---------------------------------------------------------------- the end */

static void close_all(WorkerLoop *self)
{
    if (self->is_closed) {
        return;
    }
    self->is_closed = true;
    uv_timer_t *timers[TIMER_COUNT] = {&self->heartbeat_timer, &self->report_timer,
                                       &self->retry_timer, &self->watchdog};
    for (int i = 0; i < TIMER_COUNT; i++) {
        uv_close((uv_handle_t *)timers[i], NULL);
    }
    for (int i = 0; i < 2; i++) {
        uv_close((uv_handle_t *)&self->signals[i], NULL);
    }
    uv_close((uv_handle_t *)&self->wake, NULL);
    uv_stop(&self->loop);
}

static void on_deregistered(void *context, const ProtobufCMessage *message, const RpcError *error)
{
    (void)message;
    if (error->code != RPC_CODE_OK) {
        log_debug("not deregistered: %s", error->message);
    }
    close_all(context);
}

/* No epoch runs any more: says good-bye. */
static void proceed_stop(WorkerLoop *self)
{
    if (self->step || self->is_deregistering) {
        return;
    }
    self->is_deregistering = true;
    Viaduct__V1__DeregisterWorkerRequest request = VIADUCT__V1__DEREGISTER_WORKER_REQUEST__INIT;
    request.lease_id = self->lease_id;
    request.clean = true;
    if (!self->lease_id[0] || !self->client ||
        call(self, "DeregisterWorker", &request.base, DEREGISTER_MS, on_deregistered) !=
            STATUS_OK) {
        close_all(self);
    }
}

static void begin_stop(WorkerLoop *self, Status result)
{
    if (self->is_stopping) {
        return;
    }
    self->is_stopping = true;
    self->result = result;
    if (self->step) {
        abort_epoch(self, "this worker was told to stop");
    }
    proceed_stop(self);
}

static void on_signal(uv_signal_t *handle, int number)
{
    log_info("signal %d: stopping", number);
    begin_stop(handle->data, STATUS_OK);
}

/* ---------------------------------------------------------------- run */

static void init_handles(WorkerLoop *self)
{
    CHECK(uv_loop_init(&self->loop) == 0);
    CHECK(uv_async_init(&self->loop, &self->wake, on_wake) == 0);
    self->wake.data = self;
    uv_timer_t *timers[TIMER_COUNT] = {&self->heartbeat_timer, &self->report_timer,
                                       &self->retry_timer, &self->watchdog};
    for (int i = 0; i < TIMER_COUNT; i++) {
        CHECK(uv_timer_init(&self->loop, timers[i]) == 0);
        timers[i]->data = self;
    }
    static const int numbers[] = {SIGTERM, SIGINT};
    for (int i = 0; i < 2; i++) {
        CHECK(uv_signal_init(&self->loop, &self->signals[i]) == 0);
        CHECK(uv_signal_start(&self->signals[i], on_signal, numbers[i]) == 0);
        self->signals[i].data = self;
    }
    CHECK(uv_timer_start(&self->report_timer, send_report, REPORT_MS, REPORT_MS) == 0);
}

static Status run_loop(WorkerLoop *self)
{
    TRY(make_incarnation(self->incarnation, sizeof self->incarnation));
    TRY(queue_create(EVENTS_MAX, sizeof(WorkerEvent), &self->events));
    TRY(rpc_create(&self->loop, &self->rpc));
    TRY(rpc_client_create(self->rpc, self->options->coordinator, &self->client));
    register_worker(self);
    uv_run(&self->loop, UV_RUN_DEFAULT);
    return self->result;
}

Status worker_loop_run(const WorkerOptions *options)
{
    WorkerLoop *self = NULL;
    TRY(MEMORY_NEW(&self, 1));
    self->options = options;
    self->retry_ms = RETRY_FIRST_MS;
    init_handles(self);
    Status status = run_loop(self);
    self->is_stopping = true;
    close_all(self);
    if (self->client) {
        rpc_client_destroy(self->client);
    }
    if (self->rpc) {
        rpc_destroy(self->rpc);
    }
    uv_run(&self->loop, UV_RUN_DEFAULT);
    CHECK(uv_loop_close(&self->loop) == 0);
    queue_destroy(self->events);
    forget_reports(self);
    memory_free(self->records);
    memory_free(self);
    return status;
}
