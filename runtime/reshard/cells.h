/* Cells: the global array cut at every edge of every box of two layouts. Inside a cell the same
 * ranks hold all elements, and each of them holds the cell in one piece, so that a plan can be
 * made cell by cell.
 *
 * The cells form a grid (the product of the cuts of each dim), numbered row-major. Memory is kept
 * for the next pair of layouts.
 * Threading: plain data of one owner: cells_done.
 */
#ifndef RESHARD_CELLS_H
#define RESHARD_CELLS_H

#include "reshard/layout.h"

typedef enum CellSide {
    CELL_SIDE_SOURCE,
    CELL_SIDE_DESTINATION,
    CELL_SIDE_COUNT,
} CellSide;

typedef struct CellHolder {
    int rank;
    int piece; /* of the side's layout */
} CellHolder;

/* A value at which a dim is cut, in an open-addressed table. */
typedef struct CellCut {
    int64_t value;
    int32_t index; /* in the sorted cuts; negative: the slot is free */
} CellCut;

typedef struct CellDim {
    int num_cuts;  /* cells along the dim: num_cuts - 1, or none */
    int64_t *cuts; /* ascending */
    size_t cuts_capacity;
    CellCut *table; /* power of two of slots */
    size_t table_capacity;
    int table_bits;
} CellDim;

typedef struct Cells {
    int num_dims;
    int num_cells;
    CellDim dims[LAYOUT_DIMS_MAX];
    int32_t *begins[CELL_SIDE_COUNT];     /* [num_cells + 1], the first holder of each cell */
    CellHolder *holders[CELL_SIDE_COUNT]; /* of each cell in the order of ranks */
    int32_t *order;                       /* pieces of one side in the order of ranks */
    int32_t *rank_begins;                 /* scratch of the counting sort */
    size_t begins_capacity[CELL_SIDE_COUNT];
    size_t holders_capacity[CELL_SIDE_COUNT];
    size_t order_capacity;
    size_t rank_begins_capacity;
} Cells;

/* `cells` is zeroed or used before. STATUS_INVALID when two boxes of one rank overlap. */
Status cells_make(const Layout *source, const Layout *destination, Cells *cells) STATUS_CHECKED;
void cells_done(Cells *cells);

Box cells_box(const Cells *cells, int cell);

/* Holders of a cell on one side, and how many. */
static inline const CellHolder *cells_holders(const Cells *cells, CellSide side, int cell,
                                              int *num_out)
{
    int32_t begin = cells->begins[side][cell];
    *num_out = cells->begins[side][cell + 1] - begin;
    return cells->holders[side] + begin;
}

#endif
