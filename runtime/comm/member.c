#include "comm/member.h"

#include "base/clock.h"
#include "base/memory.h"
#include "comm/group.h"
#include "comm/transfer.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>

enum {
    /* With a core per rank the answer comes within a few yields; with more ranks than cores each
     * yield lets another rank work. Only then is a sleep and the peer's system call to end it the
     * cheaper way. */
    YIELDS_BEFORE_SLEEP = 40,
};

/* The state of one operation_run. */
typedef struct Wait {
    int64_t deadline_ns;
    int64_t idle_since_ns; /* 0: something moved just now */
    int num_yields;
    bool is_armed;
    uint32_t armed;
    bool saw_gone; /* a peer that we need was gone before the last look at its ring */
} Wait;

Status member_init(Member *member, const MemberOps *ops, int rank, int size)
{
    *member = (Member){.ops = ops, .rank = rank, .size = size};
    CHECK(pthread_mutex_init(&member->lock, NULL) == 0);
    TRY(MEMORY_NEW(&member->names, size));
    TRY(MEMORY_NEW(&member->shares_memory, size));
    return MEMORY_NEW(&member->peer_states, size);
}

void member_done(Member *member)
{
    memory_free(member->names);
    memory_free(member->shares_memory);
    memory_free((void *)member->peer_states);
    pthread_mutex_destroy(&member->lock);
}

static void raise_alert(Member *member)
{
    atomic_store(&member->alert, 1);
    if (member->bell) {
        bell_ring_always(member->bell);
    }
}

/* Returns true when this failure is the first. */
static bool record_failure(Member *member, Status code, const char *text)
{
    pthread_mutex_lock(&member->lock);
    bool is_first = member->failure == STATUS_OK;
    if (is_first) {
        member->failure = code;
        snprintf(member->failure_text, sizeof member->failure_text, "%s", text);
    }
    pthread_mutex_unlock(&member->lock);
    return is_first;
}

void member_note_failure(Member *member, Status code, const char *text)
{
    record_failure(member, code, text);
    raise_alert(member);
}

void member_note_peer(Member *member, int rank, PeerState state)
{
    atomic_store(&member->peer_states[rank], (int)state);
    if (state == PEER_STATE_DEAD) {
        raise_alert(member);
    } else if (member->bell) {
        bell_ring_always(member->bell);
    }
}

void member_abort(Member *member, const char *reason)
{
    if (!record_failure(member, STATUS_ABORTED, reason)) {
        return;
    }
    char text[FAILURE_TEXT_BYTES];
    snprintf(text, sizeof text, "rank %d: %s", member->rank, reason);
    member->ops->tell_failure(member, STATUS_ABORTED, text);
    raise_alert(member);
}

Status member_failure(Member *member, char text_out[FAILURE_TEXT_BYTES])
{
    pthread_mutex_lock(&member->lock);
    Status code = member->failure;
    memcpy(text_out, member->failure_text, FAILURE_TEXT_BYTES);
    pthread_mutex_unlock(&member->lock);
    return code;
}

static Status recorded_failure(const Group *group, const char *operation)
{
    char text[FAILURE_TEXT_BYTES];
    Status code = member_failure(group->member, text);
    return code == STATUS_OK ? STATUS_OK
                             : fail(code, "%s on '%s' (rank %d of %d): %s", operation,
                                    group->comm.label, group->comm.rank, group->comm.size, text);
}

Status member_fail(const Group *group, const char *operation, Status code, const char *text)
{
    Member *member = group->member;
    if (record_failure(member, code, text)) {
        char told[FAILURE_TEXT_BYTES];
        int length = snprintf(told, sizeof told, "rank %d in %s on '%s': %s", member->rank,
                              operation, group->comm.label, text);
        CHECK(length > 0);
        member->ops->tell_failure(member, code, told);
        atomic_store(&member->alert, 1);
    }
    return recorded_failure(group, operation);
}

Status member_check(const Group *group, const char *operation)
{
    Member *member = group->member;
    if (atomic_load(&member->alert) == 0) {
        return STATUS_OK;
    }
    TRY(recorded_failure(group, operation));
    for (int rank = 0; rank < member->size; rank++) {
        if (atomic_load(&member->peer_states[rank]) == PEER_STATE_DEAD) {
            char text[FAILURE_TEXT_BYTES];
            snprintf(text, sizeof text, "rank %d of the world (%s) died or was cut off", rank,
                     member->names[rank]);
            return member_fail(group, operation, STATUS_PEER_LOST, text);
        }
    }
    return STATUS_OK;
}

/* The peers of which nothing came, or else those that are not done. */
static void name_missing(const Operation *operation, char *text, size_t text_bytes)
{
    const Group *group = operation->group;
    bool is_some_silent = false;
    for (int peer = 0; peer < group->comm.size; peer++) {
        is_some_silent |= operation->need(operation->state, peer) == PEER_NEED_SILENT;
    }
    size_t used = 0;
    text[0] = '\0';
    for (int peer = 0; peer < group->comm.size; peer++) {
        PeerNeed need = operation->need(operation->state, peer);
        if (need == PEER_NEED_NOTHING || (is_some_silent && need != PEER_NEED_SILENT) ||
            used + 1 >= text_bytes) {
            continue;
        }
        char name[2 * PEER_NAME_BYTES];
        group_peer_name(group, peer, name, sizeof name);
        int length = snprintf(text + used, text_bytes - used, "%s%s", used > 0 ? ", " : "", name);
        used += length > 0 ? (size_t)length : 0;
    }
}

