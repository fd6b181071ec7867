#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum {
    MESSAGE_BYTES = 1024,
    TRAIL_BYTES = 512
};

static _Thread_local char message[MESSAGE_BYTES];
static _Thread_local char trail[TRAIL_BYTES];

static const char *const names[STATUS_COUNT] = {
    [STATUS_OK] = "ok",
    [STATUS_INVALID] = "invalid",
    [STATUS_NOT_FOUND] = "not found",
    [STATUS_CONFLICT] = "conflict",
    [STATUS_UNSUPPORTED] = "not supported",
    [STATUS_CORRUPT] = "corrupt",
    [STATUS_EXHAUSTED] = "limit reached",
    [STATUS_DENIED] = "denied",
    [STATUS_NO_MEMORY] = "out of memory",
    [STATUS_IO] = "input/output error",
    [STATUS_INTERNAL] = "internal error",
    [STATUS_UNAVAILABLE] = "unavailable",
    [STATUS_PEER_LOST] = "peer lost",
    [STATUS_TIMEOUT] = "timed out",
    [STATUS_ABORTED] = "aborted",
};

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

Status status_fail(Status code, const char *file, int line, const char *format, ...)
{
    /* The arguments may point into the old message ("%s: %s", name, status_message()). */
    char text[MESSAGE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    memcpy(message, text, sizeof message);
    snprintf(trail, sizeof trail, "%s:%d", base_name(file), line);
    return code;
}

Status status_trace(Status code, const char *file, int line)
{
    size_t used = strlen(trail);
    snprintf(trail + used, sizeof trail - used, " < %s:%d", base_name(file), line);
    return code;
}

const char *status_name(Status code)
{
    return (unsigned)code < STATUS_COUNT ? names[code] : "unknown status";
}

const char *status_message(void)
{
    return message;
}

const char *status_trail(void)
{
    return trail;
}

void status_clear(void)
{
    message[0] = '\0';
    trail[0] = '\0';
}

void status_check_failed(const char *file, int line, const char *condition)
{
    fprintf(stderr, "%s:%d: check failed: %s\n", file, line, condition);
    fflush(stderr);
    abort();
}
