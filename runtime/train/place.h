/* Place: where a rank stands: the grids of both modules over the world (the encoder's ranks first,
 * then the decoder's) and its coordinates.
 * Threading: plain data, pure functions.
 */
#ifndef TRAIN_PLACE_H
#define TRAIN_PLACE_H

#include "comm/comm.h"
#include "comm/grid.h"
#include "job/job_spec.h"

typedef struct Place {
    Grid encoder;
    Grid llm;
    int rank; /* in the world */
    bool is_encoder;
    int tp; /* this rank's coordinates in its module's grid */
    int dp;
} Place;

/* STATUS_INVALID when the world's size is not what the modules need; STATUS_UNSUPPORTED for axes
 * that are not built. */
Status place_make(const JobSpec *spec, const Comm *world, Place *place_out) STATUS_CHECKED;

static inline const Grid *place_grid(const Place *place)
{
    return place->is_encoder ? &place->encoder : &place->llm;
}

/* "vision" or "llm" */
static inline const char *place_module(const Place *place)
{
    return place->is_encoder ? "vision" : "llm";
}

/* The group of this rank along an axis, "vision tp". Collective over that group. */
Status place_split(const Place *place, Comm *world, GridAxis axis, Comm **comm_out) STATUS_CHECKED;

#endif
