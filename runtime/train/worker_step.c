#include "train/worker_step.h"

#include "base/clock.h"
#include "base/log.h"
#include "base/memory.h"
#include "job/message.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum {
    MEMBERS_MAX = 65536,
    CONNECT_MS = 20000,       /* for all links of a world */
    POST_MS = 10000,          /* the loop thread empties the queue far sooner */
    COMMIT_MS = 24 * 3600000, /* the coordinator ends the wait long before */
};

struct WorkerStep {
    WorkerStepOptions options;
    const char **addresses; /* [members]; point into the assignment */
    pthread_t thread;
    pthread_mutex_t lock; /* guards all below up to progress_lock */
    pthread_cond_t changed;
    bool is_committed;
    bool is_aborted;
    char reason[256];
    Trainer *trainer; /* while it may be stopped */
    Comm *world;      /* while it may be aborted */
    pthread_mutex_t progress_lock;
    WorkerProgress progress;
};

const char *worker_step_code(Status status)
{
    static const char *const codes[STATUS_COUNT] = {
        [STATUS_OK] = "OK",
        [STATUS_INVALID] = "INVALID",
        [STATUS_NOT_FOUND] = "NOT_FOUND",
        [STATUS_CONFLICT] = "CONFLICT",
        [STATUS_UNSUPPORTED] = "UNSUPPORTED",
        [STATUS_CORRUPT] = "CORRUPT",
        [STATUS_EXHAUSTED] = "EXHAUSTED",
        [STATUS_DENIED] = "DENIED",
        [STATUS_NO_MEMORY] = "NO_MEMORY",
        [STATUS_IO] = "IO",
        [STATUS_INTERNAL] = "INTERNAL",
        [STATUS_UNAVAILABLE] = "UNAVAILABLE",
        [STATUS_PEER_LOST] = "PEER_LOST",
        [STATUS_TIMEOUT] = "TIMEOUT",
        [STATUS_ABORTED] = "ABORTED",
    };
    return (unsigned)status < STATUS_COUNT ? codes[status] : "INTERNAL";
}

void worker_event_free(WorkerEvent *event)
{
    memory_free(event->text);
    viaduct__v1__evaluation_report__free_unpacked(event->evaluation, NULL);
    event->text = NULL;
    event->evaluation = NULL;
}

/* ---------------------------------------------------------------- to the loop thread */

static void post(WorkerStep *step, WorkerEvent *event)
{
    if (queue_push(step->options.events, event, clock_deadline_in_ms(POST_MS)) != STATUS_OK) {
        log_error("an event of the step thread is lost: %s", status_message());
        worker_event_free(event);
    }
    step->options.wake(step->options.wake_context);
}

static void post_text(WorkerStep *step, WorkerEventKind kind, Status code, const char *text)
{
    WorkerEvent event = {.kind = kind, .code = code};
    if (memory_copy_text(text, &event.text) != STATUS_OK) {
        log_error("no memory to report: %s", text);
    }
    post(step, &event);
}

static void post_failure(WorkerStep *step, WorkerEventKind kind, Status code)
{
    char text[1024];
    snprintf(text, sizeof text, "%s: %s", status_name(code), status_message());
    log_warn("%s [%s]", text, status_trail());
    WorkerEvent event = {.kind = kind, .code = code};
    event.step.step = step->progress.step; /* the step thread wrote it itself */
    if (memory_copy_text(text, &event.text) != STATUS_OK) {
        log_error("no memory to report: %s", text);
    }
    post(step, &event);
}

static void on_progress(void *context, const char *operation, int64_t number, int microbatch)
{
    WorkerStep *step = context;
    pthread_mutex_lock(&step->progress_lock);
    step->progress.step = number;
    step->progress.counter++;
    if (microbatch >= 0) {
        snprintf(step->progress.operation, sizeof step->progress.operation,
                 "%.60s of microbatch %d", operation, microbatch);
    } else {
        snprintf(step->progress.operation, sizeof step->progress.operation, "%.90s", operation);
    }
    pthread_mutex_unlock(&step->progress_lock);
}

static void on_step(void *context, const TrainerStep *record)
{
    WorkerEvent event = {.kind = WORKER_EVENT_STEP, .step = *record};
    log_set_step(((WorkerStep *)context)->options.assignment->rank, record->step);
    post(context, &event);
}

