#include "train/boundary.h"

#include "base/hash.h"
#include "base/memory.h"
#include "nn/shard.h"
#include "reshard/reshard.h"

#include <stdio.h>

/* What one microbatch under way needs. Kept for the next one in its place: equal layouts need no
 * new plan, and others use its memory. */
typedef struct BoundarySlot {
    int microbatch;
    Layout source;
    Layout destination;
    Plan plan;
    bool has_plan; /* of layouts with these digests */
    uint64_t source_digest;
    uint64_t destination_digest;
    BoundaryCounts counts;
} BoundarySlot;

typedef struct BoundaryLane {
    Comm *comm;
    Reshard *reshard;
    BoundarySlot *slots; /* [window] a ring: those under way, oldest first */
    int first;
    int num;
} BoundaryLane;

struct Boundary {
    BoundaryOptions options;
    const PlaceModule *encoder;
    const PlaceModule *decoder;
    BoundaryLane lanes[BOUNDARY_DIRECTION_COUNT];
    BoundaryCounts counts;
};

/* ---------------------------------------------------------------- memory */

static Status open_lane(const BoundaryOptions *options, const char *what, BoundaryLane *lane)
{
    int size = options->world->size;
    char label[32];
    snprintf(label, sizeof label, "%s %s", options->place->modules[options->encoder].name, what);
    int *ranks = NULL;
    TRY(MEMORY_NEW(&ranks, size));
    for (int i = 0; i < size; i++) {
        ranks[i] = i;
    }
    Status status = comm_split(options->world, ranks, size, label, &lane->comm);
    memory_free(ranks);
    TRY(status);
    TRY(MEMORY_NEW(&lane->slots, options->window));
    for (int i = 0; i < options->window; i++) {
        const int64_t dims[2] = {0, options->width};
        layout_init(&lane->slots[i].source, 2, dims, LAYOUT_COPIES_REPLICATE);
        layout_init(&lane->slots[i].destination, 2, dims, LAYOUT_COPIES_REPLICATE);
    }
    return reshard_create(lane->comm, options->device, options->kernels, label, options->window,
                          &lane->reshard);
}

static Status open_lanes(Boundary *boundary)
{
    TRY(open_lane(&boundary->options, "rows", &boundary->lanes[BOUNDARY_ROWS]));
    return open_lane(&boundary->options, "gradients", &boundary->lanes[BOUNDARY_GRADS]);
}

Status boundary_create(const BoundaryOptions *options, Boundary **boundary_out)
{
    CHECK(options->window >= 1 && options->width >= 1 && options->extra_tokens >= 0);
    CHECK(options->encoder >= 0 && options->encoder < place_num_encoders(options->place));
    Boundary *boundary = NULL;
    TRY(MEMORY_NEW(&boundary, 1));
    boundary->options = *options;
    boundary->encoder = &options->place->modules[options->encoder];
    boundary->decoder = place_decoder(options->place);
    Status status = open_lanes(boundary);
    if (status != STATUS_OK) {
        boundary_destroy(boundary);
        return status_trace(status, __FILE__, __LINE__);
    }
    *boundary_out = boundary;
    return STATUS_OK;
}

static void close_lane(BoundaryLane *lane, int window)
{
    reshard_destroy(lane->reshard);
    comm_destroy(lane->comm);
    for (int i = 0; lane->slots && i < window; i++) {
        plan_done(&lane->slots[i].plan);
        layout_done(&lane->slots[i].source);
        layout_done(&lane->slots[i].destination);
    }
    memory_free(lane->slots);
}

void boundary_destroy(Boundary *boundary)
{
    if (!boundary) {
        return;
    }
    for (int d = 0; d < BOUNDARY_DIRECTION_COUNT; d++) {
        close_lane(&boundary->lanes[d], boundary->options.window);
    }
    memory_free(boundary);
}

bool boundary_is_encoder(const Boundary *boundary)
{
    return place_is_last_stage(boundary->encoder);
}

