/* Grid: a module's axes over a run of consecutive global ranks. tp varies fastest, then cp, then
 * dp, then pp. Threading: pure functions on plain data.
 */
#ifndef COMM_GRID_H
#define COMM_GRID_H

#include "base/status.h"

#include <stdbool.h>

typedef enum GridAxis {
    GRID_AXIS_TP,
    GRID_AXIS_CP,
    GRID_AXIS_DP,
    GRID_AXIS_PP,
    GRID_AXIS_COUNT,
} GridAxis;

typedef struct Grid {
    int first_rank;             /* global rank of the grid's first */
    int sizes[GRID_AXIS_COUNT]; /* all >= 1 */
} Grid;

typedef struct GridCoords {
    int at[GRID_AXIS_COUNT];
} GridCoords;

int grid_size(const Grid *grid);
bool grid_contains(const Grid *grid, int rank);
GridCoords grid_coords(const Grid *grid, int rank);
int grid_rank(const Grid *grid, GridCoords coords);

/* The ranks that share all coordinates of `rank` but that of `axis`, ascending;
 * ranks_out[sizes[axis]]. Returns their number. */
int grid_axis_ranks(const Grid *grid, int rank, GridAxis axis, int *ranks_out);

#endif
