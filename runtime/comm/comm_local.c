#include "comm/comm_local.h"

#include "base/memory.h"
#include "comm/collective.h"
#include "comm/group.h"
#include "comm/transfer.h"

#include <string.h>
#include <sys/mman.h>

/* The rings of one group; freed when all its ranks have closed it. */
typedef struct Region {
    struct Region *next;
    char *memory;
    size_t size_bytes;
    int num_users; /* ranks that may still use it */
} Region;

typedef struct LocalWorld LocalWorld;

typedef struct LocalMember {
    Member member; /* first */
    LocalWorld *world;
    Group *group; /* the comm of the whole world */
    bool is_here;
} LocalMember;

/* Shared by all ranks; the last to leave frees it. */
struct LocalWorld {
    pthread_mutex_t lock; /* guards what follows, and keeps members from being freed while others
                             tell them something */
    int size;
    int num_here;
    LocalMember *members; /* [size] */
    Bell *bells;          /* [size], one cache line each */
    Region *regions;
};

static size_t bells_bytes(int size)
{
    return sizeof(Bell) * (size_t)size;
}

/* Zeroed pages that cost nothing until they are touched. */
static Status map_pages(size_t size_bytes, void **memory_out)
{
    void *memory = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        return fail(STATUS_NO_MEMORY, "no address space for %zu bytes of rings", size_bytes);
    }
    *memory_out = memory;
    return STATUS_OK;
}

static void free_region(LocalWorld *world, Region *region)
{
    Region **place = &world->regions;
    while (*place != region) {
        place = &(*place)->next;
    }
    *place = region->next;
    CHECK(munmap(region->memory, region->size_bytes) == 0);
    memory_free(region);
}

static Status local_offer_region(Member *member, const Group *group, uint64_t *region_out)
{
    LocalWorld *world = ((LocalMember *)member)->world;
    Region *region = NULL;
    TRY(MEMORY_NEW(&region, 1));
    region->size_bytes = (size_t)group_region_bytes(group->comm.size);
    region->num_users = group->comm.size;
    void *memory = NULL;
    Status status = map_pages(region->size_bytes, &memory);
    if (status != STATUS_OK) {
        memory_free(region);
        return status;
    }
    region->memory = memory;
    pthread_mutex_lock(&world->lock);
    region->next = world->regions;
    world->regions = region;
    pthread_mutex_unlock(&world->lock);
    *region_out = (uint64_t)(uintptr_t)region;
    return STATUS_OK;
}

static Status local_open_links(Member *member, Group *group, GroupOffer offer)
{
    LocalWorld *world = ((LocalMember *)member)->world;
    Region *region = (Region *)(uintptr_t)offer.region; /* same address space */
    CHECK(region);
    group->backend = region;
    for (int peer = 0; peer < group->comm.size; peer++) {
        if (peer != group->comm.rank) {
            group_link_shared(group, peer, region->memory,
                              &world->bells[group->peers[peer].world_rank]);
        }
    }
    return STATUS_OK;
}

static void local_close_links(Member *member, Group *group)
{
    LocalWorld *world = ((LocalMember *)member)->world;
    Region *region = group->backend;
    if (!region) {
        return;
    }
    pthread_mutex_lock(&world->lock);
    if (--region->num_users == 0) {
        free_region(world, region);
    }
    pthread_mutex_unlock(&world->lock);
}

static void local_tell_failure(Member *member, Status code, const char *text)
{
    LocalWorld *world = ((LocalMember *)member)->world;
    pthread_mutex_lock(&world->lock);
    for (int rank = 0; rank < world->size; rank++) {
        if (world->members[rank].is_here && rank != member->rank) {
            member_note_failure(&world->members[rank].member, code, text);
        }
    }
    pthread_mutex_unlock(&world->lock);
}

static void free_world(LocalWorld *world)
{
    while (world->regions) { /* of splits that failed half-way */
        free_region(world, world->regions);
    }
    CHECK(munmap(world->bells, bells_bytes(world->size)) == 0);
    pthread_mutex_destroy(&world->lock);
    memory_free(world->members);
    memory_free(world);
}