bool boundary_is_decoder(const Boundary *boundary)
{
    return place_is_first_stage(boundary->decoder);
}

/* ---------------------------------------------------------------- which rows stand where */

/* Goes through the tokens of one cp rank and gives the rows among them to its tp ranks. */
typedef struct Walk {
    const Grid *grid;
    GridCoords coords; /* of the cp rank; with counting also the tp rank whose rows count */
    Layout *layout;    /* NULL: rows are counted and not laid out */
    int64_t counted;
    bool is_cut;        /* each tp rank has a part of the tokens, and not all of them */
    int64_t num_tokens; /* of the cp rank */
    int64_t at;         /* the token that comes next */
    int tp;             /* whose it is, if they are cut */
    Range rows;         /* of that rank, not given to it yet */
} Walk;

static bool is_sequence_parallel(const PlaceModule *module)
{
    return module->spec->sequence_parallel && module->grid.sizes[GRID_AXIS_TP] > 1;
}

static Walk walk_begin(const PlaceModule *module, int stage, int dp, int cp, Layout *layout)
{
    return (Walk){
        .grid = &module->grid,
        .coords = {.at = {[GRID_AXIS_CP] = cp, [GRID_AXIS_DP] = dp, [GRID_AXIS_PP] = stage}},
        .layout = layout,
        .is_cut = is_sequence_parallel(module),
    };
}

static Status give_rows(Walk *walk, int tp)
{
    if (!walk->layout) {
        walk->counted += tp == walk->coords.at[GRID_AXIS_TP] ? range_count(walk->rows) : 0;
        return STATUS_OK;
    }
    GridCoords coords = walk->coords;
    coords.at[GRID_AXIS_TP] = tp;
    return layout_add_rows(walk->layout, grid_rank(walk->grid, coords), walk->rows);
}

/* Also the end of a walk. */
static Status walk_flush(Walk *walk)
{
    int begin = walk->is_cut ? walk->tp : 0;
    int end = walk->is_cut ? walk->tp + 1 : walk->grid->sizes[GRID_AXIS_TP];
    for (int tp = begin; tp < end && range_count(walk->rows) > 0; tp++) {
        TRY(give_rows(walk, tp));
    }
    walk->rows = (Range){0, 0};
    return STATUS_OK;
}

static Status walk_run(Walk *walk, Range rows)
{
    if (range_count(walk->rows) > 0 && walk->rows.end == rows.begin) {
        walk->rows.end = rows.end;
        return STATUS_OK;
    }
    TRY(walk_flush(walk));
    walk->rows = rows;
    return STATUS_OK;
}

/* The next tokens are these rows. */
static Status walk_rows(Walk *walk, Range rows)
{
    while (rows.begin < rows.end) {
        Range run = rows;
        if (walk->is_cut) {
            int tp_size = walk->grid->sizes[GRID_AXIS_TP];
            Range part = range_part(walk->num_tokens, tp_size, walk->tp);
            if (walk->at >= part.end) {
                TRY(walk_flush(walk));
                walk->tp++;
                CHECK(walk->tp < tp_size);
                continue;
            }
            int64_t left = part.end - walk->at;
            run.end = left < range_count(rows) ? rows.begin + left : rows.end;
        }
        TRY(walk_run(walk, run));
        walk->at += range_count(run);
        rows.begin = run.end;
    }
    return STATUS_OK;
}

/* The next tokens are no rows. */
static void walk_skip(Walk *walk, int64_t num_tokens)
{
    walk->at += num_tokens;
}

