#include "comm/collective.h"

#include "base/clock.h"
#include "base/hash.h"
#include "comm/reduce.h"

#include <stdio.h>
#include <string.h>

enum {
    /* Up to here (bytes to all peers together) each rank sends its whole array to all and sums for
     * itself: one exchange instead of two. Must fit into a ring, since nobody reads before it has
     * sent. */
    WHOLE_BYTES_MAX = 16 << 10,
};

_Static_assert(WHOLE_BYTES_MAX + 2 * RING_ALIGNMENT <= LANE_COLLECTIVE_BYTES / 2,
               "a whole array must fit into the ring");

typedef enum GroupOperation {
    GROUP_OPERATION_ALL_REDUCE = 1,
    GROUP_OPERATION_ALL_GATHER,
    GROUP_OPERATION_REDUCE_SCATTER,
    GROUP_OPERATION_BROADCAST,
    GROUP_OPERATION_BARRIER,
    GROUP_OPERATION_SPLIT,
    GROUP_OPERATION_COUNT,
} GroupOperation;

static const char *const operation_names[GROUP_OPERATION_COUNT] = {
    [0] = "nothing known",
    [GROUP_OPERATION_ALL_REDUCE] = "all_reduce",
    [GROUP_OPERATION_ALL_GATHER] = "all_gather",
    [GROUP_OPERATION_REDUCE_SCATTER] = "reduce_scatter",
    [GROUP_OPERATION_BROADCAST] = "broadcast",
    [GROUP_OPERATION_BARRIER] = "barrier",
    [GROUP_OPERATION_SPLIT] = "split",
};

/* The exchange under way; the part that differs per peer is in PeerStep. Ranges are bytes of
 * `data`. */
typedef struct Collective {
    Group *group;
    FrameHeader header; /* what all must agree on */
    char *data;
    Range own;      /* what this rank sums; empty: nothing */
    int64_t summed; /* bytes of `own` done */
    Range outgoing; /* the result that this rank sends to all; empty: none */
    bool is_whole;  /* everybody sums everything: `own` is also what is sent, so it may change only
                       after that */
} Collective;

static const char *operation_name(const FrameHeader *header)
{
    return operation_names[header->operation < GROUP_OPERATION_COUNT ? header->operation : 0];
}

/* "all_reduce (call 7, count 100, F32, sum)" */
static void describe(const FrameHeader *header, char *text, size_t text_bytes)
{
    const char *name = operation_name(header);
    unsigned long long call = header->sequence;
    long long count = header->count;
    switch ((GroupOperation)header->operation) {
    case GROUP_OPERATION_ALL_REDUCE:
        snprintf(text, text_bytes, "%s (call %llu, count %lld, %s, %s)", name, call, count,
                 header->dtype == DTYPE_F32 ? "F32" : "F64",
                 header->reduce == COMM_REDUCE_SUM ? "sum" : "max");
        break;
    case GROUP_OPERATION_BROADCAST:
        snprintf(text, text_bytes, "%s (call %llu, %lld bytes from rank %d)", name, call, count,
                 header->root);
        break;
    default:
        snprintf(text, text_bytes, "%s (call %llu, count %lld, of digest %016llx)", name, call,
                 count, (unsigned long long)header->digest);
        break;
    }
}

static bool headers_agree(const FrameHeader *a, const FrameHeader *b)
{
    return a->operation == b->operation && a->reduce == b->reduce && a->dtype == b->dtype &&
           a->root == b->root && a->sequence == b->sequence && a->count == b->count &&
           a->digest == b->digest;
}

