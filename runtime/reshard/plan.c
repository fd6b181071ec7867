#include "reshard/plan.h"

#include "base/memory.h"
#include "reshard/cells.h"

#include <string.h>

/* All cells with one set of source holders and one set of destination holders. */
typedef struct PlanClass {
    int cell;        /* one of them: its holders' ranks are those of all */
    int next;        /* in the same slot of the table; negative: none */
    int first_owner; /* in PlanScratch.owners */
    int num_owners;
    PlanPhase phase;  /* WITHIN or CROSS: how elements leave the owners */
    int64_t total;    /* elements */
    int64_t position; /* elements of the cells already shared out */
} PlanClass;

struct PlanScratch {
    Cells cells;
    int32_t *cell_classes; /* [num_cells], negative: no destination */
    PlanClass *classes;
    int32_t *class_table;                  /* [CLASS_SLOTS], the first class of each slot */
    int32_t *owners;                       /* of all classes: indices among the source holders */
    PlanTransfer *found[PLAN_PHASE_COUNT]; /* in the order of cells */
    int32_t *order[2];                     /* of the sort */
    int32_t *rank_begins;
    int num_classes;
    int num_owners;
    int num_found[PLAN_PHASE_COUNT];
    size_t cell_classes_capacity;
    size_t classes_capacity;
    size_t class_table_capacity;
    size_t owners_capacity;
    size_t found_capacity[PLAN_PHASE_COUNT];
    size_t order_capacity[2];
    size_t rank_begins_capacity;
};

enum {
    CLASS_SLOTS = 256 /* a power of two; a few classes per replica are usual */
};

/* What the steps of one plan_make share. */
typedef struct Maker {
    const Layout *source;
    const Layout *destination;
    PlanScratch *scratch;
    Plan *plan;
} Maker;

/* A cell under way: its holders, and how it is cut into slices along one dim. */
typedef struct CellJob {
    Box box;
    const CellHolder *sources;
    const CellHolder *destinations;
    int num_sources;
    int num_destinations;
    const int32_t *owners;
    int num_owners;
    PlanPhase phase;
    int dim;
    int64_t num_slices;
    int64_t slice_count; /* elements of a slice */
    int64_t position;    /* elements of the class before this cell */
    int64_t total;       /* elements of the class */
} CellJob;

static bool are_ranks_equal(const CellHolder *a, int num_a, const CellHolder *b, int num_b)
{
    if (num_a != num_b) {
        return false;
    }
    for (int i = 0; i < num_a; i++) {
        if (a[i].rank != b[i].rank) {
            return false;
        }
    }
    return true;
}

static uint64_t hash_ranks(uint64_t hash, const CellHolder *holders, int num)
{
    for (int i = 0; i < num; i++) {
        hash = (hash ^ (uint64_t)holders[i].rank) * UINT64_C(0x9e3779b97f4a7c15);
        hash ^= hash >> 32;
    }
    return hash;
}

static int find_class(const Cells *cells, const PlanScratch *scratch, int first, int cell)
{
    int num[CELL_SIDE_COUNT];
    const CellHolder *holders[CELL_SIDE_COUNT];
    for (int side = 0; side < CELL_SIDE_COUNT; side++) {
        holders[side] = cells_holders(cells, (CellSide)side, cell, &num[side]);
    }
    int at = first;
    for (; at >= 0; at = scratch->classes[at].next) {
        bool is_equal = true;
        for (int side = 0; side < CELL_SIDE_COUNT && is_equal; side++) {
            int other_num = 0;
            const CellHolder *other =
                cells_holders(cells, (CellSide)side, scratch->classes[at].cell, &other_num);
            is_equal = are_ranks_equal(holders[side], num[side], other, other_num);
        }
        if (is_equal) {
            break;
        }
    }
    return at;
}

static const CellHolder *find_holder(const CellHolder *holders, int num, int rank)
{
    for (int i = 0; i < num; i++) {
        if (holders[i].rank == rank) {
            return &holders[i];
        }
    }
    return NULL;
}

/* Whether a source holder may own what its class sends out, from the most wanted kind to the
 * least: */
typedef enum OwnerKind {
    OWNER_NEEDS,    /* it needs the elements itself */
    OWNER_IN_GROUP, /* it is in the destination's group */
    OWNER_ANY,
    OWNER_KIND_COUNT,
} OwnerKind;