/* An item of an encoder is a segment of its own: `extra` tokens, then its rows. */
static Status walk_item(Walk *walk, const StepItem *item, int extra)
{
    Range chunks[SHARD_CHUNKS];
    int num = shard_chunks(extra + item->rows, walk->grid->sizes[GRID_AXIS_CP],
                           walk->coords.at[GRID_AXIS_CP], chunks);
    for (int i = 0; i < num; i++) {
        Range tokens = range_intersect(chunks[i], (Range){extra, extra + item->rows});
        walk_skip(walk, range_count(chunks[i]) - range_count(tokens));
        int64_t first = item->first_row - extra;
        TRY(walk_rows(walk, (Range){first + tokens.begin, first + tokens.end}));
    }
    return STATUS_OK;
}

/* A sample is a segment of the decoder, with the rows of `items` among its tokens. */
static Status walk_sample(Walk *walk, int64_t num_tokens, const StepItem *items, int64_t num_items)
{
    Range chunks[SHARD_CHUNKS];
    int num = shard_chunks(num_tokens, walk->grid->sizes[GRID_AXIS_CP],
                           walk->coords.at[GRID_AXIS_CP], chunks);
    for (int i = 0; i < num; i++) {
        Range left = chunks[i];
        for (int64_t k = 0; k < num_items; k++) {
            int64_t first = items[k].first_token;
            Range tokens = range_intersect(left, (Range){first, first + items[k].rows});
            if (range_count(tokens) > 0) {
                walk_skip(walk, tokens.begin - left.begin);
                int64_t shift = items[k].first_row - first;
                TRY(walk_rows(walk, (Range){shift + tokens.begin, shift + tokens.end}));
                left.begin = tokens.end;
            }
        }
        walk_skip(walk, range_count(left));
    }
    return STATUS_OK;
}

static const StepCrossing *crossing_of(const Boundary *boundary, const StepPlan *plan,
                                       int microbatch)
{
    return &plan->microbatches[microbatch].crossings[boundary->options.encoder];
}

/* The rows of one cp rank of an encoder's replica. */
static Status walk_encoder(const Boundary *boundary, const StepPlan *plan, int microbatch,
                           Walk *walk)
{
    int extra = boundary->options.extra_tokens;
    const StepItem *all = plan->items[boundary->options.encoder];
    Range items =
        crossing_of(boundary, plan, microbatch)->encoder_items[walk->coords.at[GRID_AXIS_DP]];
    for (int64_t i = items.begin; i < items.end; i++) {
        walk->num_tokens += shard_chunks_count(extra + all[i].rows, walk->grid->sizes[GRID_AXIS_CP],
                                               walk->coords.at[GRID_AXIS_CP]);
    }
    for (int64_t i = items.begin; i < items.end; i++) {
        TRY(walk_item(walk, &all[i], extra));
    }
    return walk_flush(walk);
}

/* The rows of one cp rank of a replica of the decoder. */
static Status walk_decoder(const Boundary *boundary, const StepPlan *plan, int microbatch,
                           Walk *walk)
{
    const StepItem *all = plan->items[boundary->options.encoder];
    int dp = walk->coords.at[GRID_AXIS_DP];
    Range items = crossing_of(boundary, plan, microbatch)->llm_items[dp];
    Range samples = plan->microbatches[microbatch].llm_samples[dp];
    for (int64_t i = samples.begin; i < samples.end; i++) {
        walk->num_tokens +=
            shard_chunks_count(plan->source.samples[plan->samples[i]].num_tokens,
                               walk->grid->sizes[GRID_AXIS_CP], walk->coords.at[GRID_AXIS_CP]);
    }
    int64_t first = items.begin;
    for (int64_t i = samples.begin; i < samples.end; i++) {
        int64_t end = first;
        while (end < items.end && all[end].sample == i) {
            end++;
        }
        TRY(walk_sample(walk, plan->source.samples[plan->samples[i]].num_tokens, all + first,
                        end - first));
        first = end;
    }
    CHECK(first == items.end);
    return walk_flush(walk);
}

