/* StageLink: activations and their gradients between the pipeline stages of one module: each rank
 * with its neighbour of the same tp, cp and dp coordinates, which has the same tokens.
 *
 * A flow into one chunk has a comm of its own, so that its messages match in the order of
 * microbatches whatever else goes on between the two ranks. Threading: the step thread.
 */
#ifndef TRAIN_STAGE_LINK_H
#define TRAIN_STAGE_LINK_H

#include "comm/comm.h"

typedef struct StageLink StageLink;

typedef enum StageFlow {
    STAGE_FLOW_ACTIVATIONS, /* to the next part */
    STAGE_FLOW_GRADS,       /* to the part before */
    STAGE_FLOW_COUNT,
} StageFlow;

/* One message. */
typedef struct StageMessage {
    StageFlow flow;
    int chunk; /* of this rank */
    int slot;  /* sending: the buffer; it may be written again after stage_link_finish of it */
    float *data;
    int64_t count; /* elements; 0: nothing is sent */
    uint64_t tag;  /* the same at both ends */
} StageMessage;

/* `pp`: one rank of each stage, in their order; borrowed. `slots`: send buffers of each chunk.
 * Collective over pp. Owned: stage_link_destroy, before pp. */
Status stage_link_create(Comm *pp, const char *module, int chunks, int slots,
                         StageLink **link_out) STATUS_CHECKED;
void stage_link_destroy(StageLink *link);

/* Does not wait for the peer, unless as many sends of the chunk are under way as a comm takes: then
 * for the oldest. */
Status stage_link_send(StageLink *link, const StageMessage *message, Stream *stream) STATUS_CHECKED;
Status stage_link_recv(StageLink *link, const StageMessage *message, Stream *stream) STATUS_CHECKED;
/* Waits until what was last sent from the buffer has left; nothing when nothing was. */
Status stage_link_finish(StageLink *link, StageFlow flow, int chunk, int slot,
                         Stream *stream) STATUS_CHECKED;
/* All buffers. */
Status stage_link_drain(StageLink *link, Stream *stream) STATUS_CHECKED;

/* Seconds spent waiting for messages since the last call. */
double stage_link_take_wait(StageLink *link);

#endif
