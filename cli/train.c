#include "base/clock.h"
#include "base/config.h"
#include "base/file.h"
#include "base/memory.h"
#include "checkpoint/checkpoint.h"
#include "cli/job_input.h"
#include "cli/launch.h"
#include "cli/layout_text.h"
#include "cli/progress.h"
#include "cli/result.h"
#include "cli/session.h"
#include "job/job_layout.h"
#include "job/message.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define STATE(name) VIADUCT__V1__JOB_STATUS__STATE__##name

enum {
    PATH_BYTES = 512,
    COORDINATOR_START_MS = 10000,
    WORKER_STOP_MS = 2500,
    COORDINATOR_STOP_MS = 4000,
    KILL_MS = 5000,
    VERDICT_MS = 20000, /* lease and settling, after a worker of this machine has ended */
    LOG_TAIL_LINES = 6,
    WORKERS_MAX = 4096
};

typedef struct Train {
    /* what was asked */
    const char *file;
    const char *output_flag;
    const char *id_flag;
    ConfigList settings;
    bool resume;
    bool verbose;
    /* what follows from it */
    JobSpec *spec;
    char id[64];
    char output[PATH_BYTES];
    char logs[PATH_BYTES];
    char resume_from[PATH_BYTES];
    char programs[3][PATH_BYTES]; /* coordinator, encoder worker, llm worker */
    char address[128];            /* of the coordinator */
    int num_workers;
    /* the run */
    Session session;
    Launch launch;
    Progress progress;
    uv_signal_t signals[3];
    uv_timer_t verdict_timer;
    bool is_started;  /* signals and timer stand on the loop */
    bool is_created;  /* the coordinator has the job */
    bool is_over;     /* `code` is the result */
    bool is_stopping; /* the children are told to end: their ends are no news */
    int interrupts;
    Viaduct__V1__Job *job; /* as last seen; NULL: not yet */
    ExitCode code;
} Train;

/* ---------------------------------------------------------------- preparation */

/* --output, or the parent of the checkpoints' directory, or here. */
static Status choose_output(Train *train)
{
    const char *directory = train->spec->checkpoint->directory;
    size_t length = strlen(directory);
    while (length > 1 && directory[length - 1] == '/') {
        length--;
    }
    while (length > 0 && directory[length - 1] != '/') {
        length--;
    }
    if (train->output_flag[0]) {
        snprintf(train->output, sizeof train->output, "%s", train->output_flag);
    } else if (length > 1) {
        snprintf(train->output, sizeof train->output, "%.*s", (int)length - 1, directory);
    } else {
        snprintf(train->output, sizeof train->output, "%s", length == 1 ? "/" : ".");
    }
    int used = snprintf(train->logs, sizeof train->logs, "%s/logs", train->output);
    if (used < 0 || (size_t)used + 80 > sizeof train->logs) {
        return fail(STATUS_INVALID, "%s: the path is too long", train->output);
    }
    return file_make_folder(train->logs);
}

static Status find_checkpoint(Train *train)
{
    if (!train->resume) {
        return STATUS_OK;
    }
    const char *directory = train->spec->checkpoint->directory;
    if (!directory[0]) {
        return fail(STATUS_INVALID, "--resume: %s names no checkpoint.directory", train->file);
    }
    Status status = checkpoint_newest(directory, train->resume_from, sizeof train->resume_from);
    if (status == STATUS_NOT_FOUND) {
        return fail(STATUS_NOT_FOUND, "--resume: there is no complete checkpoint in %s", directory);
    }
    if (status == STATUS_OK) {
        printf("resuming from %s\n", train->resume_from);
    }
    return status;
}

static Status prepare(Train *train)
{
    static const char *const names[] = {"viaduct-coordinator", "viaduct-encoder-worker",
                                        "viaduct-llm-worker"};
    for (int i = 0; i < 3; i++) {
        TRY(launch_find_program(names[i], train->programs[i], sizeof train->programs[i]));
    }
    train->num_workers = job_layout_make(train->spec).num_ranks;
    if (train->num_workers > WORKERS_MAX) {
        return fail(STATUS_INVALID, "modules: ask for %d workers, at most %d run on one machine",
                    train->num_workers, WORKERS_MAX);
    }
    TRY(choose_output(train));
    return find_checkpoint(train);
}

/* ---------------------------------------------------------------- children */

