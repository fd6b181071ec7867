#include "comm/comm.h"

static void check_begins(const Comm *comm, const int64_t *begins)
{
    CHECK(begins[0] >= 0);
    for (int rank = 0; rank < comm->size; rank++) {
        CHECK(begins[rank] <= begins[rank + 1]);
    }
}

Status comm_split(Comm *comm, const int *ranks, int num_ranks, const char *label, Comm **comm_out)
{
    CHECK(num_ranks >= 1 && num_ranks <= comm->size && label);
    int num_own = 0;
    for (int i = 0; i < num_ranks; i++) {
        CHECK(ranks[i] >= 0 && ranks[i] < comm->size);
        num_own += ranks[i] == comm->rank;
        for (int j = 0; j < i; j++) {
            CHECK(ranks[j] != ranks[i]);
        }
    }
    CHECK(num_own == 1);
    return comm->ops->split(comm, ranks, num_ranks, label, comm_out);
}

void comm_destroy(Comm *comm)
{
    if (comm) {
        comm->ops->destroy(comm);
    }
}

Status comm_all_reduce(Comm *comm, void *data, int64_t count, DType dtype, CommReduce reduce,
                       Stream *stream)
{
    CHECK(count >= 0 && (data || count == 0));
    CHECK(dtype == DTYPE_F32 || dtype == DTYPE_F64);
    CHECK(reduce == COMM_REDUCE_SUM || reduce == COMM_REDUCE_MAX);
    return comm->ops->all_reduce(comm, data, count, dtype, reduce, stream);
}

Status comm_all_gather(Comm *comm, void *data, const int64_t *begins, Stream *stream)
{
    check_begins(comm, begins);
    CHECK(data || begins[0] == begins[comm->size]);
    return comm->ops->all_gather(comm, data, begins, stream);
}

Status comm_reduce_scatter(Comm *comm, void *data, const int64_t *begins, Stream *stream)
{
    check_begins(comm, begins);
    CHECK(data || begins[0] == begins[comm->size]);
    for (int rank = 0; rank <= comm->size; rank++) {
        CHECK(begins[rank] % (int64_t)sizeof(float) == 0);
    }
    return comm->ops->reduce_scatter(comm, data, begins, stream);
}

Status comm_broadcast(Comm *comm, void *data, int64_t size_bytes, int root, Stream *stream)
{
    CHECK(size_bytes >= 0 && (data || size_bytes == 0));
    CHECK(root >= 0 && root < comm->size);
    return comm->ops->broadcast(comm, data, size_bytes, root, stream);
}

Status comm_barrier(Comm *comm, Stream *stream)
{
    return comm->ops->barrier(comm, stream);
}

Status comm_start(Comm *comm, CommTransfer *transfers, int num_transfers, Stream *stream,
                  CommRequest *request_out)
{
    CHECK(num_transfers >= 0 && (transfers || num_transfers == 0));
    int64_t sent = 0;
    int64_t received = 0;
    for (int i = 0; i < num_transfers; i++) {
        const CommTransfer *transfer = &transfers[i];
        CHECK(transfer->peer >= 0 && transfer->peer < comm->size);
        CHECK(transfer->size_bytes >= 0 && (transfer->data || transfer->size_bytes == 0));
        if (transfer->peer != comm->rank) {
            *(transfer->is_send ? &sent : &received) += transfer->size_bytes;
        }
    }
    TRY(comm->ops->start(comm, transfers, num_transfers, stream, request_out));
    comm->bytes_sent += sent;
    comm->bytes_received += received;
    return STATUS_OK;
}

Status comm_wait(Comm *comm, CommRequest *request, Stream *stream)
{
    return comm->ops->wait(comm, request, stream);
}

Status comm_exchange(Comm *comm, CommTransfer *transfers, int num_transfers, Stream *stream)
{
    CommRequest request;
    TRY(comm_start(comm, transfers, num_transfers, stream, &request));
    return comm_wait(comm, &request, stream);
}

void comm_abort(Comm *comm, const char *reason)
{
    comm->ops->abort(comm, reason);
}
