#include "train/boundary.h"

#include "base/hash.h"
#include "base/memory.h"
#include "reshard/reshard.h"

/* What one microbatch in flight needs on the way there and back. Kept from step to step: equal
 * layouts need no new plan. */
typedef struct BoundarySlot {
    Layout encoder;
    Layout llm;
    Plan plans[BOUNDARY_DIRECTION_COUNT];
    uint64_t digests[2]; /* of the layouts that the plans were made from */
    BoundaryCounts counts[BOUNDARY_DIRECTION_COUNT];
} BoundarySlot;

typedef struct BoundaryLane {
    Comm *comm;
    Reshard *reshard;
    int *microbatches; /* [window] a ring: those under way, oldest first */
    int first;
    int num;
} BoundaryLane;

struct Boundary {
    BoundaryOptions options;
    BoundaryLane lanes[BOUNDARY_DIRECTION_COUNT];
    BoundarySlot *slots; /* [window] */
    BoundaryCounts counts;
};

/* ---------------------------------------------------------------- memory */

static Status open_lane(const BoundaryOptions *options, const char *label, BoundaryLane *lane)
{
    int size = options->world->size;
    int *ranks = NULL;
    TRY(MEMORY_NEW(&ranks, size));
    for (int i = 0; i < size; i++) {
        ranks[i] = i;
    }
    Status status = comm_split(options->world, ranks, size, label, &lane->comm);
    memory_free(ranks);
    TRY(status);
    TRY(MEMORY_NEW(&lane->microbatches, options->window));
    return reshard_create(lane->comm, options->device, options->kernels, label, options->window,
                          &lane->reshard);
}

static Status open_lanes(Boundary *boundary)
{
    const BoundaryOptions *options = &boundary->options;
    TRY(open_lane(options, "vision rows", &boundary->lanes[BOUNDARY_ROWS]));
    TRY(open_lane(options, "vision gradients", &boundary->lanes[BOUNDARY_GRADS]));
    TRY(MEMORY_NEW(&boundary->slots, options->window));
    for (int i = 0; i < options->window; i++) {
        const int64_t dims[2] = {0, options->width};
        layout_init(&boundary->slots[i].encoder, 2, dims, LAYOUT_COPIES_REPLICATE);
        layout_init(&boundary->slots[i].llm, 2, dims, LAYOUT_COPIES_REPLICATE);
    }
    return STATUS_OK;
}

Status boundary_create(const BoundaryOptions *options, Boundary **boundary_out)
{
    CHECK(options->window >= 1 && options->width >= 1);
    Boundary *boundary = NULL;
    TRY(MEMORY_NEW(&boundary, 1));
    boundary->options = *options;
    Status status = open_lanes(boundary);
    if (status != STATUS_OK) {
        boundary_destroy(boundary);
        return status_trace(status, __FILE__, __LINE__);
    }
    *boundary_out = boundary;
    return STATUS_OK;
}

void boundary_destroy(Boundary *boundary)
{
    if (!boundary) {
        return;
    }
    for (int d = 0; d < BOUNDARY_DIRECTION_COUNT; d++) {
        reshard_destroy(boundary->lanes[d].reshard);
        comm_destroy(boundary->lanes[d].comm);
        memory_free(boundary->lanes[d].microbatches);
    }
    for (int i = 0; boundary->slots && i < boundary->options.window; i++) {
        BoundarySlot *slot = &boundary->slots[i];
        for (int d = 0; d < BOUNDARY_DIRECTION_COUNT; d++) {
            plan_done(&slot->plans[d]);
        }
        layout_done(&slot->encoder);
        layout_done(&slot->llm);
    }
    memory_free(boundary->slots);
    memory_free(boundary);
}

/* ---------------------------------------------------------------- planning */

/* Replica i of the grid holds items[i], the same on all its tp ranks. */
static Status lay_out(Layout *layout, const StepPlan *plan, int microbatch, const Grid *grid,
                      const Range *items)
{
    for (int dp = 0; dp < grid->sizes[GRID_AXIS_DP]; dp++) {
        Range rows = step_plan_rows(plan, microbatch, items[dp]);
        for (int tp = 0; tp < grid->sizes[GRID_AXIS_TP]; tp++) {
            GridCoords coords = {.at = {[GRID_AXIS_TP] = tp, [GRID_AXIS_DP] = dp}};
            TRY(layout_add_rows(layout, grid_rank(grid, coords), rows));
        }
    }
    return STATUS_OK;
}

/* What this rank sends to the other pool: counted message by message as they are sent, not taken
 * from the bound. */
