/* Legend: B images, P patches of an image, T = P + 1 with class token else P, t of the T tokens of
 * each image and p of its patches on this cp rank, N = B t tokens, n of them between layers, R rows
 * on this cp rank, r of them on this rank, D width, D2 width of the decoder, I = 3 patch^2 inputs
 * of a patch. */
#include "encoder_worker/vision_encoder.h"

#include "base/clock.h"
#include "base/memory.h"
#include "encoder_worker/projector.h"
#include "nn/stack.h"
#include "train/module_parts.h"

#include <math.h>
#include <stdio.h>

/* Mean and deviation of the channels in CLIP's training data, in units of 255. */
static const float pixel_mean[3] = {0.48145466f, 0.4578275f, 0.40821073f};
static const float pixel_std[3] = {0.26862954f, 0.26130258f, 0.27577711f};

enum {
    COPY_TIMEOUT_MS = 60 * 1000 /* for indices to arrive on the device */
};

static const float embedding_std = 0.02f; /* initial standard deviation of tokens and positions */

/* Kept from forward to backward of one microbatch in one chunk. */
typedef struct VisionSlot {
    float *embedded; /* [n, D]: patches, class token, positions; of the first part */
    NormActs pre_norm;
    StackActs stack;
    MlpActs projector; /* of the last part */
} VisionSlot;

typedef struct VisionChunk {
    Stack stack;
    int num_slots;
    VisionSlot *slots;
} VisionChunk;

/* One for all slots; members of different stages of a pass share memory. */
typedef struct VisionScratch {
    /* embedding */
    float *patches;    /* [B P, I] */
    float *local;      /* [B p, I]; NULL: all patches are here */
    float *patch_part; /* [B p, D/tp] */
    float *table;      /* [t, D] */
    float *embed_grad; /* [n, D] */
    float *full;       /* [N, D]; NULL: rows are not cut over tp */
    /* projector */
    float *features;      /* [r, D]; with class tokens only */
    float *features_grad; /* [r, D] */
    MlpScratch projector;
    StackShared stack;
} VisionScratch;

/* Where the tokens of B images stand on this rank; made again when B changes. */
typedef struct VisionPlaces {
    int64_t num_images; /* -1: not made */
    Sequences sequences;
    ShardRows rows;       /* R and r */
    int32_t *host_tokens; /* [r] host */
    int32_t *row_tokens;  /* [r] device: which of the n tokens row i is */
    int64_t *row_begins;  /* [tp + 1] host */
} VisionPlaces;

typedef struct VisionEncoder {
    Module module;
    LayerContext layers;
    ModuleParts parts;
    int backward_begin;
    Recompute recompute;
    int image_size, patch_size;
    int64_t width;          /* D */
    int64_t patches;        /* P */
    int64_t tokens;         /* T */
    int64_t local_tokens;   /* t */
    int64_t local_patches;  /* p */
    bool has_class_token;   /* on this cp rank: the first of its tokens of each image */
    Range patch_part;       /* of D: the patch embedding is cut over tp */
    int patch_weight;       /* parameter index, [D/tp, 3, patch, patch] */
    int class_embedding;    /* parameter index, [D]; -1: none */
    int position_embedding; /* parameter index, [T, D] */
    Norm pre_norm;
    VisionChunk chunks[MODULE_CHUNKS_MAX];
    Mlp projector;
    int64_t images_max;
    LayerLimits layer_limits;
    SequencesBuffer *buffer;
    int32_t *segment_begins; /* [images_max + 1]: each image attends to itself */
    VisionPlaces places;
    int32_t *positions;   /* [t] device: within the image */
    int32_t *patch_index; /* [images_max p] device: of all patches those that are here */
    VisionScratch scratch;
    void *memory; /* device: all slots and the scratch */
    int64_t memory_bytes;
} VisionEncoder;

static VisionEncoder *encoder_of(Module *module)
{
    return (VisionEncoder *)module; /* its first member */
}

static Status check_model(const VisionSpec *vision)
{
    if (vision->patch_size <= 0 || vision->image_size % vision->patch_size != 0) {
        return fail(STATUS_INVALID,
                    "model.vision: image_size %d is not a multiple of patch_size %d",
                    vision->image_size, vision->patch_size);
    }
    if (vision->heads <= 0 || vision->width % vision->heads != 0) {
        return fail(STATUS_INVALID, "model.vision: width %d is not a multiple of heads %d",
                    vision->width, vision->heads);
    }
    int layer = vision->feature_layer;
    if (layer < -vision->layers - 1 || layer > vision->layers) {
        return fail(STATUS_INVALID, "model.vision: feature_layer %d, but there are %d layers",
                    layer, vision->layers);
    }
    return STATUS_OK;
}

