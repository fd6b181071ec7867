/* Membership: the workers that are known, each with its lease, by the clock that the caller gives.
 *
 * A worker has a stable name and an incarnation, new for each process. A new incarnation fences the
 * one before it: leases of the old one are refused for ever. A lease not renewed in time makes the
 * worker LOST. Nothing here knows jobs; `job`, `epoch` and `rank` are the cluster's notes on a
 * worker. Times are milliseconds of a monotonic clock. Pure: no input or output, so that tests
 * drive it by a virtual clock.
 * Threading: one owner.
 */
#ifndef COORDINATOR_MEMBERSHIP_H
#define COORDINATOR_MEMBERSHIP_H

#include "base/rng.h"
#include "base/status.h"
#include "rpc/rpc.h"
#include "viaduct/v1/viaduct.pb-c.h"

#include <stdbool.h>
#include <stdint.h>

typedef Viaduct__V1__Worker__State WorkerState;
#define WORKER_STATE(name) VIADUCT__V1__WORKER__STATE__##name

enum {
    MEMBERSHIP_FENCED_MAX = 8, /* incarnations remembered per name */
    MEMBERSHIP_LABELS_MAX = 32,
    MEMBERSHIP_WORKERS_MAX = 10000,
    MEMBERSHIP_PROTOCOL = 1 /* version of the worker protocol */
};

typedef struct WorkerLabel {
    char key[64];
    char value[64];
} WorkerLabel;

typedef struct WorkerRecord {
    char name[64]; /* without "workers/" */
    char incarnation[64];
    char role[16];
    char data_address[128];
    char control_address[128];
    char software_version[32];
    WorkerLabel *labels; /* owned */
    int num_labels;
    char lease_id[48]; /* "lease-SLOT-NONCE" */
    WorkerState state;
    int64_t registered_ms;
    int64_t last_heartbeat_ms;
    int64_t lease_deadline_ms;
    bool stream_open;
    bool left_cleanly;
    char fenced[MEMBERSHIP_FENCED_MAX][64];
    int num_fenced;
    /* from heartbeats */
    int64_t step;
    int64_t progress;
    char operation[96];
    /* the cluster's notes */
    int64_t job; /* serial of the job it is a member of; 0: none */
    int64_t epoch;
    int rank;
    bool acked;
    bool finished;
    bool releasing; /* the job is over; the worker has not said that it let go */
} WorkerRecord;

typedef struct Membership {
    WorkerRecord *workers; /* slots; their indices are stable */
    size_t capacity;
    int count;
    int64_t lease_ms;
    int64_t heartbeat_ms;
    Rng rng;
    uint64_t nonces; /* random numbers drawn */
} Membership;

void membership_init(Membership *membership, int64_t lease_ms, int64_t heartbeat_ms, uint64_t seed);
void membership_done(Membership *membership);

/* A worker says who it is. The same incarnation again renews its lease and changes nothing else.
 * *replaced_out: an older incarnation, still alive as far as is known, was fenced; its slot's notes
 * are still those of the old one: the caller must clear them. False with *error_out when refused:
 * FIELD_INVALID, FENCED, PROTOCOL_VERSION, WORKERS_MAX. */
bool membership_register(Membership *membership, const Viaduct__V1__Worker *worker, int64_t now_ms,
                         int *slot_out, bool *replaced_out, RpcError *error_out);

/* The slot of a valid lease, or -1 with *error_out: FENCED, LEASE_EXPIRED. */
int membership_find_lease(const Membership *membership, const char *lease_id, RpcError *error_out);

/* The slot of "workers/NAME" or "NAME"; -1: none. */
int membership_find_name(const Membership *membership, const char *name);

void membership_renew(Membership *membership, int slot, int64_t now_ms);

/* A lease that has passed makes its worker LOST; returns the slot, or -1 when none is left. */
int membership_expire(Membership *membership, int64_t now_ms);

/* The worker is gone: LOST, or LEFT when it said so. Its lease ends. */
void membership_end(Membership *membership, int slot, WorkerState state);

/* Registered, lease valid. */
static inline bool membership_is_present(const WorkerRecord *worker)
{
    return worker->state == WORKER_STATE(STANDBY) || worker->state == WORKER_STATE(JOINING) ||
           worker->state == WORKER_STATE(ACTIVE);
}

#endif