/* Reads the header of what the peer sends; STATUS_CORRUPT when it is at something else. */
static Status take_header(Collective *collective, int peer, bool *moved)
{
    Group *group = collective->group;
    PeerStep *step = &group->peers[peer].step;
    Link *link = &group->peers[peer].links[LANE_COLLECTIVE];
    const char *from = NULL;
    if (ring_peek(&link->rx, &from) < (int64_t)sizeof(FrameHeader)) {
        return STATUS_OK;
    }
    FrameHeader header;
    memcpy(&header, from, sizeof header);
    char name[2 * PEER_NAME_BYTES];
    char text[FAILURE_TEXT_BYTES];
    if (header.magic != FRAME_MAGIC || header.sender != (uint32_t)peer) {
        group_peer_name(group, peer, name, sizeof name);
        snprintf(text, sizeof text, "what comes from %s is not a message", name);
        return member_fail(group, operation_name(&collective->header), STATUS_CORRUPT, text);
    }
    if (!headers_agree(&header, &collective->header)) {
        char here[96];
        char there[96];
        describe(&collective->header, here, sizeof here);
        describe(&header, there, sizeof there);
        group_peer_name(group, peer, name, sizeof name);
        snprintf(text, sizeof text,
                 "rank %d is in %s, but %s is in %s: all must make the same calls",
                 group->comm.rank, here, name, there);
        return member_fail(group, operation_name(&collective->header), STATUS_CORRUPT, text);
    }
    link_consume(link, sizeof header);
    step->offer = header.offer;
    step->is_header_seen = true;
    *moved = true;
    return STATUS_OK;
}

static bool is_contribution_sent(const PeerStep *step)
{
    return step->contribution_sent == ring_padded(range_count(step->contribution));
}

/* Header, contribution, then as much of the own result as is there. */
static void send_to(Collective *collective, int peer, bool *moved)
{
    PeerStep *step = &collective->group->peers[peer].step;
    Link *link = &collective->group->peers[peer].links[LANE_COLLECTIVE];
    int64_t header_bytes = sizeof step->header;
    if (step->header_sent < header_bytes) {
        *moved |= link_send(link, (const char *)&step->header, header_bytes, header_bytes,
                            &step->header_sent);
    }
    if (step->header_sent < header_bytes) {
        return;
    }
    int64_t bytes = range_count(step->contribution);
    if (!is_contribution_sent(step)) {
        *moved |= link_send(link, collective->data + step->contribution.begin, bytes, bytes,
                            &step->contribution_sent);
    }
    bytes = range_count(collective->outgoing);
    if (is_contribution_sent(step) && step->result_sent < ring_padded(bytes)) {
        bool is_all_there = collective->summed == range_count(collective->own);
        *moved |= link_send(link, collective->data + collective->outgoing.begin, bytes,
                            is_all_there ? bytes : collective->summed, &step->result_sent);
    }
}

/* How many bytes of the own part lie ready at all peers, where, in rank order; 0: somebody has to
 * send first. */
static int64_t gather_sources(Collective *collective)
{
    Group *group = collective->group;
    int64_t ready = range_count(collective->own) - collective->summed;
    for (int peer = 0; peer < group->comm.size; peer++) {
        if (peer == group->comm.rank) {
            group->sources[peer] = collective->data + collective->own.begin + collective->summed;
            continue;
        }
        PeerStep *step = &group->peers[peer].step;
        if (!step->is_header_seen || (collective->is_whole && !is_contribution_sent(step))) {
            return 0;
        }
        const char *from = NULL;
        int64_t readable = ring_peek(&group->peers[peer].links[LANE_COLLECTIVE].rx, &from);
        group->sources[peer] = from;
        ready = readable < ready ? readable : ready;
    }
    return ready;
}

/* Sums what lies ready, straight from the rings. Pieces start aligned, so a piece's end is the only
 * place for half an element. */
static void sum_ready(Collective *collective, bool *moved)
{
    Group *group = collective->group;
    DType dtype = (DType)collective->header.dtype;
    int64_t element_bytes = dtype_bytes(dtype);
    while (collective->summed < range_count(collective->own)) {
        int64_t ready = gather_sources(collective);
        ready = ready < REDUCE_BLOCK_BYTES ? ready : REDUCE_BLOCK_BYTES;
        int64_t count = ready / element_bytes;
        if (count == 0) {
            return;
        }
        reduce_block(collective->data + collective->own.begin + collective->summed, group->sources,
                     group->comm.size, count, dtype, (CommReduce)collective->header.reduce);
        collective->summed += count * element_bytes;
        for (int peer = 0; peer < group->comm.size; peer++) {
            if (peer != group->comm.rank) {
                link_consume(&group->peers[peer].links[LANE_COLLECTIVE], count * element_bytes);
                group->peers[peer].step.contribution_taken += count * element_bytes;
            }
        }
        *moved = true;
    }
}

