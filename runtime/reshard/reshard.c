#include "reshard/reshard.h"

#include "base/hash.h"
#include "base/memory.h"

enum {
    /* A contiguous run of at least this goes alone: below, the cost of a message (about that of
     * copying a few KiB) is the larger. */
    RUN_BYTES_MIN = 16 << 10,
    STAGING_BYTES_MIN = 4 << 10,
};

/* The order of one job's messages between two ranks. Within and cross never join the same pair,
 * and need the same things. */
typedef enum Stage {
    STAGE_REDUCE,
    STAGE_MOVE, /* within, cross */
    STAGE_SPREAD,
    STAGE_COUNT,
} Stage;

static const struct {
    Stage stage;
    bool is_from_destination; /* the sender reads its destination buffer */
} phases[PLAN_PHASE_COUNT] = {
    [PLAN_PHASE_REDUCE] = {STAGE_REDUCE, false},
    [PLAN_PHASE_WITHIN] = {STAGE_MOVE, false},
    [PLAN_PHASE_CROSS] = {STAGE_MOVE, false},
    [PLAN_PHASE_SPREAD] = {STAGE_SPREAD, true},
};

static const char *const stage_names[STAGE_COUNT] = {
    [STAGE_REDUCE] = "reduce",
    [STAGE_MOVE] = "move",
    [STAGE_SPREAD] = "spread",
};

/* One data message: transfers [first, first + num) of a phase, one after another. */
typedef struct Message {
    PlanPhase phase;
    int first;
    int num;
    bool is_staged;
    int64_t staging; /* elements into the staging, when staged */
    int transfer;    /* in Batch.transfers */
} Message;

/* What one comm request carries. */
typedef struct Batch {
    Message *messages;
    CommTransfer *transfers;
    int num_messages;
    int num_transfers;
    size_t messages_capacity;
    size_t transfers_capacity;
    CommRequest request;
    bool is_under_way; /* between comm_start and comm_wait */
    bool is_complete;  /* receives: the data stand where they belong */
} Batch;

/* A job under way. */
typedef struct Slot {
    ReshardJob job;
    Batch sends[STAGE_COUNT];
    Batch receives[STAGE_COUNT];
    int num_sent_stages; /* stages whose sends are listed */
    float *staging;      /* device memory: [reduced, as the source buffer] [staged messages] */
    int64_t staging_bytes;
    int64_t staging_used; /* elements */
    bool owns_sums;       /* this rank sums something */
} Slot;

struct Reshard {
    Comm *comm;
    Device *device;
    const Kernels *kernels;
    char *label;
    Slot *slots; /* [window], a ring */
    int window;
    int first;
    int num_under_way;
};

static Slot *slot_at(Reshard *reshard, int index)
{
    return &reshard->slots[(reshard->first + index) % reshard->window];
}

Status reshard_create(Comm *comm, Device *device, const Kernels *kernels, const char *label,
                      int window, Reshard **reshard_out)
{
    CHECK(comm && device && kernels && label && window >= 1 && window <= RESHARD_WINDOW_MAX);
    Reshard *reshard = NULL;
    TRY(MEMORY_NEW(&reshard, 1));
    *reshard = (Reshard){.comm = comm, .device = device, .kernels = kernels, .window = window};
    Status status = memory_copy_text(label, &reshard->label);
    if (status == STATUS_OK) {
        status = MEMORY_NEW(&reshard->slots, window);
    }
    if (status != STATUS_OK) {
        reshard_destroy(reshard);
        return status_trace(status, __FILE__, __LINE__);
    }
    *reshard_out = reshard;
    return STATUS_OK;
}

static void batch_done(Comm *comm, Batch *batch)
{
    if (batch->is_under_way) {
        /* Only after a failure, which was told: comm must let go of the transfers before they are
         * freed. */
        Status status = comm_wait(comm, &batch->request, NULL);
        (void)status;
    }
    memory_free(batch->messages);
    memory_free(batch->transfers);
}

void reshard_destroy(Reshard *reshard)
{
    if (!reshard) {
        return;
    }
    for (int i = 0; reshard->slots && i < reshard->window; i++) {
        Slot *slot = slot_at(reshard, i);
        for (int stage = 0; stage < STAGE_COUNT; stage++) {
            batch_done(reshard->comm, &slot->receives[stage]);
            batch_done(reshard->comm, &slot->sends[stage]);
        }
        device_free(reshard->device, slot->staging, slot->staging_bytes);
    }
    memory_free(reshard->slots);
    memory_free(reshard->label);
    memory_free(reshard);
}

