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
    MELS_MAX = 256,
    VOCABULARY_MAX = 1 << 22,
    AXIS_MAX = 4096,
    RANKS_MAX = 65536, /* of one module */
    VIRTUAL_STAGES_MAX = 16,
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

static void resolve_vision(VisionSpec *vision)
{
    if (vision->width > 0 && vision->width <= WIDTH_MAX) {
        DEFAULT_TO(vision->mlp_width, 4 * vision->width);
    }
    DEFAULT_TO(vision->activation, VIADUCT__V1__ACTIVATION__QUICK_GELU);
    DEFAULT_TO(vision->feature_layer, -1);
    DEFAULT_TO(vision->norm_epsilon, 1e-5);
}

static void resolve_audio(AudioSpec *audio)
{
    DEFAULT_TO(audio->mels, 80);
    if (audio->width > 0 && audio->width <= WIDTH_MAX) {
        DEFAULT_TO(audio->mlp_width, 4 * audio->width);
    }
    DEFAULT_TO(audio->max_seconds, 30.0);
    DEFAULT_TO(audio->norm_epsilon, 1e-5);
}

static void resolve_decoder(DecoderSpec *llm)
{
    DEFAULT_TO(llm->vocabulary, BYTES_VOCABULARY);
    DEFAULT_TO(llm->kv_heads, llm->heads);
    if (llm->heads > 0) {
        DEFAULT_TO(llm->head_width, llm->width / llm->heads);
    }
    DEFAULT_TO(llm->rope_theta, 10000.0);
    DEFAULT_TO(llm->norm_epsilon, 1e-5);
    DEFAULT_TO(llm->max_tokens, 2048);
}

static Status resolve_model(JobSpec *spec)
{
    ENSURE(spec->model, viaduct__v1__model_spec__descriptor);
    ModelSpec *model = spec->model;
    ENSURE(model->llm, viaduct__v1__decoder_spec__descriptor);
    resolve_decoder(model->llm);
    if (job_spec_module(spec, "vision")) {
        ENSURE(model->vision, viaduct__v1__vision_spec__descriptor);
        ENSURE(model->projector, viaduct__v1__projector_spec__descriptor);
        resolve_vision(model->vision);
        DEFAULT_TO(model->projector->width, model->llm->width);
    }
    if (job_spec_module(spec, "audio")) {
        ENSURE(model->audio, viaduct__v1__audio_spec__descriptor);
        ENSURE(model->audio_projector, viaduct__v1__projector_spec__descriptor);
        resolve_audio(model->audio);
        DEFAULT_TO(model->audio_projector->width, model->llm->width);
    }
    return STATUS_OK;
}

static int count_modules(const JobSpec *spec, const PoolSpec *pool)
{
    int count = 0;
    for (size_t i = 0; i < spec->n_modules; i++) {
        count += strcmp(spec->modules[i]->pool, pool->name) == 0;
    }
    return count;
}

/* A replica is a group; modules that share a pool are one group together. */
static void resolve_layout(JobSpec *spec)
{
    for (size_t i = 0; i < spec->n_modules; i++) {
        ModuleSpec *module = spec->modules[i];
        DEFAULT_TO(module->tp, 1);
        DEFAULT_TO(module->cp, 1);
        DEFAULT_TO(module->pp, 1);
        DEFAULT_TO(module->dp, 1);
        DEFAULT_TO(module->virtual_stages, 1);
        DEFAULT_TO(module->recompute, VIADUCT__V1__MODULE_SPEC__RECOMPUTE__NONE);
        for (size_t j = 0; j < spec->n_pools; j++) {
            PoolSpec *pool = spec->pools[j];
            if (strcmp(pool->name, module->pool) == 0) {
                DEFAULT_TO(pool->desired_groups, count_modules(spec, pool) > 1 ? 1 : module->dp);
                DEFAULT_TO(pool->min_groups, pool->desired_groups);
                DEFAULT_TO(pool->max_groups, pool->desired_groups);
            }
        }
    }
}