/* The rest of the peer's contribution (padding) and its result. */
static void receive_from(Collective *collective, int peer, bool *moved)
{
    PeerStep *step = &collective->group->peers[peer].step;
    Link *link = &collective->group->peers[peer].links[LANE_COLLECTIVE];
    int64_t own_bytes = range_count(collective->own);
    if (!step->is_header_seen || collective->summed < own_bytes) {
        return;
    }
    if (step->contribution_taken < ring_padded(own_bytes)) {
        *moved |= link_receive(link, NULL, own_bytes, &step->contribution_taken);
    }
    int64_t bytes = range_count(step->result);
    if (step->contribution_taken == ring_padded(own_bytes) &&
        step->result_taken < ring_padded(bytes)) {
        *moved |=
            link_receive(link, collective->data + step->result.begin, bytes, &step->result_taken);
    }
}

static Status collective_progress(void *state, bool *moved)
{
    Collective *collective = state;
    Group *group = collective->group;
    for (int peer = 0; peer < group->comm.size; peer++) {
        if (group->peers[peer].step.takes_part) {
            send_to(collective, peer, moved);
        }
    }
    for (int peer = 0; peer < group->comm.size; peer++) {
        PeerStep *step = &group->peers[peer].step;
        if (step->takes_part && !step->is_header_seen) {
            TRY(take_header(collective, peer, moved));
        }
    }
    sum_ready(collective, moved);
    for (int peer = 0; peer < group->comm.size; peer++) {
        if (group->peers[peer].step.takes_part) {
            receive_from(collective, peer, moved);
        }
    }
    return STATUS_OK;
}

static PeerNeed collective_need(const void *state, int peer)
{
    const Collective *collective = state;
    const PeerStep *step = &collective->group->peers[peer].step;
    if (!step->takes_part) {
        return PEER_NEED_NOTHING;
    }
    if (!step->is_header_seen) {
        return PEER_NEED_SILENT;
    }
    if (step->header_sent < (int64_t)sizeof step->header || !is_contribution_sent(step) ||
        step->result_sent < ring_padded(range_count(collective->outgoing))) {
        return PEER_NEED_SEND;
    }
    bool is_all_here = step->contribution_taken == ring_padded(range_count(collective->own)) &&
                       step->result_taken == ring_padded(range_count(step->result));
    return is_all_here ? PEER_NEED_NOTHING : PEER_NEED_RECEIVE;
}

static bool collective_is_done(const void *state)
{
    const Collective *collective = state;
    for (int peer = 0; peer < collective->group->comm.size; peer++) {
        if (collective_need(state, peer) != PEER_NEED_NOTHING) {
            return false;
        }
    }
    return true;
}

/* A collective of the given kind in which all ranks take part, with nothing to send yet. */
static Collective begin(Comm *comm, GroupOperation operation, void *data, int64_t count)
{
    Group *group = (Group *)comm;
    Collective collective = {.group = group,
                             .data = data,
                             .header = {.magic = FRAME_MAGIC,
                                        .operation = (uint8_t)operation,
                                        .dtype = DTYPE_F32,
                                        .sender = (uint32_t)comm->rank,
                                        .sequence = group->sequence,
                                        .count = count}};
    for (int peer = 0; peer < comm->size; peer++) {
        group->peers[peer].step = (PeerStep){.takes_part = peer != comm->rank};
    }
    return collective;
}

static Status run(Collective *collective, Stream *stream)
{
    Group *group = collective->group;
    for (int peer = 0; peer < group->comm.size; peer++) {
        group->peers[peer].step.header = collective->header;
    }
    if (stream) {
        TRY(stream_wait(stream, clock_deadline_in_ms(group->comm.timeout_ms)));
    }
    if (group->comm.size == 1) {
        collective->own = (Range){0, 0}; /* the own contribution is the sum already */
    }
    Operation operation = {.group = group,
                           .name = operation_name(&collective->header),
                           .lane = LANE_COLLECTIVE,
                           .state = collective,
                           .progress = collective_progress,
                           .is_done = collective_is_done,
                           .need = collective_need};
    TRY(operation_run(&operation));
    /* A split is no call that all ranks of the group must have made. */
    group->sequence += collective->header.operation != GROUP_OPERATION_SPLIT;
    return STATUS_OK;
}