/* Strides of a box's elements at one end. */
static void place_strides(const Layout *layout, const PlanTransfer *transfer,
                          const PlanPlace *place, int64_t *strides)
{
    /* A run of memory is its own outer box. */
    const Box *outer = place->is_contiguous ? &transfer->box : &layout->pieces[place->piece].box;
    int64_t stride = 1;
    for (int d = LAYOUT_DIMS_MAX - 1; d >= 0; d--) {
        strides[d] = stride;
        stride *= range_count(outer->ranges[d]);
    }
}

/* One end of a copy: the first element, and strides per dim of the box. */
typedef struct End {
    float *data;
    int64_t strides[LAYOUT_DIMS_MAX];
} End;

static End end_packed(float *data, const PlanTransfer *transfer)
{
    End end;
    end.data = data;
    place_strides(NULL, transfer, &(PlanPlace){.is_contiguous = true}, end.strides);
    return end;
}

static End end_placed(float *base, const Layout *layout, const PlanTransfer *transfer,
                      const PlanPlace *place)
{
    CHECK(base);
    End end = {.data = base + place->offset};
    place_strides(layout, transfer, place, end.strides);
    return end;
}

/* [rows, cols] of a copy, with row strides. */
typedef struct Plane {
    float *to;
    const float *from;
    int64_t to_stride;
    int64_t from_stride;
    int64_t rows;
    int64_t cols;
} Plane;

static Status copy_plane(const Kernels *kernels, const Plane *plane, bool accumulates,
                         Stream *stream)
{
    if (!accumulates) {
        return kernels->copy_matrix(plane->to, plane->to_stride, plane->from, plane->from_stride,
                                    plane->rows, plane->cols, stream);
    }
    for (int64_t row = 0; row < plane->rows; row++) {
        TRY(kernels->accumulate(plane->to + row * plane->to_stride,
                                plane->from + row * plane->from_stride, plane->cols, stream));
    }
    return STATUS_OK;
}

/* to (+)= from over the elements of the transfer's box. */
static Status copy_box(const Kernels *kernels, End to, End from, const PlanTransfer *transfer,
                       bool accumulates, Stream *stream)
{
    int64_t lengths[LAYOUT_DIMS_MAX];
    for (int d = 0; d < LAYOUT_DIMS_MAX; d++) {
        lengths[d] = range_count(transfer->box.ranges[d]);
    }
    /* Columns: as many of the inner dims as lie together at both ends; rows: the dim around them;
     * the others are walked. */
    int inner = LAYOUT_DIMS_MAX - 1;
    int64_t cols = lengths[inner];
    while (inner > 0 && to.strides[inner - 1] == cols && from.strides[inner - 1] == cols) {
        cols *= lengths[--inner];
    }
    int outer = inner > 0 ? inner - 1 : 0;
    int64_t at[LAYOUT_DIMS_MAX] = {0};
    int d = 0;
    while (d >= 0) {
        Plane plane = {.to = to.data,
                       .from = from.data,
                       .to_stride = to.strides[outer],
                       .from_stride = from.strides[outer],
                       .rows = inner > 0 ? lengths[outer] : 1,
                       .cols = cols};
        for (d = 0; d < outer; d++) {
            plane.to += at[d] * to.strides[d];
            plane.from += at[d] * from.strides[d];
        }
        TRY(copy_plane(kernels, &plane, accumulates, stream));
        for (d = outer - 1; d >= 0 && ++at[d] == lengths[d]; d--) {
            at[d] = 0;
        }
    }
    return STATUS_OK;
}

/* Whether transfer b begins where a ends at one end. */
static bool is_place_next(const PlanTransfer *a, const PlanPlace *a_place, const PlanPlace *b_place)
{
    return a_place->is_contiguous && b_place->is_contiguous &&
           a_place->offset + a->count == b_place->offset;
}

/* The end of the run of transfers that begins at `begin`: one piece of memory at both ends. */
static int run_end(const PlanTransfer *transfers, int begin, int end, int64_t *bytes_out)
{
    int at = begin;
    *bytes_out = transfers[at].count * (int64_t)sizeof(float);
    for (at++; at < end; at++) {
        const PlanTransfer *last = &transfers[at - 1];
        if (!is_place_next(last, &last->from, &transfers[at].from) ||
            !is_place_next(last, &last->to, &transfers[at].to)) {
            break;
        }
        *bytes_out += transfers[at].count * (int64_t)sizeof(float);
    }
    return at;
}

