/* Comm: a group of ranks that exchange data. Backends: local (ranks are threads of one process),
 * host (shared memory inside a host, TCP between hosts), nccl later. Each rank holds its own Comm
 * object of the group.
 *
 * Use:  all ranks of a world open it together; comm_split makes subgroups (a tensor-parallel group,
 * a boundary); then collectives and transfers. Every rank of a group must make the same collective
 * calls in the same order. The group checks that in-band: a mismatch of operation, count or order
 * is STATUS_CORRUPT and names both sides, never a hang or a wrong sum.
 *
 * Order: work follows the stream given. On backends without an asynchronous stream (local, host) a
 * collective returns when it is done. Sums add contributions in rank order, so the result is the
 * same on every rank, every run, and every backend.
 *
 * Waiting: every wait has a deadline (comm timeout), yields a few times and then sleeps; never
 * spins. A dead peer wakes all its group: STATUS_PEER_LOST naming it. After STATUS_PEER_LOST,
 * STATUS_TIMEOUT, STATUS_CORRUPT or STATUS_ABORTED the whole world is unusable; destroy it.
 *
 * Threading: all Comm objects of one rank belong to one thread (the step thread), except
 * comm_abort: any thread.
 */
#ifndef COMM_COMM_H
#define COMM_COMM_H

#include "base/status.h"
#include "device/device.h"
#include "tensor/tensor.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct Comm Comm;

/* Started and not yet waited for, per comm and rank; STATUS_EXHAUSTED beyond. */
enum {
    COMM_REQUESTS_MAX = 64
};

typedef enum CommReduce {
    COMM_REDUCE_SUM,
    COMM_REDUCE_MAX,
} CommReduce;

/* One message between this rank and `peer` (rank in this comm). Messages between a pair match in
 * the order in which both sides list them; `tag` and `size_bytes` must agree on both sides (checked
 * in-band). peer == own rank is allowed: send matches receive locally. */
typedef struct CommTransfer {
    int peer;
    bool is_send;
    void *data; /* read only when sending; must live and stay unchanged until comm_wait returns */
    int64_t size_bytes;
    uint64_t tag;
} CommTransfer;

/* A group of transfers under way. Owned by the caller, who must wait for it exactly once. Plain
 * data, so that no transfer allocates. */
typedef struct CommRequest {
    CommTransfer *transfers; /* borrowed until comm_wait returns */
    int num_transfers;
    int64_t id; /* of the backend */
} CommRequest;

typedef struct CommOps {
    const char *name;
    /* Collective over the ranks listed; others must not call. The order of `ranks` (ranks of this
     * comm) gives the new ranks. The label is copied. */
    Status (*split)(Comm *comm, const int *ranks, int num_ranks, const char *label,
                    Comm **comm_out);
    void (*destroy)(Comm *comm);
    /* In place on `data` (`count` elements of F32 or F64), = the sum or the largest over the group.
     */
    Status (*all_reduce)(Comm *comm, void *data, int64_t count, DType dtype, CommReduce reduce,
                         Stream *stream);
    /* `data` is the whole array; on entry rank r's part [begins[r], begins[r + 1]) (bytes, host
     * memory, size + 1 entries) is valid, on return all. */
    Status (*all_gather)(Comm *comm, void *data, const int64_t *begins, Stream *stream);
    /* `data` is the whole array of F32; on return rank r's part [begins[r], begins[r + 1]) (bytes,
     * multiples of 4) holds the sum; the rest is undefined. */
    Status (*reduce_scatter)(Comm *comm, void *data, const int64_t *begins, Stream *stream);
    Status (*broadcast)(Comm *comm, void *data, int64_t size_bytes, int root, Stream *stream);
    /* Returns when all ranks have called it. */
    Status (*barrier)(Comm *comm, Stream *stream);
    /* Starts sends and receives; does not wait for the peers. Copies what fits now. Reads send
     * buffers and fills receive buffers in stream order. */
    Status (*start)(Comm *comm, CommTransfer *transfers, int num_transfers, Stream *stream,
                    CommRequest *request_out);
    /* Returns when all transfers of the request are done. While any wait of a rank lasts, all its
     * started requests of all its comms move on. */
    Status (*wait)(Comm *comm, CommRequest *request, Stream *stream);
    /* Makes every present and later wait of every rank of the world return STATUS_ABORTED soon.
     * `reason` is told to the others. Idempotent. */
    void (*abort)(Comm *comm, const char *reason);
} CommOps;

struct Comm {
    const CommOps *ops;
    int rank;           /* this rank in the group */
    int size;           /* ranks in the group */
    int64_t timeout_ms; /* deadline of one operation; inherited by splits */
    const char *label;  /* for errors: "world", "llm tp" */
    /* Counters for the books, own rank only, bytes of payload through comm_start since the
     * beginning (not to itself). */
    int64_t bytes_sent;
    int64_t bytes_received;
    int64_t wait_ns; /* time spent waiting in comm_wait and collectives */
};

Status comm_split(Comm *comm, const int *ranks, int num_ranks, const char *label,
                  Comm **comm_out) STATUS_CHECKED;
void comm_destroy(Comm *comm); /* NULL is fine; children before the parent */
Status comm_all_reduce(Comm *comm, void *data, int64_t count, DType dtype, CommReduce reduce,
                       Stream *stream) STATUS_CHECKED;
Status comm_all_gather(Comm *comm, void *data, const int64_t *begins,
                       Stream *stream) STATUS_CHECKED;
Status comm_reduce_scatter(Comm *comm, void *data, const int64_t *begins,
                           Stream *stream) STATUS_CHECKED;
Status comm_broadcast(Comm *comm, void *data, int64_t size_bytes, int root,
                      Stream *stream) STATUS_CHECKED;
Status comm_barrier(Comm *comm, Stream *stream) STATUS_CHECKED;
Status comm_start(Comm *comm, CommTransfer *transfers, int num_transfers, Stream *stream,
                  CommRequest *request_out) STATUS_CHECKED;
Status comm_wait(Comm *comm, CommRequest *request, Stream *stream) STATUS_CHECKED;
/* start, then wait. */
Status comm_exchange(Comm *comm, CommTransfer *transfers, int num_transfers,
                     Stream *stream) STATUS_CHECKED;
void comm_abort(Comm *comm, const char *reason);

#endif
