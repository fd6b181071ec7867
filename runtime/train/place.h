/* Place: where a rank stands: the grids of all modules over the world, and its coordinates in those
 * that it serves. Which ranks serve what is job/job_layout.h's; a rank of a shared pool serves
 * several modules.
 * Threading: plain data, pure functions.
 */
#ifndef TRAIN_PLACE_H
#define TRAIN_PLACE_H

#include "comm/comm.h"
#include "comm/grid.h"
#include "job/job_layout.h"

typedef struct PlaceModule {
    const char *name;       /* "vision", "audio", "llm"; of the spec */
    const ModuleSpec *spec; /* borrowed */
    Grid grid;
    int chunks;        /* runs of layers on each stage */
    bool is_here;      /* this rank serves it */
    GridCoords coords; /* where it does */
} PlaceModule;

typedef struct Place {
    int rank; /* in the world */
    int world_size;
    int num_modules; /* encoders, then the decoder */
    PlaceModule modules[JOB_MODULES_MAX];
} Place;

static inline int place_num_encoders(const Place *place)
{
    return place->num_modules - 1;
}

static inline const PlaceModule *place_decoder(const Place *place)
{
    return &place->modules[place->num_modules - 1];
}

/* Pure. The spec is checked and outlives the place. */
Place place_make(const JobSpec *spec, int rank);

/* STATUS_INVALID when the world's size is not what the modules need. */
Status place_check_world(const Place *place, const Comm *world) STATUS_CHECKED;

static inline int place_stage(const PlaceModule *module)
{
    return module->coords.at[GRID_AXIS_PP];
}

/* This rank serves the module's first or last pipeline stage. */
bool place_is_first_stage(const PlaceModule *module);
bool place_is_last_stage(const PlaceModule *module);

/* Groups of ranks of one module that work together; all of this rank's in each. */
typedef enum PlaceGroup {
    PLACE_GROUP_TP,
    PLACE_GROUP_CP,
    PLACE_GROUP_PP,   /* one rank of each stage, in the order of stages */
    PLACE_GROUP_DATA, /* cp and dp, dp slowest: the same parameters, whose gradients are summed */
    PLACE_GROUP_TIED, /* the first and the last of PP, on these two only; pp 1: this rank alone */
    PLACE_GROUP_COUNT,
} PlaceGroup;

/* The world ranks of this rank's group, ascending; ranks_out [grid size]. Returns their number; 0
 * where it is in none (TIED on a middle stage). */
int place_group_ranks(const PlaceModule *module, int rank, PlaceGroup group, int *ranks_out);

/* The group's comm, "llm cp"; NULL where this rank is in none. Collective over the group; every
 * rank must make groups in the order of modules and groups. */
Status place_split(const Place *place, int module, PlaceGroup group, Comm *world,
                   Comm **comm_out) STATUS_CHECKED;

#endif