/* Who gives the elements of a class out: all holders of the best kind there is. A replicated
 * holder that needs its own elements copies them whether it owns a share or not, so the first
 * kind is for sums only: it saves sending the sum to where it is needed anyway. */
static Status choose_owners(Maker *maker, PlanClass *class)
{
    PlanScratch *scratch = maker->scratch;
    int num_sources = 0;
    int num_needing = 0;
    const CellHolder *sources =
        cells_holders(&scratch->cells, CELL_SIDE_SOURCE, class->cell, &num_sources);
    const CellHolder *needing =
        cells_holders(&scratch->cells, CELL_SIDE_DESTINATION, class->cell, &num_needing);
    TRY(memory_grow((void **)&scratch->owners, &scratch->owners_capacity,
                    (size_t)scratch->num_owners + (size_t)num_sources, sizeof *scratch->owners));
    int32_t *owners = scratch->owners + scratch->num_owners;
    int kind = maker->source->copies == LAYOUT_COPIES_PARTIAL ? OWNER_NEEDS : OWNER_IN_GROUP;
    int num = 0;
    for (; kind < OWNER_KIND_COUNT && num == 0; kind++) {
        for (int i = 0; i < num_sources; i++) {
            int rank = sources[i].rank;
            if ((kind == OWNER_NEEDS && find_holder(needing, num_needing, rank)) ||
                (kind == OWNER_IN_GROUP && layout_rank_count(maker->destination, rank) > 0) ||
                kind == OWNER_ANY) {
                owners[num++] = i;
            }
        }
        class->phase = kind == OWNER_ANY ? PLAN_PHASE_CROSS : PLAN_PHASE_WITHIN;
    }
    class->first_owner = scratch->num_owners;
    class->num_owners = num;
    scratch->num_owners += num;
    return STATUS_OK;
}

static Status classify_cell(Maker *maker, int cell)
{
    PlanScratch *scratch = maker->scratch;
    const Cells *cells = &scratch->cells;
    int num_sources = 0;
    int num_destinations = 0;
    const CellHolder *sources = cells_holders(cells, CELL_SIDE_SOURCE, cell, &num_sources);
    const CellHolder *destinations =
        cells_holders(cells, CELL_SIDE_DESTINATION, cell, &num_destinations);
    scratch->cell_classes[cell] = -1;
    if (num_destinations == 0) {
        return STATUS_OK;
    }
    Box box = cells_box(cells, cell);
    if (num_sources == 0) {
        char text[BOX_TEXT_BYTES];
        return fail(STATUS_INVALID, "plan: box %s is needed by rank %d but held by no source",
                    box_print(&box, cells->num_dims, text), destinations[0].rank);
    }
    uint64_t hash = hash_ranks(hash_ranks(UINT64_C(1) << 32, sources, num_sources) + 1,
                               destinations, num_destinations);
    int32_t *slot = &scratch->class_table[hash % CLASS_SLOTS];
    int class = find_class(cells, scratch, *slot, cell);
    if (class < 0) {
        TRY(memory_grow((void **)&scratch->classes, &scratch->classes_capacity,
                        (size_t)scratch->num_classes + 1, sizeof *scratch->classes));
        class = scratch->num_classes++;
        scratch->classes[class] = (PlanClass){.cell = cell, .next = *slot};
        *slot = class;
        TRY(choose_owners(maker, &scratch->classes[class]));
    }
    scratch->classes[class].total += box_count(&box, LAYOUT_DIMS_MAX);
    scratch->cell_classes[cell] = class;
    return STATUS_OK;
}

static Status classify(Maker *maker)
{
    PlanScratch *scratch = maker->scratch;
    size_t num_cells = (size_t)scratch->cells.num_cells;
    TRY(memory_grow((void **)&scratch->cell_classes, &scratch->cell_classes_capacity, num_cells,
                    sizeof *scratch->cell_classes));
    TRY(memory_grow((void **)&scratch->class_table, &scratch->class_table_capacity, CLASS_SLOTS,
                    sizeof *scratch->class_table));
    memset(scratch->class_table, 0xff, CLASS_SLOTS * sizeof *scratch->class_table);
    scratch->num_classes = 0;
    scratch->num_owners = 0;
    for (int cell = 0; cell < scratch->cells.num_cells; cell++) {
        TRY(classify_cell(maker, cell));
    }
    return STATUS_OK;
}