static Status declare_embedding(VisionEncoder *encoder)
{
    const char *prefix = "vision_tower.vision_model.embeddings";
    const LayerContext *layers = &encoder->layers;
    if (encoder->class_embedding >= 0) {
        ParamSpec class_token = {.num_dims = 1,
                                 .dims = {encoder->width},
                                 .shard_dim = -1,
                                 .init = PARAM_INIT_NORMAL,
                                 .init_std = embedding_std};
        TRY(layer_add_param(layers, prefix, "class_embedding", class_token,
                            &encoder->class_embedding));
    }
    int64_t patch_values = 3 * (int64_t)encoder->patch_size * encoder->patch_size;
    ParamSpec patch = {.num_dims = 4,
                       .dims = {encoder->width, 3, encoder->patch_size, encoder->patch_size},
                       .shard_dim = 0,
                       .shard = encoder->patch_part,
                       .decay = true,
                       .init = PARAM_INIT_NORMAL,
                       .init_std = 1.0f / sqrtf(3.0f * (float)patch_values)};
    TRY(layer_add_param(layers, prefix, "patch_embedding.weight", patch, &encoder->patch_weight));
    ParamSpec position = {.num_dims = 2,
                          .dims = {encoder->tokens, encoder->width},
                          .shard_dim = -1,
                          .init = PARAM_INIT_NORMAL,
                          .init_std = embedding_std};
    return layer_add_param(layers, prefix, "position_embedding.weight", position,
                           &encoder->position_embedding);
}

static BlockSpec block_spec(const VisionSpec *vision)
{
    /* The sum of 2 L branches keeps the size of one (Radford et al. 2019). */
    float branch_gain = 1.0f / sqrtf(2.0f * (float)vision->layers);
    return (BlockSpec){.norm1 = "layer_norm1",
                       .norm2 = "layer_norm2",
                       .norm = NORM_KIND_LAYER,
                       .norm_epsilon = (float)vision->norm_epsilon,
                       .attention = {.q = "self_attn.q_proj",
                                     .k = "self_attn.k_proj",
                                     .v = "self_attn.v_proj",
                                     .o = "self_attn.out_proj",
                                     .width = vision->width,
                                     .heads = vision->heads,
                                     .kv_heads = vision->heads,
                                     .head_width = vision->width / vision->heads,
                                     .bias = true,
                                     .o_gain = branch_gain},
                       .mlp = {.up = "mlp.fc1",
                               .down = "mlp.fc2",
                               .kind = vision->activation == VIADUCT__V1__ACTIVATION__GELU
                                           ? MLP_KIND_GELU
                                           : MLP_KIND_QUICK_GELU,
                               .in = vision->width,
                               .inner = vision->mlp_width,
                               .out = vision->width,
                               .bias = true,
                               .down_gain = branch_gain}};
}

static int layers_run(const VisionSpec *vision)
{
    int layer = vision->feature_layer;
    return layer < 0 ? vision->layers + 1 + layer : layer;
}

static Status declare_chunk(VisionEncoder *encoder, const ModelSpec *model, int chunk)
{
    const VisionSpec *vision = model->vision;
    const LayerContext *layers = &encoder->layers;
    const BlockSpec spec = block_spec(vision);
    if (module_parts_is_first(&encoder->parts, chunk)) {
        TRY(declare_embedding(encoder));
        TRY(norm_declare(layers, "vision_tower.vision_model", "pre_layrnorm", NORM_KIND_LAYER,
                         vision->width, (float)vision->norm_epsilon, &encoder->pre_norm));
    }
    Range part = module_part_layers(layers_run(vision), module_parts_count(&encoder->parts),
                                    module_parts_at(&encoder->parts, chunk));
    TRY(stack_init(layers, "vision_tower.vision_model.encoder.layers", &spec, part,
                   encoder->recompute, &encoder->chunks[chunk].stack));
    if (module_parts_is_last(&encoder->parts, chunk)) {
        TRY(projector_declare(layers, model, &encoder->projector));
    }
    return STATUS_OK;
}

static void set_model(VisionEncoder *encoder, const ModelSpec *model, const ModuleContext *context)
{
    const VisionSpec *vision = model->vision;
    Range chunks[SHARD_CHUNKS];
    encoder->parts = module_parts_of(context);
    encoder->backward_begin = context->backward_begin;
    encoder->recompute = context->recompute;
    encoder->image_size = vision->image_size;
    encoder->patch_size = vision->patch_size;
    encoder->width = vision->width;
    encoder->patches = module_rows_per_image(model);
    encoder->tokens = encoder->patches + (vision->class_token ? 1 : 0);
    encoder->class_embedding = vision->class_token ? 0 : -1;
    encoder->layers = (LayerContext){.kernels = context->kernels,
                                     .stream = context->stream,
                                     .tp = context->tp,
                                     .cp = context->cp,
                                     .is_sequence_parallel = context->is_sequence_parallel,
                                     .params = &encoder->module.params};
    ShardRank rank = layer_shard_rank(&encoder->layers);
    int num_chunks = shard_chunks(encoder->tokens, rank.cp_size, rank.cp_rank, chunks);
    encoder->local_tokens = shard_chunks_count(encoder->tokens, rank.cp_size, rank.cp_rank);
    encoder->has_class_token = vision->class_token && num_chunks > 0 && chunks[0].begin == 0;
    encoder->local_patches = encoder->local_tokens - (encoder->has_class_token ? 1 : 0);
    encoder->patch_part = layer_tp_part(&encoder->layers, encoder->width);
    param_set_freeze(&encoder->module.params, context->frozen, context->num_frozen);
}