/* A peer that left did everything it had to for the calls that both made: what it sent lies in the
 * ring, what we sent was taken. */
static bool is_peer_missed(const Group *group, int peer, Lane lane, PeerNeed need)
{
    Link *link = &group->peers[peer].links[lane];
    const char *from = NULL;
    if (need != PEER_NEED_SEND && ring_peek(&link->rx, &from) > 0) {
        return false; /* we wait for somebody else before we take this */
    }
    if (link->is_closed) {
        return atomic_load(link->is_closed) != 0;
    }
    int world_rank = group->peers[peer].world_rank;
    return atomic_load(&group->member->peer_states[world_rank]) == PEER_STATE_LEFT;
}

/* Looks for what can never come: from a peer that left, or over a ring that is damaged. */
static Status check_needed_peers(const Operation *operation, Wait *wait)
{
    const Group *group = operation->group;
    bool is_gone = false;
    for (int peer = 0; peer < group->comm.size; peer++) {
        const Link *link = &group->peers[peer].links[operation->lane];
        PeerNeed need = operation->need(operation->state, peer);
        if (!link->bell || need == PEER_NEED_NOTHING) {
            continue;
        }
        char name[2 * PEER_NAME_BYTES];
        char text[FAILURE_TEXT_BYTES];
        if (link->tx.is_broken || link->rx.is_broken) {
            group_peer_name(group, peer, name, sizeof name);
            snprintf(text, sizeof text, "the memory shared with %s is damaged", name);
            return member_fail(group, operation->name, STATUS_CORRUPT, text);
        }
        if (!is_peer_missed(group, peer, operation->lane, need)) {
            continue;
        }
        is_gone = true;
        if (wait->saw_gone) {
            group_peer_name(group, peer, name, sizeof name);
            snprintf(text, sizeof text, "%s left while it was still needed", name);
            return member_fail(group, operation->name, STATUS_PEER_LOST, text);
        }
    }
    wait->saw_gone = is_gone;
    return STATUS_OK;
}

/* Nothing moved: gives the processor away, in the end until somebody rings. */
static Status wait_idle(const Operation *operation, Wait *wait)
{
    Group *group = operation->group;
    if (wait->idle_since_ns == 0) {
        wait->idle_since_ns = clock_now_ns();
    }
    if (wait->num_yields < YIELDS_BEFORE_SLEEP) {
        wait->num_yields++;
        sched_yield();
        return STATUS_OK;
    }
    TRY(check_needed_peers(operation, wait));
    if (wait->saw_gone) {
        return STATUS_OK; /* one more look at the rings */
    }
    if (!wait->is_armed) {
        wait->armed = bell_arm(group->member->bell);
        wait->is_armed = true;
        return STATUS_OK;
    }
    bell_sleep(group->member->bell, wait->armed, wait->deadline_ns);
    wait->is_armed = false;
    wait->num_yields = 0;
    if (!clock_is_past(wait->deadline_ns)) {
        return STATUS_OK;
    }
    TRY(member_check(group, operation->name));
    char missing[FAILURE_TEXT_BYTES / 2];
    char text[FAILURE_TEXT_BYTES];
    name_missing(operation, missing, sizeof missing);
    snprintf(text, sizeof text, "no word from %s within %lld ms", missing,
             (long long)group->comm.timeout_ms);
    return member_fail(group, operation->name, STATUS_TIMEOUT, text);
}

static void wait_moved(Group *group, Wait *wait)
{
    if (wait->is_armed) {
        bell_disarm(group->member->bell);
    }
    if (wait->idle_since_ns != 0) {
        group->comm.wait_ns += clock_now_ns() - wait->idle_since_ns;
    }
    *wait = (Wait){.deadline_ns = wait->deadline_ns};
}

/* One look at everything of this rank that may move. */
static Status progress_all(const Operation *operation, bool *moved)
{
    if (operation->progress) {
        TRY(operation->progress(operation->state, moved));
    }
    for (Group *group = operation->group->member->groups; group; group = group->next) {
        TRY(transfer_progress(group, moved));
    }
    return STATUS_OK;
}

Status operation_run(const Operation *operation)
{
    Group *group = operation->group;
    Wait wait = {.deadline_ns = clock_deadline_in_ms(group->comm.timeout_ms)};
    Status status = STATUS_OK;
    for (;;) {
        /* After a failure nothing moves any more: the callers' buffers may be gone. */
        status = member_check(group, operation->name);
        if (status != STATUS_OK) {
            break;
        }
        bool moved = false;
        status = progress_all(operation, &moved);
        if (status != STATUS_OK || operation->is_done(operation->state)) {
            break;
        }
        if (moved) {
            wait_moved(group, &wait);
            continue;
        }
        status = wait_idle(operation, &wait);
        if (status != STATUS_OK) {
            break;
        }
    }
    wait_moved(group, &wait);
    return status;
}
