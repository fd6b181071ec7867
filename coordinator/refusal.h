/* Refusal: why the coordinator does not do what it was asked, as the RPC edge sends it.
 * Threading: pure functions.
 */
#ifndef COORDINATOR_REFUSAL_H
#define COORDINATOR_REFUSAL_H

#include "rpc/rpc.h"

#include <stdbool.h>

/* Fills *error_out and returns false, so that a check can end with it. */
bool refusal_set(RpcError *error_out, RpcCode code, const char *reason, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

#endif