static Status append_caption(Viaduct__V1__EvaluationReport *report, const TrainerCaption *from)
{
    const ProtobufCFieldDescriptor *field =
        protobuf_c_message_descriptor_get_field_by_name(report->base.descriptor, "captions");
    ProtobufCMessage *message = NULL;
    TRY(message_create(&viaduct__v1__caption__descriptor, &message));
    Viaduct__V1__Caption *caption = (Viaduct__V1__Caption *)message;
    Status status = message_set_text(&caption->sample, from->sample);
    if (status == STATUS_OK) {
        status = message_set_text(&caption->truth, from->truth);
    }
    if (status == STATUS_OK) {
        status = message_set_text(&caption->generated, from->generated);
    }
    if (status == STATUS_OK) {
        status = message_append(&report->base, field, &message);
    }
    if (status != STATUS_OK) {
        protobuf_c_message_free_unpacked(message, NULL);
    }
    return status;
}

static void on_evaluation(void *context, const TrainerEvaluation *evaluation)
{
    ProtobufCMessage *message = NULL;
    Status status = message_create(&viaduct__v1__evaluation_report__descriptor, &message);
    Viaduct__V1__EvaluationReport *report = (Viaduct__V1__EvaluationReport *)message;
    if (status == STATUS_OK) {
        report->step = evaluation->step;
        report->heldout_loss = evaluation->heldout_loss;
        report->heldout_loss_shuffled = evaluation->heldout_loss_shuffled;
        report->labels = evaluation->labels;
    }
    for (int i = 0; status == STATUS_OK && i < evaluation->num_captions; i++) {
        status = append_caption(report, &evaluation->captions[i]);
    }
    if (status != STATUS_OK) {
        log_error("the evaluation of step %lld is not reported: %s", (long long)evaluation->step,
                  status_message());
        viaduct__v1__evaluation_report__free_unpacked(report, NULL);
        return;
    }
    WorkerEvent event = {.kind = WORKER_EVENT_EVALUATION, .evaluation = report};
    post(context, &event);
}

static void on_checkpoint(void *context, int64_t number, const char *directory)
{
    log_info("checkpoint of step %lld in %s", (long long)number, directory);
    post_text(context, WORKER_EVENT_CHECKPOINT, STATUS_OK, directory);
}

/* ---------------------------------------------------------------- the step thread */

static Status open_links(WorkerStep *step)
{
    const Viaduct__V1__WatchAssignmentResponse *assignment = step->options.assignment;
    uint64_t key = 0;
    memcpy(&key, assignment->comm_id.data, sizeof key);
    const CommHostWorld world = {
        .addresses = step->addresses,
        .size = (int)assignment->n_members,
        .rank = assignment->rank,
        .key = key,
        .timeout_ms = message_duration_ms(assignment->spec->timeouts->transfer),
        .connect_timeout_ms = CONNECT_MS,
    };
    Comm *comm = NULL;
    TRY(step->options.engine->open_world(step->options.endpoint, &world, &comm));
    pthread_mutex_lock(&step->lock);
    step->world = comm;
    pthread_mutex_unlock(&step->lock);
    return STATUS_OK;
}

/* Until committed (true) or aborted (false). */
static bool wait_for_commit(WorkerStep *step)
{
    struct timespec until = clock_timespec(clock_deadline_in_ms(COMMIT_MS));
    pthread_mutex_lock(&step->lock);
    int waited = 0;
    while (!step->is_committed && !step->is_aborted && waited == 0) {
        waited = pthread_cond_timedwait(&step->changed, &step->lock, &until);
    }
    bool is_committed = step->is_committed && !step->is_aborted;
    pthread_mutex_unlock(&step->lock);
    return is_committed;
}

static void wait_for_release(WorkerStep *step)
{
    struct timespec until = clock_timespec(clock_deadline_in_ms(COMMIT_MS));
    pthread_mutex_lock(&step->lock);
    int waited = 0;
    while (!step->is_aborted && waited == 0) {
        waited = pthread_cond_timedwait(&step->changed, &step->lock, &until);
    }
    pthread_mutex_unlock(&step->lock);
}

static Status train(WorkerStep *step, Device *device, Trainer **trainer_out)
{
    const Viaduct__V1__WatchAssignmentResponse *assignment = step->options.assignment;
    const TrainerOptions options = {
        .spec = assignment->spec,
        .world = step->world,
        .device = device,
        .modules = step->options.modules,
        .num_modules = step->options.num_modules,
        .resume_from = assignment->resume_from[0] ? assignment->resume_from : NULL,
        .events = {step, on_progress, on_step, on_evaluation, on_checkpoint},
    };
    on_progress(step, "start", 0, -1);
    TRY(step->options.engine->create(&options, trainer_out));
    pthread_mutex_lock(&step->lock);
    step->trainer = *trainer_out;
    bool is_aborted = step->is_aborted;
    pthread_mutex_unlock(&step->lock);
    if (is_aborted) {
        return fail(STATUS_ABORTED, "%s", step->reason);
    }
    return step->options.engine->run(*trainer_out);
}