static PlanPlace place_of(const Layout *layout, int piece, const Box *box)
{
    const LayoutPiece *outer = &layout->pieces[piece];
    return (PlanPlace){.offset = outer->offset + box_offset(&outer->box, box),
                       .piece = piece,
                       .is_contiguous = box_is_contiguous(&outer->box, box)};
}

/* Slices [slices.begin, slices.end) of the cell from one holder to another. */
static Status emit(Maker *maker, const CellJob *job, PlanPhase phase, Range slices,
                   const CellHolder *from, const CellHolder *to)
{
    PlanScratch *scratch = maker->scratch;
    const Layout *from_layout = phase == PLAN_PHASE_SPREAD ? maker->destination : maker->source;
    const Layout *to_layout = phase == PLAN_PHASE_REDUCE ? maker->source : maker->destination;
    TRY(memory_grow((void **)&scratch->found[phase], &scratch->found_capacity[phase],
                    (size_t)scratch->num_found[phase] + 1, sizeof(PlanTransfer)));
    PlanTransfer *transfer = &scratch->found[phase][scratch->num_found[phase]++];
    int64_t begin = job->box.ranges[job->dim].begin;
    transfer->source = from->rank;
    transfer->destination = to->rank;
    transfer->box = job->box;
    transfer->box.ranges[job->dim] = (Range){begin + slices.begin, begin + slices.end};
    transfer->count = job->slice_count * range_count(slices);
    transfer->from = place_of(from_layout, from->piece, &transfer->box);
    transfer->to = place_of(to_layout, to->piece, &transfer->box);
    transfer->accumulates = phase == PLAN_PHASE_REDUCE && from != job->sources;
    return STATUS_OK;
}

/* Where share `index` of `parts` begins, in slices of this cell: the class's even cut, moved to
 * the nearest slice. */
static int64_t share_begin(const CellJob *job, int parts, int index)
{
    int64_t local = job->total / parts * index + job->total % parts * index / parts - job->position;
    int64_t slice = local <= 0 ? 0 : (local + job->slice_count / 2) / job->slice_count;
    return slice < job->num_slices ? slice : job->num_slices;
}

static Range share_of(const CellJob *job, int parts, int index)
{
    /* The last share takes the rest whatever rounding does. */
    return (Range){share_begin(job, parts, index),
                   index + 1 < parts ? share_begin(job, parts, index + 1) : job->num_slices};
}

static Status emit_reduce(Maker *maker, const CellJob *job)
{
    for (int i = 0; i < job->num_owners; i++) {
        Range share = share_of(job, job->num_owners, i);
        for (int s = 0; s < job->num_sources && range_count(share) > 0; s++) {
            TRY(emit(maker, job, PLAN_PHASE_REDUCE, share, &job->sources[s],
                     &job->sources[job->owners[i]]));
        }
    }
    return STATUS_OK;
}

static Status emit_within(Maker *maker, const CellJob *job)
{
    bool is_replicated = maker->source->copies == LAYOUT_COPIES_REPLICATE;
    for (int d = 0; d < job->num_destinations; d++) {
        const CellHolder *to = &job->destinations[d];
        const CellHolder *own =
            is_replicated ? find_holder(job->sources, job->num_sources, to->rank) : NULL;
        if (own) {
            TRY(emit(maker, job, PLAN_PHASE_WITHIN, (Range){0, job->num_slices}, own, to));
            continue;
        }
        for (int i = 0; i < job->num_owners; i++) {
            Range share = share_of(job, job->num_owners, i);
            if (range_count(share) > 0) {
                TRY(emit(maker, job, PLAN_PHASE_WITHIN, share, &job->sources[job->owners[i]], to));
            }
        }
    }
    return STATUS_OK;
}

static Status emit_cross(Maker *maker, const CellJob *job)
{
    int i = 0;
    int j = 0;
    int64_t at = 0;
    Range sent = share_of(job, job->num_owners, 0);
    Range received = share_of(job, job->num_destinations, 0);
    while (at < job->num_slices) {
        while (sent.end <= at) {
            sent = share_of(job, job->num_owners, ++i);
        }
        while (received.end <= at) {
            received = share_of(job, job->num_destinations, ++j);
        }
        int64_t end = sent.end < received.end ? sent.end : received.end;
        TRY(emit(maker, job, PLAN_PHASE_CROSS, (Range){at, end}, &job->sources[job->owners[i]],
                 &job->destinations[j]));
        at = end;
    }
    return STATUS_OK;
}

