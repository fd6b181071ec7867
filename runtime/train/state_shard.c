#include "train/state_shard.h"

#include "base/memory.h"

/* The trained parameter whose elements [offset, offset + count) hold element `at` of the flat
 * buffer. */
static const Param *find_param(const ParamSet *params, int64_t at)
{
    for (int i = 0; i < params->num_params; i++) {
        const Param *param = &params->params[i];
        if (param->is_trained && param->offset <= at &&
            at < param->offset + tensor_count(&param->value)) {
            return param;
        }
    }
    return NULL;
}

/* The place between two rows nearest to `at`, the upper of two as near: `at` was rounded down. It
 * never falls as `at` grows. */
static int64_t nearest_cut(const ParamSet *params, int64_t at)
{
    if (at == params->trained_count) {
        return at;
    }
    const Param *param = find_param(params, at);
    CHECK(param); /* the trained parameters fill [0, trained_count) */
    int64_t row = tensor_count(&param->value) / param->value.dims[0];
    int64_t past = (at - param->offset) % row;
    return past < row - past ? at - past : at - past + row;
}

Status state_shard_init(const ParamSet *params, int num_parts, int part, StateShard *shard_out)
{
    CHECK(num_parts >= 1 && part >= 0 && part < num_parts);
    StateShard shard = {.num_parts = num_parts, .part = part};
    TRY(MEMORY_NEW(&shard.begins, num_parts + 1));
    Status status = MEMORY_NEW(&shard.bytes, num_parts + 1);
    if (status != STATUS_OK) {
        state_shard_done(&shard);
        return status_trace(status, __FILE__, __LINE__);
    }
    for (int p = 0; p < num_parts; p++) {
        int64_t ideal = params->trained_count / num_parts * p +
                        params->trained_count % num_parts * p / num_parts;
        shard.begins[p] = nearest_cut(params, ideal);
    }
    shard.begins[num_parts] = params->trained_count;
    for (int p = 0; p <= num_parts; p++) {
        shard.bytes[p] = shard.begins[p] * (int64_t)sizeof(float);
    }
    *shard_out = shard;
    return STATUS_OK;
}

void state_shard_done(StateShard *shard)
{
    memory_free(shard->begins);
    memory_free(shard->bytes);
    *shard = (StateShard){0};
}
