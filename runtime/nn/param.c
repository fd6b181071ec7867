#include "nn/param.h"

#include "base/clock.h"
#include "base/hash.h"
#include "base/memory.h"
#include "base/rng.h"

#include <fnmatch.h>

enum {
    FILL_CHUNK = 1 << 16,       /* elements made on the host at a time */
    FILL_TIMEOUT_MS = 60 * 1000 /* for one chunk's copy */
};

void param_set_init(ParamSet *set, Device *device)
{
    *set = (ParamSet){.device = device};
}

void param_set_freeze(ParamSet *set, char *const *patterns, size_t num_patterns)
{
    CHECK(set->num_params == 0);
    set->frozen = patterns;
    set->num_frozen = num_patterns;
}

void param_set_done(ParamSet *set)
{
    if (set->grads) {
        device_free(set->device, set->grads, set->trained_count * (int64_t)sizeof(float));
    }
    if (set->values) {
        device_free(set->device, set->values, set->count * (int64_t)sizeof(float));
    }
    memory_free(set->params);
    *set = (ParamSet){0};
}

static bool is_frozen(const ParamSet *set, const char *name)
{
    for (size_t i = 0; i < set->num_frozen; i++) {
        if (fnmatch(set->frozen[i], name, 0) == 0) {
            return true;
        }
    }
    return false;
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
    *param = (Param){.spec = *spec, .is_trained = !is_frozen(set, spec->name), .counts = counts};
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
    set->trained_count += param->is_trained ? tensor_count(value) : 0;
    *index_out = set->num_params++;
    return STATUS_OK;
}

/* Trained parameters first. */
static void set_offsets(ParamSet *set)
{
    int64_t trained = 0;
    int64_t frozen = set->trained_count;
    for (int i = 0; i < set->num_params; i++) {
        Param *param = &set->params[i];
        int64_t *next = param->is_trained ? &trained : &frozen;
        param->offset = *next;
        *next += tensor_count(&param->value);
    }
    CHECK(trained == set->trained_count && frozen == set->count);
}

Status param_set_allocate(ParamSet *set)
{
    CHECK(set->values == NULL);
    void *values = NULL;
    TRY(device_alloc(set->device, set->count * (int64_t)sizeof(float), &values));
    set->values = values;
    if (set->trained_count > 0) {
        void *grads = NULL; /* values: freed by param_set_done */
        TRY(device_alloc(set->device, set->trained_count * (int64_t)sizeof(float), &grads));
        set->grads = grads;
    }
    set_offsets(set);
    for (int i = 0; i < set->num_params; i++) {
        Param *param = &set->params[i];
        param->value.data = set->values + param->offset;
        if (param->is_trained && set->grads) {
            param->grad.data = set->grads + param->offset;
        }
    }
    set->frozen = NULL;
    set->num_frozen = 0;
    return STATUS_OK;
}

/* The index in the global array of local element `local`. Seen from the shard's dim the array is
 * [outer, dim, inner]. */
int64_t param_global_index(const ParamSpec *spec, int64_t local)
{
    if (spec->shard_dim < 0) {
        return local;
    }
    int64_t inner = 1;
    for (int i = spec->shard_dim + 1; i < spec->num_dims; i++) {
        inner *= spec->dims[i];
    }
    int64_t block = range_count(spec->shard) * inner; /* local elements of one outer index */
    int64_t outer = local / block;
    return outer * spec->dims[spec->shard_dim] * inner + spec->shard.begin * inner + local % block;
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
            values_out[i] =
                spec->init_std * rng_normal(rng, (uint64_t)param_global_index(spec, first + i));
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