/* Reads the line with its address that the coordinator prints once it listens. */
static Status read_address(Train *train, int output, const char *log)
{
    size_t used = 0;
    int64_t deadline_ns = clock_deadline_in_ms(COORDINATOR_START_MS);
    while (used + 1 < sizeof train->address) {
        int64_t left_ms = (deadline_ns - clock_now_ns()) / CLOCK_NS_PER_MS;
        struct pollfd wait = {.fd = output, .events = POLLIN};
        int ready = left_ms > 0 ? poll(&wait, 1, (int)left_ms) : 0;
        if (ready < 0 && errno == EINTR) {
            continue;
        }
        char c = 0;
        ssize_t count = ready > 0 ? read(output, &c, 1) : 0;
        if (count <= 0) {
            return fail(STATUS_UNAVAILABLE, "the coordinator did not start; see %s", log);
        }
        if (c == '\n') {
            train->address[used] = '\0';
            return STATUS_OK;
        }
        train->address[used++] = c;
    }
    return fail(STATUS_UNAVAILABLE, "the coordinator printed no address; see %s", log);
}

static Status start_coordinator(Train *train)
{
    char log[PATH_BYTES + 80];
    snprintf(log, sizeof log, "%s/coordinator.log", train->logs);
    const char *const argv[] = {train->programs[0], "--listen", "127.0.0.1:0",
                                train->verbose ? "--verbose" : NULL, NULL};
    int output = -1;
    TRY(launch_start(&train->launch, "coordinator", argv, NULL, log, &output));
    Status status = read_address(train, output, log);
    close(output);
    return status;
}

/* Workers of one kind are numbered through all its pools, in the order of ranks: the coordinator
 * places them in the order of their names. */
static Status start_pool(Train *train, const char *role, const char *program, Range numbers,
                         char *const *environment)
{
    for (int64_t i = numbers.begin; i < numbers.end; i++) {
        char name[64];
        char log[PATH_BYTES + 80];
        snprintf(name, sizeof name, "%s-%d", role, (int)i);
        snprintf(log, sizeof log, "%s/%s.log", train->logs, name);
        const char *const argv[] = {
            program, "--coordinator", train->address, "--name",
            name,    "--listen",      "127.0.0.1:0",  train->verbose ? "--verbose" : NULL,
            NULL};
        TRY(launch_start(&train->launch, name, argv, environment, log, NULL));
    }
    return STATUS_OK;
}

static Status start_workers(Train *train)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    long threads = cores / train->num_workers;
    char text[24];
    snprintf(text, sizeof text, "%ld", threads > 1 ? threads : 1);
    char **environment = NULL;
    TRY(config_environment_with("OMP_NUM_THREADS", text, &environment));
    JobLayout layout = job_layout_make(train->spec);
    Status status = STATUS_OK;
    int started[2] = {0}; /* encoder workers, llm workers */
    for (int i = 0; i < layout.num_pools && status == STATUS_OK; i++) {
        const JobLayoutPool *pool = &layout.pools[i];
        int kind = strcmp(pool->spec->role, "llm") == 0;
        Range numbers = {started[kind], started[kind] + pool->num_ranks};
        status =
            start_pool(train, pool->spec->role, train->programs[1 + kind], numbers, environment);
        started[kind] += pool->num_ranks;
    }
    memory_free(environment);
    return status;
}

