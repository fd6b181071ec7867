#include "train/place.h"

#include "base/memory.h"

#include <stdio.h>

Place place_make(const JobSpec *spec, int rank)
{
    JobLayout layout = job_layout_make(spec);
    Place place = {.rank = rank, .world_size = layout.num_ranks, .num_modules = layout.num_modules};
    for (int i = 0; i < layout.num_modules; i++) {
        const JobLayoutModule *from = &layout.modules[i];
        PlaceModule *module = &place.modules[i];
        *module = (PlaceModule){
            .name = from->spec->name,
            .spec = from->spec,
            .grid = {.first_rank = from->first_rank,
                     .sizes = {[GRID_AXIS_TP] = from->spec->tp,
                               [GRID_AXIS_CP] = from->spec->cp,
                               [GRID_AXIS_DP] = from->spec->dp,
                               [GRID_AXIS_PP] = from->spec->pp}},
            .chunks = from->spec->virtual_stages,
        };
        CHECK(grid_size(&module->grid) == from->num_ranks && module->chunks >= 1);
        module->is_here = grid_contains(&module->grid, rank);
        if (module->is_here) {
            module->coords = grid_coords(&module->grid, rank);
        }
    }
    return place;
}

Status place_check_world(const Place *place, const Comm *world)
{
    if (world->size != place->world_size) {
        return fail(STATUS_INVALID, "the world has %d ranks, the job's modules need %d",
                    world->size, place->world_size);
    }
    return STATUS_OK;
}

bool place_is_first_stage(const PlaceModule *module)
{
    return module->is_here && place_stage(module) == 0;
}

bool place_is_last_stage(const PlaceModule *module)
{
    return module->is_here && place_stage(module) == module->grid.sizes[GRID_AXIS_PP] - 1;
}

static int data_ranks(const Grid *grid, GridCoords coords, int *ranks_out)
{
    int num = 0;
    for (int dp = 0; dp < grid->sizes[GRID_AXIS_DP]; dp++) {
        for (int cp = 0; cp < grid->sizes[GRID_AXIS_CP]; cp++) {
            coords.at[GRID_AXIS_DP] = dp;
            coords.at[GRID_AXIS_CP] = cp;
            ranks_out[num++] = grid_rank(grid, coords);
        }
    }
    return num;
}

static int tied_ranks(const Grid *grid, GridCoords coords, int *ranks_out)
{
    int last = grid->sizes[GRID_AXIS_PP] - 1;
    int stage = coords.at[GRID_AXIS_PP];
    if (stage != 0 && stage != last) {
        return 0;
    }
    int num = 0;
    coords.at[GRID_AXIS_PP] = 0;
    ranks_out[num++] = grid_rank(grid, coords);
    if (last > 0) {
        coords.at[GRID_AXIS_PP] = last;
        ranks_out[num++] = grid_rank(grid, coords);
    }
    return num;
}

int place_group_ranks(const PlaceModule *module, int rank, PlaceGroup group, int *ranks_out)
{
    const Grid *grid = &module->grid;
    if (!grid_contains(grid, rank)) {
        return 0;
    }
    switch (group) {
    case PLACE_GROUP_TP:
        return grid_axis_ranks(grid, rank, GRID_AXIS_TP, ranks_out);
    case PLACE_GROUP_CP:
        return grid_axis_ranks(grid, rank, GRID_AXIS_CP, ranks_out);
    case PLACE_GROUP_PP:
        return grid_axis_ranks(grid, rank, GRID_AXIS_PP, ranks_out);
    case PLACE_GROUP_DATA:
        return data_ranks(grid, grid_coords(grid, rank), ranks_out);
    case PLACE_GROUP_TIED:
        return tied_ranks(grid, grid_coords(grid, rank), ranks_out);
    case PLACE_GROUP_COUNT:
        break;
    }
    CHECK(false);
    return 0;
}

Status place_split(const Place *place, int module, PlaceGroup group, Comm *world, Comm **comm_out)
{
    static const char *const names[PLACE_GROUP_COUNT] = {"tp", "cp", "pp", "data", "tied"};
    const PlaceModule *split = &place->modules[module];
    char label[32];
    snprintf(label, sizeof label, "%s %s", split->name, names[group]);
    int *ranks = NULL;
    TRY(MEMORY_NEW(&ranks, grid_size(&split->grid)));
    int num = place_group_ranks(split, place->rank, group, ranks);
    Comm *comm = NULL;
    Status status = num > 0 ? comm_split(world, ranks, num, label, &comm) : STATUS_OK;
    memory_free(ranks);
    TRY(status);
    *comm_out = comm;
    return STATUS_OK;
}