/* Declares one part alone, to look at its parameters. */
static Status look_at_part(const ModelSpec *model, const ModuleContext *context, int part,
                           bool *is_trained_out)
{
    VisionEncoder *encoder = NULL;
    ModuleContext alone = *context;
    alone.tp = NULL;
    alone.cp = NULL;
    TRY(MEMORY_NEW(&encoder, 1));
    ModuleParts parts = module_parts_of(context);
    alone.stage = part % parts.stages;
    param_set_init(&encoder->module.params, NULL);
    set_model(encoder, model, &alone);
    Status status = declare_chunk(encoder, model, part / parts.stages);
    *is_trained_out = module_parts_any_trained(&encoder->module.params);
    stack_done(&encoder->chunks[part / parts.stages].stack);
    param_set_done(&encoder->module.params);
    memory_free(encoder);
    return status;
}

static Status vision_first_trained(const ModelSpec *model, const ModuleContext *context,
                                   int *part_out)
{
    ModuleParts parts = module_parts_of(context);
    int part = 0;
    bool is_trained = false;
    for (; part < module_parts_count(&parts) && !is_trained; part++) {
        TRY(look_at_part(model, context, part, &is_trained));
    }
    *part_out = is_trained ? part - 1 : part;
    return STATUS_OK;
}

/* ---- memory ---- */

static void carve_slot(VisionEncoder *encoder, Arena *arena, int chunk, VisionSlot *slot)
{
    const LayerLimits *limits = &encoder->layer_limits;
    if (module_parts_is_first(&encoder->parts, chunk)) {
        slot->embedded = layer_take(arena, limits->local, encoder->width);
        norm_carve(&encoder->pre_norm, arena, limits->local, &slot->pre_norm);
    }
    stack_carve(&encoder->layers, &encoder->chunks[chunk].stack, arena, limits,
                &encoder->scratch.stack, &slot->stack);
    if (module_parts_is_last(&encoder->parts, chunk)) {
        mlp_carve(&encoder->projector, arena, encoder->images_max * encoder->local_patches,
                  &slot->projector);
    }
}

static void carve_embedding(VisionEncoder *encoder, Arena *arena)
{
    VisionScratch *scratch = &encoder->scratch;
    const LayerLimits *limits = &encoder->layer_limits;
    int64_t inputs = 3 * (int64_t)encoder->patch_size * encoder->patch_size;
    int64_t local = encoder->images_max * encoder->local_patches;
    bool is_cut = layer_cuts_rows(&encoder->layers);
    scratch->patches = layer_take(arena, encoder->images_max * encoder->patches, inputs);
    scratch->local =
        encoder->local_tokens < encoder->tokens ? layer_take(arena, local, inputs) : NULL;
    scratch->patch_part = layer_take(arena, local, range_count(encoder->patch_part));
    scratch->table = layer_take(arena, encoder->local_tokens, encoder->width);
    scratch->embed_grad = layer_take(arena, limits->local, encoder->width);
    scratch->full = is_cut ? layer_take(arena, limits->tokens, encoder->width) : NULL;
}

