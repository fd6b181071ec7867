#include "coordinator/membership.h"

#include "base/hash.h"
#include "base/memory.h"
#include "coordinator/refusal.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char name_prefix[] = "workers/";

void membership_init(Membership *membership, int64_t lease_ms, int64_t heartbeat_ms, uint64_t seed)
{
    CHECK(heartbeat_ms > 0 && 3 * heartbeat_ms <= lease_ms);
    *membership = (Membership){
        .lease_ms = lease_ms, .heartbeat_ms = heartbeat_ms, .rng = {seed, hash_text("membership")}};
}

void membership_done(Membership *membership)
{
    for (int i = 0; i < membership->count; i++) {
        memory_free(membership->workers[i].labels);
    }
    memory_free(membership->workers);
    membership->workers = NULL;
    membership->count = 0;
}

static const char *short_name(const char *name)
{
    size_t length = sizeof name_prefix - 1;
    return strncmp(name, name_prefix, length) == 0 ? name + length : name;
}

int membership_find_name(const Membership *membership, const char *name)
{
    const char *own = short_name(name);
    for (int i = 0; i < membership->count; i++) {
        if (strcmp(membership->workers[i].name, own) == 0) {
            return i;
        }
    }
    return -1;
}

/* Names of Kubernetes pods: letters, digits, '-', '.', '_'. */
static bool is_name(const char *text, size_t size)
{
    size_t length = strlen(text);
    return length > 0 && length < size &&
           strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._") ==
               length;
}

static bool check_worker(const Viaduct__V1__Worker *worker, RpcError *error_out)
{
    const WorkerRecord *record = NULL;
    const char *field = NULL;
    const char *expected = "";
    if (!is_name(short_name(worker->name), sizeof record->name)) {
        field = "worker.name";
        expected = "1 to 63 letters, digits, '-', '.' or '_'";
    } else if (!is_name(worker->incarnation, sizeof record->incarnation)) {
        field = "worker.incarnation";
        expected = "a UUID, new for each process";
    } else if (strcmp(worker->role, "encoder") != 0 && strcmp(worker->role, "llm") != 0) {
        field = "worker.role";
        expected = "\"encoder\" or \"llm\"";
    } else if (!worker->data_address[0] ||
               strlen(worker->data_address) >= sizeof record->data_address) {
        field = "worker.data_address";
        expected = "host:port where peers reach it";
    } else if (worker->n_labels > MEMBERSHIP_LABELS_MAX) {
        field = "worker.labels";
        expected = "at most 32";
    }
    if (field) {
        refusal_set(error_out, RPC_CODE_INVALID_ARGUMENT, "FIELD_INVALID", "%s: expected %s", field,
                    expected);
        return false;
    }
    if (worker->protocol_version != MEMBERSHIP_PROTOCOL) {
        refusal_set(error_out, RPC_CODE_FAILED_PRECONDITION, "PROTOCOL_VERSION",
                    "worker \"%s\" speaks protocol %d, this coordinator %d: run the same release",
                    worker->name, worker->protocol_version, MEMBERSHIP_PROTOCOL);
        return false;
    }
    return true;
}

static bool is_fenced(const WorkerRecord *record, const char *incarnation)
{
    for (int i = 0; i < record->num_fenced; i++) {
        if (strcmp(record->fenced[i], incarnation) == 0) {
            return true;
        }
    }
    return false;
}

static void fence(WorkerRecord *record)
{
    if (record->num_fenced == MEMBERSHIP_FENCED_MAX) {
        memmove(record->fenced[0], record->fenced[1],
                sizeof record->fenced - sizeof *record->fenced);
        record->num_fenced--;
    }
    memcpy(record->fenced[record->num_fenced++], record->incarnation, sizeof record->incarnation);
}

static Status copy_labels(WorkerRecord *record, const Viaduct__V1__Worker *worker)
{
    WorkerLabel *labels = NULL;
    TRY(MEMORY_NEW(&labels, worker->n_labels));
    for (size_t i = 0; i < worker->n_labels; i++) {
        snprintf(labels[i].key, sizeof labels[i].key, "%s", worker->labels[i]->key);
        snprintf(labels[i].value, sizeof labels[i].value, "%s", worker->labels[i]->value);
    }
    memory_free(record->labels);
    record->labels = labels;
    record->num_labels = (int)worker->n_labels;
    return STATUS_OK;
}

/* An unused slot: a new one, or when there are too many, the one longest gone. -1: all are
 * present. */
