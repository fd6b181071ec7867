#include "job/job_spec.h"

#include "job/message.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum {
    BYTES_VOCABULARY = 259, /* 256 byte values, bos, eos, image placeholder */
    WIDTH_MAX = 1 << 16,
    LAYERS_MAX = 1024,
    IMAGE_SIZE_MAX = 4096,
    VOCABULARY_MAX = 1 << 22,
    AXIS_MAX = 4096,
    BATCH_MAX = 1 << 20,
    LEASE_MS = 10000,
    DRAIN_MS_MAX = 24 * 3600 * 1000
};

/* ---------------------------------------------------------------- defaults */

#define DEFAULT_TO(field, value) \
    do {                         \
        if ((field) == 0) {      \
            (field) = (value);   \
        }                        \
    } while (0)

#define ENSURE(field, type_descriptor)                                              \
    do {                                                                            \
        if (!(field)) {                                                             \
            TRY(message_create(&(type_descriptor), (ProtobufCMessage **)&(field))); \
        }                                                                           \
    } while (0)

static Status resolve_model(JobSpec *spec)
{
    ENSURE(spec->model, viaduct__v1__model_spec__descriptor);
    ModelSpec *model = spec->model;
    ENSURE(model->vision, viaduct__v1__vision_spec__descriptor);
    ENSURE(model->projector, viaduct__v1__projector_spec__descriptor);
    ENSURE(model->llm, viaduct__v1__decoder_spec__descriptor);
    VisionSpec *vision = model->vision;
    if (vision->width > 0 && vision->width <= WIDTH_MAX) {
        DEFAULT_TO(vision->mlp_width, 4 * vision->width);
    }
    DEFAULT_TO(vision->activation, VIADUCT__V1__ACTIVATION__QUICK_GELU);
    DEFAULT_TO(vision->feature_layer, -1);
    DEFAULT_TO(vision->norm_epsilon, 1e-5);
    DecoderSpec *llm = model->llm;
    DEFAULT_TO(llm->vocabulary, BYTES_VOCABULARY);
    DEFAULT_TO(llm->kv_heads, llm->heads);
    if (llm->heads > 0) {
        DEFAULT_TO(llm->head_width, llm->width / llm->heads);
    }
    DEFAULT_TO(llm->rope_theta, 10000.0);
    DEFAULT_TO(llm->norm_epsilon, 1e-5);
    DEFAULT_TO(llm->max_tokens, 2048);
    DEFAULT_TO(model->projector->width, llm->width);
    return STATUS_OK;
}

static Status resolve_layout(JobSpec *spec)
{
    for (size_t i = 0; i < spec->n_modules; i++) {
        ModuleSpec *module = spec->modules[i];
        DEFAULT_TO(module->tp, 1);
        DEFAULT_TO(module->cp, 1);
        DEFAULT_TO(module->pp, 1);
        DEFAULT_TO(module->dp, 1);
        for (size_t j = 0; j < spec->n_pools; j++) {
            PoolSpec *pool = spec->pools[j];
            if (strcmp(pool->name, module->pool) == 0) {
                DEFAULT_TO(pool->desired_groups, module->dp);
                DEFAULT_TO(pool->min_groups, pool->desired_groups);
                DEFAULT_TO(pool->max_groups, pool->desired_groups);
            }
        }
    }
    return STATUS_OK;
}