static Status emit_spread(Maker *maker, const CellJob *job)
{
    for (int j = 0; j < job->num_destinations; j++) {
        Range share = share_of(job, job->num_destinations, j);
        for (int k = 0; k < job->num_destinations && range_count(share) > 0; k++) {
            if (k != j) {
                TRY(emit(maker, job, PLAN_PHASE_SPREAD, share, &job->destinations[j],
                         &job->destinations[k]));
            }
        }
    }
    return STATUS_OK;
}

/* Chooses the dim along which shares are cut. */
static void cut_cell(CellJob *job, int num_dims)
{
    int64_t count = box_count(&job->box, LAYOUT_DIMS_MAX);
    int most = job->num_owners > job->num_destinations ? job->num_owners : job->num_destinations;
    int64_t slice_max = job->total / most / PLAN_SHARE_SLICES_MIN;
    job->dim = 0;
    if (most > 1 && count / range_count(job->box.ranges[0]) > slice_max) {
        for (int d = 1; d < num_dims; d++) {
            if (range_count(job->box.ranges[d]) > range_count(job->box.ranges[job->dim])) {
                job->dim = d;
            }
        }
    }
    job->num_slices = range_count(job->box.ranges[job->dim]);
    job->slice_count = count / job->num_slices;
}

static Status share_cell(Maker *maker, int cell)
{
    PlanScratch *scratch = maker->scratch;
    if (scratch->cell_classes[cell] < 0) {
        return STATUS_OK;
    }
    PlanClass *class = &scratch->classes[scratch->cell_classes[cell]];
    CellJob job = {.box = cells_box(&scratch->cells, cell),
                   .owners = scratch->owners + class->first_owner,
                   .num_owners = class->num_owners,
                   .phase = class->phase,
                   .position = class->position,
                   .total = class->total};
    job.sources = cells_holders(&scratch->cells, CELL_SIDE_SOURCE, cell, &job.num_sources);
    job.destinations =
        cells_holders(&scratch->cells, CELL_SIDE_DESTINATION, cell, &job.num_destinations);
    cut_cell(&job, scratch->cells.num_dims);
    class->position += job.num_slices * job.slice_count;
    if (maker->source->copies == LAYOUT_COPIES_PARTIAL) {
        TRY(emit_reduce(maker, &job));
    }
    if (job.phase == PLAN_PHASE_WITHIN) {
        return emit_within(maker, &job);
    }
    TRY(emit_cross(maker, &job));
    return emit_spread(maker, &job);
}

/* One pass of a stable counting sort of transfers by one rank. `from` NULL: the order they have. */
static void sort_pass(PlanScratch *scratch, PlanPhase phase, bool by_source, const int32_t *from,
                      int32_t *to, int num_ranks)
{
    int num = scratch->num_found[phase];
    int32_t *begins = scratch->rank_begins;
    const PlanTransfer *found = scratch->found[phase];
    memset(begins, 0, ((size_t)num_ranks + 1) * sizeof *begins);
    for (int i = 0; i < num; i++) {
        begins[(by_source ? found[i].source : found[i].destination) + 1]++;
    }
    for (int r = 0; r < num_ranks; r++) {
        begins[r + 1] += begins[r];
    }
    for (int i = 0; i < num; i++) {
        int32_t at = from ? from[i] : i;
        to[begins[by_source ? found[at].source : found[at].destination]++] = at;
    }
}

/* Whether `next` prolongs `last`: one box, and one run of memory at both ends. */
static bool try_join(PlanTransfer *last, const PlanTransfer *next)
{
    if (last->source != next->source || last->destination != next->destination ||
        last->accumulates != next->accumulates || !last->from.is_contiguous ||
        !next->from.is_contiguous || !last->to.is_contiguous || !next->to.is_contiguous ||
        last->from.offset + last->count != next->from.offset ||
        last->to.offset + last->count != next->to.offset) {
        return false;
    }
    /* They must lie end to end along the outermost dim in which they are longer than 1. */
    int joined = 0;
    while (joined < LAYOUT_DIMS_MAX &&
           last->box.ranges[joined].begin == next->box.ranges[joined].begin &&
           range_count(last->box.ranges[joined]) == 1 &&
           range_count(next->box.ranges[joined]) == 1) {
        joined++;
    }
    if (joined == LAYOUT_DIMS_MAX ||
        last->box.ranges[joined].end != next->box.ranges[joined].begin) {
        return false;
    }
    for (int d = joined + 1; d < LAYOUT_DIMS_MAX; d++) {
        if (last->box.ranges[d].begin != next->box.ranges[d].begin ||
            last->box.ranges[d].end != next->box.ranges[d].end) {
            return false;
        }
    }
    last->box.ranges[joined].end = next->box.ranges[joined].end;
    last->count += next->count;
    return true;
}