/* The end of the message that begins at `begin`: one long run, or short ones up to the next long
 * one. A function of the plan alone, so that both ends cut alike. */
static int message_end(const PlanTransfer *transfers, int begin, int end)
{
    int64_t bytes = 0;
    int at = run_end(transfers, begin, end, &bytes);
    while (bytes < RUN_BYTES_MIN && at < end) {
        int next = run_end(transfers, at, end, &bytes);
        at = bytes < RUN_BYTES_MIN ? next : at;
    }
    return at;
}

static bool is_run_at(const PlanTransfer *transfers, int begin, int end, bool is_send)
{
    const PlanTransfer *first = &transfers[begin];
    bool is_run = is_send ? first->from.is_contiguous : first->to.is_contiguous;
    for (int i = begin + 1; i < end && is_run; i++) {
        const PlanTransfer *a = &transfers[i - 1];
        const PlanTransfer *b = &transfers[i];
        is_run = is_send ? is_place_next(a, &a->from, &b->from) : is_place_next(a, &a->to, &b->to);
    }
    return is_run;
}

/* Tells messages of other jobs, layouts, phases or boxes apart. */
static uint64_t message_tag(const ReshardJob *job, const Message *message)
{
    const Plan *plan = job->plan;
    uint64_t tag = hash_u64(plan->digest ^ job->tag * UINT64_C(0x9e3779b97f4a7c15),
                            (uint64_t)message->phase << 32 | (uint32_t)message->num);
    for (int i = message->first; i < message->first + message->num; i++) {
        const Box *box = &plan->transfers[message->phase][i].box;
        for (int d = 0; d < plan->num_dims; d++) {
            tag = (tag ^ (uint64_t)box->ranges[d].begin) * UINT64_C(0x9e3779b97f4a7c15);
            tag = (tag ^ (uint64_t)box->ranges[d].end ^ tag >> 32) * UINT64_C(0xff51afd7ed558ccd);
        }
    }
    return tag;
}

static Status add_transfer(Batch *batch, CommTransfer transfer)
{
    TRY(memory_grow((void **)&batch->transfers, &batch->transfers_capacity,
                    (size_t)batch->num_transfers + 1, sizeof *batch->transfers));
    batch->transfers[batch->num_transfers++] = transfer;
    return STATUS_OK;
}

/* Lists the messages of transfers [begin, end), all of one pair. */
static Status add_pair(Slot *slot, PlanPhase phase, int begin, int end, bool is_send)
{
    const Plan *plan = slot->job.plan;
    const PlanTransfer *transfers = plan->transfers[phase];
    Stage stage = phases[phase].stage;
    Batch *batch = is_send ? &slot->sends[stage] : &slot->receives[stage];
    CommTransfer transfer = {.peer =
                                 is_send ? transfers[begin].destination : transfers[begin].source,
                             .is_send = is_send};
    for (int at = begin; at < end;) {
        int next = message_end(transfers, at, end);
        int64_t count = 0;
        for (int i = at; i < next; i++) {
            count += transfers[i].count;
        }
        Message message = {.phase = phase,
                           .first = at,
                           .num = next - at,
                           .transfer = batch->num_transfers,
                           .is_staged = !is_run_at(transfers, at, next, is_send) ||
                                        (stage == STAGE_REDUCE && !is_send)};
        if (message.is_staged) {
            message.staging = slot->staging_used;
            slot->staging_used += count;
        }
        TRY(memory_grow((void **)&batch->messages, &batch->messages_capacity,
                        (size_t)batch->num_messages + 1, sizeof *batch->messages));
        batch->messages[batch->num_messages++] = message;
        transfer.size_bytes = count * (int64_t)sizeof(float);
        transfer.tag = message_tag(&slot->job, &message);
        TRY(add_transfer(batch, transfer));
        at = next;
    }
    return STATUS_OK;
}

