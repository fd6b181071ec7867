#include "train/rank_module.h"

#include "base/memory.h"

Status rank_module_join(RankModule *rank_module, const Place *place, int index, Comm *world)
{
    if (!place->modules[index].is_here) {
        return STATUS_OK;
    }
    rank_module->place = &place->modules[index];
    rank_module->index = index;
    for (int g = 0; g < PLACE_GROUP_COUNT; g++) {
        TRY(place_split(place, index, g, world, &rank_module->groups[g]));
    }
    return STATUS_OK;
}

static Recompute recompute_of(const ModuleSpec *spec)
{
    switch (spec->recompute) {
    case VIADUCT__V1__MODULE_SPEC__RECOMPUTE__SELECTIVE:
        return RECOMPUTE_SELECTIVE;
    case VIADUCT__V1__MODULE_SPEC__RECOMPUTE__FULL:
        return RECOMPUTE_FULL;
    default:
        return RECOMPUTE_NONE;
    }
}

static ModuleContext context_of(const RankModule *rank_module, const RankModuleOptions *options)
{
    const PlaceModule *place = rank_module->place;
    const TrainingSpec *training = options->spec->training;
    return (ModuleContext){
        .device = options->device,
        .kernels = options->kernels,
        .stream = options->stream,
        .tp = rank_module->groups[PLACE_GROUP_TP],
        .cp = rank_module->groups[PLACE_GROUP_CP],
        .is_sequence_parallel = place->spec->sequence_parallel && place->spec->tp > 1,
        .stage = place_stage(place),
        .stages = place->grid.sizes[GRID_AXIS_PP],
        .chunks = place->chunks,
        .recompute = recompute_of(place->spec),
        .frozen = training->frozen,
        .num_frozen = training->n_frozen,
        .backward_begin = options->schedule->backward_begin,
    };
}

static int64_t grads_bytes(const RankModule *rank_module)
{
    const Module *module = rank_module->module;
    return module->local_max * module->width * (int64_t)sizeof(float);
}

static Status allocate_grads(RankModule *rank_module, Device *device)
{
    for (int c = 0; c < rank_module->place->chunks; c++) {
        if (rank_module_part(rank_module, c) < rank_module->backward_begin) {
            continue;
        }
        for (int i = 0; i < RANK_MODULE_GRADS; i++) {
            TRY(device_alloc(device, grads_bytes(rank_module), (void **)&rank_module->grads[c][i]));
        }
    }
    return STATUS_OK;
}

static Status open_link(RankModule *rank_module, const ScheduleSlots *slots)
{
    Comm *pp = rank_module->groups[PLACE_GROUP_PP];
    if (pp->size == 1) {
        return STATUS_OK;
    }
    int most = RANK_MODULE_GRADS;
    for (int c = 0; c < rank_module->place->chunks; c++) {
        most = slots->chunks[c] > most ? slots->chunks[c] : most;
    }
    return stage_link_create(pp, rank_module->place->name, rank_module->place->chunks, most,
                             &rank_module->link);
}

Status rank_module_open(RankModule *rank_module, const RankModuleOptions *options)
{
    const JobSpec *spec = options->spec;
    rank_module->is_trained = options->schedule->is_trained;
    rank_module->backward_begin = options->schedule->backward_begin;
    TRY(open_link(rank_module, options->slots));
    const ModuleContext context = context_of(rank_module, options);
    TRY(options->ops->create(spec->model, &context, &options->limits, &rank_module->module));
    ParamSet *params = &rank_module->module->params;
    TRY(allocate_grads(rank_module, options->device));
    if (!rank_module->is_trained) {
        return STATUS_OK;
    }
    Comm *tied = rank_module->groups[PLACE_GROUP_TIED];
    const GradientGroups groups = {.tp = rank_module->groups[PLACE_GROUP_TP],
                                   .tied = tied && tied->size > 1 ? tied : NULL,
                                   .data = rank_module->groups[PLACE_GROUP_DATA]};
    bool is_sharded = spec->optimizer->sharding == VIADUCT__V1__OPTIMIZER_SPEC__SHARDING__ZERO1;
    TRY(gradients_init(&rank_module->gradients, params, &groups, is_sharded));
    return optimizer_init(&rank_module->optimizer, spec->optimizer, params, options->kernels,
                          groups.data);
}

void rank_module_close(RankModule *rank_module)
{
    cached_encoder_destroy(rank_module->cached);
    encoder_side_destroy(rank_module->encoder);
    llm_side_destroy(rank_module->llm);
    if (rank_module->module) {
        Device *device = rank_module->module->params.device;
        for (int c = 0; c < MODULE_CHUNKS_MAX; c++) {
            for (int i = 0; i < RANK_MODULE_GRADS; i++) {
                if (rank_module->grads[c][i]) {
                    device_free(device, rank_module->grads[c][i], grads_bytes(rank_module));
                }
            }
        }
        optimizer_done(&rank_module->optimizer);
        gradients_done(&rank_module->gradients);
        rank_module->module->ops->destroy(rank_module->module);
    }
    stage_link_destroy(rank_module->link);
    for (int g = PLACE_GROUP_COUNT - 1; g >= 0; g--) {
        comm_destroy(rank_module->groups[g]);
    }
    *rank_module = (RankModule){0};
}