static void local_leave(Member *member)
{
    LocalMember *own = (LocalMember *)member;
    LocalWorld *world = own->world;
    pthread_mutex_lock(&world->lock);
    own->is_here = false;
    for (int rank = 0; rank < world->size; rank++) {
        if (world->members[rank].is_here) {
            member_note_peer(&world->members[rank].member, member->rank, PEER_STATE_LEFT);
        }
    }
    member_done(member);
    bool is_last = --world->num_here == 0;
    pthread_mutex_unlock(&world->lock);
    if (is_last) {
        free_world(world);
    }
}

static const MemberOps member_ops_local = {
    .offer_region = local_offer_region,
    .open_links = local_open_links,
    .close_links = local_close_links,
    .tell_failure = local_tell_failure,
    .leave = local_leave,
};

static const CommOps comm_ops_local = {
    .name = "local",
    .split = group_split,
    .destroy = group_destroy,
    .all_reduce = collective_all_reduce,
    .all_gather = collective_all_gather,
    .reduce_scatter = collective_reduce_scatter,
    .broadcast = collective_broadcast,
    .barrier = collective_barrier,
    .start = transfer_start,
    .wait = transfer_wait,
    .abort = group_abort,
};

/* One rank's member and its comm of the whole world, without links. */
static Status join(LocalWorld *world, int rank, const int *ranks, int64_t timeout_ms)
{
    LocalMember *own = &world->members[rank];
    own->world = world;
    own->is_here = true;
    world->num_here++;
    TRY(member_init(&own->member, &member_ops_local, rank, world->size));
    own->member.bell = &world->bells[rank];
    for (int peer = 0; peer < world->size; peer++) {
        own->member.shares_memory[peer] = true;
    }
    TRY(group_create(&own->member, &comm_ops_local, "world", rank, world->size, ranks,
                     &own->group));
    own->group->comm.timeout_ms = timeout_ms;
    return STATUS_OK;
}

static Status create_world(int size, LocalWorld **world_out)
{
    LocalWorld *world = NULL;
    TRY(MEMORY_NEW(&world, 1));
    world->size = size;
    void *bells = NULL;
    Status status = MEMORY_NEW(&world->members, size);
    if (status == STATUS_OK) {
        status = map_pages(bells_bytes(size), &bells);
    }
    if (status != STATUS_OK) {
        memory_free(world->members);
        memory_free(world);
        return status;
    }
    world->bells = bells;
    CHECK(pthread_mutex_init(&world->lock, NULL) == 0);
    *world_out = world;
    return STATUS_OK;
}

static Status join_all(LocalWorld *world, int64_t timeout_ms)
{
    int *ranks = NULL;
    TRY(MEMORY_NEW(&ranks, world->size));
    for (int rank = 0; rank < world->size; rank++) {
        ranks[rank] = rank;
    }
    Status status = STATUS_OK;
    for (int rank = 0; status == STATUS_OK && rank < world->size; rank++) {
        status = join(world, rank, ranks, timeout_ms);
    }
    memory_free(ranks);
    if (status != STATUS_OK) {
        return status;
    }
    LocalMember *members = world->members;
    GroupOffer offer = {0};
    TRY(local_offer_region(&members[0].member, members[0].group, &offer.region));
    for (int rank = 0; rank < world->size; rank++) {
        TRY(local_open_links(&members[rank].member, members[rank].group, offer));
    }
    return STATUS_OK;
}

/* Undoes join_all, which may have stopped anywhere. */
static void dismiss_all(LocalWorld *world)
{
    for (int rank = 0; rank < world->num_here; rank++) {
        if (world->members[rank].group) {
            group_free(world->members[rank].group);
        }
        member_done(&world->members[rank].member);
    }
    free_world(world);
}

Status comm_local_create(int size, int64_t timeout_ms, Comm **comms_out)
{
    CHECK(size >= 1 && timeout_ms >= 0);
    LocalWorld *world = NULL;
    TRY(create_world(size, &world));
    CHECK(world);
    Status status = join_all(world, timeout_ms);
    if (status != STATUS_OK) {
        dismiss_all(world);
        return status;
    }
    for (int rank = 0; rank < size; rank++) {
        comms_out[rank] = &world->members[rank].group->comm;
    }
    return STATUS_OK;
}
