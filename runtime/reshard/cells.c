#include "reshard/cells.h"

#include "base/memory.h"

#include <string.h>

enum {
    CELLS_MAX = 1 << 24, /* far more than any real pair of layouts; keeps indices in 32 bits */
};

static CellCut *find_cut(const CellDim *dim, int64_t value)
{
    uint64_t hash = (uint64_t)value * UINT64_C(0x9e3779b97f4a7c15);
    uint64_t slot = hash >> (64 - dim->table_bits);
    uint64_t last = (UINT64_C(1) << dim->table_bits) - 1;
    while (dim->table[slot].index >= 0 && dim->table[slot].value != value) {
        slot = (slot + 1) & last;
    }
    return &dim->table[slot];
}

static void add_cut(CellDim *dim, int64_t value)
{
    CellCut *cut = find_cut(dim, value);
    if (cut->index < 0) {
        *cut = (CellCut){.value = value, .index = 0};
        dim->cuts[dim->num_cuts++] = value;
    }
}

/* Shell sort (Ciura's gaps): no memory, and nearly linear on values that come nearly sorted. */
static void sort_values(int64_t *values, int num_values)
{
    static const int gaps[] = {1750, 701, 301, 132, 57, 23, 10, 4, 1};
    for (size_t g = 0; g < sizeof gaps / sizeof gaps[0]; g++) {
        int gap = gaps[g];
        for (int i = gap; i < num_values; i++) {
            int64_t value = values[i];
            int at = i;
            for (; at >= gap && values[at - gap] > value; at -= gap) {
                values[at] = values[at - gap];
            }
            values[at] = value;
        }
    }
}

static Status make_dim(const Layout *const layouts[CELL_SIDE_COUNT], int d, CellDim *dim)
{
    size_t edges_max = 2 * ((size_t)layouts[0]->num_pieces + (size_t)layouts[1]->num_pieces);
    dim->table_bits = 3;
    while ((size_t)1 << dim->table_bits < 2 * edges_max) {
        dim->table_bits++;
    }
    size_t num_slots = (size_t)1 << dim->table_bits;
    TRY(memory_grow((void **)&dim->cuts, &dim->cuts_capacity, edges_max, sizeof *dim->cuts));
    TRY(memory_grow((void **)&dim->table, &dim->table_capacity, num_slots, sizeof *dim->table));
    memset(dim->table, 0xff, num_slots * sizeof *dim->table);
    dim->num_cuts = 0;
    for (int side = 0; side < CELL_SIDE_COUNT; side++) {
        Range last = {-1, -1};
        for (int i = 0; i < layouts[side]->num_pieces; i++) {
            Range range = layouts[side]->pieces[i].box.ranges[d];
            if (range.begin == last.begin && range.end == last.end) {
                continue;
            }
            add_cut(dim, range.begin);
            add_cut(dim, range.end);
            last = range;
        }
    }
    sort_values(dim->cuts, dim->num_cuts);
    for (int i = 0; i < dim->num_cuts; i++) {
        find_cut(dim, dim->cuts[i])->index = i;
    }
    return STATUS_OK;
}

/* Visits the cells of a box in order. */
typedef struct Walk {
    int64_t strides[LAYOUT_DIMS_MAX];
    int begins[LAYOUT_DIMS_MAX];
    int ends[LAYOUT_DIMS_MAX];
    int at[LAYOUT_DIMS_MAX];
    int cell;
} Walk;

static Walk walk_begin(const Cells *cells, const Box *box)
{
    Walk walk = {0};
    int64_t stride = 1;
    for (int d = LAYOUT_DIMS_MAX - 1; d >= 0; d--) {
        const CellDim *dim = &cells->dims[d];
        walk.begins[d] = find_cut(dim, box->ranges[d].begin)->index;
        walk.ends[d] = find_cut(dim, box->ranges[d].end)->index;
        walk.at[d] = walk.begins[d];
        walk.strides[d] = stride;
        walk.cell += (int)(stride * walk.at[d]);
        stride *= dim->num_cuts - 1;
    }
    return walk;
}

/* False when the box is over. */
static bool walk_next(Walk *walk)
{
    for (int d = LAYOUT_DIMS_MAX - 1; d >= 0; d--) {
        walk->at[d]++;
        walk->cell += (int)walk->strides[d];
        if (walk->at[d] < walk->ends[d]) {
            return true;
        }
        walk->cell -= (int)walk->strides[d] * (walk->ends[d] - walk->begins[d]);
        walk->at[d] = walk->begins[d];
    }
    return false;
}

/* Stable counting sort of the pieces by rank. */
static Status order_pieces(Cells *cells, const Layout *layout)
{
    size_t num_ranks = (size_t)layout->num_ranks;
    TRY(memory_grow((void **)&cells->order, &cells->order_capacity, (size_t)layout->num_pieces,
                    sizeof *cells->order));
    TRY(memory_grow((void **)&cells->rank_begins, &cells->rank_begins_capacity, num_ranks + 1,
                    sizeof *cells->rank_begins));
    memset(cells->rank_begins, 0, (num_ranks + 1) * sizeof *cells->rank_begins);
    for (int i = 0; i < layout->num_pieces; i++) {
        cells->rank_begins[layout->pieces[i].rank + 1]++;
    }
    for (size_t r = 0; r < num_ranks; r++) {
        cells->rank_begins[r + 1] += cells->rank_begins[r];
    }
    for (int i = 0; i < layout->num_pieces; i++) {
        cells->order[cells->rank_begins[layout->pieces[i].rank]++] = i;
    }
    return STATUS_OK;
}