static Status lay_out_encoder(const Boundary *boundary, const StepPlan *plan, int microbatch,
                              Layout *layout)
{
    const int *sizes = boundary->encoder->grid.sizes;
    for (int dp = 0; dp < sizes[GRID_AXIS_DP]; dp++) {
        for (int cp = 0; cp < sizes[GRID_AXIS_CP]; cp++) {
            Walk walk = walk_begin(boundary->encoder, sizes[GRID_AXIS_PP] - 1, dp, cp, layout);
            TRY(walk_encoder(boundary, plan, microbatch, &walk));
        }
    }
    return STATUS_OK;
}

/* Every rank of a replica has all its rows. */
static Status lay_out_whole(const Boundary *boundary, const StepPlan *plan, int microbatch,
                            Walk *walk)
{
    Range items = crossing_of(boundary, plan, microbatch)->llm_items[walk->coords.at[GRID_AXIS_DP]];
    walk->is_cut = false;
    walk->rows = step_plan_rows(plan, boundary->options.encoder, microbatch, items);
    return walk_flush(walk);
}

static Status lay_out_decoder(const Boundary *boundary, const StepPlan *plan, int microbatch,
                              bool is_whole, Layout *layout)
{
    const int *sizes = boundary->decoder->grid.sizes;
    for (int dp = 0; dp < sizes[GRID_AXIS_DP]; dp++) {
        for (int cp = 0; cp < sizes[GRID_AXIS_CP]; cp++) {
            Walk walk = walk_begin(boundary->decoder, 0, dp, cp, layout);
            TRY(is_whole ? lay_out_whole(boundary, plan, microbatch, &walk)
                         : walk_decoder(boundary, plan, microbatch, &walk));
        }
    }
    return STATUS_OK;
}

int64_t boundary_rows_max(const Place *place, const StepBounds *bounds, int encoder)
{
    const PlaceModule *decoder = place_decoder(place);
    int64_t tokens = shard_count_max(bounds->llm_tokens, bounds->llm_segments,
                                     decoder->grid.sizes[GRID_AXIS_CP]);
    if (is_sequence_parallel(decoder)) {
        tokens = range_count(range_part(tokens, decoder->grid.sizes[GRID_AXIS_TP], 0));
    }
    return bounds->llm_rows[encoder] < tokens ? bounds->llm_rows[encoder] : tokens;
}

int64_t boundary_count_rows(const Boundary *boundary, const StepPlan *plan, int microbatch)
{
    if (!boundary_is_decoder(boundary)) {
        return 0;
    }
    GridCoords coords = boundary->decoder->coords;
    Walk walk =
        walk_begin(boundary->decoder, 0, coords.at[GRID_AXIS_DP], coords.at[GRID_AXIS_CP], NULL);
    walk.coords = coords;
    Status status = walk_decoder(boundary, plan, microbatch, &walk);
    CHECK(status == STATUS_OK); /* nothing is allocated to count */
    return walk.counted;
}

/* ---------------------------------------------------------------- planning */

/* What this rank sends out of its end: counted message by message as they are sent, not taken from
 * the bound. */
static int64_t count_sent(const Plan *plan, const Layout *destination, int rank)
{
    if (layout_rank_count(destination, rank) > 0) {
        return 0;
    }
    int64_t count = 0;
    for (int phase = 0; phase < PLAN_PHASE_COUNT; phase++) {
        for (int i = 0; i < plan->num_transfers[phase]; i++) {
            const PlanTransfer *transfer = &plan->transfers[phase][i];
            count += transfer->source == rank ? transfer->count : 0;
        }
    }
    return count;
}