static Status sort_phase(Maker *maker, PlanPhase phase, int num_ranks)
{
    PlanScratch *scratch = maker->scratch;
    Plan *plan = maker->plan;
    size_t num = (size_t)scratch->num_found[phase];
    for (int i = 0; i < 2; i++) {
        TRY(memory_grow((void **)&scratch->order[i], &scratch->order_capacity[i], num,
                        sizeof *scratch->order[i]));
    }
    TRY(memory_grow((void **)&plan->transfers[phase], &plan->capacities[phase], num,
                    sizeof(PlanTransfer)));
    sort_pass(scratch, phase, false, NULL, scratch->order[0], num_ranks);
    sort_pass(scratch, phase, true, scratch->order[0], scratch->order[1], num_ranks);
    PlanTransfer *out = plan->transfers[phase];
    int num_out = 0;
    for (size_t i = 0; i < num; i++) {
        const PlanTransfer *next = &scratch->found[phase][scratch->order[1][i]];
        if (num_out == 0 || !try_join(&out[num_out - 1], next)) {
            out[num_out++] = *next;
        }
    }
    plan->num_transfers[phase] = num_out;
    return STATUS_OK;
}

static Status check_layouts(const Layout *source, const Layout *destination)
{
    if (destination->copies == LAYOUT_COPIES_PARTIAL) {
        return fail(STATUS_INVALID, "plan: the destination is PARTIAL; a sum can only be a source");
    }
    if (source->num_dims != destination->num_dims) {
        return fail(STATUS_INVALID, "plan: the source has %d dims, the destination %d",
                    source->num_dims, destination->num_dims);
    }
    for (int d = 0; d < source->num_dims; d++) {
        if (source->dims[d] != destination->dims[d]) {
            return fail(STATUS_INVALID,
                        "plan: dim %d is %lld in the source, %lld in the destination", d,
                        (long long)source->dims[d], (long long)destination->dims[d]);
        }
    }
    return STATUS_OK;
}

static Status make(Maker *maker)
{
    PlanScratch *scratch = maker->scratch;
    int num_ranks = maker->source->num_ranks > maker->destination->num_ranks
                        ? maker->source->num_ranks
                        : maker->destination->num_ranks;
    TRY(memory_grow((void **)&scratch->rank_begins, &scratch->rank_begins_capacity,
                    (size_t)num_ranks + 1, sizeof *scratch->rank_begins));
    TRY(cells_make(maker->source, maker->destination, &scratch->cells));
    TRY(classify(maker));
    for (int cell = 0; cell < scratch->cells.num_cells; cell++) {
        TRY(share_cell(maker, cell));
    }
    for (int phase = 0; phase < PLAN_PHASE_COUNT; phase++) {
        TRY(sort_phase(maker, (PlanPhase)phase, num_ranks));
    }
    return STATUS_OK;
}

Status plan_make(const Layout *source, const Layout *destination, Plan *plan)
{
    plan->num_dims = source->num_dims;
    plan->digest = plan_digest(source, destination);
    memset(plan->num_transfers, 0, sizeof plan->num_transfers);
    TRY(check_layouts(source, destination));
    if (!plan->scratch) {
        TRY(MEMORY_NEW(&plan->scratch, 1));
    }
    memset(plan->scratch->num_found, 0, sizeof plan->scratch->num_found);
    Maker maker = {
        .source = source, .destination = destination, .scratch = plan->scratch, .plan = plan};
    Status status = make(&maker);
    if (status != STATUS_OK) {
        memset(plan->num_transfers, 0, sizeof plan->num_transfers);
        return status_trace(status, __FILE__, __LINE__);
    }
    return STATUS_OK;
}

