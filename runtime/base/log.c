#include "base/log.h"

#include "base/clock.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    LINE_BYTES = 2048
};

static _Atomic int current_level = LOG_LEVEL_INFO;
static pthread_mutex_t role_lock = PTHREAD_MUTEX_INITIALIZER;
static char role[64];
static _Thread_local int thread_rank = -1;
static _Thread_local int64_t thread_step = -1;

static const char *const level_names[] = {"error", "warn ", "info ", "debug"};

void log_set_level(LogLevel level)
{
    atomic_store(&current_level, (int)level);
}

bool log_enabled(LogLevel level)
{
    return (int)level <= atomic_load_explicit(&current_level, memory_order_relaxed);
}

void log_set_role(const char *name)
{
    pthread_mutex_lock(&role_lock);
    snprintf(role, sizeof role, "%s", name);
    pthread_mutex_unlock(&role_lock);
}

void log_set_step(int rank, int64_t step)
{
    thread_rank = rank;
    thread_step = step;
}

/* Appends to line; what does not fit is cut. */
static void append(char *line, size_t *used, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line + *used, LINE_BYTES - *used, format, arguments);
    va_end(arguments);
    if (length > 0) {
        size_t left = LINE_BYTES - *used - 1;
        *used += (size_t)length < left ? (size_t)length : left;
    }
}

void log_write(LogLevel level, const char *format, ...)
{
    char line[LINE_BYTES + 1];
    size_t used = 0;
    int64_t now_ns = clock_wall_ns();
    time_t seconds = (time_t)(now_ns / CLOCK_NS_PER_S);
    struct tm parts;
    gmtime_r(&seconds, &parts);
    char stamp[32];
    strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%S", &parts);
    append(line, &used, "%s.%03dZ %s ", stamp, (int)(now_ns / CLOCK_NS_PER_MS % 1000),
           level_names[level]);
    pthread_mutex_lock(&role_lock);
    if (role[0]) {
        append(line, &used, "%s ", role);
    }
    pthread_mutex_unlock(&role_lock);
    if (thread_rank >= 0) {
        append(line, &used, "rank %d ", thread_rank);
    }
    if (thread_step >= 0) {
        append(line, &used, "step %lld ", (long long)thread_step);
    }
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line + used, LINE_BYTES - used, format, arguments);
    va_end(arguments);
    if (length > 0) {
        size_t left = LINE_BYTES - used - 1;
        used += (size_t)length < left ? (size_t)length : left;
    }
    line[used++] = '\n';
    ssize_t written = write(STDERR_FILENO, line, used);
    (void)written; /* there is nowhere left to report a failing standard error */
}
