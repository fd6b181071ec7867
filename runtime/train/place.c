#include "train/place.h"

#include "base/memory.h"

#include <stdio.h>

static Status make_grid(const JobSpec *spec, const char *name, int first_rank, Grid *grid_out)
{
    const ModuleSpec *module = job_spec_module(spec, name);
    if (!module) {
        return fail(STATUS_INVALID, "the job has no module \"%s\"", name);
    }
    if (module->cp != 1 || module->pp != 1) {
        return fail(STATUS_UNSUPPORTED, "module \"%s\": cp %d and pp %d, expected 1 and 1", name,
                    module->cp, module->pp);
    }
    *grid_out =
        (Grid){.first_rank = first_rank, .sizes = {module->tp, module->cp, module->dp, module->pp}};
    return STATUS_OK;
}

Status place_make(const JobSpec *spec, const Comm *world, Place *place_out)
{
    Place place = {.rank = world->rank};
    TRY(make_grid(spec, "vision", 0, &place.encoder));
    TRY(make_grid(spec, "llm", grid_size(&place.encoder), &place.llm));
    int size = grid_size(&place.encoder) + grid_size(&place.llm);
    if (world->size != size) {
        return fail(STATUS_INVALID, "the world has %d ranks, the job's modules need %d",
                    world->size, size);
    }
    place.is_encoder = grid_contains(&place.encoder, place.rank);
    GridCoords coords = grid_coords(place_grid(&place), place.rank);
    place.tp = coords.at[GRID_AXIS_TP];
    place.dp = coords.at[GRID_AXIS_DP];
    *place_out = place;
    return STATUS_OK;
}

Status place_split(const Place *place, Comm *world, GridAxis axis, Comm **comm_out)
{
    static const char *const axes[GRID_AXIS_COUNT] = {"tp", "cp", "dp", "pp"};
    const Grid *grid = place_grid(place);
    char label[32];
    snprintf(label, sizeof label, "%s %s", place_module(place), axes[axis]);
    int *ranks = NULL;
    TRY(MEMORY_NEW(&ranks, grid->sizes[axis]));
    int num = grid_axis_ranks(grid, place->rank, axis, ranks);
    Status status = comm_split(world, ranks, num, label, comm_out);
    memory_free(ranks);
    TRY(status);
    return STATUS_OK;
}