static void carve_projector(VisionEncoder *encoder, Arena *arena)
{
    VisionScratch *scratch = &encoder->scratch;
    int64_t rows = encoder->images_max * encoder->local_patches;
    if (encoder->class_embedding >= 0) {
        scratch->features = layer_take(arena, rows, encoder->width);
        scratch->features_grad = layer_take(arena, rows, encoder->width);
    }
    mlp_carve_scratch(&encoder->layers, &encoder->projector, arena, rows, &scratch->projector);
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* The stages of a pass follow one another, so each begins at the same place. */
static void carve_scratch(VisionEncoder *encoder, Arena *arena)
{
    int64_t stage = arena->used;
    int64_t end = stage;
    if (module_parts_is_first(&encoder->parts, 0)) {
        carve_embedding(encoder, arena);
        end = larger(end, arena->used);
        arena_rewind(arena, stage);
    }
    if (module_parts_is_last(&encoder->parts, encoder->parts.chunks - 1)) {
        carve_projector(encoder, arena);
        end = larger(end, arena->used);
        arena_rewind(arena, stage);
    }
    if (arena->used < end) {
        arena_take(arena, end - arena->used);
    }
}

/* The largest of the chunks serves all: their blocks are alike. */
static void carve_stack(VisionEncoder *encoder, Arena *arena)
{
    int most = 0;
    for (int c = 1; c < encoder->parts.chunks; c++) {
        if (encoder->chunks[c].stack.num_blocks > encoder->chunks[most].stack.num_blocks) {
            most = c;
        }
    }
    stack_carve_shared(&encoder->layers, &encoder->chunks[most].stack, arena,
                       &encoder->layer_limits, &encoder->scratch.stack);
}

static void carve(VisionEncoder *encoder, Arena *arena)
{
    int64_t rows = encoder->images_max * encoder->local_patches;
    encoder->positions = arena_take(arena, encoder->local_tokens * (int64_t)sizeof(int32_t));
    encoder->patch_index = arena_take(arena, rows * (int64_t)sizeof(int32_t));
    encoder->places.row_tokens = arena_take(arena, rows * (int64_t)sizeof(int32_t));
    carve_stack(encoder, arena);
    carve_scratch(encoder, arena);
    for (int c = 0; c < encoder->parts.chunks; c++) {
        for (int i = 0; i < encoder->chunks[c].num_slots; i++) {
            carve_slot(encoder, arena, c, &encoder->chunks[c].slots[i]);
        }
    }
}

static Status allocate_slots(VisionEncoder *encoder, const ModuleLimits *limits)
{
    for (int c = 0; c < encoder->parts.chunks; c++) {
        VisionChunk *chunk = &encoder->chunks[c];
        chunk->num_slots = limits->slots[c];
        TRY(MEMORY_NEW(&chunk->slots, chunk->num_slots));
        for (int i = 0; i < chunk->num_slots; i++) {
            TRY(stack_acts_init(&chunk->stack, &chunk->slots[i].stack));
        }
    }
    return STATUS_OK;
}

static Status allocate_activations(VisionEncoder *encoder, const ModuleLimits *limits)
{
    TRY(allocate_slots(encoder, limits));
    Arena arena;
    arena_init_measure(&arena);
    carve(encoder, &arena);
    encoder->memory_bytes = arena.peak;
    TRY(device_alloc(encoder->module.params.device, encoder->memory_bytes, &encoder->memory));
    arena_init(&arena, encoder->memory, encoder->memory_bytes);
    carve(encoder, &arena);
    return STATUS_OK;
}

/* Positions of the tokens of an image that are here, and which of all patches. */
static Status fill_indices(VisionEncoder *encoder)
{
    ShardRank rank = layer_shard_rank(&encoder->layers);
    int64_t extra = encoder->tokens - encoder->patches;
    Range chunks[SHARD_CHUNKS];
    int32_t *positions = NULL;
    int32_t *index = NULL;
    int64_t rows = encoder->images_max * encoder->local_patches;
    int num_chunks = shard_chunks(encoder->tokens, rank.cp_size, rank.cp_rank, chunks);
    TRY(MEMORY_NEW(&positions, encoder->local_tokens));
    Status status = MEMORY_NEW(&index, rows);
    int64_t at = 0;
    for (int c = 0; c < num_chunks; c++) {
        for (int64_t t = chunks[c].begin; t < chunks[c].end; t++) {
            positions[at++] = (int32_t)t;
        }
    }
    int64_t skipped = encoder->local_tokens - encoder->local_patches;
    for (int64_t i = 0; status == STATUS_OK && i < rows; i++) {
        int64_t image = i / encoder->local_patches;
        int64_t token = positions[skipped + i % encoder->local_patches];
        index[i] = (int32_t)(image * encoder->patches + token - extra);
    }
    Stream *stream = encoder->layers.stream;
    if (status == STATUS_OK) {
        status = stream_copy(stream, encoder->positions, positions,
                             encoder->local_tokens * (int64_t)sizeof *positions);
    }
    if (status == STATUS_OK) {
        status = stream_copy(stream, encoder->patch_index, index, rows * (int64_t)sizeof *index);
    }
    if (status == STATUS_OK) {
        status = stream_wait(stream, clock_deadline_in_ms(COPY_TIMEOUT_MS));
    }
    memory_free(positions);
    memory_free(index);
    return status;
}

static Status allocate_places(VisionEncoder *encoder)
{
    const LayerContext *layers = &encoder->layers;
    VisionPlaces *places = &encoder->places;
    places->num_images = -1;
    TRY(MEMORY_NEW(&encoder->segment_begins, encoder->images_max + 1));
    for (int64_t i = 0; i <= encoder->images_max; i++) {
        encoder->segment_begins[i] = (int32_t)(i * encoder->tokens);
    }
    TRY(MEMORY_NEW(&places->host_tokens, encoder->images_max * encoder->local_patches));
    TRY(MEMORY_NEW(&places->row_begins, layer_tp_size(layers) + 1));
    return sequences_buffer_create(encoder->module.params.device, layer_shard_rank(layers),
                                   encoder->images_max * encoder->tokens, encoder->images_max,
                                   false, &encoder->buffer);
}

static void vision_destroy(Module *module)
{
    if (!module) {
        return;
    }
    VisionEncoder *encoder = encoder_of(module);
    if (encoder->memory) {
        device_free(module->params.device, encoder->memory, encoder->memory_bytes);
    }
    for (int c = 0; c < MODULE_CHUNKS_MAX; c++) {
        VisionChunk *chunk = &encoder->chunks[c];
        for (int i = 0; chunk->slots && i < chunk->num_slots; i++) {
            stack_acts_done(&chunk->slots[i].stack);
        }
        memory_free(chunk->slots);
        stack_done(&chunk->stack);
    }
    sequences_buffer_destroy(encoder->buffer);
    memory_free(encoder->places.host_tokens);
    memory_free(encoder->places.row_begins);
    memory_free(encoder->segment_begins);
    param_set_done(&module->params);
    memory_free(encoder);
}

static Status build(VisionEncoder *encoder, const ModelSpec *model, const ModuleLimits *limits)
{
    if (encoder->images_max > INT32_MAX / encoder->tokens - 1) {
        return fail(STATUS_INVALID, "vision: %lld images of %lld tokens in one microbatch",
                    (long long)encoder->images_max, (long long)encoder->tokens);
    }
    for (int c = 0; c < encoder->parts.chunks; c++) {
        TRY(declare_chunk(encoder, model, c));
    }
    TRY(param_set_allocate(&encoder->module.params));
    encoder->layer_limits = module_parts_limits(
        &encoder->layers, encoder->images_max * encoder->tokens, encoder->images_max);
    encoder->module.width = encoder->width;
    encoder->module.local_max = encoder->layer_limits.local;
    TRY(allocate_activations(encoder, limits));
    TRY(allocate_places(encoder));
    return fill_indices(encoder);
}

static Status vision_create(const ModelSpec *model, const ModuleContext *context,
                            const ModuleLimits *limits, Module **module_out)
{
    CHECK(limits->items >= 0 && context->chunks <= MODULE_CHUNKS_MAX);
    TRY(check_model(model->vision));
    VisionEncoder *encoder = NULL;
    TRY(MEMORY_NEW(&encoder, 1));
    encoder->module.ops = &vision_module_ops;
    param_set_init(&encoder->module.params, context->device);
    set_model(encoder, model, context);
    encoder->images_max = limits->items;
    Status status = build(encoder, model, limits);
    if (status != STATUS_OK) {
        vision_destroy(&encoder->module);
        return status_trace(status, __FILE__, __LINE__);
    }
    *module_out = &encoder->module;
    return STATUS_OK;
}

/* ---- where tokens and rows stand ---- */

static int64_t count_tokens(const VisionEncoder *encoder, const ModuleBatch *batch)
{
    return batch->num_items * encoder->local_tokens;
}

/* Rows among the first `tokens` of this cp rank. */
static int64_t rows_before(const VisionEncoder *encoder, int64_t tokens)
{
    int64_t t = encoder->local_tokens;
    return encoder->has_class_token ? tokens - (tokens + t - 1) / t : tokens;
}

static Range local_part(const VisionEncoder *encoder, const ModuleBatch *batch)
{
    ShardRank rank = layer_shard_rank(&encoder->layers);
    return range_part(count_tokens(encoder, batch), rank.tp_size, rank.tp_rank);
}

static int64_t vision_count_local(const Module *module, const ModuleBatch *batch)
{
    return range_count(local_part((const VisionEncoder *)module, batch));
}

static int64_t vision_count_rows(const Module *module, const ModuleBatch *batch)
{
    const VisionEncoder *encoder = (const VisionEncoder *)module;
    Range part = local_part(encoder, batch);
    return rows_before(encoder, part.end) - rows_before(encoder, part.begin);
}

static Status find_places(VisionEncoder *encoder, const ModuleBatch *batch)
{
    VisionPlaces *places = &encoder->places;
    Stream *stream = encoder->layers.stream;
    if (places->num_images == batch->num_items) {
        return STATUS_OK;
    }
    if (places->num_images >= 0) { /* host memory that copies read is written again */
        TRY(stream_wait(stream, clock_deadline_in_ms(COPY_TIMEOUT_MS)));
    }
    places->num_images = -1;
    TRY(sequences_make(encoder->buffer, encoder->segment_begins, (int32_t)batch->num_items, stream,
                       &places->sequences));
    const ShardRows *tokens = &places->sequences.rows;
    places->rows = (ShardRows){
        .count = rows_before(encoder, tokens->count),
        .part = {rows_before(encoder, tokens->part.begin), rows_before(encoder, tokens->part.end)}};
    for (int i = 0; tokens->begins && i <= layer_tp_size(&encoder->layers); i++) {
        places->row_begins[i] = rows_before(encoder, tokens->begins[i]);
    }
    places->rows.begins = tokens->begins ? places->row_begins : NULL;
    int64_t num = 0;
    for (int64_t n = tokens->part.begin; n < tokens->part.end; n++) {
        if (!encoder->has_class_token || n % encoder->local_tokens != 0) {
            places->host_tokens[num++] = (int32_t)(n - tokens->part.begin);
        }
    }
    CHECK(num == range_count(places->rows.part));
    TRY(stream_copy(stream, places->row_tokens, places->host_tokens,
                    num * (int64_t)sizeof(int32_t)));
    places->num_images = batch->num_items;
    return STATUS_OK;
}

/* ---- patches, class token, positions ---- */

/* Where this rank's columns of the patch tokens of an image begin in [N, D]. */
static int64_t patch_columns(const VisionEncoder *encoder, int64_t image)
{
    int64_t skipped = encoder->local_tokens - encoder->local_patches;
    return (image * encoder->local_tokens + skipped) * encoder->width + encoder->patch_part.begin;
}

/* scratch.patch_part [B p, D/tp] into this rank's columns of the patch tokens of x [N, D]. */
static Status put_patch_columns(const VisionEncoder *encoder, float *x, int64_t images)
{
    const LayerContext *layers = &encoder->layers;
    int64_t cols = range_count(encoder->patch_part);
    int64_t rows = encoder->local_patches;
    for (int64_t i = 0; i < images; i++) {
        TRY(layers->kernels->copy_matrix(x + patch_columns(encoder, i), encoder->width,
                                         encoder->scratch.patch_part + i * rows * cols, cols, rows,
                                         cols, layers->stream));
    }
    return STATUS_OK;
}

/* The other way. */
static Status take_patch_columns(const VisionEncoder *encoder, const float *x, int64_t images)
{
    const LayerContext *layers = &encoder->layers;
    int64_t cols = range_count(encoder->patch_part);
    int64_t rows = encoder->local_patches;
    for (int64_t i = 0; i < images; i++) {
        TRY(layers->kernels->copy_matrix(encoder->scratch.patch_part + i * rows * cols, cols,
                                         x + patch_columns(encoder, i), encoder->width, rows, cols,
                                         layers->stream));
    }
    return STATUS_OK;
}

/* *patches_out [B p, I]: those that are here. */
static Status cut_patches(VisionEncoder *encoder, const ModuleBatch *batch,
                          const float **patches_out)
{
    const LayerContext *layers = &encoder->layers;
    VisionScratch *scratch = &encoder->scratch;
    TRY(layers->kernels->patches_forward(scratch->patches, batch->pixels, pixel_mean, pixel_std,
                                         batch->num_items, encoder->image_size, encoder->patch_size,
                                         layers->stream));
    *patches_out = scratch->patches;
    if (!scratch->local) {
        return STATUS_OK;
    }
    *patches_out = scratch->local;
    return layers->kernels->gather_rows(scratch->local, scratch->patches, encoder->patch_index,
                                        batch->num_items * encoder->local_patches,
                                        3 * (int64_t)encoder->patch_size * encoder->patch_size,
                                        layers->stream);
}

/* The product's result is x itself: all columns are here, and no class token stands between. */
static bool is_direct(const VisionEncoder *encoder)
{
    return range_count(encoder->patch_part) == encoder->width && !encoder->has_class_token;
}

/* x [N, D] = patches @ weight^T at this rank's columns of the patch tokens, 0 elsewhere. */
static Status embed_patches(VisionEncoder *encoder, float *x, const ModuleBatch *batch)
{
    const LayerContext *layers = &encoder->layers;
    const float *patches = NULL;
    TRY(cut_patches(encoder, batch, &patches));
    const MatMul product = {.c = is_direct(encoder) ? x : encoder->scratch.patch_part,
                            .a = patches,
                            .b = layer_value(layers, encoder->patch_weight),
                            .m = batch->num_items * encoder->local_patches,
                            .n = range_count(encoder->patch_part),
                            .k = 3 * (int64_t)encoder->patch_size * encoder->patch_size,
                            .transpose_b = true};
    TRY(layers->kernels->matmul(&product, layers->stream));
    if (is_direct(encoder)) {
        return STATUS_OK;
    }
    int64_t count = count_tokens(encoder, batch) * encoder->width;
    TRY(stream_zero(layers->stream, x, count * (int64_t)sizeof(float)));
    return put_patch_columns(encoder, x, batch->num_items);
}

/* scratch.table [t, D]: what is added to the tokens of each image. */
static Status make_table(VisionEncoder *encoder)
{
    const LayerContext *layers = &encoder->layers;
    const Kernels *kernels = layers->kernels;
    float *table = encoder->scratch.table;
    TRY(kernels->embedding_forward(table, layer_value(layers, encoder->position_embedding),
                                   encoder->positions, encoder->local_tokens, encoder->width, 0,
                                   encoder->tokens, layers->stream));
    if (!encoder->has_class_token) {
        return STATUS_OK;
    }
    return kernels->accumulate(table, layer_value(layers, encoder->class_embedding), encoder->width,
                               layers->stream);
}

/* slot.embedded [n, D]. The table is added by one tp rank, and the sum over tp puts the columns
 * together. */
static Status embed_forward(VisionEncoder *encoder, VisionSlot *slot, const ModuleBatch *batch)
{
    const LayerContext *layers = &encoder->layers;
    const ShardRows *rows = &encoder->places.sequences.rows;
    float *x = layer_addend(rows, slot->embedded, encoder->scratch.full);
    TRY(embed_patches(encoder, x, batch));
    if (layer_tp_rank(layers) == 0) {
        TRY(make_table(encoder));
        TRY(layers->kernels->add_table(x, encoder->scratch.table, batch->num_items,
                                       encoder->local_tokens, encoder->width, layers->stream));
    }
    TRY(layer_reduce_to(layers, rows, slot->embedded, x, encoder->width));
    return norm_forward(layers, &encoder->pre_norm, &slot->pre_norm, stack_input(&slot->stack),
                        slot->embedded, range_count(rows->part));
}

/* table_grad [t, D] to the class token and the positions. */
static Status table_backward(VisionEncoder *encoder, const float *grad, const ModuleBatch *batch)
{
    const LayerContext *layers = &encoder->layers;
    const Kernels *kernels = layers->kernels;
    float *table = encoder->scratch.table;
    float *position_grad = layer_grad(layers, encoder->position_embedding);
    float *class_grad =
        encoder->has_class_token ? layer_grad(layers, encoder->class_embedding) : NULL;
    if (!position_grad && !class_grad) {
        return STATUS_OK;
    }
    TRY(stream_zero(layers->stream, table,
                    encoder->local_tokens * encoder->width * (int64_t)sizeof(float)));
    TRY(kernels->add_table_backward(table, grad, batch->num_items, encoder->local_tokens,
                                    encoder->width, layers->stream));
    if (position_grad) {
        TRY(kernels->embedding_backward(position_grad, table, encoder->positions,
                                        encoder->local_tokens, encoder->width, 0, encoder->tokens,
                                        layers->stream));
    }
    return class_grad ? kernels->accumulate(class_grad, table, encoder->width, layers->stream)
                      : STATUS_OK;
}

/* Pixels have no gradient; patches are cut again rather than kept: they are wider than all else.
 * grad [N, D]. */
static Status patch_backward(VisionEncoder *encoder, const float *grad, const ModuleBatch *batch)
{
    const LayerContext *layers = &encoder->layers;
    const float *patches = NULL;
    if (!layer_is_trained(layers, encoder->patch_weight)) {
        return STATUS_OK;
    }
    if (!is_direct(encoder)) {
        TRY(take_patch_columns(encoder, grad, batch->num_items));
    }
    TRY(cut_patches(encoder, batch, &patches));
    const MatMul product = {.c = layer_grad(layers, encoder->patch_weight),
                            .a = is_direct(encoder) ? grad : encoder->scratch.patch_part,
                            .b = patches,
                            .m = range_count(encoder->patch_part),
                            .n = 3 * (int64_t)encoder->patch_size * encoder->patch_size,
                            .k = batch->num_items * encoder->local_patches,
                            .transpose_a = true,
                            .accumulate = true};
    return layers->kernels->matmul(&product, layers->stream);
}

static bool embedding_is_trained(const VisionEncoder *encoder)
{
    const LayerContext *layers = &encoder->layers;
    return layer_is_trained(layers, encoder->patch_weight) ||
           layer_is_trained(layers, encoder->position_embedding) ||
           layer_is_trained(layers, encoder->class_embedding) ||
           norm_is_trained(layers, &encoder->pre_norm);
}

/* grad [n, D] of the stack's input. */
static Status embed_backward(VisionEncoder *encoder, VisionSlot *slot, const float *grad,
                             const ModuleBatch *batch)
{
    const LayerContext *layers = &encoder->layers;
    const ShardRows *rows = &encoder->places.sequences.rows;
    float *x_grad = encoder->scratch.embed_grad;
    TRY(norm_backward(layers, &encoder->pre_norm, &slot->pre_norm, x_grad, grad, slot->embedded,
                      range_count(rows->part), false));
    const float *whole_grad = NULL; /* [N, D] */
    TRY(layer_join(layers, rows, encoder->scratch.full, x_grad, encoder->width, &whole_grad));
    TRY(table_backward(encoder, whole_grad, batch));
    return patch_backward(encoder, whole_grad, batch);
}

/* ---- rows ---- */

/* *features_out [r, D]: the stack's output itself where no class token stands between, else a copy
 * in scratch. */
static Status take_features(VisionEncoder *encoder, const float *x, const float **features_out)
{
    const LayerContext *layers = &encoder->layers;
    *features_out = x;
    if (!encoder->has_class_token) {
        return STATUS_OK;
    }
    *features_out = encoder->scratch.features;
    return layers->kernels->gather_rows(encoder->scratch.features, x, encoder->places.row_tokens,
                                        range_count(encoder->places.rows.part), encoder->width,
                                        layers->stream);
}

/* grad [n, D] = gradient of the stack's output from that of the rows. */
static Status rows_backward(VisionEncoder *encoder, VisionSlot *slot, const float *x,
                            const float *rows_grad, float *grad, bool wants_grad)
{
    const LayerContext *layers = &encoder->layers;
    const VisionPlaces *places = &encoder->places;
    VisionScratch *scratch = &encoder->scratch;
    bool is_copied = encoder->has_class_token;
    const float *features = NULL;
    TRY(take_features(encoder, x, &features));
    float *features_grad = is_copied ? scratch->features_grad : grad;
    TRY(mlp_backward(layers, &encoder->projector, &slot->projector, &scratch->projector,
                     &places->rows, wants_grad ? features_grad : NULL, rows_grad, features));
    if (!wants_grad || !is_copied) {
        return STATUS_OK;
    }
    TRY(stream_zero(layers->stream, grad,
                    range_count(places->sequences.rows.part) * encoder->width *
                        (int64_t)sizeof(float)));
    return layers->kernels->scatter_rows(grad, features_grad, places->row_tokens,
                                         range_count(places->rows.part), encoder->width,
                                         layers->stream);
}

/* ---- the module ---- */

static VisionSlot *slot_of(VisionEncoder *encoder, int chunk, int slot)
{
    CHECK(chunk >= 0 && chunk < encoder->parts.chunks);
    CHECK(slot >= 0 && slot < encoder->chunks[chunk].num_slots);
    return &encoder->chunks[chunk].slots[slot];
}

static float *vision_input(Module *module, int chunk, int slot)
{
    return stack_input(&slot_of(encoder_of(module), chunk, slot)->stack);
}

static const float *vision_output(Module *module, int chunk, int slot)
{
    VisionEncoder *encoder = encoder_of(module);
    return stack_output(&encoder->chunks[chunk].stack, &slot_of(encoder, chunk, slot)->stack);
}

// NOLINTBEGIN(readability-non-const-parameter): the signatures are the contract's
static Status vision_forward(Module *module, int chunk, int slot_index, const ModuleBatch *batch,
                             float *rows_out, double *loss_sum_out)
{
    (void)loss_sum_out;
    VisionEncoder *encoder = encoder_of(module);
    const LayerContext *layers = &encoder->layers;
    VisionSlot *slot = slot_of(encoder, chunk, slot_index);
    const Stack *stack = &encoder->chunks[chunk].stack;
    CHECK(batch->num_items >= 0 && batch->num_items <= encoder->images_max);
    if (batch->num_items == 0) {
        return STATUS_OK; /* on all ranks of the replica */
    }
    TRY(find_places(encoder, batch));
    if (module_parts_is_first(&encoder->parts, chunk)) {
        TRY(embed_forward(encoder, slot, batch));
    }
    TRY(stack_forward(layers, stack, &slot->stack, &encoder->scratch.stack,
                      &encoder->places.sequences));
    if (!module_parts_is_last(&encoder->parts, chunk)) {
        return STATUS_OK;
    }
    const float *features = NULL;
    TRY(take_features(encoder, stack_output(stack, &slot->stack), &features));
    return mlp_forward(layers, &encoder->projector, &slot->projector, &encoder->scratch.projector,
                       &encoder->places.rows, rows_out, features, NULL);
}

static Status vision_backward(Module *module, int chunk, int slot_index, const ModuleBatch *batch,
                              float *grad, float *rows_grad)
{
    VisionEncoder *encoder = encoder_of(module);
    VisionSlot *slot = slot_of(encoder, chunk, slot_index);
    const Stack *stack = &encoder->chunks[chunk].stack;
    if (batch->num_items == 0) {
        return STATUS_OK;
    }
    bool is_first = module_parts_is_first(&encoder->parts, chunk);
    bool wants_input_grad = is_first
                                ? embedding_is_trained(encoder)
                                : module_parts_at(&encoder->parts, chunk) > encoder->backward_begin;
    TRY(find_places(encoder, batch));
    if (module_parts_is_last(&encoder->parts, chunk)) {
        bool wants_grad = wants_input_grad || stack->first_trained < stack->num_blocks;
        TRY(rows_backward(encoder, slot, stack_output(stack, &slot->stack), rows_grad, grad,
                          wants_grad));
    }
    TRY(stack_backward(&encoder->layers, stack, &slot->stack, &encoder->scratch.stack,
                       &encoder->places.sequences, grad, wants_input_grad));
    return is_first && wants_input_grad ? embed_backward(encoder, slot, grad, batch) : STATUS_OK;
}

static Status vision_predict(Module *module, int slot, const int32_t *tokens, int32_t num,
                             int32_t *ids_out)
{
    (void)module;
    (void)slot;
    (void)tokens;
    (void)num;
    (void)ids_out;
    return fail(STATUS_UNSUPPORTED, "a vision encoder does not predict tokens");
}

// NOLINTEND(readability-non-const-parameter)

const ModuleOps vision_module_ops = {
    .name = "vision",
    .first_trained = vision_first_trained,
    .create = vision_create,
    .destroy = vision_destroy,
    .count_local = vision_count_local,
    .count_rows = vision_count_rows,
    .input = vision_input,
    .output = vision_output,
    .forward = vision_forward,
    .backward = vision_backward,
    .predict = vision_predict,
};
