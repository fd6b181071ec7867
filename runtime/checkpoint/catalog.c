#include "checkpoint/catalog.h"

#include "base/clock.h"
#include "base/memory.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

enum {
    RANK_BYTES_MAX = 64 << 20, /* declared by one rank: 300 thousand tensors */
    COPY_TIMEOUT_MS = 60 * 1000,
    GATHERED_BYTES_MAX = 1 << 30,
};

/* Digits as numbers by their value, the rest as bytes. */
static int compare_natural(const char *a, const char *b)
{
    while (*a && *b) {
        if (isdigit((unsigned char)*a) && isdigit((unsigned char)*b)) {
            a += strspn(a, "0");
            b += strspn(b, "0");
            size_t digits_a = strspn(a, "0123456789");
            size_t digits_b = strspn(b, "0123456789");
            int order = digits_a == digits_b  ? memcmp(a, b, digits_a)
                        : digits_a < digits_b ? -1
                                              : 1;
            if (order != 0) {
                return order;
            }
            a += digits_a;
            b += digits_b;
            continue;
        }
        if (*a != *b) {
            return (unsigned char)*a - (unsigned char)*b;
        }
        a++;
        b++;
    }
    return (unsigned char)*a - (unsigned char)*b;
}

static int compare_names(const void *a, const void *b)
{
    const CatalogTensor *left = a;
    const CatalogTensor *right = b;
    int order = strcmp(left->module, right->module);
    order = order != 0 ? order : compare_natural(left->name, right->name);
    return order != 0 ? order : strcmp(left->name, right->name); /* "1" and "01" */
}

static int compare_names_and_ranks(const void *a, const void *b)
{
    int order = compare_names(a, b);
    int left = ((const CatalogTensor *)a)->rank;
    int right = ((const CatalogTensor *)b)->rank;
    return order != 0 ? order : (left > right) - (left < right);
}

/* The module's name becomes a part of a file's name. */
static bool is_module_name(const char *name)
{
    size_t length =
        strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-");
    return length > 0 && name[length] == '\0';
}

static int64_t count_elements(const CatalogTensor *tensor)
{
    int64_t count = 1;
    for (int i = 0; i < tensor->num_dims; i++) {
        count *= tensor->dims[i];
    }
    return count;
}

/* What another rank says is not believed. */
static Status check_tensor(const CatalogTensor *tensor)
{
    if (!memchr(tensor->module, '\0', sizeof tensor->module) || !is_module_name(tensor->module) ||
        !memchr(tensor->name, '\0', sizeof tensor->name) || !tensor->name[0]) {
        return fail(STATUS_CORRUPT, "rank %d declares a tensor without a name", tensor->rank);
    }
    bool is_right = tensor->num_dims >= 1 && tensor->num_dims <= TENSOR_DIMS_MAX;
    int64_t size_bytes = sizeof(float);
    for (int i = 0; is_right && i < tensor->num_dims; i++) {
        is_right = tensor->dims[i] >= 0 &&
                   !__builtin_mul_overflow(size_bytes, tensor->dims[i], &size_bytes);
    }
    if (!is_right) {
        return fail(STATUS_CORRUPT, "rank %d declares tensor %s in a shape that cannot be",
                    tensor->rank, tensor->name);
    }
    return STATUS_OK;
}

static bool is_same_shape(const CatalogTensor *tensor, int num_dims, const int64_t *dims)
{
    return tensor->num_dims == num_dims &&
           memcmp(tensor->dims, dims, (size_t)num_dims * sizeof *dims) == 0;
}

/* Sorted declarations of one tensor become one. */
static Status merge(Catalog *catalog)
{
    int64_t num = 0;
    for (int64_t i = 0; i < catalog->num_tensors; i++) {
        const CatalogTensor *tensor = &catalog->tensors[i];
        CatalogTensor *last = num > 0 ? &catalog->tensors[num - 1] : NULL;
        if (!last || compare_names(last, tensor) != 0) {
            catalog->tensors[num++] = *tensor;
            continue;
        }
        if (!is_same_shape(last, tensor->num_dims, tensor->dims) ||
            last->has_state != tensor->has_state) {
            return fail(STATUS_INTERNAL,
                        "ranks %d and %d have declared different tensors for module %s: %s",
                        last->rank, tensor->rank, tensor->module, tensor->name);
        }
    }
    catalog->num_tensors = num;
    return STATUS_OK;
}

