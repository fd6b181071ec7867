/* ModuleParts: which parts of a module (module.h) a rank holds.
 * Threading: pure.
 */
#ifndef TRAIN_MODULE_PARTS_H
#define TRAIN_MODULE_PARTS_H

#include "train/module.h"

typedef struct ModuleParts {
    int stage;
    int stages;
    int chunks;
} ModuleParts;

static inline ModuleParts module_parts_of(const ModuleContext *context)
{
    return (ModuleParts){.stage = context->stage,
                         .stages = context->stages > 0 ? context->stages : 1,
                         .chunks = context->chunks > 0 ? context->chunks : 1};
}

static inline int module_parts_count(const ModuleParts *parts)
{
    int count = parts->stages * parts->chunks;
    CHECK(count > 0);
    return count;
}

/* The part that a chunk of this stage is. */
static inline int module_parts_at(const ModuleParts *parts, int chunk)
{
    return chunk * parts->stages + parts->stage;
}

static inline bool module_parts_is_first(const ModuleParts *parts, int chunk)
{
    return module_parts_at(parts, chunk) == 0;
}

static inline bool module_parts_is_last(const ModuleParts *parts, int chunk)
{
    return module_parts_at(parts, chunk) == module_parts_count(parts) - 1;
}

/* A parameter of the set is trained. */
static inline bool module_parts_any_trained(const ParamSet *params)
{
    for (int i = 0; i < params->num_params; i++) {
        if (params->params[i].is_trained) {
            return true;
        }
    }
    return false;
}

/* What stacks of blocks are sized by, of a replica's tokens in so many segments. */
static inline LayerLimits module_parts_limits(const LayerContext *layers, int64_t keys,
                                              int64_t segments)
{
    ShardRank rank = layer_shard_rank(layers);
    int64_t tokens = shard_count_max(keys, segments, rank.cp_size);
    return (LayerLimits){
        .tokens = tokens, .local = (tokens + rank.tp_size - 1) / rank.tp_size, .keys = keys};
}

#endif
