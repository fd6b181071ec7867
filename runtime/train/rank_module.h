/* RankModule: all that one rank has of one module that it serves: its groups, the module with
 * parameters, gradients and optimizer, the links between pipeline stages, and what is in flight.
 * Threading: the step thread.
 */
#ifndef TRAIN_RANK_MODULE_H
#define TRAIN_RANK_MODULE_H

#include "train/cached_encoder.h"
#include "train/encoder_side.h"
#include "train/gradients.h"
#include "train/llm_side.h"
#include "train/optimizer.h"
#include "train/schedule.h"
#include "train/stage_link.h"

enum {
    RANK_MODULE_GRADS = 2 /* buffers for gradients of activations, each chunk */
};

typedef struct RankModule {
    const PlaceModule *place; /* NULL: this rank does not serve it, and all else is empty */
    int index;                /* of the module */
    bool is_trained;
    int backward_begin; /* of its parts */
    Comm *groups[PLACE_GROUP_COUNT];
    Module *module;
    Gradients gradients; /* with `is_trained` */
    Optimizer optimizer; /* with `is_trained` */
    StageLink *link;     /* NULL: one stage */
    /* [local_max, D] of each chunk: the gradient of its output, then of its input. NULL: never any.
     */
    float *grads[MODULE_CHUNKS_MAX][RANK_MODULE_GRADS];
    EncoderSide *encoder; /* one of the two */
    LlmSide *llm;
    CachedEncoder *cached; /* NULL: its rows are not cached */
} RankModule;

/* Opens the rank's groups. Collective over them: in the order of modules on every rank. */
Status rank_module_join(RankModule *rank_module, const Place *place, int index,
                        Comm *world) STATUS_CHECKED;

typedef struct RankModuleOptions {
    const JobSpec *spec; /* borrowed, as all here */
    Device *device;
    const Kernels *kernels;
    Stream *stream;
    const ModuleOps *ops;
    ModuleLimits limits;
    const ScheduleModule *schedule; /* of the module */
    const ScheduleSlots *slots;     /* of this rank for the module */
} RankModuleOptions;

/* After join: makes module (weights not filled), gradients, optimizer, link and buffers; the sides
 * are the caller's to add. */
Status rank_module_open(RankModule *rank_module, const RankModuleOptions *options) STATUS_CHECKED;
/* Also after a failure, and of an empty one. */
void rank_module_close(RankModule *rank_module);

static inline int rank_module_parts(const RankModule *rank_module)
{
    return rank_module->place->grid.sizes[GRID_AXIS_PP] * rank_module->place->chunks;
}

/* The part of the module that a chunk of this rank is. */
static inline int rank_module_part(const RankModule *rank_module, int chunk)
{
    return chunk * rank_module->place->grid.sizes[GRID_AXIS_PP] + place_stage(rank_module->place);
}

#endif
