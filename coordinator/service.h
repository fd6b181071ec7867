/* Service: the coordinator's calls: JobService and WorkerService over a cluster (cluster.h), a
 * store and the streams that are open.
 *
 * Each handler gives its request to the cluster, carries out the effects (save, tell watchers, send
 * assignments), then answers: what was answered has been saved.
 * Threading: the loop thread.
 */
#ifndef COORDINATOR_SERVICE_H
#define COORDINATOR_SERVICE_H

#include "coordinator/cluster.h"
#include "coordinator/store.h"
#include "rpc/rpc.h"

typedef struct Service Service;

typedef struct ServiceOptions {
    const char *address; /* "127.0.0.1:7070"; port 0 picks one */
    ClusterOptions cluster;
    Store *store; /* borrowed */
} ServiceOptions;

/* Listens when it returns. */
Status service_create(uv_loop_t *loop, Rpc *rpc, const ServiceOptions *options,
                      Service **service_out) STATUS_CHECKED;

int service_port(const Service *service);

/* Ends streams with UNAVAILABLE, waits up to grace_ms for calls; `done` is called once, after which
 * the service is freed. */
void service_shutdown(Service *service, int64_t grace_ms, void (*done)(void *context),
                      void *context);

#endif