static Status add_to_module(CatalogModule *module, const CatalogTensor *tensor)
{
    module->num_tensors++;
    module->creator = tensor->rank < module->creator ? tensor->rank : module->creator;
    int64_t count = count_elements(tensor);
    int64_t size_bytes =
        0; /* of weights, m and v together, which are three times as many at most */
    if (__builtin_add_overflow(module->num_values, count, &module->num_values) ||
        __builtin_mul_overflow(module->num_values, 3 * (int64_t)sizeof(float), &size_bytes)) {
        return fail(STATUS_CORRUPT, "module %s has more elements than files can have",
                    module->name);
    }
    module->num_states += tensor->has_state ? count : 0;
    module->has_states = module->has_states || tensor->has_state;
    return STATUS_OK;
}

static Status list_modules(Catalog *catalog)
{
    CatalogModule *module = NULL;
    for (int64_t i = 0; i < catalog->num_tensors; i++) {
        const CatalogTensor *tensor = &catalog->tensors[i];
        if (!module || strcmp(module->name, tensor->module) != 0) {
            if (catalog->num_modules == CHECKPOINT_PARTS_MAX) {
                return fail(STATUS_INVALID, "more than %d modules", CHECKPOINT_PARTS_MAX);
            }
            module = &catalog->modules[catalog->num_modules++];
            *module =
                (CatalogModule){.name = tensor->module, .tensors = tensor, .creator = tensor->rank};
        }
        TRY(add_to_module(module, tensor));
    }
    return STATUS_OK;
}

Status catalog_build(CatalogTensor *tensors, int64_t num_tensors, Catalog *catalog_out)
{
    *catalog_out = (Catalog){.tensors = tensors, .num_tensors = num_tensors};
    for (int64_t i = 0; i < num_tensors; i++) {
        TRY(check_tensor(&tensors[i]));
    }
    if (num_tensors > 0) {
        qsort(tensors, (size_t)num_tensors, sizeof *tensors, compare_names_and_ranks);
    }
    TRY(merge(catalog_out));
    return list_modules(catalog_out);
}

void catalog_done(Catalog *catalog)
{
    memory_free(catalog->tensors);
    *catalog = (Catalog){0};
}

const CatalogModule *catalog_find_module(const Catalog *catalog, const char *module)
{
    for (int i = 0; i < catalog->num_modules; i++) {
        if (strcmp(catalog->modules[i].name, module) == 0) {
            return &catalog->modules[i];
        }
    }
    return NULL;
}

const CatalogTensor *catalog_find(const Catalog *catalog, const char *module, const char *name)
{
    CatalogTensor key = {0};
    if (strlen(module) >= sizeof key.module || strlen(name) >= sizeof key.name ||
        catalog->num_tensors == 0) {
        return NULL;
    }
    memcpy(key.module, module, strlen(module));
    memcpy(key.name, name, strlen(name));
    return bsearch(&key, catalog->tensors, (size_t)catalog->num_tensors, sizeof key, compare_names);
}

bool catalog_has_state(const CheckpointPart *part, const Param *param)
{
    return param->is_trained && part->m != NULL;
}

Status catalog_check_part(const Catalog *catalog, const CheckpointPart *part)
{
    const ParamSet *params = part->params;
    const CatalogModule *module = catalog_find_module(catalog, part->module);
    if (!module && params->num_params > 0) {
        return fail(STATUS_INTERNAL, "no rank writes module %s", part->module);
    }
    for (int i = 0; i < params->num_params; i++) {
        const Param *param = &params->params[i];
        const ParamSpec *spec = &param->spec;
        const CatalogTensor *tensor = catalog_find(catalog, part->module, spec->name);
        if (!tensor) {
            return fail(STATUS_INTERNAL, "no rank writes tensor %s of module %s", spec->name,
                        part->module);
        }
        if (!is_same_shape(tensor, spec->num_dims, spec->dims) ||
            (tensor->has_state != 0) != catalog_has_state(part, param)) {
            return fail(STATUS_INTERNAL,
                        "this rank and rank %d have declared different tensors for module %s: %s",
                        tensor->rank, part->module, spec->name);
        }
    }
    return STATUS_OK;
}

/* What this rank declares. Owned by the caller. */
static Status declare(const CheckpointPart *parts, int num_parts, CatalogTensor **tensors_out,
                      int64_t *num_out)
{
    int64_t num = 0;
    for (int p = 0; p < num_parts; p++) {
        num += parts[p].writes_weights ? parts[p].params->num_params : 0;
    }
    if (num * (int64_t)sizeof(CatalogTensor) > RANK_BYTES_MAX) {
        return fail(STATUS_INVALID, "%lld tensors on one rank are too many for a checkpoint",
                    (long long)num);
    }
    TRY(MEMORY_NEW(tensors_out, num));
    *num_out = num;
    CatalogTensor *tensor = *tensors_out;
    for (int p = 0; p < num_parts; p++) {
        const CheckpointPart *part = &parts[p];
        CHECK(is_module_name(part->module) && strlen(part->module) < sizeof tensor->module);
        for (int i = 0; part->writes_weights && i < part->params->num_params; i++) {
            const Param *param = &part->params->params[i];
            memcpy(tensor->module, part->module, strlen(part->module));
            _Static_assert(sizeof tensor->name == sizeof param->spec.name, "a name fits");
            memcpy(tensor->name, param->spec.name, strlen(param->spec.name));
            memcpy(tensor->dims, param->spec.dims, sizeof tensor->dims);
            tensor->num_dims = param->spec.num_dims;
            tensor->has_state = catalog_has_state(part, param);
            tensor++;
        }
    }
    return STATUS_OK;
}