static Status resolve_training(JobSpec *spec)
{
    ENSURE(spec->data, viaduct__v1__data_spec__descriptor);
    DEFAULT_TO(spec->data->tokenizer, VIADUCT__V1__TOKENIZER__BYTES);
    DEFAULT_TO(spec->data->loader_threads, 1);
    if (!spec->data->prompt[0]) {
        TRY(message_set_text(&spec->data->prompt, "<image>"));
    }
    ENSURE(spec->training, viaduct__v1__training_spec__descriptor);
    DEFAULT_TO(spec->training->microbatches, 1);
    DEFAULT_TO(spec->training->seed, 1);
    DEFAULT_TO(spec->training->encoder_window, 2);
    ENSURE(spec->optimizer, viaduct__v1__optimizer_spec__descriptor);
    OptimizerSpec *optimizer = spec->optimizer;
    DEFAULT_TO(optimizer->kind, VIADUCT__V1__OPTIMIZER_SPEC__KIND__ADAMW);
    DEFAULT_TO(optimizer->beta1, 0.9);
    DEFAULT_TO(optimizer->beta2, 0.95);
    DEFAULT_TO(optimizer->epsilon, 1e-8);
    ENSURE(spec->checkpoint, viaduct__v1__checkpoint_spec__descriptor);
    DEFAULT_TO(spec->checkpoint->keep, 2);
    ENSURE(spec->evaluation, viaduct__v1__evaluation_spec__descriptor);
    DEFAULT_TO(spec->evaluation->max_new_tokens, 64);
    return STATUS_OK;
}

static Status resolve_timeouts(JobSpec *spec)
{
    ENSURE(spec->timeouts, viaduct__v1__timeouts__descriptor);
    Viaduct__V1__Timeouts *timeouts = spec->timeouts;
    struct {
        Google__Protobuf__Duration **field;
        int64_t default_ms;
    } fields[] = {
        {&timeouts->start, 600000}, {&timeouts->last_call, 10000}, {&timeouts->transfer, 30000},
        {&timeouts->step, 120000},  {&timeouts->drain, 120000},    {&timeouts->reconfigure, 60000},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (message_duration_ms(*fields[i].field) == 0) {
            TRY(message_set_duration(fields[i].field, fields[i].default_ms));
        }
    }
    return STATUS_OK;
}

Status job_spec_resolve(JobSpec *spec)
{
    TRY(resolve_model(spec));
    TRY(resolve_layout(spec));
    TRY(resolve_training(spec));
    TRY(resolve_timeouts(spec));
    DEFAULT_TO(spec->transport, VIADUCT__V1__TRANSPORT__TRANSPORT_HOST);
    return STATUS_OK;
}

/* ---------------------------------------------------------------- checks */

typedef struct Problems {
    JobProblem *items;
    int capacity;
    int count;
} Problems;

