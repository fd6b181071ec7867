#include "comm/group.h"

#include "base/hash.h"
#include "base/memory.h"
#include "comm/collective.h"

#include <stdio.h>
#include <string.h>

Status group_create(Member *member, const CommOps *ops, const char *label, int rank, int size,
                    const int *world_ranks, Group **group_out)
{
    Group *group = NULL;
    TRY(MEMORY_NEW(&group, 1));
    Status status = memory_copy_text(label, &group->label);
    if (status == STATUS_OK) {
        status = MEMORY_NEW(&group->peers, size);
    }
    if (status == STATUS_OK) {
        status = MEMORY_NEW(&group->sources, size);
    }
    if (status != STATUS_OK) {
        memory_free(group->peers);
        memory_free(group->label);
        memory_free(group);
        return status;
    }
    group->comm = (Comm){.ops = ops, .rank = rank, .size = size, .label = group->label};
    group->member = member;
    for (int peer = 0; peer < size; peer++) {
        group->peers[peer].world_rank = world_ranks[peer];
    }
    group->next = member->groups;
    member->groups = group;
    *group_out = group;
    return STATUS_OK;
}

void group_free(Group *group)
{
    Group **place = &group->member->groups;
    while (*place != group) {
        place = &(*place)->next;
    }
    *place = group->next;
    memory_free((void *)group->sources);
    memory_free(group->peers);
    memory_free(group->label);
    memory_free(group);
}

int64_t group_region_bytes(int size)
{
    int64_t pair_bytes = 0;
    for (int lane = 0; lane < LANE_COUNT; lane++) {
        pair_bytes += ring_total_bytes(lane_bytes((Lane)lane));
    }
    return pair_bytes * size * size;
}

/* Where the rings from one rank of the group to another lie in its region. */
static char *pair_place(char *region, int size, int from, int to)
{
    return region + group_region_bytes(1) * ((int64_t)from * size + to);
}

void group_link_shared(Group *group, int peer, char *region, Bell *peer_bell)
{
    char *tx = pair_place(region, group->comm.size, group->comm.rank, peer);
    char *rx = pair_place(region, group->comm.size, peer, group->comm.rank);
    for (int lane = 0; lane < LANE_COUNT; lane++) {
        Link *link = &group->peers[peer].links[lane];
        *link = (Link){.bell = peer_bell, .event_fd = -1};
        ring_attach(&link->tx, tx, lane_bytes((Lane)lane));
        ring_attach(&link->rx, rx, lane_bytes((Lane)lane));
        tx += ring_total_bytes(lane_bytes((Lane)lane));
        rx += ring_total_bytes(lane_bytes((Lane)lane));
    }
}

void group_peer_name(const Group *group, int peer, char *name, size_t name_bytes)
{
    int world_rank = group->peers[peer].world_rank;
    const char *address = group->member->names[world_rank];
    const char *comma = address[0] ? ", " : "";
    if (group->id == 0) {
        snprintf(name, name_bytes, "rank %d%s%s%s", peer, address[0] ? " (" : "", address,
                 address[0] ? ")" : "");
    } else {
        snprintf(name, name_bytes, "rank %d (rank %d of the world%s%s)", peer, world_rank, comma,
                 address);
    }
}

/* The lowest of the group's ranks that shares memory with this one, itself included. */
static int memory_leader(const Group *group)
{
    for (int peer = 0; peer < group->comm.rank; peer++) {
        if (group->member->shares_memory[group->peers[peer].world_rank]) {
            return peer;
        }
    }
    return group->comm.rank;
}

/* The new group's rank order, as world ranks, and the caller's place in it. */
static int map_ranks(const Group *parent, const int *ranks, int num_ranks, int *world_ranks)
{
    int own = -1;
    for (int i = 0; i < num_ranks; i++) {
        world_ranks[i] = parent->peers[ranks[i]].world_rank;
        own = ranks[i] == parent->comm.rank ? i : own;
    }
    return own;
}

static Status connect_split(Group *parent, Group *group, const int *ranks, int num_ranks)
{
    Member *member = parent->member;
    GroupOffer offer = {0};
    if (group->comm.rank == 0) {
        offer.group_id = ((uint64_t)member->rank << 32) | ++member->num_groups_made;
    }
    if (memory_leader(group) == group->comm.rank) {
        TRY(member->ops->offer_region(member, group, &offer.region));
    }
    uint64_t digest = hash_text(group->label);
    for (int i = 0; i < num_ranks; i++) {
        digest = hash_u64(digest, (uint64_t)ranks[i]);
    }
    TRY(collective_split(parent, ranks, num_ranks, digest, &offer));
    group->id = offer.group_id;
    return member->ops->open_links(member, group, offer);
}

Status group_split(Comm *comm, const int *ranks, int num_ranks, const char *label, Comm **comm_out)
{
    Group *parent = (Group *)comm;
    int *world_ranks = NULL;
    TRY(MEMORY_NEW(&world_ranks, num_ranks));
    int own = map_ranks(parent, ranks, num_ranks, world_ranks);
    Group *group = NULL;
    Status status =
        group_create(parent->member, comm->ops, label, own, num_ranks, world_ranks, &group);
    memory_free(world_ranks);
    if (status != STATUS_OK) {
        return status;
    }
    CHECK(group);
    group->comm.timeout_ms = comm->timeout_ms;
    status = connect_split(parent, group, ranks, num_ranks);
    if (status != STATUS_OK) {
        status = member_fail(parent, "split", status, status_message()); /* the others learn why */
        parent->member->ops->close_links(parent->member, group);
        group_free(group);
        return status;
    }
    *comm_out = &group->comm;
    return STATUS_OK;
}

void group_destroy(Comm *comm)
{
    Group *group = (Group *)comm;
    Member *member = group->member;
    bool is_world = group->id == 0;
    /* This rank may be gone before the news of a failure arrives from where it was seen; it must
     * not look like the cause. */
    char text[FAILURE_TEXT_BYTES];
    Status failure = member_failure(member, text);
    if (failure != STATUS_OK) {
        member->ops->tell_failure(member, failure, text);
    }
    member->ops->close_links(member, group);
    group_free(group);
    if (is_world) {
        CHECK(member->groups == NULL); /* children before the parent */
        member->ops->leave(member);
    }
}

void group_abort(Comm *comm, const char *reason)
{
    member_abort(((Group *)comm)->member, reason);
}
