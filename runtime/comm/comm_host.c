#include "comm/comm_host.h"

#include "base/clock.h"
#include "base/hash.h"
#include "base/memory.h"
#include "comm/collective.h"
#include "comm/endpoint.h"
#include "comm/group.h"
#include "comm/transfer.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    PAGE_BYTES = 4096,
    CONNECT_MS =
        2000, /* one attempt: a host that does not answer must not hide which others are missing */
    RETRY_MIN_MS = 1,
    RETRY_MAX_MS = 20,
    SEGMENT_VERSION = 1,
};

#define SEGMENT_MAGIC UINT64_C(0x5365676d656e7431)
#define SEGMENT_BYTES \
    (INT64_C(1)       \
     << 40) /* never filled: pages exist once touched, and regions are never given back */

/* What the ranks of one host share, before the regions of rings. */
typedef struct Segment {
    uint64_t magic;
    uint32_t version;
    int32_t world_size;
    _Atomic int64_t next_region; /* offset in bytes */
    char unused[40];
    Bell bells[]; /* [world size] */
} Segment;

_Static_assert(sizeof(Segment) == 64, "bells lie on cache lines");

/* What a group of this backend holds. */
typedef struct HostGroup {
    char *region; /* rings shared with others, mapped; NULL: none */
    size_t region_bytes;
    Channel *lanes; /* [num_lanes] to ranks of other hosts */
    int num_lanes;
} HostGroup;

