#include "coordinator/refusal.h"

#include <stdarg.h>
#include <stdio.h>

bool refusal_set(RpcError *error_out, RpcCode code, const char *reason, const char *format, ...)
{
    *error_out = (RpcError){.code = code};
    snprintf(error_out->reason, sizeof error_out->reason, "%s", reason);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error_out->message, sizeof error_out->message, format, arguments);
    va_end(arguments);
    return false;
}
