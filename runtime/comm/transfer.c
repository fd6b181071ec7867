#include "comm/transfer.h"

#include "base/clock.h"

#include <stdio.h>
#include <string.h>

/* The next transfer with the peer in this direction, or NULL; moves the cursor there. */
static CommTransfer *find_next(Cursor *cursor, int peer, bool is_send)
{
    while (cursor->slot) {
        for (; cursor->index < cursor->slot->num_transfers; cursor->index++) {
            CommTransfer *transfer = &cursor->slot->transfers[cursor->index];
            if (transfer->peer == peer && transfer->is_send == is_send) {
                return transfer;
            }
        }
        cursor->slot = cursor->slot->next;
        cursor->index = 0;
    }
    return NULL;
}

/* The transfer under the cursor is done. */
static void advance(Cursor *cursor)
{
    cursor->slot->num_left--;
    cursor->index++;
    cursor->is_headed = false;
    cursor->header_position = 0;
    cursor->position = 0;
    cursor->count++;
}

static void send_all(Group *group, int peer, bool *moved)
{
    Cursor *cursor = &group->peers[peer].sends;
    Link *link = &group->peers[peer].links[LANE_TRANSFER];
    CommTransfer *transfer = NULL;
    while ((transfer = find_next(cursor, peer, true)) != NULL) {
        FrameHeader header = {.magic = FRAME_MAGIC,
                              .sender = (uint32_t)group->comm.rank,
                              .sequence = cursor->count,
                              .count = transfer->size_bytes,
                              .digest = transfer->tag};
        if (cursor->header_position < (int64_t)sizeof header) {
            *moved |= link_send(link, (const char *)&header, sizeof header, sizeof header,
                                &cursor->header_position);
        }
        if (cursor->header_position < (int64_t)sizeof header) {
            return;
        }
        int64_t end = ring_padded(transfer->size_bytes);
        if (cursor->position < end) {
            *moved |= link_send(link, transfer->data, transfer->size_bytes, transfer->size_bytes,
                                &cursor->position);
        }
        if (cursor->position < end) {
            return;
        }
        advance(cursor);
    }
}

/* Reads the header of the next message and compares it with what this rank listed. */
static Status take_header(Group *group, int peer, const CommTransfer *transfer)
{
    Cursor *cursor = &group->peers[peer].receives;
    Link *link = &group->peers[peer].links[LANE_TRANSFER];
    const char *from = NULL;
    if (ring_peek(&link->rx, &from) < (int64_t)sizeof(FrameHeader)) {
        return STATUS_OK;
    }
    FrameHeader header;
    memcpy(&header, from, sizeof header);
    char name[2 * PEER_NAME_BYTES];
    char text[FAILURE_TEXT_BYTES];
    if (header.magic != FRAME_MAGIC || header.sender != (uint32_t)peer ||
        header.sequence != cursor->count) {
        group_peer_name(group, peer, name, sizeof name);
        snprintf(text, sizeof text, "what comes from %s is not message %llu", name,
                 (unsigned long long)cursor->count);
        return member_fail(group, "receive", STATUS_CORRUPT, text);
    }
    if (header.count != transfer->size_bytes || header.digest != transfer->tag) {
        group_peer_name(group, peer, name, sizeof name);
        snprintf(
            text, sizeof text,
            "message %llu from %s has tag %llu and %lld bytes, but rank %d expects tag %llu and "
            "%lld bytes: both sides must list the same transfers in the same order",
            (unsigned long long)cursor->count, name, (unsigned long long)header.digest,
            (long long)header.count, group->comm.rank, (unsigned long long)transfer->tag,
            (long long)transfer->size_bytes);
        return member_fail(group, "receive", STATUS_CORRUPT, text);
    }
    link_consume(link, sizeof header);
    cursor->is_headed = true;
    return STATUS_OK;
}

static Status receive_all(Group *group, int peer, bool *moved)
{
    Cursor *cursor = &group->peers[peer].receives;
    Link *link = &group->peers[peer].links[LANE_TRANSFER];
    CommTransfer *transfer = NULL;
    while ((transfer = find_next(cursor, peer, false)) != NULL) {
        if (!cursor->is_headed) {
            TRY(take_header(group, peer, transfer));
            *moved |= cursor->is_headed;
        }
        if (!cursor->is_headed) {
            return STATUS_OK;
        }
        int64_t end = ring_padded(transfer->size_bytes);
        if (cursor->position < end) {
            *moved |= link_receive(link, transfer->data, transfer->size_bytes, &cursor->position);
        }
        if (cursor->position < end) {
            return STATUS_OK;
        }
        advance(cursor);
    }
    return STATUS_OK;
}

/* Messages to the own rank: the next send into the next receive. */
static Status copy_own(Group *group, bool *moved)
{
    GroupPeer *own = &group->peers[group->comm.rank];
    for (;;) {
        CommTransfer *send = find_next(&own->sends, group->comm.rank, true);
        CommTransfer *receive = find_next(&own->receives, group->comm.rank, false);
        if (!send || !receive) {
            return STATUS_OK;
        }
        if (send->tag != receive->tag || send->size_bytes != receive->size_bytes) {
            char text[FAILURE_TEXT_BYTES];
            snprintf(text, sizeof text,
                     "rank %d sends itself tag %llu and %lld bytes, but expects tag %llu and %lld "
                     "bytes",
                     group->comm.rank, (unsigned long long)send->tag, (long long)send->size_bytes,
                     (unsigned long long)receive->tag, (long long)receive->size_bytes);
            return member_fail(group, "receive", STATUS_CORRUPT, text);
        }
        if (send->size_bytes > 0) {
            memmove(receive->data, send->data, (size_t)send->size_bytes);
        }
        advance(&own->sends);
        advance(&own->receives);
        *moved = true;
    }
}

