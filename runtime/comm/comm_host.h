/* The host backend of comm: ranks are processes; rings in shared memory between ranks that can
 * reach each other's abstract Unix socket (one network namespace), TCP between others. A socket to
 * each peer is its sign of life: its end wakes every wait at once.
 *
 * Threading: an endpoint's own thread accepts and watches; the rest as comm.h.
 */
#ifndef COMM_COMM_HOST_H
#define COMM_COMM_HOST_H

#include "comm/comm.h"

/* Where a process can be reached, for its whole life; worlds come and go on it. */
typedef struct CommEndpoint CommEndpoint;

/* Listens on `address` ("host:port", port 0 picks one; "[::1]:0" for IPv6) and on an abstract Unix
 * socket derived from it. The host is the one under which peers reach this process: a wildcard
 * (0.0.0.0) is STATUS_INVALID. */
Status comm_endpoint_open(const char *address, CommEndpoint **endpoint_out) STATUS_CHECKED;
/* After all its worlds are destroyed; NULL is fine. */
void comm_endpoint_close(CommEndpoint *endpoint);

/* "127.0.0.1:40123": what peers must be told; valid until close. */
const char *comm_endpoint_address(const CommEndpoint *endpoint);

typedef struct CommHostWorld {
    const char *const *addresses; /* [size] of every member, in rank order */
    int size;
    int rank;
    /* The same on all members, another for every epoch: strangers and old epochs are refused. */
    uint64_t key;
    int64_t timeout_ms; /* one operation */
    int64_t connect_timeout_ms;
    /* This rank reaches all others over TCP, even where it could share memory (tests,
     * measurements). */
    bool tcp_only;
} CommHostWorld;

/* Connects all members; each must call it. STATUS_TIMEOUT names who is missing. */
Status comm_host_create(CommEndpoint *endpoint, const CommHostWorld *world,
                        Comm **comm_out) STATUS_CHECKED;

#endif