static int64_t count_sent(const Boundary *boundary, const Plan *plan)
{
    const Place *place = boundary->options.place;
    int64_t bytes = 0;
    for (int phase = 0; phase < PLAN_PHASE_COUNT; phase++) {
        for (int i = 0; i < plan->num_transfers[phase]; i++) {
            const PlanTransfer *transfer = &plan->transfers[phase][i];
            bool is_to_other_pool = grid_contains(&place->encoder, transfer->source) !=
                                    grid_contains(&place->encoder, transfer->destination);
            if (transfer->source == place->rank && is_to_other_pool) {
                bytes += box_count(&transfer->box, plan->num_dims) * (int64_t)sizeof(float);
            }
        }
    }
    return bytes;
}

static Status plan_slot(Boundary *boundary, BoundarySlot *slot, const StepPlan *plan,
                        int microbatch)
{
    const StepMicrobatch *part = &plan->microbatches[microbatch];
    const Place *place = boundary->options.place;
    Range all = step_plan_rows(plan, microbatch, part->items);
    const int64_t dims[2] = {all.end, boundary->options.width};
    layout_reset(&slot->encoder, 2, dims, LAYOUT_COPIES_REPLICATE);
    layout_reset(&slot->llm, 2, dims, LAYOUT_COPIES_REPLICATE);
    TRY(lay_out(&slot->encoder, plan, microbatch, &place->encoder, part->encoder_items));
    TRY(lay_out(&slot->llm, plan, microbatch, &place->llm, part->llm_items));
    if (slot->digests[0] == slot->encoder.digest && slot->digests[1] == slot->llm.digest) {
        return STATUS_OK;
    }
    slot->digests[0] = 0; /* if a plan cannot be made, the slot holds none */
    for (int d = 0; d < BOUNDARY_DIRECTION_COUNT; d++) {
        const Layout *from = d == BOUNDARY_ROWS ? &slot->encoder : &slot->llm;
        const Layout *to = d == BOUNDARY_ROWS ? &slot->llm : &slot->encoder;
        TRY(plan_make(from, to, &slot->plans[d]));
        slot->counts[d] = (BoundaryCounts){.bytes = count_sent(boundary, &slot->plans[d]),
                                           .bytes_minimum = plan_minimum_count(from, to) *
                                                            (int64_t)sizeof(float)};
    }
    slot->digests[0] = slot->encoder.digest;
    slot->digests[1] = slot->llm.digest;
    return STATUS_OK;
}

/* ---------------------------------------------------------------- moving */

static uint64_t tag_of(const BoundaryCrossing *crossing)
{
    uint64_t hash = hash_u64(HASH_SEED, crossing->kind);
    hash = hash_u64(hash, (uint64_t)crossing->plan->step);
    hash = hash_u64(hash, (uint64_t)crossing->microbatch);
    hash = hash_u64(hash, (uint64_t)crossing->direction);
    return hash_u64(hash, crossing->plan->microbatches[crossing->microbatch].identity);
}

Status boundary_finish(Boundary *boundary, BoundaryDirection direction, int microbatch_end,
                       Stream *stream)
{
    BoundaryLane *lane = &boundary->lanes[direction];
    while (lane->num > 0 && lane->microbatches[lane->first] < microbatch_end) {
        TRY(reshard_finish(lane->reshard, stream));
        lane->first = (lane->first + 1) % boundary->options.window;
        lane->num--;
    }
    return STATUS_OK;
}

Status boundary_start(Boundary *boundary, const BoundaryCrossing *crossing, Stream *stream)
{
    int window = boundary->options.window;
    int microbatch = crossing->microbatch;
    if (range_count(crossing->plan->microbatches[microbatch].items) == 0) {
        return STATUS_OK;
    }
    /* Whatever the slot's last microbatch still has under way borrows its plans. */
    for (int d = 0; d < BOUNDARY_DIRECTION_COUNT; d++) {
        TRY(boundary_finish(boundary, d, microbatch - window + 1, stream));
    }
    BoundarySlot *slot = &boundary->slots[microbatch % window];
    TRY(plan_slot(boundary, slot, crossing->plan, microbatch));
    bool is_rows = crossing->direction == BOUNDARY_ROWS;
    ReshardJob job = {
        .source = is_rows ? &slot->encoder : &slot->llm,
        .destination = is_rows ? &slot->llm : &slot->encoder,
        .plan = &slot->plans[crossing->direction],
        .source_data = crossing->source,
        .destination_data = crossing->destination,
        .tag = tag_of(crossing),
    };
    BoundaryLane *lane = &boundary->lanes[crossing->direction];
    CHECK(lane->num < window);
    TRY(reshard_start(lane->reshard, &job, stream));
    lane->microbatches[(lane->first + lane->num) % window] = microbatch;
    lane->num++;
    boundary->counts.bytes += slot->counts[crossing->direction].bytes;
    boundary->counts.bytes_minimum += slot->counts[crossing->direction].bytes_minimum;
    return STATUS_OK;
}

BoundaryCounts boundary_take_counts(Boundary *boundary)
{
    BoundaryCounts counts = boundary->counts;
    boundary->counts = (BoundaryCounts){0};
    return counts;
}
