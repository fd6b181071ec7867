#include "comm/comm_paper.h"

#include "base/memory.h"

#include <stdio.h>

enum {
    LABEL_BYTES = 64
};

typedef struct CommPaper {
    Comm comm;
    char label[LABEL_BYTES];
} CommPaper;

static Status paper_split(Comm *comm, const int *ranks, int num_ranks, const char *label,
                          Comm **comm_out)
{
    int rank = 0;
    for (int i = 0; i < num_ranks; i++) {
        rank = ranks[i] == comm->rank ? i : rank;
    }
    return comm_paper_create(num_ranks, rank, label, comm_out);
}

static void paper_destroy(Comm *comm)
{
    memory_free(comm); /* its first member */
}

static Status paper_all_reduce(Comm *comm, void *data, int64_t count, DType dtype,
                               CommReduce reduce, Stream *stream)
{
    (void)comm;
    (void)data;
    (void)count;
    (void)dtype;
    (void)reduce;
    (void)stream;
    return STATUS_OK;
}

static Status paper_parts(Comm *comm, void *data, const int64_t *begins, Stream *stream)
{
    (void)comm;
    (void)data;
    (void)begins;
    (void)stream;
    return STATUS_OK;
}

static Status paper_broadcast(Comm *comm, void *data, int64_t size_bytes, int root, Stream *stream)
{
    (void)comm;
    (void)data;
    (void)size_bytes;
    (void)root;
    (void)stream;
    return STATUS_OK;
}

static Status paper_barrier(Comm *comm, Stream *stream)
{
    (void)comm;
    (void)stream;
    return STATUS_OK;
}

static Status paper_start(Comm *comm, CommTransfer *transfers, int num_transfers, Stream *stream,
                          CommRequest *request_out)
{
    (void)transfers;
    (void)num_transfers;
    (void)stream;
    (void)request_out;
    return fail(STATUS_UNSUPPORTED, "%s: a comm on paper has no peers", comm->label);
}

static Status paper_wait(Comm *comm, CommRequest *request, Stream *stream)
{
    (void)request;
    (void)stream;
    return fail(STATUS_UNSUPPORTED, "%s: a comm on paper has no peers", comm->label);
}

static void paper_abort(Comm *comm, const char *reason)
{
    (void)comm;
    (void)reason;
}

static const CommOps comm_ops_paper = {
    .name = "paper",
    .split = paper_split,
    .destroy = paper_destroy,
    .all_reduce = paper_all_reduce,
    .all_gather = paper_parts,
    .reduce_scatter = paper_parts,
    .broadcast = paper_broadcast,
    .barrier = paper_barrier,
    .start = paper_start,
    .wait = paper_wait,
    .abort = paper_abort,
};

Status comm_paper_create(int size, int rank, const char *label, Comm **comm_out)
{
    CHECK(size >= 1 && rank >= 0 && rank < size);
    CommPaper *paper = NULL;
    TRY(MEMORY_NEW(&paper, 1));
    snprintf(paper->label, sizeof paper->label, "%s", label);
    paper->comm = (Comm){.ops = &comm_ops_paper, .rank = rank, .size = size, .label = paper->label};
    *comm_out = &paper->comm;
    return STATUS_OK;
}