static void add(Problems *problems, const char *field, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void add(Problems *problems, const char *field, const char *format, ...)
{
    if (problems->count < problems->capacity) {
        JobProblem *problem = &problems->items[problems->count];
        snprintf(problem->field, sizeof problem->field, "%s", field);
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(problem->message, sizeof problem->message, format, arguments);
        va_end(arguments);
    }
    problems->count++;
}

static void check_range(Problems *problems, const char *field, int64_t value, int64_t low,
                        int64_t high)
{
    if (value < low || value > high) {
        add(problems, field, "is %" PRId64 ", expected %" PRId64 " to %" PRId64, value, low, high);
    }
}

/* low <= value < high, and a number at all. */
static void check_real(Problems *problems, const char *field, double value, double low, double high)
{
    if (!(value >= low && value < high)) {
        add(problems, field, "is %g, expected at least %g and less than %g", value, low, high);
    }
}

static void check_name(Problems *problems, const char *field, int value,
                       const ProtobufCEnumDescriptor *descriptor)
{
    if (!protobuf_c_enum_descriptor_get_value(descriptor, value)) {
        add(problems, field, "is %d, which is no value of %s", value, descriptor->short_name);
    }
}

static void check_vision(Problems *problems, const VisionSpec *vision)
{
    check_range(problems, "model.vision.image_size", vision->image_size, 1, IMAGE_SIZE_MAX);
    check_range(problems, "model.vision.patch_size", vision->patch_size, 1, IMAGE_SIZE_MAX);
    check_range(problems, "model.vision.width", vision->width, 1, WIDTH_MAX);
    check_range(problems, "model.vision.layers", vision->layers, 1, LAYERS_MAX);
    check_range(problems, "model.vision.heads", vision->heads, 1, WIDTH_MAX);
    check_range(problems, "model.vision.mlp_width", vision->mlp_width, 1, INT64_C(16) * WIDTH_MAX);
    check_real(problems, "model.vision.norm_epsilon", vision->norm_epsilon, 1e-12, 1.0);
    check_name(problems, "model.vision.activation", (int)vision->activation,
               &viaduct__v1__activation__descriptor);
    if (vision->patch_size > 0 && vision->image_size % vision->patch_size != 0) {
        add(problems, "model.vision.image_size", "is %d, expected a multiple of patch_size %d",
            vision->image_size, vision->patch_size);
    }
    if (vision->heads > 0 && vision->width % vision->heads != 0) {
        add(problems, "model.vision.width", "is %d, expected a multiple of heads %d", vision->width,
            vision->heads);
    }
    if (vision->layers > 0 && vision->layers <= LAYERS_MAX &&
        (vision->feature_layer < -vision->layers || vision->feature_layer > vision->layers)) {
        add(problems, "model.vision.feature_layer", "is %d, expected %d to %d",
            vision->feature_layer, -vision->layers, vision->layers);
    }
}

static void check_decoder(Problems *problems, const DecoderSpec *llm)
{
    check_range(problems, "model.llm.vocabulary", llm->vocabulary, BYTES_VOCABULARY,
                VOCABULARY_MAX);
    check_range(problems, "model.llm.width", llm->width, 1, WIDTH_MAX);
    check_range(problems, "model.llm.layers", llm->layers, 1, LAYERS_MAX);
    check_range(problems, "model.llm.heads", llm->heads, 1, WIDTH_MAX);
    check_range(problems, "model.llm.kv_heads", llm->kv_heads, 1, WIDTH_MAX);
    check_range(problems, "model.llm.head_width", llm->head_width, 2, WIDTH_MAX);
    check_range(problems, "model.llm.mlp_width", llm->mlp_width, 1, INT64_C(16) * WIDTH_MAX);
    check_range(problems, "model.llm.max_tokens", llm->max_tokens, 2, 1 << 24);
    check_real(problems, "model.llm.rope_theta", llm->rope_theta, 1.0, 1e12);
    check_real(problems, "model.llm.norm_epsilon", llm->norm_epsilon, 1e-12, 1.0);
    if (llm->kv_heads > 0 && llm->heads % llm->kv_heads != 0) {
        add(problems, "model.llm.heads", "is %d, expected a multiple of kv_heads %d", llm->heads,
            llm->kv_heads);
    }
    if (llm->head_width % 2 != 0) {
        add(problems, "model.llm.head_width",
            "is %d, expected an even number: rotary positions turn pairs", llm->head_width);
    }
}

static void check_model(Problems *problems, const JobSpec *spec)
{
    const ModelSpec *model = spec->model;
    check_vision(problems, model->vision);
    check_decoder(problems, model->llm);
    check_range(problems, "model.projector.width", model->projector->width, 1,
                INT64_C(16) * WIDTH_MAX);
    const VisionSpec *vision = model->vision;
    if (vision->patch_size > 0 && vision->image_size > 0) {
        int64_t side = vision->image_size / vision->patch_size;
        if (side * side >= model->llm->max_tokens) {
            add(problems, "model.llm.max_tokens",
                "is %d, expected more than the %" PRId64 " rows of one image",
                model->llm->max_tokens, side * side);
        }
    }
}

static void check_files(Problems *problems, const char *field, char *const *paths, size_t count,
                        bool is_needed)
{
    char name[64];
    if (is_needed && count == 0) {
        add(problems, field, "is empty, expected at least one path of a tar shard");
    }
    for (size_t i = 0; i < count; i++) {
        if (!paths[i][0]) {
            snprintf(name, sizeof name, "%s[%zu]", field, i);
            add(problems, name, "is empty, expected a path");
        }
    }
}

static void check_axes(Problems *problems, const ModuleSpec *module, const char *field)
{
    const struct {
        const char *name;
        int value;
        bool is_built;
    } axes[] = {{"tp", module->tp, true},
                {"cp", module->cp, false},
                {"pp", module->pp, false},
                {"dp", module->dp, true}};
    char name[96];
    for (size_t i = 0; i < sizeof axes / sizeof *axes; i++) {
        snprintf(name, sizeof name, "%s.%s", field, axes[i].name);
        check_range(problems, name, axes[i].value, 1, AXIS_MAX);
        if (axes[i].value > 1 && !axes[i].is_built) {
            add(problems, name, "not supported yet: %s greater than 1", axes[i].name);
        }
    }
}

static const PoolSpec *find_pool(const JobSpec *spec, const char *name)
{
    for (size_t i = 0; i < spec->n_pools; i++) {
        if (strcmp(spec->pools[i]->name, name) == 0) {
            return spec->pools[i];
        }
    }
    return NULL;
}

static void check_module(Problems *problems, const JobSpec *spec, size_t index)
{
    const ModuleSpec *module = spec->modules[index];
    char field[64];
    char name[96];
    snprintf(field, sizeof field, "modules[%zu]", index);
    snprintf(name, sizeof name, "%s.name", field);
    bool is_vision = strcmp(module->name, "vision") == 0;
    bool is_llm = strcmp(module->name, "llm") == 0;
    if (!is_vision && !is_llm) {
        add(problems, name, "is \"%.60s\", expected \"vision\" or \"llm\"", module->name);
    }
    check_axes(problems, module, field);
    snprintf(name, sizeof name, "%s.pool", field);
    const PoolSpec *pool = find_pool(spec, module->pool);
    if (!pool) {
        add(problems, name, "is \"%.60s\", which pools does not have", module->pool);
        return;
    }
    const char *role = is_vision ? "encoder" : "llm";
    if ((is_vision || is_llm) && strcmp(pool->role, role) != 0) {
        add(problems, name, "is \"%.60s\" with role \"%.30s\", expected a pool of role \"%s\"",
            module->pool, pool->role, role);
    }
    for (size_t i = 0; i < index; i++) {
        if (strcmp(spec->modules[i]->pool, module->pool) == 0) {
            add(problems, name, "not supported yet: colocation, two modules on the pool \"%.60s\"",
                module->pool);
        }
        if (strcmp(spec->modules[i]->name, module->name) == 0) {
            snprintf(name, sizeof name, "%s.name", field);
            add(problems, name, "is \"%.60s\" a second time", module->name);
        }
    }
}

static bool pool_is_used(const JobSpec *spec, const PoolSpec *pool)
{
    for (size_t i = 0; i < spec->n_modules; i++) {
        if (strcmp(spec->modules[i]->pool, pool->name) == 0) {
            return true;
        }
    }
    return false;
}

static void check_pool(Problems *problems, const JobSpec *spec, size_t index)
{
    const PoolSpec *pool = spec->pools[index];
    char name[96];
    snprintf(name, sizeof name, "pools[%zu].name", index);
    if (!pool->name[0]) {
        add(problems, name, "is empty, expected a name");
    }
    for (size_t i = 0; i < index; i++) {
        if (strcmp(spec->pools[i]->name, pool->name) == 0) {
            add(problems, name, "is \"%.60s\" a second time", pool->name);
        }
    }
    if (!pool_is_used(spec, pool)) {
        add(problems, name, "is \"%.60s\", which no module names", pool->name);
        return;
    }
    snprintf(name, sizeof name, "pools[%zu].role", index);
    if (strcmp(pool->role, "encoder") != 0 && strcmp(pool->role, "llm") != 0) {
        add(problems, name, "is \"%.60s\", expected \"encoder\" or \"llm\"", pool->role);
    }
    snprintf(name, sizeof name, "pools[%zu].min_groups", index);
    bool is_ordered = pool->min_groups >= 1 && pool->min_groups <= pool->desired_groups &&
                      pool->desired_groups <= pool->max_groups;
    if (!is_ordered) {
        add(problems, name,
            "is %d with desired_groups %d and max_groups %d, expected 1 <= min <= desired <= max",
            pool->min_groups, pool->desired_groups, pool->max_groups);
    }
    for (size_t i = 0; i < spec->n_modules; i++) {
        const ModuleSpec *module = spec->modules[i];
        if (strcmp(module->pool, pool->name) == 0 && module->dp != pool->desired_groups) {
            snprintf(name, sizeof name, "pools[%zu].desired_groups", index);
            add(problems, name, "is %d, expected the dp %d of module \"%.30s\"",
                pool->desired_groups, module->dp, module->name);
        }
    }
}

static void check_layout(Problems *problems, const JobSpec *spec)
{
    static const char *const needed[] = {"vision", "llm"};
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        if (!job_spec_module(spec, needed[i])) {
            add(problems, "modules", "has no module \"%s\"", needed[i]);
        }
    }
    for (size_t i = 0; i < spec->n_modules; i++) {
        check_module(problems, spec, i);
    }
    for (size_t i = 0; i < spec->n_pools; i++) {
        check_pool(problems, spec, i);
    }
}

