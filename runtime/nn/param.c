#include "nn/param.h"

#include "base/clock.h"
#include "base/hash.h"
#include "base/memory.h"
#include "base/rng.h"

#include <string.h>

enum {
    FILL_CHUNK = 1 << 16,       /* elements made on the host at a time */
    FILL_TIMEOUT_MS = 60 * 1000 /* for one chunk's copy */
};

void param_set_init(ParamSet *set, Device *device)
{
    *set = (ParamSet){.device = device};
}

void param_set_done(ParamSet *set)
{
    int64_t size_bytes = set->count * (int64_t)sizeof(float);
    if (set->grads) {
        device_free(set->device, set->grads, size_bytes);
    }
    if (set->values) {
        device_free(set->device, set->values, size_bytes);
    }
    memory_free(set->params);
    *set = (ParamSet){0};
}

Status param_set_add(ParamSet *set, const ParamSpec *spec, bool counts, int *index_out)
{
    CHECK(set->values == NULL); /* declared before allocation */
    CHECK(spec->num_dims >= 1 && spec->num_dims <= TENSOR_DIMS_MAX);
    CHECK(spec->shard_dim >= -1 && spec->shard_dim < spec->num_dims);
    CHECK(!spec->grad_is_partial || spec->shard_dim < 0);
    TRY(memory_grow((void **)&set->params, &set->capacity, (size_t)set->num_params + 1,
                    sizeof *set->params));
    Param *param = &set->params[set->num_params];
    *param = (Param){.spec = *spec, .offset = set->count, .counts = counts};
    Tensor *value = &param->value;
    value->dtype = DTYPE_F32;
    value->num_dims = spec->num_dims;
    for (int i = 0; i < spec->num_dims; i++) {
        CHECK(spec->dims[i] >= 0);
        value->dims[i] = spec->dims[i];
    }
    if (spec->shard_dim >= 0) {
        CHECK(spec->shard.begin >= 0 && spec->shard.begin <= spec->shard.end &&
              spec->shard.end <= spec->dims[spec->shard_dim]);
        value->dims[spec->shard_dim] = range_count(spec->shard);
    }
    param->grad = *value;
    set->count += tensor_count(value);
    *index_out = set->num_params++;
    return STATUS_OK;
}

Status param_set_allocate(ParamSet *set)
{
    CHECK(set->values == NULL);
    int64_t size_bytes = set->count * (int64_t)sizeof(float);
    void *values = NULL;
    TRY(device_alloc(set->device, size_bytes, &values));
    set->values = values;
    void *grads = NULL;
    TRY(device_alloc(set->device, size_bytes, &grads)); /* values: freed by param_set_done */
    set->grads = grads;
    for (int i = 0; i < set->num_params; i++) {
        Param *param = &set->params[i];
        param->value.data = set->values + param->offset;
        param->grad.data = set->grads + param->offset;
    }
    return STATUS_OK;
}

/* The index in the global array of local element `local`. Seen from the shard's dim the array is
 * [outer, dim, inner]. */
static uint64_t global_index(const ParamSpec *spec, int64_t local)
{
    if (spec->shard_dim < 0) {
        return (uint64_t)local;
    }
    int64_t inner = 1;
    for (int i = spec->shard_dim + 1; i < spec->num_dims; i++) {
        inner *= spec->dims[i];
    }
    int64_t block = range_count(spec->shard) * inner; /* local elements of one outer index */
    int64_t outer = local / block;
    return (uint64_t)(outer * spec->dims[spec->shard_dim] * inner + spec->shard.begin * inner +
                      local % block);
}

static void make_values(const ParamSpec *spec, uint64_t seed, int64_t first, int64_t count,
                        float *values_out)
{
    Rng rng = {.seed = seed, .stream = hash_text(spec->name)};
    for (int64_t i = 0; i < count; i++) {
        switch (spec->init) {
        case PARAM_INIT_ZEROS:
            values_out[i] = 0;
            break;
        case PARAM_INIT_ONES:
            values_out[i] = 1;
            break;
        case PARAM_INIT_NORMAL:
            values_out[i] = spec->init_std * rng_normal(rng, global_index(spec, first + i));
            break;
        }
    }
}

static Status fill_param(const Param *param, uint64_t seed, float *staging, Stream *stream)
{
    int64_t count = tensor_count(&param->value);
    for (int64_t first = 0; first < count; first += FILL_CHUNK) {
        int64_t chunk = count - first < FILL_CHUNK ? count - first : FILL_CHUNK;
        make_values(&param->spec, seed, first, chunk, staging);
        TRY(stream_copy(stream, tensor_f32(&param->value) + first, staging,
                        chunk * (int64_t)sizeof(float)));
        /* The staging buffer is written again. */
        TRY(stream_wait(stream, clock_deadline_in_ms(FILL_TIMEOUT_MS)));
    }
    return STATUS_OK;
}

Status param_set_fill(ParamSet *set, uint64_t seed, Stream *stream)
{
    CHECK(set->values != NULL);
    void *staging = NULL;
    int64_t size_bytes = FILL_CHUNK * (int64_t)sizeof(float);
    TRY(device_alloc_host(set->device, size_bytes, &staging));
    Status status = STATUS_OK;
    for (int i = 0; i < set->num_params && status == STATUS_OK; i++) {
        status = fill_param(&set->params[i], seed, staging, stream);
    }
    device_free_host(set->device, staging, size_bytes);
    TRY(status);
    return STATUS_OK;
}
