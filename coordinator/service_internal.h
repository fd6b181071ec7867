/* What the files of the service share: service.c (life, effects, time), service_jobs.c and
 * service_workers.c (handlers).
 * Threading: the loop thread.
 */
#ifndef COORDINATOR_SERVICE_INTERNAL_H
#define COORDINATOR_SERVICE_INTERNAL_H

#include "coordinator/service.h"
#include "rpc/health.h"

/* One open stream. */
typedef struct ServiceStream {
    Service *service;
    RpcCall *call;
    int slot;     /* assignment streams: whose; watches: -1 */
    char job[64]; /* watches: the only job to tell of; "": all */
    struct ServiceStream *next;
} ServiceStream;

struct Service {
    Cluster cluster;
    Store *store;
    RpcServer *server;
    Health *health;
    uv_timer_t timer;
    int64_t next_bookmark_ms;
    ServiceStream *watches;
    ServiceStream *assignments;
    char boot_id[40];
    bool is_closing;
    int num_open; /* of timer and server */
    void (*done)(void *context);
    void *done_context;
};

int64_t service_now_ms(void);

/* Carries out and clears the cluster's effects. */
void service_carry(Service *service);

/* One watch message; job_name NULL for bookmarks. A reader that is too slow is dropped. */
void service_tell_watch(ServiceStream *stream, Viaduct__V1__WatchJobsResponse__Type type,
                        int64_t revision, Viaduct__V1__Job *job);

/* Ends a call with STATUS_NO_MEMORY's message or the like. */
void service_fail_status(RpcCall *call, Status status);

/* "" and 0 begin at the start; the token is the number of items before the page. False: a bad token
 * or size, *error_out says which. */
bool service_page(int32_t page_size, const char *token, int count, int *begin_out, int *end_out,
                  RpcError *error_out);

extern const RpcMethod service_job_methods[];
extern const int service_num_job_methods;
extern const RpcMethod service_worker_methods[];
extern const int service_num_worker_methods;

#endif