static void check_training(Problems *problems, const JobSpec *spec)
{
    const TrainingSpec *training = spec->training;
    check_range(problems, "training.steps", training->steps, 1, INT64_C(1) << 40);
    check_range(problems, "training.global_batch", training->global_batch, 1, BATCH_MAX);
    check_range(problems, "training.microbatches", training->microbatches, 1, BATCH_MAX);
    check_range(problems, "training.encoder_window", training->encoder_window, 1, 1024);
    const OptimizerSpec *optimizer = spec->optimizer;
    check_name(problems, "optimizer.kind", (int)optimizer->kind,
               &viaduct__v1__optimizer_spec__kind__descriptor);
    check_real(problems, "optimizer.learning_rate", optimizer->learning_rate, 1e-12, 1e3);
    check_real(problems, "optimizer.min_learning_rate", optimizer->min_learning_rate, 0.0, 1e3);
    if (optimizer->min_learning_rate > optimizer->learning_rate) {
        add(problems, "optimizer.min_learning_rate", "is %g, expected at most learning_rate %g",
            optimizer->min_learning_rate, optimizer->learning_rate);
    }
    check_range(problems, "optimizer.warmup_steps", optimizer->warmup_steps, 0, INT64_C(1) << 40);
    check_real(problems, "optimizer.weight_decay", optimizer->weight_decay, 0.0, 10.0);
    check_real(problems, "optimizer.beta1", optimizer->beta1, 0.0, 1.0);
    check_real(problems, "optimizer.beta2", optimizer->beta2, 0.0, 1.0);
    check_real(problems, "optimizer.epsilon", optimizer->epsilon, 1e-30, 1.0);
    check_real(problems, "optimizer.max_grad_norm", optimizer->max_grad_norm, 0.0, 1e12);
    check_range(problems, "checkpoint.every_steps", spec->checkpoint->every_steps, 0,
                INT64_C(1) << 40);
    check_range(problems, "checkpoint.keep", spec->checkpoint->keep, 1, 1 << 20);
    const EvaluationSpec *evaluation = spec->evaluation;
    check_range(problems, "evaluation.every_steps", evaluation->every_steps, 0, INT64_C(1) << 40);
    check_range(problems, "evaluation.captions", evaluation->captions, 0, 1000);
    check_range(problems, "evaluation.max_new_tokens", evaluation->max_new_tokens, 1, 1 << 16);
    check_range(problems, "data.loader_threads", spec->data->loader_threads, 1, 256);
    check_name(problems, "data.tokenizer", (int)spec->data->tokenizer,
               &viaduct__v1__tokenizer__descriptor);
    check_files(problems, "data.train", spec->data->train, spec->data->n_train, true);
    check_files(problems, "data.heldout", spec->data->heldout, spec->data->n_heldout, false);
    check_name(problems, "transport", (int)spec->transport, &viaduct__v1__transport__descriptor);
}

