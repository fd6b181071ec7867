/* The local backend of comm: ranks are threads of one process. Tests and `viaduct verify` run on
 * it. Threading: create once, then each rank's Comm goes to its own thread; destroy each in its
 * thread.
 */
#ifndef COMM_COMM_LOCAL_H
#define COMM_COMM_LOCAL_H

#include "comm/comm.h"

/* A world of `size` ranks; comms_out[size] are owned by the caller (comm_destroy each). */
Status comm_local_create(int size, int64_t timeout_ms, Comm **comms_out) STATUS_CHECKED;

#endif