typedef struct Gather {
    Comm *world;
    Stream *stream;
    CatalogTensor *own;
    int64_t num_own;
    int64_t *sizes;  /* [ranks] bytes; -1: the rank could not declare */
    int64_t *begins; /* [ranks + 1] bytes */
    CatalogTensor *all;
} Gather;

/* Every rank's bytes [begins[r], begins[r + 1]) come from `own` there and go to `all` everywhere. */
static Status exchange(const Gather *gather, const void *own, void *all)
{
    Comm *world = gather->world;
    Device *device = gather->stream->device;
    const int64_t *begins = gather->begins;
    int64_t total_bytes = begins[world->size];
    void *buffer = NULL;
    TRY(device_alloc(device, total_bytes, &buffer));
    Status status = stream_copy(gather->stream, (char *)buffer + begins[world->rank], own,
                                begins[world->rank + 1] - begins[world->rank]);
    if (status == STATUS_OK) {
        status = comm_all_gather(world, buffer, begins, gather->stream);
    }
    if (status == STATUS_OK) {
        status = stream_copy(gather->stream, all, buffer, total_bytes);
    }
    if (status == STATUS_OK) {
        status = stream_wait(gather->stream, clock_deadline_in_ms(COPY_TIMEOUT_MS));
    }
    device_free(device, buffer, total_bytes);
    TRY(status);
    return STATUS_OK;
}

/* The begins of all ranks' declarations from their sizes. */
static Status place_sizes(Gather *gather)
{
    gather->begins[0] = 0;
    for (int r = 0; r < gather->world->size; r++) {
        int64_t size_bytes = gather->sizes[r];
        if (size_bytes < 0 || size_bytes > RANK_BYTES_MAX ||
            size_bytes % (int64_t)sizeof(CatalogTensor) != 0) {
            return fail(STATUS_INVALID, "rank %d could not declare its tensors", r);
        }
        gather->begins[r + 1] = gather->begins[r] + size_bytes;
        if (gather->begins[r + 1] > GATHERED_BYTES_MAX) {
            return fail(STATUS_INVALID, "the ranks declare too many tensors for a checkpoint");
        }
    }
    return STATUS_OK;
}

static Status gather_all(Gather *gather, Status declared)
{
    int size = gather->world->size;
    TRY(MEMORY_NEW(&gather->sizes, size));
    TRY(MEMORY_NEW(&gather->begins, size + 1));
    for (int r = 0; r <= size; r++) {
        gather->begins[r] = r * (int64_t)sizeof *gather->sizes;
    }
    int64_t own_bytes =
        declared == STATUS_OK ? gather->num_own * (int64_t)sizeof(CatalogTensor) : -1;
    TRY(exchange(gather, &own_bytes, gather->sizes));
    TRY(declared);
    TRY(place_sizes(gather));
    TRY(MEMORY_NEW(&gather->all, gather->begins[size] / (int64_t)sizeof(CatalogTensor)));
    TRY(exchange(gather, gather->own, gather->all));
    for (int r = 0; r < size; r++) {
        int64_t first = gather->begins[r] / (int64_t)sizeof(CatalogTensor);
        int64_t end = gather->begins[r + 1] / (int64_t)sizeof(CatalogTensor);
        for (int64_t i = first; i < end; i++) {
            gather->all[i].rank = r;
        }
    }
    return STATUS_OK;
}

Status catalog_gather(const CheckpointPart *parts, int num_parts, Comm *world, Stream *stream,
                      Catalog *catalog_out)
{
    *catalog_out = (Catalog){0};
    Gather gather = {.world = world, .stream = stream};
    Status declared = declare(parts, num_parts, &gather.own, &gather.num_own);
    Status status = gather_all(&gather, declared);
    if (status == STATUS_OK) {
        status = catalog_build(
            gather.all, gather.begins[world->size] / (int64_t)sizeof(CatalogTensor), catalog_out);
    } else {
        memory_free(gather.all);
    }
    memory_free(gather.own);
    memory_free(gather.sizes);
    memory_free(gather.begins);
    TRY(status);
    return STATUS_OK;
}
