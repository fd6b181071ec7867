/* Clock: monotonic time, and deadlines made from it.
 * Threading: any thread.
 */
#ifndef BASE_CLOCK_H
#define BASE_CLOCK_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#define CLOCK_NS_PER_MS INT64_C(1000000)
#define CLOCK_NS_PER_S  INT64_C(1000000000)

/* Nanoseconds of CLOCK_MONOTONIC. */
static inline int64_t clock_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * CLOCK_NS_PER_S + now.tv_nsec;
}

/* Nanoseconds since 1970, for records that people read. */
static inline int64_t clock_wall_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec * CLOCK_NS_PER_S + now.tv_nsec;
}

/* A deadline is the clock_now_ns() at which waiting ends. */
static inline int64_t clock_deadline_in_ms(int64_t timeout_ms)
{
    return clock_now_ns() + timeout_ms * CLOCK_NS_PER_MS;
}

static inline bool clock_is_past(int64_t deadline_ns)
{
    return clock_now_ns() >= deadline_ns;
}

/* The pthread clock for timed waits must be CLOCK_MONOTONIC; this is the deadline in its form. */
static inline struct timespec clock_timespec(int64_t deadline_ns)
{
    return (struct timespec){.tv_sec = deadline_ns / CLOCK_NS_PER_S,
                             .tv_nsec = deadline_ns % CLOCK_NS_PER_S};
}

#endif
