#include "cli/watch.h"

#include "base/config.h"
#include "cli/progress.h"
#include "cli/result.h"

#include <inttypes.h>
#include <signal.h>

typedef struct Watch {
    Session *session;
    Progress progress;
    uv_signal_t interrupt;
    uv_timer_t timer;
    FILE *file;
    bool is_done;
    ExitCode code;
} Watch;

static void finish(Watch *watch, ExitCode code)
{
    if (!watch->is_done) {
        watch->is_done = true;
        watch->code = code;
        session_unwatch(watch->session);
    }
}

static void on_job(void *context, const Viaduct__V1__Job *job)
{
    Watch *watch = context;
    if (watch->is_done) {
        return;
    }
    progress_show(&watch->progress, job);
    if (session_is_terminal(job)) {
        progress_clear(&watch->progress);
        result_print(watch->file, job);
        finish(watch, verbs_code_of_state((int)job->status->state));
    }
}

static void on_ended(void *context, const RpcError *error)
{
    Watch *watch = context;
    if (!watch->is_done) {
        progress_clear(&watch->progress);
        finish(watch, verbs_fail_call(watch->session->coordinator, error));
    }
}

static void on_interrupt(uv_signal_t *handle, int number)
{
    (void)number;
    Watch *watch = handle->data;
    progress_clear(&watch->progress);
    fprintf(stderr, "viaduct: no longer watching; the job goes on\n");
    finish(watch, EXIT_CODE_INTERRUPTED);
}

static void on_time_over(uv_timer_t *timer)
{
    Watch *watch = timer->data;
    progress_clear(&watch->progress);
    fprintf(stderr, "viaduct: the job has not ended in time; it goes on\n");
    finish(watch, EXIT_CODE_TIMED_OUT);
}

ExitCode watch_follow(Session *session, const char *name, FILE *file, int64_t timeout_ms)
{
    Watch watch = {.session = session, .file = file};
    progress_init(&watch.progress, file);
    watch.interrupt.data = &watch;
    watch.timer.data = &watch;
    CHECK(uv_signal_init(&session->loop, &watch.interrupt) == 0);
    CHECK(uv_signal_start(&watch.interrupt, on_interrupt, SIGINT) == 0);
    CHECK(uv_timer_init(&session->loop, &watch.timer) == 0);
    if (timeout_ms > 0) {
        CHECK(uv_timer_start(&watch.timer, on_time_over, (uint64_t)timeout_ms, 0) == 0);
    }
    Status status = session_watch(session, name, on_job, on_ended, &watch);
    if (status != STATUS_OK) {
        finish(&watch, verbs_fail_status(status));
    }
    while (!watch.is_done || session->watch) {
        uv_run(&session->loop, UV_RUN_ONCE);
    }
    uv_close((uv_handle_t *)&watch.interrupt, NULL);
    uv_close((uv_handle_t *)&watch.timer, NULL);
    uv_run(&session->loop, UV_RUN_NOWAIT); /* both are of this frame */
    return watch.code;
}

ExitCode watch_verb(int argc, const char *const *argv)
{
    const char *coordinator = SESSION_DEFAULT;
    int64_t timeout_s = 0;
    const ConfigFlag flags[] = {
        SESSION_FLAG(&coordinator),
        {"timeout", 0, CONFIG_KIND_INTEGER, &timeout_s, "SECONDS", NULL,
         "stop watching after so long, with exit status 6 (default: never)"},
    };
    const ConfigCommand command = {
        "viaduct watch NAME [flags]",
        "Follows a job to its end. Exit status: 0 SUCCEEDED, 1 FAILED, 7 CANCELLED. Ctrl-C ends "
        "the\nwatching, never the job.",
        flags,
        sizeof flags / sizeof *flags,
        1,
        1};
    ConfigList rest;
    bool help = false;
    Status status = config_parse(&command, argc, argv, &rest, &help);
    if (status != STATUS_OK) {
        return verbs_fail_status(status);
    }
    if (help) {
        config_print_help(&command, stdout);
        return EXIT_CODE_OK;
    }
    Session session;
    session_init(&session);
    status = session_connect(&session, coordinator);
    ExitCode code = status == STATUS_OK
                        ? watch_follow(&session, rest.items[0], stdout, timeout_s * 1000)
                        : verbs_fail_status(status);
    session_close(&session);
    return code;
}
