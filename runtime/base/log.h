/* Log: lines for people on standard error: time, level, role, rank, step, message.
 *
 * Only main files and the RPC edge log errors; libraries return Status.
 *
 * Threading: any thread; a line is written with one write(2). Level and context are process-wide,
 * the step per thread.
 */
#ifndef BASE_LOG_H
#define BASE_LOG_H

#include <stdbool.h>
#include <stdint.h>

typedef enum LogLevel {
    LOG_LEVEL_ERROR,
    LOG_LEVEL_WARN,
    LOG_LEVEL_INFO,
    LOG_LEVEL_DEBUG,
} LogLevel;

void log_set_level(LogLevel level);
bool log_enabled(LogLevel level);

/* Who writes: "coordinator", "encoder-0", ...; at most 63 bytes are kept. */
void log_set_role(const char *role);

/* This thread's rank and step; -1 leaves the field out. */
void log_set_step(int rank, int64_t step);

void log_write(LogLevel level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define log_at(level, ...)                   \
    do {                                     \
        if (log_enabled(level)) {            \
            log_write((level), __VA_ARGS__); \
        }                                    \
    } while (0)
#define log_error(...) log_at(LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warn(...)  log_at(LOG_LEVEL_WARN, __VA_ARGS__)
#define log_info(...)  log_at(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(...) log_at(LOG_LEVEL_DEBUG, __VA_ARGS__)

#endif