Status transfer_progress(Group *group, bool *moved)
{
    if (!group->first_slot) {
        return STATUS_OK;
    }
    for (int peer = 0; peer < group->comm.size; peer++) {
        if (peer == group->comm.rank) {
            TRY(copy_own(group, moved));
        } else {
            send_all(group, peer, moved);
            TRY(receive_all(group, peer, moved));
        }
    }
    return STATUS_OK;
}

static void append_slot(Group *group, RequestSlot *slot)
{
    slot->previous = group->last_slot;
    slot->next = NULL;
    if (group->last_slot) {
        group->last_slot->next = slot;
    } else {
        group->first_slot = slot;
    }
    group->last_slot = slot;
    for (int peer = 0; peer < group->comm.size; peer++) {
        Cursor *cursors[] = {&group->peers[peer].sends, &group->peers[peer].receives};
        for (int i = 0; i < 2; i++) {
            if (!cursors[i]->slot) {
                cursors[i]->slot = slot;
                cursors[i]->index = 0;
            }
        }
    }
}

static void remove_slot(Group *group, RequestSlot *slot)
{
    for (int peer = 0; peer < group->comm.size; peer++) {
        Cursor *cursors[] = {&group->peers[peer].sends, &group->peers[peer].receives};
        for (int i = 0; i < 2; i++) {
            if (cursors[i]->slot == slot) {
                cursors[i]->slot = slot->next;
                cursors[i]->index = 0;
            }
        }
    }
    *(slot->previous ? &slot->previous->next : &group->first_slot) = slot->next;
    *(slot->next ? &slot->next->previous : &group->last_slot) = slot->previous;
    slot->is_used = false;
}

Status transfer_start(Comm *comm, CommTransfer *transfers, int num_transfers, Stream *stream,
                      CommRequest *request_out)
{
    Group *group = (Group *)comm;
    TRY(member_check(group, "start"));
    int id = 0;
    while (id < GROUP_REQUESTS_MAX && group->slots[id].is_used) {
        id++;
    }
    if (id == GROUP_REQUESTS_MAX) {
        return fail(STATUS_EXHAUSTED,
                    "start on '%s': %d requests are started and not waited for; wait for one first",
                    comm->label, GROUP_REQUESTS_MAX);
    }
    if (stream) {
        TRY(stream_wait(stream, clock_deadline_in_ms(comm->timeout_ms)));
    }
    RequestSlot *slot = &group->slots[id];
    *slot = (RequestSlot){.transfers = transfers,
                          .num_transfers = num_transfers,
                          .num_left = num_transfers,
                          .is_used = true};
    append_slot(group, slot);
    bool moved = false;
    Status status = transfer_progress(group, &moved);
    if (status != STATUS_OK) {
        remove_slot(group, slot);
        return status_trace(status, __FILE__, __LINE__);
    }
    *request_out = (CommRequest){.transfers = transfers, .num_transfers = num_transfers, .id = id};
    return STATUS_OK;
}

/* A wait for one request; `slot` is among the group's. */
typedef struct TransferWait {
    const Group *group;
    const RequestSlot *slot;
} TransferWait;

static bool wait_is_done(const void *state)
{
    return ((const TransferWait *)state)->slot->num_left == 0;
}

/* A cursor that has not passed the request still has something of it to do, or of one before it. */
static bool is_pending(const Cursor *cursor, const RequestSlot *slot, int peer, bool is_send)
{
    int first = 0;
    const RequestSlot *at = cursor->slot;
    while (at && at != slot) {
        at = at->next;
    }
    if (!at) {
        return false;
    }
    first = cursor->slot == slot ? cursor->index : 0;
    for (int i = first; i < slot->num_transfers; i++) {
        if (slot->transfers[i].peer == peer && slot->transfers[i].is_send == is_send) {
            return true;
        }
    }
    return false;
}

static PeerNeed wait_need(const void *state, int peer)
{
    const TransferWait *wait = state;
    const GroupPeer *other = &wait->group->peers[peer];
    if (is_pending(&other->sends, wait->slot, peer, true)) {
        return PEER_NEED_SEND;
    }
    return is_pending(&other->receives, wait->slot, peer, false) ? PEER_NEED_RECEIVE
                                                                 : PEER_NEED_NOTHING;
}

Status transfer_wait(Comm *comm, CommRequest *request, Stream *stream)
{
    (void)stream; /* what follows on the stream runs after this call returned */
    Group *group = (Group *)comm;
    CHECK(request->id >= 0 && request->id < GROUP_REQUESTS_MAX);
    RequestSlot *slot = &group->slots[request->id];
    CHECK(slot->is_used && slot->transfers == request->transfers);
    TransferWait wait = {.group = group, .slot = slot};
    Operation operation = {.group = group,
                           .name = "transfer",
                           .lane = LANE_TRANSFER,
                           .state = &wait,
                           .is_done = wait_is_done,
                           .need = wait_need};
    Status status = operation_run(&operation);
    remove_slot(group, slot);
    return status == STATUS_OK ? STATUS_OK : status_trace(status, __FILE__, __LINE__);
}
