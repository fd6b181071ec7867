/* Status: how every fallible function of the project reports failure.
 *
 * The first function to see a failure returns fail(CODE, "what, where, expected, what to do");
 * callers pass it on with TRY(call), which adds their place to the trail. Message and trail are
 * kept per thread, until the next fail() or status_clear() of that thread.
 *
 * Threading: each thread has its own message; a Status value can be passed between threads, its
 * message only as a copy.
 */
#ifndef BASE_STATUS_H
#define BASE_STATUS_H

#include <stdlib.h>

/* Codes are grouped by what must be redone. */
typedef enum Status {
    STATUS_OK = 0,
    /* this request: the process is as it was before */
    STATUS_INVALID,     /* an argument, a file or a field is wrong */
    STATUS_NOT_FOUND,   /* the named thing does not exist */
    STATUS_CONFLICT,    /* it exists already, or its state forbids the request */
    STATUS_UNSUPPORTED, /* right in itself, but not built here */
    STATUS_CORRUPT,     /* outside bytes that break their own format */
    STATUS_EXHAUSTED,   /* a configured limit is reached */
    STATUS_DENIED,      /* no or weak credentials */
    /* this process: it cannot go on with what it was doing */
    STATUS_NO_MEMORY,
    STATUS_IO,
    STATUS_INTERNAL,
    /* this group of peers: the epoch must be formed anew */
    STATUS_UNAVAILABLE, /* the other side cannot be reached now; trying again may help */
    STATUS_PEER_LOST,   /* a peer died or left */
    STATUS_TIMEOUT,     /* a deadline passed */
    STATUS_ABORTED,     /* someone asked for the end */
    STATUS_COUNT,
} Status;

#define STATUS_CHECKED __attribute__((warn_unused_result))

/* Records the message for this thread, starts a new trail, and returns `code`. */
Status status_fail(Status code, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5))) STATUS_CHECKED;

#define fail(code, ...) status_fail((code), __FILE__, __LINE__, __VA_ARGS__)

/* Appends a place to the trail; returns `code` unchanged. Used by TRY. */
Status status_trace(Status code, const char *file, int line);

#define TRY(call)                                                 \
    do {                                                          \
        Status try_status_ = (call);                              \
        if (__builtin_expect(try_status_ != STATUS_OK, 0)) {      \
            return status_trace(try_status_, __FILE__, __LINE__); \
        }                                                         \
    } while (0)

/* "invalid", "peer lost", ...: lower case, for people. */
const char *status_name(Status code);

/* This thread's message without the trail; "" when there is none. Valid until its next fail(). */
const char *status_message(void);

/* "comm.c:120 < trainer.c:88": where the failure was first seen, then who passed it on. */
const char *status_trail(void);

void status_clear(void);

/* Own bugs end the process, in every build: the state can no longer be trusted. */
_Noreturn void status_check_failed(const char *file, int line, const char *condition);

#define CHECK(condition)                                         \
    do {                                                         \
        if (__builtin_expect(!(condition), 0)) {                 \
            status_check_failed(__FILE__, __LINE__, #condition); \
        }                                                        \
    } while (0)

#ifdef NDEBUG
#define DCHECK(condition) ((void)sizeof(condition))
#else
#define DCHECK(condition) CHECK(condition)
#endif

#endif
