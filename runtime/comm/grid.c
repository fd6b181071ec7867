#include "comm/grid.h"

int grid_size(const Grid *grid)
{
    int size = 1;
    for (int axis = 0; axis < GRID_AXIS_COUNT; axis++) {
        CHECK(grid->sizes[axis] >= 1);
        size *= grid->sizes[axis];
    }
    return size;
}

bool grid_contains(const Grid *grid, int rank)
{
    return rank >= grid->first_rank && rank - grid->first_rank < grid_size(grid);
}

GridCoords grid_coords(const Grid *grid, int rank)
{
    CHECK(grid_contains(grid, rank));
    GridCoords coords;
    int left = rank - grid->first_rank;
    for (int axis = 0; axis < GRID_AXIS_COUNT; axis++) {
        coords.at[axis] = left % grid->sizes[axis];
        left /= grid->sizes[axis];
    }
    return coords;
}

int grid_rank(const Grid *grid, GridCoords coords)
{
    int rank = grid->first_rank;
    int stride = 1;
    for (int axis = 0; axis < GRID_AXIS_COUNT; axis++) {
        CHECK(coords.at[axis] >= 0 && coords.at[axis] < grid->sizes[axis]);
        rank += coords.at[axis] * stride;
        stride *= grid->sizes[axis];
    }
    return rank;
}

int grid_axis_ranks(const Grid *grid, int rank, GridAxis axis, int *ranks_out)
{
    CHECK((unsigned)axis < GRID_AXIS_COUNT);
    GridCoords coords = grid_coords(grid, rank);
    for (int i = 0; i < grid->sizes[axis]; i++) {
        coords.at[axis] = i;
        ranks_out[i] = grid_rank(grid, coords);
    }
    return grid->sizes[axis];
}
