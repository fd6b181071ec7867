#include "train/stage_link.h"

#include "base/clock.h"
#include "base/memory.h"

#include <stdio.h>

enum {
    SENDS_MAX = COMM_REQUESTS_MAX - 1 /* under way from a chunk; one more is a receive */
};

typedef struct StageSend {
    CommTransfer transfer;
    CommRequest request;
    Comm *comm;     /* NULL: nothing is under way */
    int64_t number; /* of all sends of the link */
} StageSend;

struct StageLink {
    int stage;
    int stages;
    int chunks;
    int slots;
    Comm **comms[STAGE_FLOW_COUNT];     /* [chunks] into each chunk */
    StageSend *sends[STAGE_FLOW_COUNT]; /* [chunks * slots] */
    int64_t num_sends;
    int64_t wait_ns;
};

static Status split(Comm *pp, const char *module, StageFlow flow, int chunk, Comm **comm_out)
{
    char label[64];
    int *ranks = NULL;
    snprintf(label, sizeof label, "%s %s %d", module,
             flow == STAGE_FLOW_ACTIVATIONS ? "activations" : "activation gradients", chunk);
    TRY(MEMORY_NEW(&ranks, pp->size));
    for (int i = 0; i < pp->size; i++) {
        ranks[i] = i;
    }
    Status status = comm_split(pp, ranks, pp->size, label, comm_out);
    memory_free(ranks);
    TRY(status);
    return STATUS_OK;
}

static Status open_flows(StageLink *link, Comm *pp, const char *module)
{
    for (int f = 0; f < STAGE_FLOW_COUNT; f++) {
        TRY(memory_alloc((size_t)link->chunks, sizeof(void *), (void **)&link->comms[f]));
        TRY(MEMORY_NEW(&link->sends[f], link->chunks * link->slots));
        for (int c = 0; c < link->chunks; c++) {
            TRY(split(pp, module, f, c, &link->comms[f][c]));
        }
    }
    return STATUS_OK;
}

Status stage_link_create(Comm *pp, const char *module, int chunks, int slots, StageLink **link_out)
{
    StageLink *link = NULL;
    TRY(MEMORY_NEW(&link, 1));
    link->stage = pp->rank;
    link->stages = pp->size;
    link->chunks = chunks;
    link->slots = slots;
    Status status = open_flows(link, pp, module);
    if (status != STATUS_OK) {
        stage_link_destroy(link);
        return status_trace(status, __FILE__, __LINE__);
    }
    *link_out = link;
    return STATUS_OK;
}

void stage_link_destroy(StageLink *link)
{
    if (!link) {
        return;
    }
    for (int f = 0; f < STAGE_FLOW_COUNT; f++) {
        for (int c = 0; link->comms[f] && c < link->chunks; c++) {
            comm_destroy(link->comms[f][c]);
        }
        memory_free((void *)link->comms[f]);
        memory_free(link->sends[f]);
    }
    memory_free(link);
}

static StageSend *send_of(StageLink *link, StageFlow flow, int chunk, int slot)
{
    CHECK(chunk >= 0 && chunk < link->chunks && slot >= 0 && slot < link->slots);
    return &link->sends[flow][chunk * link->slots + slot];
}

Status stage_link_finish(StageLink *link, StageFlow flow, int chunk, int slot, Stream *stream)
{
    StageSend *send = send_of(link, flow, chunk, slot);
    Comm *comm = send->comm;
    if (!comm) {
        return STATUS_OK;
    }
    send->comm = NULL;
    return comm_wait(comm, &send->request, stream);
}

/* A pipeline of many stages has more microbatches in flight than a comm takes requests: then the
 * oldest send is waited for. */
static Status make_room(StageLink *link, StageFlow flow, int chunk, Stream *stream)
{
    int num = 0;
    int oldest = 0;
    for (int s = 0; s < link->slots; s++) {
        const StageSend *send = send_of(link, flow, chunk, s);
        if (send->comm) {
            bool is_older = num == 0 || send->number < send_of(link, flow, chunk, oldest)->number;
            oldest = is_older ? s : oldest;
            num++;
        }
    }
    return num < SENDS_MAX ? STATUS_OK : stage_link_finish(link, flow, chunk, oldest, stream);
}

Status stage_link_send(StageLink *link, const StageMessage *message, Stream *stream)
{
    StageSend *send = send_of(link, message->flow, message->chunk, message->slot);
    TRY(stage_link_finish(link, message->flow, message->chunk, message->slot, stream));
    if (message->count == 0) {
        return STATUS_OK;
    }
    if (link->slots > SENDS_MAX) {
        TRY(make_room(link, message->flow, message->chunk, stream));
    }
    bool is_next = message->flow == STAGE_FLOW_ACTIVATIONS;
    int peer = (link->stage + (is_next ? 1 : link->stages - 1)) % link->stages;
    /* Around the end of the pipeline: the next run of layers, or the one before. */
    int into = message->chunk;
    if (is_next && link->stage == link->stages - 1) {
        into++;
    } else if (!is_next && link->stage == 0) {
        into--;
    }
    CHECK(into >= 0 && into < link->chunks);
    Comm *comm = link->comms[message->flow][into];
    send->transfer = (CommTransfer){.peer = peer,
                                    .is_send = true,
                                    .data = message->data,
                                    .size_bytes = message->count * (int64_t)sizeof(float),
                                    .tag = message->tag};
    TRY(comm_start(comm, &send->transfer, 1, stream, &send->request));
    send->comm = comm;
    send->number = link->num_sends++;
    return STATUS_OK;
}

Status stage_link_recv(StageLink *link, const StageMessage *message, Stream *stream)
{
    if (message->count == 0) {
        return STATUS_OK;
    }
    bool is_next = message->flow == STAGE_FLOW_ACTIVATIONS;
    int peer = (link->stage + (is_next ? link->stages - 1 : 1)) % link->stages;
    CommTransfer transfer = {.peer = peer,
                             .data = message->data,
                             .size_bytes = message->count * (int64_t)sizeof(float),
                             .tag = message->tag};
    int64_t begin_ns = clock_now_ns();
    TRY(comm_exchange(link->comms[message->flow][message->chunk], &transfer, 1, stream));
    link->wait_ns += clock_now_ns() - begin_ns;
    return STATUS_OK;
}

Status stage_link_drain(StageLink *link, Stream *stream)
{
    for (int f = 0; f < STAGE_FLOW_COUNT; f++) {
        for (int c = 0; c < link->chunks; c++) {
            for (int s = 0; s < link->slots; s++) {
                TRY(stage_link_finish(link, f, c, s, stream));
            }
        }
    }
    return STATUS_OK;
}

double stage_link_take_wait(StageLink *link)
{
    double seconds = (double)link->wait_ns / (double)CLOCK_NS_PER_S;
    link->wait_ns = 0;
    return seconds;
}