/* Another rank must not wait for one that cannot go on. */
static void give_up(WorkerStep *step, Status status)
{
    post_failure(step, WORKER_EVENT_FAILED, status);
    if (step->world) {
        comm_abort(step->world, status_message());
    }
}

static void run_epoch(WorkerStep *step)
{
    Device *device = NULL;
    Trainer *trainer = NULL;
    Status status = device_open(step->options.device, 0, &device);
    if (status == STATUS_OK) {
        status = train(step, device, &trainer);
    }
    if (status == STATUS_OK) {
        post_text(step, WORKER_EVENT_FINISHED, STATUS_OK, "");
    } else {
        give_up(step, status);
    }
    /* Links and weights stay until the job is over everywhere. */
    wait_for_release(step);
    pthread_mutex_lock(&step->lock);
    step->trainer = NULL;
    pthread_mutex_unlock(&step->lock);
    if (trainer) {
        step->options.engine->destroy(trainer);
    }
    device_close(device);
}

static void *step_main(void *context)
{
    WorkerStep *step = context;
    log_set_step(step->options.assignment->rank, -1);
    Status status = open_links(step);
    if (status == STATUS_OK) {
        WorkerEvent linked = {.kind = WORKER_EVENT_LINKED};
        post(step, &linked);
        if (wait_for_commit(step)) {
            run_epoch(step);
        }
    } else {
        post_failure(step, WORKER_EVENT_LINK_FAILED, status);
        wait_for_release(step);
    }
    pthread_mutex_lock(&step->lock);
    Comm *world = step->world;
    step->world = NULL;
    pthread_mutex_unlock(&step->lock);
    comm_destroy(world);
    WorkerEvent ended = {.kind = WORKER_EVENT_ENDED};
    post(step, &ended);
    return NULL;
}

/* ---------------------------------------------------------------- the loop thread */

static Status check_assignment(const Viaduct__V1__WatchAssignmentResponse *assignment)
{
    bool is_good = assignment->spec && assignment->n_members >= 1 &&
                   assignment->n_members <= MEMBERS_MAX && assignment->rank >= 0 &&
                   (size_t)assignment->rank < assignment->n_members &&
                   assignment->comm_id.len == sizeof(uint64_t);
    if (!is_good) {
        return fail(STATUS_INVALID, "the assignment of epoch %lld lacks members, rank, key or spec",
                    (long long)assignment->epoch);
    }
    return STATUS_OK;
}

Status worker_step_start(const WorkerStepOptions *options, WorkerStep **step_out)
{
    TRY(check_assignment(options->assignment));
    WorkerStep *step = NULL;
    TRY(MEMORY_NEW(&step, 1));
    step->options = *options;
    Status status = MEMORY_NEW(&step->addresses, options->assignment->n_members);
    if (status != STATUS_OK) {
        memory_free(step);
        return status_trace(status, __FILE__, __LINE__);
    }
    for (size_t i = 0; i < options->assignment->n_members; i++) {
        step->addresses[i] = options->assignment->members[i]->data_address;
    }
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&step->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&step->lock, NULL);
    pthread_mutex_init(&step->progress_lock, NULL);
    if (pthread_create(&step->thread, NULL, step_main, step) != 0) {
        memory_free((void *)step->addresses);
        memory_free(step);
        return fail(STATUS_NO_MEMORY, "cannot start the step thread");
    }
    *step_out = step;
    return STATUS_OK;
}

void worker_step_commit(WorkerStep *step)
{
    pthread_mutex_lock(&step->lock);
    step->is_committed = true;
    pthread_cond_broadcast(&step->changed);
    pthread_mutex_unlock(&step->lock);
}

void worker_step_abort(WorkerStep *step, const char *reason)
{
    pthread_mutex_lock(&step->lock);
    if (!step->is_aborted) {
        step->is_aborted = true;
        snprintf(step->reason, sizeof step->reason, "%s", reason);
        pthread_cond_broadcast(&step->changed);
        if (step->trainer) {
            step->options.engine->stop(step->trainer, reason);
        } else if (step->world) {
            comm_abort(step->world, reason);
        }
    }
    pthread_mutex_unlock(&step->lock);
}

void worker_step_progress(WorkerStep *step, WorkerProgress *progress_out)
{
    pthread_mutex_lock(&step->progress_lock);
    *progress_out = step->progress;
    pthread_mutex_unlock(&step->progress_lock);
}

void worker_step_join(WorkerStep *step)
{
    pthread_join(step->thread, NULL);
    pthread_cond_destroy(&step->changed);
    pthread_mutex_destroy(&step->lock);
    pthread_mutex_destroy(&step->progress_lock);
    memory_free((void *)step->addresses);
    memory_free(step);
}