static Status add_phase(const Reshard *reshard, Slot *slot, PlanPhase phase)
{
    const PlanTransfer *transfers = slot->job.plan->transfers[phase];
    int num = slot->job.plan->num_transfers[phase];
    int rank = reshard->comm->rank;
    for (int begin = 0; begin < num;) {
        int source = transfers[begin].source;
        int destination = transfers[begin].destination;
        int end = begin + 1;
        while (end < num && transfers[end].source == source &&
               transfers[end].destination == destination) {
            end++;
        }
        slot->owns_sums |= phase == PLAN_PHASE_REDUCE && destination == rank;
        if (source != destination && (source == rank || destination == rank)) {
            TRY(add_pair(slot, phase, begin, end, source == rank));
        }
        begin = end;
    }
    return STATUS_OK;
}

static void batch_reset(Batch *batch)
{
    batch->num_messages = 0;
    batch->num_transfers = 0;
    batch->is_complete = false;
}

static Status reserve_staging(Reshard *reshard, Slot *slot)
{
    int64_t bytes = slot->staging_used * (int64_t)sizeof(float);
    if (bytes <= slot->staging_bytes) {
        return STATUS_OK;
    }
    int64_t wanted = bytes > STAGING_BYTES_MIN ? bytes : STAGING_BYTES_MIN;
    wanted = wanted > 2 * slot->staging_bytes ? wanted : 2 * slot->staging_bytes;
    void *memory = NULL;
    TRY(device_alloc(reshard->device, wanted, &memory));
    device_free(reshard->device, slot->staging, slot->staging_bytes);
    slot->staging = memory;
    slot->staging_bytes = wanted;
    return STATUS_OK;
}

/* What a phase's senders read. The sums of a PARTIAL source lie at the beginning of the staging,
 * laid out as the source. */
static float *send_base(const Slot *slot, PlanPhase phase)
{
    const ReshardJob *job = &slot->job;
    if (phases[phase].is_from_destination) {
        return job->destination_data;
    }
    if (job->source->copies == LAYOUT_COPIES_PARTIAL && phase != PLAN_PHASE_REDUCE) {
        return slot->staging;
    }
    return (float *)job->source_data; /* comm and copies only read it */
}

static const Layout *send_layout(const Slot *slot, PlanPhase phase)
{
    return phases[phase].is_from_destination ? slot->job.destination : slot->job.source;
}

static void point_batch(Slot *slot, Batch *batch, bool is_send)
{
    for (int i = 0; i < batch->num_messages; i++) {
        const Message *message = &batch->messages[i];
        const PlanTransfer *first = &slot->job.plan->transfers[message->phase][message->first];
        float *data = slot->staging + message->staging;
        if (!message->is_staged) {
            data = is_send ? send_base(slot, message->phase) + first->from.offset
                           : slot->job.destination_data + first->to.offset;
        }
        batch->transfers[message->transfer].data = data;
    }
}

/* Makes this rank's messages of the job. */
static Status build(Reshard *reshard, Slot *slot)
{
    for (int stage = 0; stage < STAGE_COUNT; stage++) {
        batch_reset(&slot->sends[stage]);
        batch_reset(&slot->receives[stage]);
    }
    slot->num_sent_stages = 0;
    slot->owns_sums = false;
    slot->staging_used = slot->job.source->copies == LAYOUT_COPIES_PARTIAL
                             ? layout_rank_count(slot->job.source, reshard->comm->rank)
                             : 0;
    for (int phase = 0; phase < PLAN_PHASE_COUNT; phase++) {
        TRY(add_phase(reshard, slot, (PlanPhase)phase));
    }
    TRY(reserve_staging(reshard, slot));
    for (int stage = 0; stage < STAGE_COUNT; stage++) {
        point_batch(slot, &slot->sends[stage], true);
        point_batch(slot, &slot->receives[stage], false);
    }
    return STATUS_OK;
}

/* Says whose failure it is. */
static Status fail_job(const Reshard *reshard, const Slot *slot, int stage, Status status)
{
    const char *hint = status == STATUS_CORRUPT
                           ? "; the ranks disagree about the job's tag, its layouts or their order"
                           : "";
    return fail(status, "%s, job tag %llu on rank %d, %s: %s%s", reshard->label,
                (unsigned long long)slot->job.tag, reshard->comm->rank, stage_names[stage],
                status_message(), hint);
}

static Status list_batch(Reshard *reshard, Slot *slot, int stage, Batch *batch, Stream *stream)
{
    if (batch->num_transfers == 0) {
        return STATUS_OK;
    }
    Status status =
        comm_start(reshard->comm, batch->transfers, batch->num_transfers, stream, &batch->request);
    if (status != STATUS_OK) {
        return fail_job(reshard, slot, stage, status);
    }
    batch->is_under_way = true;
    return STATUS_OK;
}