static int take_slot(Membership *membership)
{
    if (membership->count < MEMBERSHIP_WORKERS_MAX) {
        void *workers = membership->workers;
        if (memory_grow(&workers, &membership->capacity, (size_t)membership->count + 1,
                        sizeof *membership->workers) != STATUS_OK) {
            return -1;
        }
        membership->workers = workers;
        memset(&membership->workers[membership->count], 0, sizeof *membership->workers);
        return membership->count++;
    }
    int oldest = -1;
    for (int i = 0; i < membership->count; i++) {
        const WorkerRecord *worker = &membership->workers[i];
        bool is_gone = !membership_is_present(worker) && worker->job == 0;
        if (is_gone && (oldest < 0 || worker->last_heartbeat_ms <
                                          membership->workers[oldest].last_heartbeat_ms)) {
            oldest = i;
        }
    }
    if (oldest >= 0) {
        memory_free(membership->workers[oldest].labels);
        memset(&membership->workers[oldest], 0, sizeof *membership->workers);
    }
    return oldest;
}

static void write_record(Membership *membership, int slot, const Viaduct__V1__Worker *worker,
                         int64_t now_ms)
{
    WorkerRecord *record = &membership->workers[slot];
    snprintf(record->name, sizeof record->name, "%s", short_name(worker->name));
    snprintf(record->incarnation, sizeof record->incarnation, "%s", worker->incarnation);
    snprintf(record->role, sizeof record->role, "%s", worker->role);
    snprintf(record->data_address, sizeof record->data_address, "%s", worker->data_address);
    snprintf(record->control_address, sizeof record->control_address, "%s",
             worker->control_address);
    snprintf(record->software_version, sizeof record->software_version, "%s",
             worker->software_version);
    snprintf(record->lease_id, sizeof record->lease_id, "lease-%d-%016" PRIx64, slot,
             rng_bits64(membership->rng, membership->nonces++));
    record->state = WORKER_STATE(STANDBY);
    record->registered_ms = now_ms;
    record->stream_open = false;
    record->left_cleanly = false;
    membership_renew(membership, slot, now_ms);
}

bool membership_register(Membership *membership, const Viaduct__V1__Worker *worker, int64_t now_ms,
                         int *slot_out, bool *replaced_out, RpcError *error_out)
{
    *replaced_out = false;
    if (!check_worker(worker, error_out)) {
        return false;
    }
    int slot = membership_find_name(membership, worker->name);
    WorkerRecord *record = slot >= 0 ? &membership->workers[slot] : NULL;
    if (record && is_fenced(record, worker->incarnation)) {
        refusal_set(error_out, RPC_CODE_ABORTED, "FENCED",
                    "worker \"%s\": a newer process has taken this name", worker->name);
        return false;
    }
    bool is_same = record && strcmp(record->incarnation, worker->incarnation) == 0;
    if (is_same && membership_is_present(record)) {
        membership_renew(membership, slot, now_ms);
        *slot_out = slot;
        return true;
    }
    slot = slot >= 0 ? slot : take_slot(membership);
    if (slot < 0 || copy_labels(&membership->workers[slot], worker) != STATUS_OK) {
        refusal_set(error_out, RPC_CODE_RESOURCE_EXHAUSTED, "WORKERS_MAX",
                    "%d workers are registered, there is room for no more", membership->count);
        return false;
    }
    CHECK(membership->workers);
    record = &membership->workers[slot];
    if (record->incarnation[0] && !is_same) {
        fence(record);
    }
    *replaced_out = record->job != 0;
    write_record(membership, slot, worker, now_ms);
    *slot_out = slot;
    return true;
}

int membership_find_lease(const Membership *membership, const char *lease_id, RpcError *error_out)
{
    int slot = -1;
    if (sscanf(lease_id, "lease-%9d-", &slot) == 1 && slot >= 0 && slot < membership->count) {
        const WorkerRecord *worker = &membership->workers[slot];
        if (strcmp(worker->lease_id, lease_id) == 0 && membership_is_present(worker)) {
            return slot;
        }
    }
    refusal_set(error_out, RPC_CODE_NOT_FOUND, "LEASE_EXPIRED",
                "lease \"%.60s\" is over: register again", lease_id);
    return -1;
}

void membership_renew(Membership *membership, int slot, int64_t now_ms)
{
    WorkerRecord *worker = &membership->workers[slot];
    worker->last_heartbeat_ms = now_ms;
    worker->lease_deadline_ms = now_ms + membership->lease_ms;
}

int membership_expire(Membership *membership, int64_t now_ms)
{
    for (int i = 0; i < membership->count; i++) {
        const WorkerRecord *worker = &membership->workers[i];
        if (membership_is_present(worker) && now_ms >= worker->lease_deadline_ms) {
            membership_end(membership, i, WORKER_STATE(LOST));
            return i;
        }
    }
    return -1;
}

void membership_end(Membership *membership, int slot, WorkerState state)
{
    WorkerRecord *worker = &membership->workers[slot];
    worker->state = state;
    worker->left_cleanly = state == WORKER_STATE(LEFT);
}
