/* Health: the standard gRPC health service (grpc.health.v1): Check, and Watch as a stream.
 *
 * A service is known once health_set has named it; "" stands for the server as a whole and is known
 * from the start, as not serving. Check of an unknown service is NOT_FOUND; Watch of one reports
 * SERVICE_UNKNOWN and stays open.
 *
 * Threading: the loop thread.
 */
#ifndef RPC_HEALTH_H
#define RPC_HEALTH_H

#include "rpc/rpc.h"

typedef struct Health Health;

/* Owned by the caller: health_destroy, after the shutdown of the server it was given to is done. */
Status health_create(Health **health_out) STATUS_CHECKED;
void health_destroy(Health *health);

/* `service` as clients name it: "viaduct.v1.JobService". Tells the watchers when the state is
 * another. */
Status health_set(Health *health, const char *service, bool is_serving) STATUS_CHECKED;

/* For RpcServerOptions.services. */
RpcService health_service(Health *health);

#endif