static Status wait_batch(Reshard *reshard, Slot *slot, int stage, Batch *batch, Stream *stream)
{
    if (!batch->is_under_way) {
        return STATUS_OK;
    }
    batch->is_under_way = false;
    Status status = comm_wait(reshard->comm, &batch->request, stream);
    return status == STATUS_OK ? STATUS_OK : fail_job(reshard, slot, stage, status);
}

static Status pack(const Reshard *reshard, const Slot *slot, const Message *message, Stream *stream)
{
    const PlanTransfer *transfers = slot->job.plan->transfers[message->phase];
    float *packed = slot->staging + message->staging;
    for (int i = message->first; i < message->first + message->num; i++) {
        const PlanTransfer *transfer = &transfers[i];
        End from = end_placed(send_base(slot, message->phase), send_layout(slot, message->phase),
                              transfer, &transfer->from);
        TRY(copy_box(reshard->kernels, end_packed(packed, transfer), from, transfer, false,
                     stream));
        packed += transfer->count;
    }
    return STATUS_OK;
}

static Status unpack(const Reshard *reshard, const Slot *slot, const Message *message,
                     Stream *stream)
{
    const PlanTransfer *transfers = slot->job.plan->transfers[message->phase];
    float *packed = slot->staging + message->staging;
    for (int i = message->first; i < message->first + message->num; i++) {
        const PlanTransfer *transfer = &transfers[i];
        End to =
            end_placed(slot->job.destination_data, slot->job.destination, transfer, &transfer->to);
        TRY(copy_box(reshard->kernels, to, end_packed(packed, transfer), transfer, false, stream));
        packed += transfer->count;
    }
    return STATUS_OK;
}

/* Adds the contributions up in the order of ranks, this rank's own among them. */
static Status sum_parts(const Reshard *reshard, const Slot *slot, Stream *stream)
{
    const Plan *plan = slot->job.plan;
    const Message *message = slot->receives[STAGE_REDUCE].messages;
    float *packed = NULL;
    for (int i = 0; i < plan->num_transfers[PLAN_PHASE_REDUCE] && slot->owns_sums; i++) {
        const PlanTransfer *transfer = &plan->transfers[PLAN_PHASE_REDUCE][i];
        if (transfer->destination != reshard->comm->rank) {
            continue;
        }
        End from;
        if (transfer->source == transfer->destination) {
            from = end_placed(send_base(slot, PLAN_PHASE_REDUCE), slot->job.source, transfer,
                              &transfer->from);
        } else {
            /* Messages were listed in the order of the transfers. */
            message += i >= message->first + message->num;
            packed = i == message->first ? slot->staging + message->staging : packed;
            from = end_packed(packed, transfer);
            packed += transfer->count;
        }
        End to = end_placed(slot->staging, slot->job.source, transfer, &transfer->to);
        TRY(copy_box(reshard->kernels, to, from, transfer, transfer->accumulates, stream));
    }
    return STATUS_OK;
}

/* Elements that stay in the rank. */
static Status copy_own(const Reshard *reshard, const Slot *slot, Stream *stream)
{
    const Plan *plan = slot->job.plan;
    for (int i = 0; i < plan->num_transfers[PLAN_PHASE_WITHIN]; i++) {
        const PlanTransfer *transfer = &plan->transfers[PLAN_PHASE_WITHIN][i];
        if (transfer->source != reshard->comm->rank || transfer->destination != transfer->source) {
            continue;
        }
        End from = end_placed(send_base(slot, PLAN_PHASE_WITHIN), slot->job.source, transfer,
                              &transfer->from);
        End to =
            end_placed(slot->job.destination_data, slot->job.destination, transfer, &transfer->to);
        TRY(copy_box(reshard->kernels, to, from, transfer, false, stream));
    }
    return STATUS_OK;
}