static Status plan_slot(const Boundary *boundary, const BoundaryCrossing *crossing,
                        BoundarySlot *slot)
{
    bool is_rows = crossing->direction == BOUNDARY_ROWS;
    Layout *encoder = is_rows ? &slot->source : &slot->destination;
    Layout *decoder = is_rows ? &slot->destination : &slot->source;
    const int64_t dims[2] = {crossing_of(boundary, crossing->plan, crossing->microbatch)->num_rows,
                             boundary->options.width};
    layout_reset(encoder, 2, dims, LAYOUT_COPIES_REPLICATE);
    layout_reset(decoder, 2, dims, LAYOUT_COPIES_REPLICATE);
    TRY(lay_out_encoder(boundary, crossing->plan, crossing->microbatch, encoder));
    TRY(lay_out_decoder(boundary, crossing->plan, crossing->microbatch, crossing->is_whole,
                        decoder));
    if (slot->has_plan && slot->source_digest == slot->source.digest &&
        slot->destination_digest == slot->destination.digest) {
        return STATUS_OK;
    }
    slot->has_plan = false;
    TRY(plan_make(&slot->source, &slot->destination, &slot->plan));
    int64_t sent = count_sent(&slot->plan, &slot->destination, boundary->options.place->rank);
    int64_t least = plan_minimum_count(&slot->source, &slot->destination);
    slot->counts = (BoundaryCounts){.bytes = sent * (int64_t)sizeof(float),
                                    .bytes_minimum = least * (int64_t)sizeof(float)};
    slot->source_digest = slot->source.digest;
    slot->destination_digest = slot->destination.digest;
    slot->has_plan = true;
    return STATUS_OK;
}

/* ---------------------------------------------------------------- moving */

static uint64_t tag_of(const BoundaryCrossing *crossing, uint64_t identity)
{
    uint64_t hash = hash_u64(HASH_SEED, crossing->kind);
    hash = hash_u64(hash, (uint64_t)crossing->plan->step);
    hash = hash_u64(hash, (uint64_t)crossing->microbatch);
    hash = hash_u64(hash, (uint64_t)crossing->direction);
    return hash_u64(hash, identity);
}

static Status finish_oldest(Boundary *boundary, BoundaryDirection direction, Stream *stream)
{
    BoundaryLane *lane = &boundary->lanes[direction];
    TRY(reshard_finish(lane->reshard, stream));
    lane->first = (lane->first + 1) % boundary->options.window;
    lane->num--;
    return STATUS_OK;
}

Status boundary_finish(Boundary *boundary, BoundaryDirection direction, int microbatch_end,
                       Stream *stream)
{
    BoundaryLane *lane = &boundary->lanes[direction];
    while (lane->num > 0 && lane->slots[lane->first].microbatch < microbatch_end) {
        TRY(finish_oldest(boundary, direction, stream));
    }
    return STATUS_OK;
}

Status boundary_start(Boundary *boundary, const BoundaryCrossing *crossing, Stream *stream)
{
    const StepCrossing *rows = crossing_of(boundary, crossing->plan, crossing->microbatch);
    bool is_at_end = boundary_is_encoder(boundary) || boundary_is_decoder(boundary);
    if (!is_at_end || rows->num_rows == 0) {
        return STATUS_OK;
    }
    CHECK(!crossing->is_whole || crossing->direction == BOUNDARY_ROWS);
    int window = boundary->options.window;
    BoundaryLane *lane = &boundary->lanes[crossing->direction];
    if (lane->num == window) {
        TRY(finish_oldest(boundary, crossing->direction, stream));
    }
    BoundarySlot *slot = &lane->slots[(lane->first + lane->num) % window];
    TRY(plan_slot(boundary, crossing, slot));
    const ReshardJob job = {
        .source = &slot->source,
        .destination = &slot->destination,
        .plan = &slot->plan,
        .source_data = crossing->source,
        .destination_data = crossing->destination,
        .tag = tag_of(crossing, rows->identity),
    };
    TRY(reshard_start(lane->reshard, &job, stream));
    slot->microbatch = crossing->microbatch;
    lane->num++;
    boundary->counts.bytes += slot->counts.bytes;
    boundary->counts.bytes_minimum += slot->counts.bytes_minimum;
    return STATUS_OK;
}

BoundaryCounts boundary_take_counts(Boundary *boundary)
{
    BoundaryCounts counts = boundary->counts;
    boundary->counts = (BoundaryCounts){0};
    return counts;
}