void plan_done(Plan *plan)
{
    PlanScratch *scratch = plan->scratch;
    for (int phase = 0; phase < PLAN_PHASE_COUNT; phase++) {
        memory_free(plan->transfers[phase]);
        if (scratch) {
            memory_free(scratch->found[phase]);
        }
    }
    if (scratch) {
        cells_done(&scratch->cells);
        memory_free(scratch->cell_classes);
        memory_free(scratch->classes);
        memory_free(scratch->class_table);
        memory_free(scratch->owners);
        memory_free(scratch->order[0]);
        memory_free(scratch->order[1]);
        memory_free(scratch->rank_begins);
        memory_free(scratch);
    }
    *plan = (Plan){0};
}

int64_t plan_moved_count(const Plan *plan, PlanPhase phase)
{
    int64_t count = 0;
    for (int i = 0; i < plan->num_transfers[phase]; i++) {
        const PlanTransfer *transfer = &plan->transfers[phase][i];
        count += transfer->source != transfer->destination ? transfer->count : 0;
    }
    return count;
}

/* Box `index` of those that make elements of destination piece `piece` free: what earlier pieces
 * need is counted already, and what the group holds as a source need not come. NULL: this one
 * does not. */
static const Box *free_box(const Layout *source, const Layout *destination, int piece, int index)
{
    if (index < piece) {
        return &destination->pieces[index].box;
    }
    const LayoutPiece *held = &source->pieces[index - piece];
    return layout_rank_count(destination, held->rank) > 0 ? &held->box : NULL;
}

static bool is_overlapping(const Box *a, const Box *b)
{
    for (int d = 0; d < LAYOUT_DIMS_MAX; d++) {
        if (a->ranges[d].begin >= b->ranges[d].end || b->ranges[d].begin >= a->ranges[d].end) {
            return false;
        }
    }
    return true;
}

/* Shrinks `block`, which begins at a point of the grid that all free boxes draw in a piece, to
 * the grid's cell there; whether the cell is free. */
static bool shrink_to_cell(const Layout *source, const Layout *destination, int piece, Box *block)
{
    bool is_free = false;
    const Box *needed = &destination->pieces[piece].box;
    for (int i = 0; i < piece + source->num_pieces; i++) {
        const Box *box = free_box(source, destination, piece, i);
        if (!box || !is_overlapping(box, needed)) {
            continue;
        }
        bool holds_corner = true;
        for (int d = 0; d < LAYOUT_DIMS_MAX; d++) {
            Range *range = &block->ranges[d];
            int64_t begin = box->ranges[d].begin;
            int64_t end = box->ranges[d].end;
            range->end = begin > range->begin && begin < range->end ? begin : range->end;
            range->end = end > range->begin && end < range->end ? end : range->end;
            holds_corner = holds_corner && begin <= range->begin && range->begin < end;
        }
        is_free = is_free || holds_corner;
    }
    return is_free;
}

/* Whether one box alone makes all of the piece free: the usual case of a replicated destination. */
static bool is_piece_free(const Layout *source, const Layout *destination, int piece)
{
    const Box *needed = &destination->pieces[piece].box;
    for (int i = 0; i < piece + source->num_pieces; i++) {
        const Box *box = free_box(source, destination, piece, i);
        bool holds = box != NULL;
        for (int d = 0; d < LAYOUT_DIMS_MAX && holds; d++) {
            holds = box->ranges[d].begin <= needed->ranges[d].begin &&
                    needed->ranges[d].end <= box->ranges[d].end;
        }
        if (holds) {
            return true;
        }
    }
    return false;
}

int64_t plan_minimum_count(const Layout *source, const Layout *destination)
{
    int64_t count = 0;
    for (int piece = 0; piece < destination->num_pieces; piece++) {
        if (is_piece_free(source, destination, piece)) {
            continue;
        }
        const Box *needed = &destination->pieces[piece].box;
        Box block = *needed;
        int d = 0;
        while (d >= 0) {
            bool is_free = shrink_to_cell(source, destination, piece, &block);
            count += is_free ? 0 : box_count(&block, LAYOUT_DIMS_MAX);
            /* The next cell of the grid, row-major; done when dim 0 is through. */
            for (d = LAYOUT_DIMS_MAX - 1; d >= 0; d--) {
                Range *range = &block.ranges[d];
                range->begin = range->end;
                range->end = needed->ranges[d].end;
                if (range->begin < range->end) {
                    break;
                }
                range->begin = needed->ranges[d].begin;
            }
        }
    }
    return count;
}