/* A mark for each encoder. */
static Status resolve_prompt(JobSpec *spec)
{
    bool has_vision = job_spec_module(spec, "vision") != NULL;
    bool has_audio = job_spec_module(spec, "audio") != NULL;
    if (spec->data->prompt[0] || (!has_vision && !has_audio)) {
        return STATUS_OK;
    }
    const char *marks = has_vision && has_audio ? "<image><audio>"
                        : has_vision            ? "<image>"
                                                : "<audio>";
    return message_set_text(&spec->data->prompt, marks);
}

static Status resolve_training(JobSpec *spec)
{
    ENSURE(spec->data, viaduct__v1__data_spec__descriptor);
    DEFAULT_TO(spec->data->tokenizer, VIADUCT__V1__TOKENIZER__BYTES);
    DEFAULT_TO(spec->data->loader_threads, 1);
    TRY(resolve_prompt(spec));
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
    DEFAULT_TO(optimizer->sharding, VIADUCT__V1__OPTIMIZER_SPEC__SHARDING__NONE);
    ENSURE(spec->row_cache, viaduct__v1__row_cache_spec__descriptor);
    DEFAULT_TO(spec->row_cache->size_bytes_max, INT64_C(1) << 30);
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
    resolve_layout(spec);
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

static void check_audio(Problems *problems, const AudioSpec *audio)
{
    check_range(problems, "model.audio.mels", audio->mels, 1, MELS_MAX);
    check_range(problems, "model.audio.width", audio->width, 1, WIDTH_MAX);
    check_range(problems, "model.audio.layers", audio->layers, 1, LAYERS_MAX);
    check_range(problems, "model.audio.heads", audio->heads, 1, WIDTH_MAX);
    check_range(problems, "model.audio.mlp_width", audio->mlp_width, 1, INT64_C(16) * WIDTH_MAX);
    check_real(problems, "model.audio.max_seconds", audio->max_seconds, 0.01, 3600.0);
    check_real(problems, "model.audio.norm_epsilon", audio->norm_epsilon, 1e-12, 1.0);
    if (audio->heads > 0 && audio->width % audio->heads != 0) {
        add(problems, "model.audio.width", "is %d, expected a multiple of heads %d", audio->width,
            audio->heads);
    }
    if (audio->width % 2 != 0) {
        add(problems, "model.audio.width",
            "is %d, expected an even number: its positions are pairs of sine and cosine",
            audio->width);
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

/* What the model has and no module runs would be ignored. */
static void check_unused(Problems *problems, const char *field, const void *given,
                         const char *module)
{
    if (given) {
        add(problems, field, "is given, but modules has no \"%s\"", module);
    }
}

static void check_image_rows(Problems *problems, const ModelSpec *model)
{
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

static void check_model(Problems *problems, const JobSpec *spec)
{
    const ModelSpec *model = spec->model;
    check_decoder(problems, model->llm);
    if (job_spec_module(spec, "vision")) {
        check_vision(problems, model->vision);
        check_range(problems, "model.projector.width", model->projector->width, 1,
                    INT64_C(16) * WIDTH_MAX);
        check_image_rows(problems, model);
    } else {
        check_unused(problems, "model.vision", model->vision, "vision");
        check_unused(problems, "model.projector", model->projector, "vision");
    }
    if (job_spec_module(spec, "audio")) {
        check_audio(problems, model->audio);
        check_range(problems, "model.audio_projector.width", model->audio_projector->width, 1,
                    INT64_C(16) * WIDTH_MAX);
    } else {
        check_unused(problems, "model.audio", model->audio, "audio");
        check_unused(problems, "model.audio_projector", model->audio_projector, "audio");
    }
}

static void check_texts(Problems *problems, const char *field, char *const *texts, size_t count,
                        const char *expected)
{
    char name[64];
    for (size_t i = 0; i < count; i++) {
        if (!texts[i][0]) {
            snprintf(name, sizeof name, "%s[%zu]", field, i);
            add(problems, name, "is empty, expected %s", expected);
        }
    }
}

static void check_axes(Problems *problems, const ModuleSpec *module, const char *field)
{
    const struct {
        const char *name;
        int value;
    } axes[] = {{"tp", module->tp}, {"cp", module->cp}, {"pp", module->pp}, {"dp", module->dp}};
    char name[96];
    int64_t ranks = 1;
    for (size_t i = 0; i < sizeof axes / sizeof *axes; i++) {
        snprintf(name, sizeof name, "%s.%s", field, axes[i].name);
        check_range(problems, name, axes[i].value, 1, AXIS_MAX);
        /* Bad axes have their own problem; 4096^4 fits. */
        ranks *= axes[i].value >= 1 && axes[i].value <= AXIS_MAX ? axes[i].value : 1;
    }
    if (ranks > RANKS_MAX) {
        add(problems, field,
            "has tp %d, cp %d, pp %d and dp %d: %" PRId64 " ranks, expected at most %d", module->tp,
            module->cp, module->pp, module->dp, ranks, RANKS_MAX);
    }
}

/* Layers that a pipeline of the module can share out; 0 when that is not known. */
static int layers_run(const ModelSpec *model, const char *module)
{
    int layers = 0;
    if (strcmp(module, "vision") == 0) {
        const VisionSpec *vision = model->vision;
        int64_t feature = vision->feature_layer;
        int64_t run = feature < 0 ? vision->layers + INT64_C(1) + feature : feature;
        layers = run >= 1 && run <= vision->layers ? (int)run : 0;
    } else if (strcmp(module, "audio") == 0) {
        layers = model->audio->layers;
    } else if (strcmp(module, "llm") == 0) {
        layers = model->llm->layers;
    }
    return layers > 0 && layers <= LAYERS_MAX ? layers : 0;
}

static void check_pipeline(Problems *problems, const JobSpec *spec, const ModuleSpec *module,
                           const char *field)
{
    char name[96];
    snprintf(name, sizeof name, "%s.virtual_stages", field);
    check_range(problems, name, module->virtual_stages, 1, VIRTUAL_STAGES_MAX);
    if (module->virtual_stages > 1 && module->pp == 1) {
        add(problems, name, "is %d, expected 1 where pp is 1: only a pipeline can be interleaved",
            module->virtual_stages);
    }
    int layers = layers_run(spec->model, module->name);
    int64_t parts = (int64_t)module->pp * module->virtual_stages;
    bool is_known = layers > 0 && module->pp > 1 && module->virtual_stages >= 1;
    if (is_known && parts > layers) {
        snprintf(name, sizeof name, "%s.pp", field);
        add(problems, name,
            "is %d with virtual_stages %d: %" PRId64
            " parts, expected at most the %d layers that the module runs",
            module->pp, module->virtual_stages, parts, layers);
    }
    snprintf(name, sizeof name, "%s.recompute", field);
    check_name(problems, name, (int)module->recompute,
               &viaduct__v1__module_spec__recompute__descriptor);
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

static bool is_encoder(const char *module)
{
    return strcmp(module, "vision") == 0 || strcmp(module, "audio") == 0;
}

static bool is_module(const char *module)
{
    return is_encoder(module) || strcmp(module, "llm") == 0;
}

/* Workers of role "encoder" serve encoders; those of role "llm" the decoder, and the encoders that
 * share its pool. */
static void check_role(Problems *problems, const JobSpec *spec, const ModuleSpec *module,
                       const PoolSpec *pool, const char *name)
{
    const ModuleSpec *llm = job_spec_module(spec, "llm");
    const char *expected = NULL;
    if (is_encoder(module->name)) {
        bool is_colocated = llm && strcmp(llm->pool, pool->name) == 0;
        if (strcmp(pool->role, "encoder") != 0 && !is_colocated) {
            expected = "a pool of role \"encoder\", or that of the module \"llm\"";
        }
    } else if (strcmp(module->name, "llm") == 0 && strcmp(pool->role, "llm") != 0) {
        expected = "a pool of role \"llm\"";
    }
    if (expected) {
        add(problems, name, "is \"%.60s\" with role \"%.30s\", expected %s", module->pool,
            pool->role, expected);
    }
}

static void check_module(Problems *problems, const JobSpec *spec, size_t index)
{
    const ModuleSpec *module = spec->modules[index];
    char field[64];
    char name[96];
    snprintf(field, sizeof field, "modules[%zu]", index);
    snprintf(name, sizeof name, "%s.name", field);
    if (!is_module(module->name)) {
        add(problems, name, "is \"%.60s\", expected \"vision\", \"audio\" or \"llm\"",
            module->name);
    }
    for (size_t i = 0; i < index; i++) {
        if (strcmp(spec->modules[i]->name, module->name) == 0) {
            add(problems, name, "is \"%.60s\" a second time", module->name);
            break;
        }
    }
    check_axes(problems, module, field);
    check_pipeline(problems, spec, module, field);
    snprintf(name, sizeof name, "%s.pool", field);
    const PoolSpec *pool = find_pool(spec, module->pool);
    if (pool) {
        check_role(problems, spec, module, pool, name);
    } else {
        add(problems, name, "is \"%.60s\", which pools does not have", module->pool);
    }
}

/* The groups of a pool that one module has to itself are that module's replicas. */
static void check_groups(Problems *problems, const JobSpec *spec, size_t index)
{
    const PoolSpec *pool = spec->pools[index];
    char name[96];
    bool is_shared = count_modules(spec, pool) > 1;
    bool is_one = pool->min_groups == 1 && pool->desired_groups == 1 && pool->max_groups == 1;
    snprintf(name, sizeof name, "pools[%zu].min_groups", index);
    if (is_shared && !is_one) {
        add(problems, name,
            "is %d with desired_groups %d and max_groups %d, expected 1 each: modules that share a "
            "pool are one group",
            pool->min_groups, pool->desired_groups, pool->max_groups);
    }
    if (is_shared) {
        return;
    }
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
    if (count_modules(spec, pool) == 0) {
        add(problems, name, "is \"%.60s\", which no module names", pool->name);
        return;
    }
    snprintf(name, sizeof name, "pools[%zu].role", index);
    if (strcmp(pool->role, "encoder") != 0 && strcmp(pool->role, "llm") != 0) {
        add(problems, name, "is \"%.60s\", expected \"encoder\" or \"llm\"", pool->role);
    }
    check_groups(problems, spec, index);
}

static void check_layout(Problems *problems, const JobSpec *spec)
{
    if (!job_spec_module(spec, "llm")) {
        add(problems, "modules", "has no module \"llm\"");
    }
    for (size_t i = 0; i < spec->n_modules; i++) {
        check_module(problems, spec, i);
    }
    for (size_t i = 0; i < spec->n_pools; i++) {
        check_pool(problems, spec, i);
    }
}

static void check_optimizer(Problems *problems, const OptimizerSpec *optimizer)
{
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
    check_name(problems, "optimizer.sharding", (int)optimizer->sharding,
               &viaduct__v1__optimizer_spec__sharding__descriptor);
}

static void check_training(Problems *problems, const JobSpec *spec)
{
    const TrainingSpec *training = spec->training;
    check_range(problems, "training.steps", training->steps, 1, INT64_C(1) << 40);
    check_range(problems, "training.global_batch", training->global_batch, 1, BATCH_MAX);
    check_range(problems, "training.microbatches", training->microbatches, 1, BATCH_MAX);
    check_range(problems, "training.encoder_window", training->encoder_window, 1, 1024);
    check_texts(problems, "training.frozen", training->frozen, training->n_frozen,
                "a pattern of parameters' names");
    check_optimizer(problems, spec->optimizer);
    check_range(problems, "row_cache.size_bytes_max", spec->row_cache->size_bytes_max, 1,
                INT64_C(1) << 50);
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
    if (spec->data->n_train == 0) {
        add(problems, "data.train", "is empty, expected at least one path of a tar shard");
    }
    check_texts(problems, "data.train", spec->data->train, spec->data->n_train, "a path");
    check_texts(problems, "data.heldout", spec->data->heldout, spec->data->n_heldout, "a path");
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