/* Waits for a stage's receives and brings them to their places. */
static Status complete_receives(Reshard *reshard, Slot *slot, int stage, Stream *stream)
{
    Batch *batch = &slot->receives[stage];
    if (batch->is_complete) {
        return STATUS_OK;
    }
    TRY(wait_batch(reshard, slot, stage, batch, stream));
    if (stage == STAGE_REDUCE) {
        TRY(sum_parts(reshard, slot, stream));
        TRY(copy_own(reshard, slot, stream));
    } else {
        for (int i = 0; i < batch->num_messages; i++) {
            if (batch->messages[i].is_staged) {
                TRY(unpack(reshard, slot, &batch->messages[i], stream));
            }
        }
    }
    batch->is_complete = true;
    return STATUS_OK;
}

/* Comm matches messages of a pair in the order listed, and ranks may call finish at different
 * times: what goes to a peer is listed in the order of jobs and stages on every rank, so a stage
 * waits while an older job still has something to list for one of its peers. */
static bool is_blocked(Reshard *reshard, int index, int stage)
{
    const Batch *batch = &slot_at(reshard, index)->sends[stage];
    for (int older = 0; older < index; older++) {
        const Slot *slot = slot_at(reshard, older);
        for (int s = slot->num_sent_stages; s < STAGE_COUNT; s++) {
            const Batch *other = &slot->sends[s];
            for (int i = 0; i < batch->num_transfers * other->num_transfers; i++) {
                if (batch->transfers[i % batch->num_transfers].peer ==
                    other->transfers[i / batch->num_transfers].peer) {
                    return true;
                }
            }
        }
    }
    return false;
}

/* Lists all sends of a job that can be. */
static Status advance(Reshard *reshard, int index, Stream *stream)
{
    Slot *slot = slot_at(reshard, index);
    while (slot->num_sent_stages < STAGE_COUNT) {
        int stage = slot->num_sent_stages;
        Batch *batch = &slot->sends[stage];
        bool is_ready = batch->num_transfers == 0 || stage == STAGE_REDUCE ||
                        slot->receives[stage - 1].is_complete;
        if (!is_ready || is_blocked(reshard, index, stage)) {
            break;
        }
        for (int i = 0; i < batch->num_messages; i++) {
            if (batch->messages[i].is_staged) {
                TRY(pack(reshard, slot, &batch->messages[i], stream));
            }
        }
        TRY(list_batch(reshard, slot, stage, batch, stream));
        slot->num_sent_stages++;
    }
    return STATUS_OK;
}

Status reshard_start(Reshard *reshard, const ReshardJob *job, Stream *stream)
{
    int rank = reshard->comm->rank;
    CHECK(job->plan->digest == plan_digest(job->source, job->destination));
    CHECK(job->source->num_ranks <= reshard->comm->size);
    CHECK(job->destination->num_ranks <= reshard->comm->size);
    CHECK(job->source_data || layout_rank_count(job->source, rank) == 0);
    CHECK(job->destination_data || layout_rank_count(job->destination, rank) == 0);
    if (reshard->num_under_way == reshard->window) {
        return fail(STATUS_EXHAUSTED, "%s: %d jobs are under way; finish one first", reshard->label,
                    reshard->window);
    }
    int index = reshard->num_under_way;
    Slot *slot = slot_at(reshard, index);
    slot->job = *job;
    TRY(build(reshard, slot));
    reshard->num_under_way++;
    for (int stage = 0; stage < STAGE_COUNT; stage++) {
        TRY(list_batch(reshard, slot, stage, &slot->receives[stage], stream));
    }
    for (int stage = 0; stage < STAGE_COUNT; stage++) {
        if (slot->receives[stage].num_transfers > 0) {
            break;
        }
        TRY(complete_receives(reshard, slot, stage, stream));
    }
    return advance(reshard, index, stream);
}

Status reshard_finish(Reshard *reshard, Stream *stream)
{
    if (reshard->num_under_way == 0) {
        return fail(STATUS_CONFLICT, "%s: no job is under way", reshard->label);
    }
    Slot *slot = slot_at(reshard, 0);
    for (int stage = 0; stage < STAGE_COUNT; stage++) {
        TRY(complete_receives(reshard, slot, stage, stream));
        for (int index = 0; index < reshard->num_under_way; index++) {
            TRY(advance(reshard, index, stream));
        }
    }
    CHECK(slot->num_sent_stages == STAGE_COUNT);
    for (int stage = 0; stage < STAGE_COUNT; stage++) {
        TRY(wait_batch(reshard, slot, stage, &slot->sends[stage], stream));
    }
    reshard->first = (reshard->first + 1) % reshard->window;
    reshard->num_under_way--;
    return STATUS_OK;
}