/* What the schema has and this version would ignore is refused, so that nobody relies on it. */
static void check_supported(Problems *problems, const JobSpec *spec)
{
    const struct {
        const char *field;
        bool is_asked;
        const char *what;
    } asked[] = {
        {"transport", spec->transport == VIADUCT__V1__TRANSPORT__TRANSPORT_NCCL, "TRANSPORT_NCCL"},
        {"training.deterministic_reduction", spec->training->deterministic_reduction,
         "sums in sample order"},
        {"max_reconfigurations_on_failure", spec->max_reconfigurations_on_failure != 0,
         "going on after a failure without a new job"},
        {"ttl_after_finished", spec->ttl_after_finished != NULL, "deleting finished jobs by time"},
        {"active_deadline", spec->active_deadline != NULL, "a limit on a job's whole time"},
    };
    for (size_t i = 0; i < sizeof asked / sizeof asked[0]; i++) {
        if (asked[i].is_asked) {
            add(problems, asked[i].field, "not supported yet: %s", asked[i].what);
        }
    }
}

/* lease < transfer < step <= drain: each wait must outlive what it waits for. */
static void check_timeouts(Problems *problems, const Viaduct__V1__Timeouts *timeouts)
{
    int64_t transfer_ms = message_duration_ms(timeouts->transfer);
    int64_t step_ms = message_duration_ms(timeouts->step);
    int64_t drain_ms = message_duration_ms(timeouts->drain);
    if (transfer_ms <= LEASE_MS) {
        add(problems, "timeouts.transfer", "is %" PRId64 " ms, expected more than the lease, %d ms",
            transfer_ms, LEASE_MS);
    }
    if (step_ms <= transfer_ms) {
        add(problems, "timeouts.step",
            "is %" PRId64 " ms, expected more than timeouts.transfer, %" PRId64 " ms", step_ms,
            transfer_ms);
    }
    if (drain_ms < step_ms || drain_ms > DRAIN_MS_MAX) {
        add(problems, "timeouts.drain",
            "is %" PRId64 " ms, expected from timeouts.step, %" PRId64 " ms, to %d ms", drain_ms,
            step_ms, DRAIN_MS_MAX);
    }
    const struct {
        const char *field;
        const Google__Protobuf__Duration *duration;
    } others[] = {{"timeouts.start", timeouts->start},
                  {"timeouts.last_call", timeouts->last_call},
                  {"timeouts.reconfigure", timeouts->reconfigure}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        if (message_duration_ms(others[i].duration) <= 0) {
            add(problems, others[i].field, "is %" PRId64 " ms, expected more than 0",
                message_duration_ms(others[i].duration));
        }
    }
}

int job_spec_check(const JobSpec *spec, JobProblem *problems_out, int capacity)
{
    Problems problems = {problems_out, capacity, 0};
    check_model(&problems, spec);
    check_layout(&problems, spec);
    check_training(&problems, spec);
    check_supported(&problems, spec);
    check_timeouts(&problems, spec->timeouts);
    return problems.count;
}

const ModuleSpec *job_spec_module(const JobSpec *spec, const char *name)
{
    for (size_t i = 0; i < spec->n_modules; i++) {
        if (strcmp(spec->modules[i]->name, name) == 0) {
            return spec->modules[i];
        }
    }
    return NULL;
}

int job_spec_module_ranks(const ModuleSpec *module)
{
    return module->tp * module->cp * module->pp * module->dp;
}