/* The end of a log, for those who would have to look for it. */
static void print_tail(const char *path)
{
    char text[4096];
    FILE *file = fopen(path, "re");
    if (!file) {
        return;
    }
    if (fseek(file, 0, SEEK_END) == 0) {
        long size = ftell(file);
        long begin = size > (long)sizeof text - 1 ? size - ((long)sizeof text - 1) : 0;
        if (fseek(file, begin, SEEK_SET) != 0) {
            rewind(file);
        }
    }
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = '\0';
    size_t at = length > 0 ? length - 1 : 0;
    for (int lines = 0; at > 0; at--) {
        lines += text[at - 1] == '\n';
        if (lines == LOG_TAIL_LINES) {
            break;
        }
    }
    fprintf(stderr, "  %s ends with:\n", path);
    char *rest = NULL;
    for (char *line = strtok_r(text + at, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        fprintf(stderr, "    %s\n", line);
    }
}

/* ---------------------------------------------------------------- the run */

static void finish(Train *train, ExitCode code)
{
    if (!train->is_over) {
        train->is_over = true;
        train->code = code;
    }
}

static bool job_has_ended(const Train *train)
{
    return train->job && session_is_terminal(train->job);
}

static void on_verdict_late(uv_timer_t *timer)
{
    Train *train = timer->data;
    progress_clear(&train->progress);
    fprintf(stderr, "viaduct: the coordinator has not noticed in time; stopping everything\n");
    finish(train, EXIT_CODE_FAILED);
}

static void on_child_end(void *context, const LaunchChild *child)
{
    Train *train = context;
    if (train->is_stopping || train->is_over || job_has_ended(train)) {
        return;
    }
    char how[96];
    launch_describe_end(child, how, sizeof how);
    progress_clear(&train->progress);
    fprintf(stderr, "viaduct: %s %s\n", child->name, how);
    print_tail(child->log);
    bool is_coordinator = child == &train->launch.children[0];
    bool is_placed = train->job && train->job->status->state != STATE(PENDING);
    if (is_coordinator || !is_placed) {
        finish(train, EXIT_CODE_FAILED);
        return;
    }
    /* The coordinator says what this means for the job: worker, step and operation. */
    uv_timer_start(&train->verdict_timer, on_verdict_late, VERDICT_MS, 0);
}

static void on_cancelled(void *context, const ProtobufCMessage *message, const RpcError *error)
{
    (void)message;
    Train *train = context;
    if (error->code != RPC_CODE_OK && !train->is_over && !job_has_ended(train)) {
        finish(train, EXIT_CODE_CANCELLED);
    }
}

static void request_cancel(Train *train)
{
    char name[80];
    Viaduct__V1__CancelJobRequest request = VIADUCT__V1__CANCEL_JOB_REQUEST__INIT;
    snprintf(name, sizeof name, "jobs/%s", train->id);
    request.name = name;
    if (!train->is_created ||
        rpc_client_call(train->session.client, SESSION_JOBS, "CancelJob", &request.base, KILL_MS,
                        on_cancelled, train, NULL) != STATUS_OK) {
        finish(train, EXIT_CODE_CANCELLED);
    }
}

/* The first asks the job to end, the second ends everything at once. */
static void on_interrupt(uv_signal_t *handle, int number)
{
    Train *train = handle->data;
    train->interrupts++;
    progress_clear(&train->progress);
    if (train->interrupts == 1) {
        fprintf(stderr, "viaduct: stopping%s\n",
                number == SIGINT ? "; Ctrl-C again stops at once" : "");
        if (!train->is_over) {
            request_cancel(train);
        }
    } else {
        launch_signal(&train->launch, 0, SIGKILL);
        finish(train, EXIT_CODE_INTERRUPTED);
        train->code = EXIT_CODE_INTERRUPTED;
    }
}

static void on_job(void *context, const Viaduct__V1__Job *job)
{
    Train *train = context;
    ProtobufCMessage *copy = NULL;
    if (message_copy(&job->base, &copy) != STATUS_OK) {
        return;
    }
    viaduct__v1__job__free_unpacked(train->job, NULL);
    train->job = (Viaduct__V1__Job *)copy;
    progress_show(&train->progress, job);
    if (session_is_terminal(job)) {
        finish(train, verbs_code_of_state((int)job->status->state));
    }
}

static void on_watch_ended(void *context, const RpcError *error)
{
    Train *train = context;
    if (!train->is_over && !train->is_stopping) {
        progress_clear(&train->progress);
        fprintf(stderr, "viaduct: the coordinator of this run is gone: %s\n", error->message);
        finish(train, EXIT_CODE_UNAVAILABLE);
    }
}

static ExitCode create_job(Train *train)
{
    Viaduct__V1__CreateJobRequest request = VIADUCT__V1__CREATE_JOB_REQUEST__INIT;
    Viaduct__V1__Job job = VIADUCT__V1__JOB__INIT;
    job.spec = train->spec;
    request.job = &job;
    request.job_id = train->id;
    request.resume_from = train->resume_from;
    ProtobufCMessage *response = NULL;
    RpcError error =
        session_call(&train->session, SESSION_JOBS, "CreateJob", &request.base, &response);
    if (error.code != RPC_CODE_OK) {
        return verbs_fail_call(train->address, &error);
    }
    protobuf_c_message_free_unpacked(response, NULL);
    train->is_created = true;
    Status status = session_watch(&train->session, train->id, on_job, on_watch_ended, train);
    return status == STATUS_OK ? EXIT_CODE_OK : verbs_fail_status(status);
}

static void watch_signals(Train *train)
{
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    for (int i = 0; i < 3; i++) {
        train->signals[i].data = train;
        CHECK(uv_signal_init(&train->session.loop, &train->signals[i]) == 0);
        CHECK(uv_signal_start(&train->signals[i], on_interrupt, numbers[i]) == 0);
    }
    train->verdict_timer.data = train;
    CHECK(uv_timer_init(&train->session.loop, &train->verdict_timer) == 0);
    train->is_started = true;
}

static Status start_all(Train *train)
{
    TRY(launch_init(&train->launch, &train->session.loop, train->num_workers + 1, on_child_end,
                    train));
    watch_signals(train);
    TRY(start_coordinator(train));
    TRY(start_workers(train));
    return session_connect(&train->session, train->address);
}

/* Nothing that was started is left after this. */
static void stop_all(Train *train)
{
    train->is_stopping = true;
    Launch *launch = &train->launch;
    launch_signal(launch, 1, SIGTERM);
    if (!launch_wait(launch, 1, WORKER_STOP_MS)) {
        launch_signal(launch, 1, SIGKILL);
    }
    launch_signal(launch, 0, SIGTERM);
    if (!launch_wait(launch, 0, COORDINATOR_STOP_MS)) {
        launch_signal(launch, 0, SIGKILL);
        if (!launch_wait(launch, 0, KILL_MS)) {
            fprintf(stderr, "viaduct: a program does not end although it was killed\n");
            _exit(EXIT_CODE_FAILED);
        }
    }
}

static void show_result(Train *train)
{
    char path[PATH_BYTES + 32];
    snprintf(path, sizeof path, "%s/summary.json", train->output);
    progress_clear(&train->progress);
    if (!job_has_ended(train)) {
        return;
    }
    bool is_good = train->job->status->state == STATE(SUCCEEDED);
    result_print(is_good ? stdout : stderr, train->job);
    if (result_write_summary(path, train->job) != STATUS_OK) {
        finish(train, EXIT_CODE_FAILED);
        train->code = verbs_fail_status(STATUS_IO);
        return;
    }
    fprintf(is_good ? stdout : stderr, "summary: %s\nlogs: %s\n", path, train->logs);
}

static void close_run(Train *train)
{
    for (int i = 0; train->is_started && i < 3; i++) {
        uv_close((uv_handle_t *)&train->signals[i], NULL);
    }
    if (train->is_started) {
        uv_close((uv_handle_t *)&train->verdict_timer, NULL);
    }
    launch_done(&train->launch);
    session_close(&train->session);
    viaduct__v1__job__free_unpacked(train->job, NULL);
}

static ExitCode run(Train *train)
{
    session_init(&train->session);
    progress_init(&train->progress, stdout);
    Status status = start_all(train);
    if (status != STATUS_OK) {
        finish(train, verbs_fail_status(status));
    } else {
        printf("job %s: %d workers, logs in %s\n", train->id, train->num_workers, train->logs);
        layout_text_print(stdout, train->spec);
        fflush(stdout);
        ExitCode code = create_job(train);
        if (code != EXIT_CODE_OK) {
            finish(train, code);
        }
    }
    while (!train->is_over) {
        uv_run(&train->session.loop, UV_RUN_ONCE);
    }
    train->is_stopping = true;
    session_unwatch(&train->session);
    show_result(train);
    stop_all(train);
    close_run(train);
    return train->code;
}

ExitCode train_verb(int argc, const char *const *argv)
{
    Train *train = NULL;
    if (MEMORY_NEW(&train, 1) != STATUS_OK) {
        return verbs_fail_status(STATUS_NO_MEMORY);
    }
    train->output_flag = "";
    train->id_flag = "";
    const ConfigFlag flags[] = {
        {"set", 0, CONFIG_KIND_LIST, &train->settings, "FIELD=VALUE", NULL,
         "changes one field, such as training.steps=100; may be repeated"},
        {"resume", 0, CONFIG_KIND_SWITCH, &train->resume, NULL, NULL,
         "go on from the newest checkpoint of checkpoint.directory"},
        {"output", 0, CONFIG_KIND_TEXT, &train->output_flag, "DIRECTORY", NULL,
         "where summary.json and logs/ go (default: the parent of checkpoint.directory)"},
        {"id", 0, CONFIG_KIND_TEXT, &train->id_flag, "ID", NULL,
         "the job's name (default: the file's)"},
        {"verbose", 'v', CONFIG_KIND_SWITCH, &train->verbose, NULL, NULL, "log more"},
    };
    const ConfigCommand command = {
        "viaduct train JOB.yaml [flags]",
        "Starts a coordinator and the workers that the job asks for on this machine, runs the job "
        "and stops\nthem. Exit status: 0 SUCCEEDED, 1 FAILED, 2 a wrong job, 7 stopped by Ctrl-C, "
        "130 by a second one.",
        flags,
        sizeof flags / sizeof *flags,
        1,
        1};
    ConfigList rest;
    bool help = false;
    ExitCode code = EXIT_CODE_OK;
    Status status = config_parse(&command, argc, argv, &rest, &help);
    if (status != STATUS_OK) {
        code = verbs_fail_status(status);
    } else if (help) {
        config_print_help(&command, stdout);
    } else {
        train->file = rest.items[0];
        job_input_id(train->file, train->id, sizeof train->id);
        if (train->id_flag[0]) {
            snprintf(train->id, sizeof train->id, "%s", train->id_flag);
        }
        code = job_input_read(train->file, &train->settings, &train->spec);
        if (code == EXIT_CODE_OK) {
            status = prepare(train);
            code = status == STATUS_OK ? run(train) : verbs_fail_status(status);
            viaduct__v1__job_spec__free_unpacked(train->spec, NULL);
        }
    }
    memory_free(train);
    return code;
}