static int64_t round_to_pages(int64_t size_bytes)
{
    return (size_bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

static int64_t segment_head_bytes(int world_size)
{
    return round_to_pages((int64_t)(sizeof(Segment) + sizeof(Bell) * (size_t)world_size));
}

/* Maps part of the shared memory. */
static Status map_memory(const HostWorld *world, int64_t offset, int64_t size_bytes,
                         void **memory_out)
{
    void *memory = mmap(NULL, (size_t)size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                        world->memory_fd, offset);
    if (memory == MAP_FAILED) {
        return fail(STATUS_NO_MEMORY, "cannot map %lld bytes of shared memory: %s",
                    (long long)size_bytes, strerror(errno));
    }
    *memory_out = memory;
    return STATUS_OK;
}

/* A nameless file in memory: it is gone with the last process that holds it, however that ends. */
static Status make_memory(HostWorld *world)
{
    int fd = memfd_create("viaduct-comm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) {
        return fail(STATUS_IO, "cannot make shared memory: %s", strerror(errno));
    }
    if (ftruncate(fd, SEGMENT_BYTES) != 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        Status status = fail(STATUS_IO, "cannot size shared memory: %s", strerror(errno));
        close(fd);
        return status;
    }
    world->memory_fd = fd;
    world->memory_from = world->member.rank;
    void *memory = NULL;
    TRY(map_memory(world, 0, segment_head_bytes(world->member.size), &memory));
    CHECK(memory);
    world->segment = memory;
    world->segment->magic = SEGMENT_MAGIC;
    world->segment->version = SEGMENT_VERSION;
    world->segment->world_size = world->member.size;
    int64_t first_region = segment_head_bytes(world->member.size);
    atomic_store(&world->segment->next_region,
                 first_region + round_to_pages(group_region_bytes(world->member.size)));
    return STATUS_OK;
}

/* Opens the memory that came from the lowest rank of the host. */
static Status open_memory(HostWorld *world)
{
    struct stat info;
    int seals = fcntl(world->memory_fd, F_GET_SEALS);
    if (fstat(world->memory_fd, &info) != 0 || info.st_size != SEGMENT_BYTES || seals < 0 ||
        !(seals & F_SEAL_SHRINK)) {
        return fail(STATUS_CORRUPT, "rank %d sent a descriptor that is not its shared memory",
                    world->memory_from);
    }
    void *memory = NULL;
    TRY(map_memory(world, 0, segment_head_bytes(world->member.size), &memory));
    CHECK(memory);
    world->segment = memory;
    if (world->segment->magic != SEGMENT_MAGIC || world->segment->version != SEGMENT_VERSION ||
        world->segment->world_size != world->member.size) {
        return fail(STATUS_CORRUPT, "the shared memory of rank %d is of another world or version",
                    world->memory_from);
    }
    return STATUS_OK;
}

/* Says Hello and reads the answer. False: the connection is of no use (yet). */
static bool greet(HostWorld *world, const Channel *channel, int fd, int64_t deadline_ns,
                  HelloReply *reply_out)
{
    Hello hello = {.magic = HELLO_MAGIC,
                   .version = HELLO_VERSION,
                   .lane = channel->lane,
                   .key = world->key,
                   .digest = world->digest,
                   .group_id = channel->group_id,
                   .from = world->member.rank,
                   .to = channel->peer};
    if (send(fd, &hello, sizeof hello, MSG_NOSIGNAL) != (ssize_t)sizeof hello) {
        return false;
    }
    size_t used = 0;
    while (used < sizeof *reply_out) {
        if (!address_wait(fd, POLLIN, deadline_ns)) {
            return false;
        }
        ssize_t received = recv(fd, (char *)reply_out + used, sizeof *reply_out - used, 0);
        if (received <= 0 && !(received < 0 && (errno == EAGAIN || errno == EINTR))) {
            return false;
        }
        used += received > 0 ? (size_t)received : 0;
    }
    return reply_out->magic == HELLO_MAGIC;
}

/* A socket to the peer, over the Unix socket if it is in the same network namespace; -1: not now.
 */
static int reach(HostWorld *world, const Channel *channel, int64_t deadline_ns, bool *is_unix_out)
{
    const Address *address = &world->addresses[channel->peer];
    bool may_be_unix = channel->lane == CHANNEL_CONTROL && !world->tcp_only && !channel->is_remote;
    int fd = may_be_unix ? address_connect_unix(address) : -1;
    int tcp_fd = -1;
    if (fd < 0) {
        int64_t attempt_ns = clock_deadline_in_ms(CONNECT_MS);
        tcp_fd = address_connect_tcp(address, attempt_ns < deadline_ns ? attempt_ns : deadline_ns);
        /* An endpoint listens on its Unix socket before its TCP port: if it came up just now, the
         * Unix socket is there by now. */
        fd = tcp_fd >= 0 && may_be_unix ? address_connect_unix(address) : -1;
    }
    *is_unix_out = fd >= 0;
    if (fd < 0) {
        return tcp_fd;
    }
    if (tcp_fd >= 0) {
        close(tcp_fd);
    }
    if (!address_is_same_user(fd)) {
        close(fd);
        return -1;
    }
    return fd;
}

/* One attempt. STATUS_OK without a connection: try again later. */
static Status dial(HostWorld *world, Channel *channel, int64_t deadline_ns)
{
    bool is_unix = false;
    int fd = reach(world, channel, deadline_ns, &is_unix);
    HelloReply reply = {0};
    if (fd < 0) {
        return STATUS_OK;
    }
    bool is_heard = greet(world, channel, fd, deadline_ns, &reply);
    if (!is_heard || reply.verdict == VERDICT_LATER || reply.verdict == VERDICT_USE_TCP) {
        channel->is_remote |= is_heard && reply.verdict == VERDICT_USE_TCP;
        close(fd);
        return STATUS_OK;
    }
    const char *address = world->addresses[channel->peer].text;
    Status status = STATUS_OK;
    if (reply.verdict == VERDICT_ACCEPTED) {
        pthread_mutex_lock(&world->endpoint->lock);
        status = channel_connect(world->endpoint, channel, fd, is_unix);
        pthread_mutex_unlock(&world->endpoint->lock);
    } else if (reply.verdict == VERDICT_VERSION) {
        status = fail(STATUS_UNSUPPORTED, "rank %d (%s) speaks version %u, this is version %d",
                      channel->peer, address, reply.version, HELLO_VERSION);
    } else if (reply.verdict == VERDICT_MISMATCH) {
        status = fail(STATUS_CONFLICT,
                      "rank %d (%s) has opened this key with other members, or with another order "
                      "of them",
                      channel->peer, address);
    } else {
        status = fail(STATUS_CONFLICT, "rank %d (%s) has a connection with a rank %d already",
                      channel->peer, address, world->member.rank);
    }
    if (status != STATUS_OK) {
        close(fd);
    }
    return status;
}

static bool was_connected(HostWorld *world, const Channel *channel)
{
    pthread_mutex_lock(&world->endpoint->lock);
    bool answer = channel->was_connected;
    pthread_mutex_unlock(&world->endpoint->lock);
    return answer;
}

static void wait_for_change(HostWorld *world, int64_t until_ns)
{
    struct timespec until = clock_timespec(until_ns);
    pthread_mutex_lock(&world->endpoint->lock);
    pthread_cond_timedwait(&world->endpoint->changed, &world->endpoint->lock, &until);
    pthread_mutex_unlock(&world->endpoint->lock);
}

static Status fail_missing(const Group *group, const Channel *channels, int num_channels)
{
    HostWorld *world = (HostWorld *)group->member;
    char text[FAILURE_TEXT_BYTES];
    size_t used = (size_t)snprintf(text, sizeof text, "no connection in time with");
    int last_peer = -1;
    for (int i = 0; i < num_channels; i++) {
        int peer = channels[i].peer;
        if (was_connected(world, &channels[i]) || peer == last_peer || used >= sizeof text - 1) {
            continue;
        }
        int length = snprintf(text + used, sizeof text - used, "%s rank %d (%s)",
                              last_peer >= 0 ? "," : "", peer, world->addresses[peer].text);
        used += length > 0 ? (size_t)length : 0;
        last_peer = peer;
    }
    return member_fail(group, "connect", STATUS_TIMEOUT, text);
}

/* Dials the lower ranks and waits for the higher ones, until all channels are connected. */
static Status connect_channels(const Group *group, Channel *channels, int num_channels,
                               int64_t deadline_ns)
{
    HostWorld *world = (HostWorld *)group->member;
    for (int64_t retry_ms = RETRY_MIN_MS;; retry_ms *= retry_ms < RETRY_MAX_MS ? 2 : 1) {
        int num_missing = 0;
        for (int i = 0; i < num_channels; i++) {
            TRY(member_check(group, "connect"));
            if (was_connected(world, &channels[i])) {
                continue;
            }
            if (channels[i].peer < world->member.rank) {
                TRY(dial(world, &channels[i], deadline_ns));
            }
            num_missing += !was_connected(world, &channels[i]);
        }
        if (num_missing == 0) {
            return STATUS_OK;
        }
        if (clock_is_past(deadline_ns)) {
            return fail_missing(group, channels, num_channels);
        }
        int64_t retry_ns = clock_deadline_in_ms(retry_ms);
        wait_for_change(world, retry_ns < deadline_ns ? retry_ns : deadline_ns);
    }
}

/* The lowest rank of each host makes the memory and hands it to the others. */
static Status share_memory(const Group *group, int64_t deadline_ns)
{
    HostWorld *world = (HostWorld *)group->member;
    Member *member = &world->member;
    CommEndpoint *endpoint = world->endpoint;
    pthread_mutex_lock(&endpoint->lock);
    int leader = member->rank;
    for (int rank = member->size - 1; rank >= 0; rank--) {
        member->shares_memory[rank] = rank == member->rank || world->controls[rank].is_unix;
        leader = member->shares_memory[rank] && rank < leader ? rank : leader;
    }
    pthread_mutex_unlock(&endpoint->lock);
    if (leader == member->rank) {
        TRY(make_memory(world));
    }
    for (;;) {
        TRY(member_check(group, "connect"));
        pthread_mutex_lock(&endpoint->lock);
        bool is_there = world->memory_fd >= 0;
        for (int rank = leader + 1; is_there && leader == member->rank && rank < member->size;
             rank++) {
            if (member->shares_memory[rank]) {
                control_send(endpoint, &world->controls[rank], CONTROL_MEMORY, STATUS_OK, "",
                             world->memory_fd);
            }
        }
        pthread_mutex_unlock(&endpoint->lock);
        if (is_there) {
            break;
        }
        if (clock_is_past(deadline_ns)) {
            char text[FAILURE_TEXT_BYTES];
            snprintf(text, sizeof text, "rank %d (%s) did not share its memory in time", leader,
                     member->names[leader]);
            return member_fail(group, "connect", STATUS_TIMEOUT, text);
        }
        wait_for_change(world, deadline_ns);
    }
    if (leader != member->rank) {
        TRY(open_memory(world));
    }
    pthread_mutex_lock(&endpoint->lock);
    member->bell = &world->segment->bells[member->rank];
    pthread_mutex_unlock(&endpoint->lock);
    return STATUS_OK;
}

static Status host_offer_region(Member *member, const Group *group, uint64_t *region_out)
{
    HostWorld *world = (HostWorld *)member;
    int64_t size_bytes = round_to_pages(group_region_bytes(group->comm.size));
    int64_t offset = atomic_fetch_add(&world->segment->next_region, size_bytes);
    if (offset < 0 || offset > SEGMENT_BYTES - size_bytes) {
        return fail(STATUS_EXHAUSTED,
                    "split: the world's shared memory has no room for more groups");
    }
    *region_out = (uint64_t)offset;
    return STATUS_OK;
}

/* Rings with the ranks of this host. */
static Status open_shared(HostWorld *world, Group *group, uint64_t region)
{
    HostGroup *own = group->backend;
    int64_t size_bytes = round_to_pages(group_region_bytes(group->comm.size));
    if (region % PAGE_BYTES != 0 || region < (uint64_t)segment_head_bytes(world->member.size) ||
        region > (uint64_t)(SEGMENT_BYTES - size_bytes)) {
        return fail(STATUS_CORRUPT, "split of '%s': a region of rings at offset %llu cannot be",
                    group->label, (unsigned long long)region);
    }
    void *memory = NULL;
    TRY(map_memory(world, (int64_t)region, size_bytes, &memory));
    own->region = memory;
    own->region_bytes = (size_t)size_bytes;
    for (int peer = 0; peer < group->comm.size; peer++) {
        int world_rank = group->peers[peer].world_rank;
        if (peer != group->comm.rank && world->member.shares_memory[world_rank]) {
            group_link_shared(group, peer, own->region, &world->segment->bells[world_rank]);
        }
    }
    return STATUS_OK;
}

/* Two rings inside this process between the rank and the endpoint's thread. */
static Status init_lane(HostWorld *world, Group *group, int peer, Lane lane, Channel *channel)
{
    *channel = (Channel){.world = world,
                         .peer = group->peers[peer].world_rank,
                         .lane = lane,
                         .group_id = group->id,
                         .watch = -1};
    int64_t ring_bytes = ring_total_bytes(lane_bytes(lane));
    void *memory = mmap(NULL, 2 * (size_t)ring_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        return fail(STATUS_NO_MEMORY, "no memory for the rings of '%s'", group->label);
    }
    channel->memory = memory;
    Link *link = &group->peers[peer].links[lane];
    *link = (Link){.bell = &world->endpoint->bell,
                   .event_fd = world->endpoint->event_fd,
                   .is_closed = &channel->is_closed};
    ring_attach(&link->tx, channel->memory, lane_bytes(lane));
    ring_attach(&channel->drain, channel->memory, lane_bytes(lane));
    ring_attach(&link->rx, channel->memory + ring_bytes, lane_bytes(lane));
    ring_attach(&channel->fill, channel->memory + ring_bytes, lane_bytes(lane));
    return STATUS_OK;
}

static Status make_lanes(HostWorld *world, Group *group)
{
    HostGroup *own = group->backend;
    int num_remote = 0;
    for (int peer = 0; peer < group->comm.size; peer++) {
        num_remote += !world->member.shares_memory[group->peers[peer].world_rank];
    }
    TRY(MEMORY_NEW(&own->lanes, num_remote * LANE_COUNT));
    for (int peer = 0; peer < group->comm.size; peer++) {
        if (world->member.shares_memory[group->peers[peer].world_rank]) {
            continue;
        }
        for (int lane = 0; lane < LANE_COUNT; lane++) {
            TRY(init_lane(world, group, peer, (Lane)lane, &own->lanes[own->num_lanes]));
            own->num_lanes++;
        }
    }
    pthread_mutex_lock(&world->endpoint->lock);
    for (int i = 0; i < own->num_lanes; i++) {
        own->lanes[i].next = world->lanes;
        world->lanes = &own->lanes[i];
    }
    pthread_mutex_unlock(&world->endpoint->lock);
    return STATUS_OK;
}

static Status open_links_by(HostWorld *world, Group *group, uint64_t region, int64_t deadline_ns)
{
    HostGroup *own = NULL;
    TRY(MEMORY_NEW(&own, 1));
    group->backend = own;
    TRY(open_shared(world, group, region));
    TRY(make_lanes(world, group));
    return connect_channels(group, own->lanes, own->num_lanes, deadline_ns);
}

static Status host_open_links(Member *member, Group *group, GroupOffer offer)
{
    return open_links_by((HostWorld *)member, group, offer.region,
                         clock_deadline_in_ms(group->comm.timeout_ms));
}

/* Waits until what this rank sent has left its rings; not after a failure. */
static void flush_lanes(HostWorld *world, HostGroup *own, int64_t deadline_ns)
{
    for (;;) {
        bool is_drained = true;
        pthread_mutex_lock(&world->endpoint->lock);
        for (int i = 0; i < own->num_lanes; i++) {
            bool is_open = own->lanes[i].watch >= 0;
            is_drained &= !is_open || lane_is_drained(&own->lanes[i]);
        }
        pthread_mutex_unlock(&world->endpoint->lock);
        if (is_drained || atomic_load(&world->member.alert) != 0 || clock_is_past(deadline_ns)) {
            return;
        }
        int64_t look_ns = clock_deadline_in_ms(RETRY_MAX_MS);
        wait_for_change(world, look_ns < deadline_ns ? look_ns : deadline_ns);
    }
}

static void forget_lane(HostWorld *world, const Channel *channel)
{
    Channel **place = &world->lanes;
    while (*place && *place != channel) {
        place = &(*place)->next;
    }
    if (*place) {
        *place = channel->next;
    }
}

static void host_close_links(Member *member, Group *group)
{
    HostWorld *world = (HostWorld *)member;
    HostGroup *own = group->backend;
    if (!own) {
        return;
    }
    flush_lanes(world, own, clock_deadline_in_ms(group->comm.timeout_ms));
    pthread_mutex_lock(&world->endpoint->lock);
    for (int i = 0; i < own->num_lanes; i++) {
        forget_lane(world, &own->lanes[i]);
        channel_disconnect(world->endpoint, &own->lanes[i]);
    }
    pthread_mutex_unlock(&world->endpoint->lock);
    for (int i = 0; i < own->num_lanes; i++) {
        size_t ring_bytes = (size_t)ring_total_bytes(lane_bytes((Lane)own->lanes[i].lane));
        CHECK(munmap(own->lanes[i].memory, 2 * ring_bytes) == 0);
    }
    if (own->region) {
        CHECK(munmap(own->region, own->region_bytes) == 0);
    }
    memory_free(own->lanes);
    memory_free(own);
    group->backend = NULL;
}

static void host_tell_failure(Member *member, Status code, const char *text)
{
    HostWorld *world = (HostWorld *)member;
    pthread_mutex_lock(&world->endpoint->lock);
    for (int rank = 0; rank < member->size; rank++) {
        control_send(world->endpoint, &world->controls[rank], CONTROL_FAILURE, code, text, -1);
    }
    pthread_mutex_unlock(&world->endpoint->lock);
}

static void free_world(HostWorld *world)
{
    if (world->segment) {
        CHECK(munmap(world->segment, (size_t)segment_head_bytes(world->member.size)) == 0);
    }
    if (world->memory_fd >= 0) {
        close(world->memory_fd);
    }
    member_done(&world->member);
    memory_free(world->addresses);
    memory_free(world->controls);
    memory_free(world);
}

static void host_leave(Member *member)
{
    HostWorld *world = (HostWorld *)member;
    CommEndpoint *endpoint = world->endpoint;
    pthread_mutex_lock(&endpoint->lock);
    HostWorld **place = &endpoint->worlds;
    while (*place != world) {
        place = &(*place)->next;
    }
    *place = world->next;
    for (int rank = 0; rank < member->size; rank++) {
        control_send(endpoint, &world->controls[rank], CONTROL_LEAVE, STATUS_OK, "", -1);
        channel_disconnect(endpoint, &world->controls[rank]);
    }
    pthread_mutex_unlock(&endpoint->lock);
    free_world(world);
}

static const MemberOps member_ops_host = {
    .offer_region = host_offer_region,
    .open_links = host_open_links,
    .close_links = host_close_links,
    .tell_failure = host_tell_failure,
    .leave = host_leave,
};

static const CommOps comm_ops_host = {
    .name = "host",
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

/* Members' addresses in numbers; all must agree on them, on their order and on the transport. */
static Status fill_in_members(HostWorld *world, const CommHostWorld *options)
{
    world->digest = hash_u64(HASH_SEED, (uint64_t)options->size);
    for (int rank = 0; rank < options->size; rank++) {
        TRY(address_parse(options->addresses[rank], &world->addresses[rank]));
        const char *text = world->addresses[rank].text;
        for (int other = 0; other < rank; other++) {
            if (strcmp(world->addresses[other].text, text) == 0) {
                return fail(STATUS_INVALID, "ranks %d and %d have the same address %s", other, rank,
                            text);
            }
        }
        snprintf(world->member.names[rank], PEER_NAME_BYTES, "%s", text);
        world->digest = hash_u64(world->digest, hash_text(text));
        world->controls[rank] =
            (Channel){.world = world, .peer = rank, .lane = CHANNEL_CONTROL, .watch = -1};
    }
    world->controls[options->rank].was_connected = true;
    const char *own = world->addresses[options->rank].text;
    if (strcmp(own, comm_endpoint_address(world->endpoint)) != 0) {
        return fail(STATUS_INVALID, "rank %d has address %s, but this endpoint is %s",
                    options->rank, own, comm_endpoint_address(world->endpoint));
    }
    return STATUS_OK;
}

static Status make_world(CommEndpoint *endpoint, const CommHostWorld *options,
                         HostWorld **world_out)
{
    HostWorld *world = NULL;
    TRY(MEMORY_NEW(&world, 1));
    world->endpoint = endpoint;
    world->key = options->key;
    world->tcp_only = options->tcp_only;
    world->memory_fd = -1;
    world->memory_from = -1;
    Status status = member_init(&world->member, &member_ops_host, options->rank, options->size);
    if (status == STATUS_OK) {
        status = MEMORY_NEW(&world->addresses, options->size);
    }
    if (status == STATUS_OK) {
        status = MEMORY_NEW(&world->controls, options->size);
    }
    if (status == STATUS_OK) {
        status = fill_in_members(world, options);
    }
    if (status != STATUS_OK) {
        free_world(world);
        return status;
    }
    *world_out = world;
    return STATUS_OK;
}

/* From here on the endpoint accepts the world's members. */
static Status register_world(CommEndpoint *endpoint, HostWorld *world)
{
    Status status = STATUS_OK;
    pthread_mutex_lock(&endpoint->lock);
    for (HostWorld *other = endpoint->worlds; other; other = other->next) {
        if (other->key == world->key) {
            status = fail(STATUS_CONFLICT, "a world of key %016llx is open on %s already",
                          (unsigned long long)world->key, endpoint->address.text);
        }
    }
    if (status == STATUS_OK) {
        world->next = endpoint->worlds;
        endpoint->worlds = world;
    }
    pthread_mutex_unlock(&endpoint->lock);
    return status;
}

static Status make_world_group(HostWorld *world, int64_t timeout_ms, Group **group_out)
{
    Member *member = &world->member;
    int *ranks = NULL;
    TRY(MEMORY_NEW(&ranks, member->size));
    for (int rank = 0; rank < member->size; rank++) {
        ranks[rank] = rank;
    }
    Status status =
        group_create(member, &comm_ops_host, "world", member->rank, member->size, ranks, group_out);
    memory_free(ranks);
    if (status == STATUS_OK) {
        (*group_out)->comm.timeout_ms = timeout_ms;
    }
    return status;
}

static Status connect_world(HostWorld *world, Group *group, int64_t deadline_ns)
{
    TRY(connect_channels(group, world->controls, world->member.size, deadline_ns));
    TRY(share_memory(group, deadline_ns));
    return open_links_by(world, group, (uint64_t)segment_head_bytes(world->member.size),
                         deadline_ns);
}

Status comm_host_create(CommEndpoint *endpoint, const CommHostWorld *options, Comm **comm_out)
{
    CHECK(options->size >= 1 && options->rank >= 0 && options->rank < options->size);
    int64_t deadline_ns = clock_deadline_in_ms(options->connect_timeout_ms);
    HostWorld *world = NULL;
    TRY(make_world(endpoint, options, &world));
    CHECK(world);
    Group *group = NULL;
    Status status = make_world_group(world, options->timeout_ms, &group);
    if (status == STATUS_OK) {
        status = register_world(endpoint, world);
        if (status != STATUS_OK) {
            group_free(group);
        }
    }
    if (status != STATUS_OK) {
        free_world(world);
        return status;
    }
    CHECK(group);
    status = connect_world(world, group, deadline_ns);
    if (status != STATUS_OK) {
        /* The others learn why, unless they told us. */
        status = member_fail(group, "connect", status, status_message());
        group_destroy(&group->comm);
        return status;
    }
    *comm_out = &group->comm;
    return STATUS_OK;
}
