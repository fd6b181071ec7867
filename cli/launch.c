#include "cli/launch.h"

#include "base/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    EXIT_NOT_STARTED = 127
};

static void reap(Launch *launch)
{
    for (int i = 0; i < launch->count; i++) {
        LaunchChild *child = &launch->children[i];
        int wait_status = 0;
        if (child->is_running && waitpid(child->pid, &wait_status, WNOHANG) == child->pid) {
            child->is_running = false;
            child->wait_status = wait_status;
            launch->on_end(launch->context, child);
        }
    }
}

static void on_child_signal(uv_signal_t *handle, int number)
{
    (void)number;
    reap(handle->data); /* signals coalesce: all are looked at */
}

Status launch_init(Launch *launch, uv_loop_t *loop, int capacity,
                   void (*on_end)(void *context, const LaunchChild *child), void *context)
{
    *launch = (Launch){.capacity = capacity, .loop = loop, .on_end = on_end, .context = context};
    TRY(MEMORY_NEW(&launch->children, capacity));
    launch->reaper.data = launch;
    CHECK(uv_signal_init(loop, &launch->reaper) == 0);
    CHECK(uv_signal_start(&launch->reaper, on_child_signal, SIGCHLD) == 0);
    return STATUS_OK;
}

void launch_done(Launch *launch)
{
    for (int i = 0; i < launch->count; i++) {
        CHECK(!launch->children[i].is_running);
    }
    if (launch->children) {
        uv_close((uv_handle_t *)&launch->reaper, NULL);
        memory_free(launch->children);
        launch->children = NULL;
    }
}

Status launch_find_program(const char *name, char *path_out, size_t size)
{
    char own[512];
    ssize_t length = readlink("/proc/self/exe", own, sizeof own - 1);
    if (length <= 0) {
        return fail(STATUS_IO, "/proc/self/exe: %s", strerror(errno));
    }
    own[length] = '\0';
    char *slash = strrchr(own, '/');
    CHECK(slash);
    *slash = '\0';
    int used = snprintf(path_out, size, "%s/%s", own, name);
    if (used < 0 || (size_t)used >= size || access(path_out, X_OK) != 0) {
        return fail(STATUS_NOT_FOUND,
                    "%s: the program %s is not there; it must stand beside viaduct", own, name);
    }
    return STATUS_OK;
}

/* In the child, between fork and exec: only calls that are safe there. */
static _Noreturn void become(const char *const *argv, char *const *environment, pid_t parent,
                             int output, int log)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) {
        _exit(EXIT_NOT_STARTED); /* the parent died before the line above */
    }
    setpgid(0, 0);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    int input = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (dup2(input, STDIN_FILENO) < 0 || dup2(output, STDOUT_FILENO) < 0 ||
        dup2(log, STDERR_FILENO) < 0) {
        _exit(EXIT_NOT_STARTED);
    }
    execve(argv[0], (char *const *)(uintptr_t)argv, environment);
    _exit(EXIT_NOT_STARTED);
}

static Status open_files(const char *log_path, bool wants_output, int *log_out, int pipe_out[2])
{
    *log_out = open(log_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (*log_out < 0) {
        return fail(STATUS_IO, "%s: cannot create it: %s", log_path, strerror(errno));
    }
    pipe_out[0] = -1;
    pipe_out[1] = *log_out;
    if (wants_output && pipe2(pipe_out, O_CLOEXEC) != 0) {
        close(*log_out);
        return fail(STATUS_IO, "cannot make a pipe: %s", strerror(errno));
    }
    return STATUS_OK;
}

Status launch_start(Launch *launch, const char *name, const char *const *argv,
                    char *const *environment, const char *log_path, int *output_out)
{
    CHECK(launch->count < launch->capacity);
    int log = -1;
    int ends[2] = {-1, -1};
    TRY(open_files(log_path, output_out != NULL, &log, ends));
    pid_t parent = getpid();
    pid_t pid = fork();
    if (pid == 0) {
        become(argv, environment ? environment : environ, parent, ends[1], log);
    }
    int error = errno;
    if (output_out) {
        close(ends[1]);
        *output_out = ends[0];
    }
    close(log);
    if (pid < 0) {
        if (output_out) {
            close(ends[0]);
        }
        return fail(STATUS_IO, "cannot start %s: %s", argv[0], strerror(error));
    }
    LaunchChild *child = &launch->children[launch->count++];
    *child = (LaunchChild){.pid = pid, .is_running = true};
    snprintf(child->name, sizeof child->name, "%s", name);
    snprintf(child->log, sizeof child->log, "%s", log_path);
    return STATUS_OK;
}

void launch_signal(Launch *launch, int first, int number)
{
    for (int i = first; i < launch->count; i++) {
        if (launch->children[i].is_running) {
            kill(launch->children[i].pid, number);
        }
    }
}

static bool any_running(const Launch *launch, int first)
{
    for (int i = first; i < launch->count; i++) {
        if (launch->children[i].is_running) {
            return true;
        }
    }
    return false;
}

static void on_time_over(uv_timer_t *timer)
{
    *(bool *)timer->data = true;
}

bool launch_wait(Launch *launch, int first, int64_t timeout_ms)
{
    bool is_over = false;
    uv_timer_t timer;
    CHECK(uv_timer_init(launch->loop, &timer) == 0);
    timer.data = &is_over;
    uv_update_time(launch->loop);
    CHECK(uv_timer_start(&timer, on_time_over, (uint64_t)timeout_ms, 0) == 0);
    reap(launch);
    while (any_running(launch, first) && !is_over) {
        uv_run(launch->loop, UV_RUN_ONCE);
    }
    uv_close((uv_handle_t *)&timer, NULL);
    uv_run(launch->loop, UV_RUN_NOWAIT); /* the timer is of this frame: it must be closed */
    return !any_running(launch, first);
}

void launch_describe_end(const LaunchChild *child, char *text, size_t size)
{
    if (WIFSIGNALED(child->wait_status)) {
        snprintf(text, size, "was killed by signal %d (%s)", WTERMSIG(child->wait_status),
                 strsignal(WTERMSIG(child->wait_status)));
    } else {
        snprintf(text, size, "ended with exit status %d", WEXITSTATUS(child->wait_status));
    }
}