Status collective_all_reduce(Comm *comm, void *data, int64_t count, DType dtype, CommReduce reduce,
                             Stream *stream)
{
    Group *group = (Group *)comm;
    Collective collective = begin(comm, GROUP_OPERATION_ALL_REDUCE, data, count);
    int64_t element_bytes = dtype_bytes(dtype);
    collective.header.dtype = (uint8_t)dtype;
    collective.header.reduce = (uint8_t)reduce;
    collective.is_whole = count * element_bytes * (comm->size - 1) <= WHOLE_BYTES_MAX;
    for (int peer = 0; peer < comm->size; peer++) {
        PeerStep *step = &group->peers[peer].step;
        Range part = range_part(count, comm->size, peer);
        Range bytes = {part.begin * element_bytes, part.end * element_bytes};
        step->contribution = collective.is_whole ? (Range){0, count * element_bytes} : bytes;
        step->result = collective.is_whole ? (Range){0, 0} : bytes;
    }
    collective.own = group->peers[comm->rank].step.contribution;
    collective.outgoing = group->peers[comm->rank].step.result;
    return run(&collective, stream);
}

static uint64_t digest_begins(const int64_t *begins, int size)
{
    return hash_bytes(HASH_SEED, begins, sizeof *begins * ((size_t)size + 1));
}

Status collective_all_gather(Comm *comm, void *data, const int64_t *begins, Stream *stream)
{
    Group *group = (Group *)comm;
    Collective collective =
        begin(comm, GROUP_OPERATION_ALL_GATHER, data, begins[comm->size] - begins[0]);
    collective.header.digest = digest_begins(begins, comm->size);
    for (int peer = 0; peer < comm->size; peer++) {
        group->peers[peer].step.result = (Range){begins[peer], begins[peer + 1]};
    }
    collective.outgoing = group->peers[comm->rank].step.result;
    return run(&collective, stream);
}

Status collective_reduce_scatter(Comm *comm, void *data, const int64_t *begins, Stream *stream)
{
    Group *group = (Group *)comm;
    Collective collective =
        begin(comm, GROUP_OPERATION_REDUCE_SCATTER, data, begins[comm->size] - begins[0]);
    collective.header.digest = digest_begins(begins, comm->size);
    for (int peer = 0; peer < comm->size; peer++) {
        group->peers[peer].step.contribution = (Range){begins[peer], begins[peer + 1]};
    }
    collective.own = group->peers[comm->rank].step.contribution;
    return run(&collective, stream);
}

Status collective_broadcast(Comm *comm, void *data, int64_t size_bytes, int root, Stream *stream)
{
    Group *group = (Group *)comm;
    Collective collective = begin(comm, GROUP_OPERATION_BROADCAST, data, size_bytes);
    collective.header.root = root;
    if (comm->rank == root) {
        collective.outgoing = (Range){0, size_bytes};
    } else {
        group->peers[root].step.result = (Range){0, size_bytes};
    }
    return run(&collective, stream);
}

Status collective_barrier(Comm *comm, Stream *stream)
{
    Collective collective = begin(comm, GROUP_OPERATION_BARRIER, NULL, 0);
    return run(&collective, stream);
}

/* The lowest of the ranks that shares memory with this one, itself included. */
static int region_giver(const Group *group, const int *ranks, int num_ranks)
{
    for (int i = 0; i < num_ranks; i++) {
        int world_rank = group->peers[ranks[i]].world_rank;
        if (ranks[i] == group->comm.rank || group->member->shares_memory[world_rank]) {
            return ranks[i];
        }
    }
    return group->comm.rank;
}

Status collective_split(Group *group, const int *ranks, int num_ranks, uint64_t digest,
                        GroupOffer *offer)
{
    Collective collective = begin(&group->comm, GROUP_OPERATION_SPLIT, NULL, num_ranks);
    collective.header.digest = digest;
    collective.header.offer = *offer;
    for (int peer = 0; peer < group->comm.size; peer++) {
        group->peers[peer].step.takes_part = false;
    }
    for (int i = 0; i < num_ranks; i++) {
        group->peers[ranks[i]].step.takes_part = ranks[i] != group->comm.rank;
    }
    TRY(run(&collective, NULL));
    if (ranks[0] != group->comm.rank) {
        offer->group_id = group->peers[ranks[0]].step.offer.group_id;
    }
    int giver = region_giver(group, ranks, num_ranks);
    if (giver != group->comm.rank) {
        offer->region = group->peers[giver].step.offer.region;
    }
    return STATUS_OK;
}