static Status fail_overlap(const Layout *layout, int a, int b)
{
    char first[BOX_TEXT_BYTES];
    char second[BOX_TEXT_BYTES];
    return fail(
        STATUS_INVALID,
        "layout: boxes %s and %s of rank %d overlap; a rank holds each element at most once",
        box_print(&layout->pieces[a].box, layout->num_dims, first),
        box_print(&layout->pieces[b].box, layout->num_dims, second), layout->pieces[a].rank);
}

/* Holders come in the order of ranks: one that holds a cell twice stands beside itself. */
static Status check_overlap(const Cells *cells, CellSide side, const Layout *layout)
{
    for (int cell = 0; cell < cells->num_cells; cell++) {
        int num = 0;
        const CellHolder *holders = cells_holders(cells, side, cell, &num);
        for (int i = 1; i < num; i++) {
            if (holders[i].rank == holders[i - 1].rank) {
                return fail_overlap(layout, holders[i - 1].piece, holders[i].piece);
            }
        }
    }
    return STATUS_OK;
}

static Status fill_side(Cells *cells, CellSide side, const Layout *layout)
{
    TRY(order_pieces(cells, layout));
    TRY(memory_grow((void **)&cells->begins[side], &cells->begins_capacity[side],
                    (size_t)cells->num_cells + 2, sizeof(int32_t)));
    /* Counted two places ahead: the filling below advances begins[cell + 1] to where it belongs. */
    int32_t *begins = cells->begins[side];
    memset(begins, 0, ((size_t)cells->num_cells + 2) * sizeof *begins);
    for (int i = 0; i < layout->num_pieces; i++) {
        Walk walk = walk_begin(cells, &layout->pieces[i].box);
        do {
            begins[walk.cell + 2]++;
        } while (walk_next(&walk));
    }
    int64_t total = 0;
    for (int cell = 0; cell < cells->num_cells; cell++) {
        total += begins[cell + 2];
        if (total > INT32_MAX) {
            return fail(STATUS_EXHAUSTED, "layout: more than %d holders of boxes", INT32_MAX);
        }
        begins[cell + 2] = (int32_t)total;
    }
    TRY(memory_grow((void **)&cells->holders[side], &cells->holders_capacity[side], (size_t)total,
                    sizeof(CellHolder)));
    CellHolder *holders = cells->holders[side];
    for (int i = 0; i < layout->num_pieces; i++) {
        int piece = cells->order[i];
        int rank = layout->pieces[piece].rank;
        Walk walk = walk_begin(cells, &layout->pieces[piece].box);
        do {
            holders[begins[walk.cell + 1]++] = (CellHolder){.rank = rank, .piece = piece};
        } while (walk_next(&walk));
    }
    return check_overlap(cells, side, layout);
}

Status cells_make(const Layout *source, const Layout *destination, Cells *cells)
{
    const Layout *layouts[CELL_SIDE_COUNT] = {source, destination};
    cells->num_dims = source->num_dims;
    int64_t num_cells = 1;
    for (int d = 0; d < LAYOUT_DIMS_MAX; d++) {
        TRY(make_dim(layouts, d, &cells->dims[d]));
        int num_cuts = cells->dims[d].num_cuts;
        num_cells *= num_cuts > 0 ? num_cuts - 1 : 0;
        if (num_cells > CELLS_MAX) {
            return fail(STATUS_EXHAUSTED,
                        "layouts: the edges of %d and %d boxes cut the array into more than %d "
                        "cells",
                        source->num_pieces, destination->num_pieces, CELLS_MAX);
        }
    }
    cells->num_cells = (int)num_cells;
    TRY(fill_side(cells, CELL_SIDE_SOURCE, source));
    return fill_side(cells, CELL_SIDE_DESTINATION, destination);
}

void cells_done(Cells *cells)
{
    for (int d = 0; d < LAYOUT_DIMS_MAX; d++) {
        memory_free(cells->dims[d].cuts);
        memory_free(cells->dims[d].table);
    }
    for (int side = 0; side < CELL_SIDE_COUNT; side++) {
        memory_free(cells->begins[side]);
        memory_free(cells->holders[side]);
    }
    memory_free(cells->order);
    memory_free(cells->rank_begins);
    *cells = (Cells){0};
}

Box cells_box(const Cells *cells, int cell)
{
    Box box;
    int64_t rest = cell;
    for (int d = LAYOUT_DIMS_MAX - 1; d >= 0; d--) {
        const CellDim *dim = &cells->dims[d];
        int64_t at = rest % (dim->num_cuts - 1);
        rest /= dim->num_cuts - 1;
        box.ranges[d] = (Range){dim->cuts[at], dim->cuts[at + 1]};
    }
    return box;
}
