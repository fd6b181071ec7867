/* Store: what the coordinator must not forget: jobs, each with the request that made it. Backends:
 * memory (nothing outlives the process).
 *
 * A put is one transaction: the job and its request_id are there together or not at all, before the
 * call returns.
 * Threading: the loop thread.
 */
#ifndef COORDINATOR_STORE_H
#define COORDINATOR_STORE_H

#include "base/status.h"
#include "viaduct/v1/viaduct.pb-c.h"

#include <stdint.h>

typedef struct Store Store;

/* One job as it is kept; pointers are borrowed for the call. */
typedef struct StoreRecord {
    const Viaduct__V1__Job *job; /* its uid is the key */
    const char *request_id;
    uint64_t request_hash;
} StoreRecord;

typedef void (*StoreVisit)(void *context, const StoreRecord *record);

typedef struct StoreOps {
    const char *name;
    /* Adds the job or replaces it. Blocks until it is safe. Idempotent. */
    Status (*put)(Store *store, const StoreRecord *record);
    /* Not there is fine. */
    Status (*remove)(Store *store, const char *uid);
    /* Calls `visit` for each job, oldest first; it must not change the store. */
    Status (*each)(Store *store, StoreVisit visit, void *context);
    void (*close)(Store *store);
} StoreOps;

struct Store {
    const StoreOps *ops;
};

Status store_open_memory(Store **store_out) STATUS_CHECKED;

static inline Status store_put(Store *store, const StoreRecord *record)
{
    return store->ops->put(store, record);
}

static inline Status store_remove(Store *store, const char *uid)
{
    return store->ops->remove(store, uid);
}

static inline Status store_each(Store *store, StoreVisit visit, void *context)
{
    return store->ops->each(store, visit, context);
}

static inline void store_close(Store *store)
{
    if (store) {
        store->ops->close(store);
    }
}

#endif
