/* Legend: B images, P patches of an image, T = P + 1 with class token else P, N = B T tokens, R = B
 * P rows, D width, D2 width of the decoder, I = 3 patch^2 inputs of a patch. */
#include "encoder_worker/vision_encoder.h"

#include "base/memory.h"
#include "encoder_worker/projector.h"
#include "nn/block.h"

#include <math.h>
#include <stdio.h>

/* Mean and deviation of the channels in CLIP's training data, in units of 255. */
static const float pixel_mean[3] = {0.48145466f, 0.4578275f, 0.40821073f};
static const float pixel_std[3] = {0.26862954f, 0.26130258f, 0.27577711f};

static const float embedding_std = 0.02f; /* initial standard deviation of tokens and positions */

/* Kept from forward to backward of one microbatch. */
typedef struct VisionSlot {
    float *embedded; /* [N, D]: patches, class token, positions */
    NormActs pre_norm;
    float *first; /* [N, D]: input of block 0 */
    BlockActs *blocks;
    MlpActs projector;
} VisionSlot;

/* One for all slots; members of different stages share memory. */
typedef struct VisionScratch {
    float *grad; /* [N, D]: travels down through the blocks */
    /* embedding */
    float *patches;    /* [R, I] */
    float *patch_part; /* [R, D/tp] */
    float *table;      /* [T, D] */
    float *embed_grad; /* [N, D] */
    /* projector */
    float *features;      /* [R, D]; with class token only */
    float *features_grad; /* [R, D]; with class token only */
    MlpScratch projector;
    BlockScratch block;
} VisionScratch;

typedef struct VisionEncoder {
    Module module;
    LayerContext layers;
    int image_size, patch_size;
    int64_t width;          /* D */
    int64_t patches;        /* P */
    int64_t tokens;         /* T */
    Range patch_part;       /* of D: the patch embedding is cut over tp */
    int patch_weight;       /* parameter index, [D/tp, 3, patch, patch] */
    int class_embedding;    /* parameter index, [D]; -1: none */
    int position_embedding; /* parameter index, [T, D] */
    Norm pre_norm;
    int num_blocks;
    Block *blocks;
    Mlp projector;
    int64_t images_max;
    int num_slots;
    VisionSlot *slots;
    VisionScratch scratch;
    int32_t *segment_begins; /* [images_max + 1]: each image attends to itself */
    void *memory;            /* device: all slots and the scratch */
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
    encoder->patch_part = layer_tp_part(layers, encoder->width);
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

static Status declare(VisionEncoder *encoder, const ModelSpec *model)
{
    const VisionSpec *vision = model->vision;
    const LayerContext *layers = &encoder->layers;
    TRY(declare_embedding(encoder));
    TRY(norm_declare(layers, "vision_tower.vision_model", "pre_layrnorm", NORM_KIND_LAYER,
                     vision->width, (float)vision->norm_epsilon, &encoder->pre_norm));
    BlockSpec spec = block_spec(vision);
    for (int i = 0; i < encoder->num_blocks; i++) {
        char prefix[64];
        snprintf(prefix, sizeof prefix, "vision_tower.vision_model.encoder.layers.%d", i);
        TRY(block_declare(layers, prefix, &spec, &encoder->blocks[i]));
    }
    TRY(projector_declare(layers, model, &encoder->projector));
    return param_set_allocate(&encoder->module.params);
}

static void carve_slot(VisionEncoder *encoder, Arena *arena, VisionSlot *slot)
{
    int64_t n = encoder->images_max * encoder->tokens;
    slot->embedded = layer_take(arena, n, encoder->width);
    norm_carve(&encoder->pre_norm, arena, n, &slot->pre_norm);
    slot->first = layer_take(arena, n, encoder->width);
    for (int i = 0; i < encoder->num_blocks; i++) {
        block_carve(&encoder->blocks[i], arena, n, &slot->blocks[i]);
    }
    mlp_carve(&encoder->projector, arena, encoder->images_max * encoder->patches, &slot->projector);
}

/* The stages of a pass follow one another, so each begins at the same place. */
static void carve_scratch(VisionEncoder *encoder, Arena *arena)
{
    VisionScratch *scratch = &encoder->scratch;
    int64_t n = encoder->images_max * encoder->tokens;
    int64_t rows = encoder->images_max * encoder->patches;
    int64_t inputs = 3 * (int64_t)encoder->patch_size * encoder->patch_size;
    scratch->grad = layer_take(arena, n, encoder->width);
    int64_t stage = arena->used;

    scratch->patches = layer_take(arena, rows, inputs);
    scratch->patch_part = layer_take(arena, rows, range_count(encoder->patch_part));
    scratch->table = layer_take(arena, encoder->tokens, encoder->width);
    scratch->embed_grad = layer_take(arena, n, encoder->width);
    int64_t end = arena->used;

    arena_rewind(arena, stage);
    if (encoder->class_embedding >= 0) {
        scratch->features = layer_take(arena, rows, encoder->width);
        scratch->features_grad = layer_take(arena, rows, encoder->width);
    }
    mlp_carve_scratch(&encoder->projector, arena, rows, &scratch->projector);
    end = arena->used > end ? arena->used : end;

    arena_rewind(arena, stage);
    for (int i = 0; i < encoder->num_blocks; i++) { /* all alike: the same memory again */
        arena_rewind(arena, stage);
        block_carve_scratch(&encoder->blocks[i], arena, n, &scratch->block);
    }
    if (arena->used < end) {
        arena_take(arena, end - arena->used);
    }
}

static void carve(VisionEncoder *encoder, Arena *arena)
{
    for (int i = 0; i < encoder->num_slots; i++) {
        carve_slot(encoder, arena, &encoder->slots[i]);
    }
    carve_scratch(encoder, arena);
}

static Status allocate_activations(VisionEncoder *encoder)
{
    TRY(MEMORY_NEW(&encoder->segment_begins, encoder->images_max + 1));
    for (int64_t i = 0; i <= encoder->images_max; i++) {
        encoder->segment_begins[i] = (int32_t)(i * encoder->tokens);
    }
    TRY(MEMORY_NEW(&encoder->slots, encoder->num_slots));
    for (int i = 0; i < encoder->num_slots; i++) {
        TRY(MEMORY_NEW(&encoder->slots[i].blocks, encoder->num_blocks));
    }
    Arena arena;
    arena_init_measure(&arena);
    carve(encoder, &arena);
    encoder->memory_bytes = arena.peak;
    TRY(device_alloc(encoder->module.params.device, encoder->memory_bytes, &encoder->memory));
    arena_init(&arena, encoder->memory, encoder->memory_bytes);
    carve(encoder, &arena);
    return STATUS_OK;
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
    for (int i = 0; encoder->slots && i < encoder->num_slots; i++) {
        memory_free(encoder->slots[i].blocks);
    }
    memory_free(encoder->slots);
    memory_free(encoder->segment_begins);
    memory_free(encoder->blocks);
    param_set_done(&module->params);
    memory_free(encoder);
}

static Status build(VisionEncoder *encoder, const ModelSpec *model)
{
    const VisionSpec *vision = model->vision;
    int layer = vision->feature_layer;
    encoder->num_blocks = layer < 0 ? vision->layers + 1 + layer : layer;
    encoder->image_size = vision->image_size;
    encoder->patch_size = vision->patch_size;
    encoder->width = vision->width;
    encoder->patches = module_rows_per_image(model);
    encoder->tokens = encoder->patches + (vision->class_token ? 1 : 0);
    encoder->class_embedding = vision->class_token ? 0 : -1;
    if (encoder->images_max > INT32_MAX / encoder->tokens - 1) {
        return fail(STATUS_INVALID, "vision: %lld images of %lld tokens in one microbatch",
                    (long long)encoder->images_max, (long long)encoder->tokens);
    }
    TRY(MEMORY_NEW(&encoder->blocks, encoder->num_blocks));
    TRY(declare(encoder, model));
    return allocate_activations(encoder);
}

static Status vision_create(const ModelSpec *model, const ModuleContext *context,
                            const ModuleLimits *limits, Module **module_out)
{
    CHECK(limits->slots > 0 && limits->images >= 0);
    TRY(check_model(model->vision));
    VisionEncoder *encoder = NULL;
    TRY(MEMORY_NEW(&encoder, 1));
    encoder->module.ops = &vision_module_ops;
    param_set_init(&encoder->module.params, context->device);
    encoder->layers = (LayerContext){.kernels = context->kernels,
                                     .stream = context->stream,
                                     .tp = context->tp,
                                     .params = &encoder->module.params};
    encoder->images_max = limits->images;
    encoder->num_slots = limits->slots;
    Status status = build(encoder, model);
    if (status != STATUS_OK) {
        vision_destroy(&encoder->module);
        return status_trace(status, __FILE__, __LINE__);
    }
    *module_out = &encoder->module;
    return STATUS_OK;
}

/* ---- patches, class token, positions ---- */

/* Where the patch tokens lie in an array [N, D]. */
typedef struct PatchView {
    int64_t offset; /* elements before the first patch token of an image */
    int64_t image;  /* elements from image to image */
} PatchView;

static PatchView patch_view(const VisionEncoder *encoder)
{
    int64_t before = encoder->tokens - encoder->patches; /* class tokens */
    return (PatchView){before * encoder->width, encoder->tokens * encoder->width};
}

/* matrix [R, D/tp] into this rank's columns of the patch tokens of x [N, D], or back. */
static Status copy_patch_columns(const VisionEncoder *encoder, float *x, float *matrix,
                                 int64_t images, bool into_x)
{
    const LayerContext *layers = &encoder->layers;
    PatchView view = patch_view(encoder);
    int64_t cols = range_count(encoder->patch_part);
    for (int64_t i = 0; i < images; i++) {
        float *tokens = x + i * view.image + view.offset + encoder->patch_part.begin;
        float *rows = matrix + i * encoder->patches * cols;
        if (into_x) {
            TRY(layers->kernels->copy_matrix(tokens, encoder->width, rows, cols, encoder->patches,
                                             cols, layers->stream));
        } else {
            TRY(layers->kernels->copy_matrix(rows, cols, tokens, encoder->width, encoder->patches,
                                             cols, layers->stream));
        }
    }
    return STATUS_OK;
}

/* x [N, D] = patches @ weight^T at the patch tokens, 0 at the class tokens. */
static Status embed_patches(VisionEncoder *encoder, float *x, const ModuleBatch *batch)
{
    const LayerContext *layers = &encoder->layers;
    VisionScratch *scratch = &encoder->scratch;
    int64_t rows = batch->num_images * encoder->patches;
    int64_t inputs = 3 * (int64_t)encoder->patch_size * encoder->patch_size;
    int64_t cols = range_count(encoder->patch_part);
    bool direct = cols == encoder->width && encoder->class_embedding < 0;
    TRY(layers->kernels->patches_forward(scratch->patches, batch->pixels, pixel_mean, pixel_std,
                                         batch->num_images, encoder->image_size,
                                         encoder->patch_size, layers->stream));
    MatMul product = {.c = direct ? x : scratch->patch_part,
                      .a = scratch->patches,
                      .b = layer_value(layers, encoder->patch_weight),
                      .m = rows,
                      .n = cols,
                      .k = inputs,
                      .transpose_b = true};
    TRY(layers->kernels->matmul(&product, layers->stream));
    if (direct) {
        return STATUS_OK;
    }
    int64_t count = batch->num_images * encoder->tokens * encoder->width;
    TRY(stream_zero(layers->stream, x, count * (int64_t)sizeof(float)));
    TRY(copy_patch_columns(encoder, x, scratch->patch_part, batch->num_images, true));
    return layer_sum(layers, x, count); /* to zeros: it puts the columns together */
}

/* x [N, D] of the slot: positions and class token added; both are one table [T, D]. */
static Status embed_forward(VisionEncoder *encoder, VisionSlot *slot, const ModuleBatch *batch)
{
    const LayerContext *layers = &encoder->layers;
    const Kernels *kernels = layers->kernels;
    TRY(embed_patches(encoder, slot->embedded, batch));
    const float *table = layer_value(layers, encoder->position_embedding);
    if (encoder->class_embedding >= 0) {
        float *sum = encoder->scratch.table;
        int64_t table_bytes = encoder->tokens * encoder->width * (int64_t)sizeof(float);
        TRY(stream_copy(layers->stream, sum, table, table_bytes));
        TRY(kernels->accumulate(sum, layer_value(layers, encoder->class_embedding), encoder->width,
                                layers->stream));
        table = sum;
    }
    return kernels->add_table(slot->embedded, table, batch->num_images, encoder->tokens,
                              encoder->width, layers->stream);
}

/* grad [N, D] of the sum. Pixels have no gradient; patches are cut again rather than kept: they are
 * wider than all else. */
static Status embed_backward(VisionEncoder *encoder, float *grad, const ModuleBatch *batch)
{
    const LayerContext *layers = &encoder->layers;
    const Kernels *kernels = layers->kernels;
    VisionScratch *scratch = &encoder->scratch;
    int64_t table_count = encoder->tokens * encoder->width;
    TRY(stream_zero(layers->stream, scratch->table, table_count * (int64_t)sizeof(float)));
    TRY(kernels->add_table_backward(scratch->table, grad, batch->num_images, encoder->tokens,
                                    encoder->width, layers->stream));
    TRY(kernels->accumulate(layer_grad(layers, encoder->position_embedding), scratch->table,
                            table_count, layers->stream));
    if (encoder->class_embedding >= 0) {
        TRY(kernels->accumulate(layer_grad(layers, encoder->class_embedding), scratch->table,
                                encoder->width, layers->stream));
    }
    int64_t cols = range_count(encoder->patch_part);
    bool direct = cols == encoder->width && encoder->class_embedding < 0;
    if (!direct) {
        TRY(copy_patch_columns(encoder, grad, scratch->patch_part, batch->num_images, false));
    }
    TRY(kernels->patches_forward(scratch->patches, batch->pixels, pixel_mean, pixel_std,
                                 batch->num_images, encoder->image_size, encoder->patch_size,
                                 layers->stream));
    MatMul product = {.c = layer_grad(layers, encoder->patch_weight),
                      .a = direct ? grad : scratch->patch_part,
                      .b = scratch->patches,
                      .m = cols,
                      .n = 3 * (int64_t)encoder->patch_size * encoder->patch_size,
                      .k = batch->num_images * encoder->patches,
                      .transpose_a = true,
                      .accumulate = true};
    return kernels->matmul(&product, layers->stream);
}

/* ---- features: the patch tokens of the last block's output ---- */

static const float *block_input(const VisionSlot *slot, int block)
{
    return block == 0 ? slot->first : slot->blocks[block - 1].out;
}

/* *features_out [R, D]: the tokens themselves where there is no class token, else a copy in
 * scratch. */
static Status take_features(VisionEncoder *encoder, const VisionSlot *slot, int64_t images,
                            const float **features_out)
{
    const LayerContext *layers = &encoder->layers;
    const float *x = block_input(slot, encoder->num_blocks);
    *features_out = x;
    if (encoder->class_embedding < 0) {
        return STATUS_OK;
    }
    PatchView view = patch_view(encoder);
    int64_t image = encoder->patches * encoder->width;
    *features_out = encoder->scratch.features;
    return layers->kernels->copy_matrix(encoder->scratch.features, image, x + view.offset,
                                        view.image, images, image, layers->stream);
}

/* grad [N, D] from features_grad [R, D]: class tokens get none. */
static Status put_features_grad(VisionEncoder *encoder, float *grad, int64_t images)
{
    const LayerContext *layers = &encoder->layers;
    PatchView view = patch_view(encoder);
    int64_t image = encoder->patches * encoder->width;
    TRY(stream_zero(layers->stream, grad, images * view.image * (int64_t)sizeof(float)));
    return layers->kernels->copy_matrix(grad + view.offset, view.image,
                                        encoder->scratch.features_grad, image, images, image,
                                        layers->stream);
}

static Sequences sequences_of(const VisionEncoder *encoder, int64_t images)
{
    return (Sequences){.num_tokens = images * encoder->tokens,
                       .num_segments = (int32_t)images,
                       .segment_begins = encoder->segment_begins};
}

// NOLINTBEGIN(readability-non-const-parameter): the signatures are the contract's
static Status vision_forward(Module *module, int slot_index, const ModuleBatch *batch,
                             float *rows_out, double *loss_sum_out)
{
    (void)loss_sum_out;
    VisionEncoder *encoder = encoder_of(module);
    CHECK(slot_index >= 0 && slot_index < encoder->num_slots);
    CHECK(batch->num_images >= 0 && batch->num_images <= encoder->images_max);
    if (batch->num_images == 0) {
        return STATUS_OK;
    }
    const LayerContext *layers = &encoder->layers;
    VisionSlot *slot = &encoder->slots[slot_index];
    Sequences sequences = sequences_of(encoder, batch->num_images);
    TRY(embed_forward(encoder, slot, batch));
    TRY(norm_forward(layers, &encoder->pre_norm, &slot->pre_norm, slot->first, slot->embedded,
                     sequences.num_tokens));
    for (int i = 0; i < encoder->num_blocks; i++) {
        TRY(block_forward(layers, &encoder->blocks[i], &slot->blocks[i], &encoder->scratch.block,
                          &sequences, block_input(slot, i)));
    }
    const float *features = NULL;
    TRY(take_features(encoder, slot, batch->num_images, &features));
    return mlp_forward(layers, &encoder->projector, &slot->projector, &encoder->scratch.projector,
                       rows_out, features, NULL, batch->num_images * encoder->patches);
}

static Status vision_backward(Module *module, int slot_index, const ModuleBatch *batch,
                              float *rows_grad)
{
    VisionEncoder *encoder = encoder_of(module);
    CHECK(slot_index >= 0 && slot_index < encoder->num_slots);
    CHECK(batch->num_images >= 0 && batch->num_images <= encoder->images_max);
    if (batch->num_images == 0) {
        return STATUS_OK;
    }
    const LayerContext *layers = &encoder->layers;
    VisionSlot *slot = &encoder->slots[slot_index];
    VisionScratch *scratch = &encoder->scratch;
    Sequences sequences = sequences_of(encoder, batch->num_images);
    bool class_token = encoder->class_embedding >= 0;
    const float *features = NULL;
    TRY(take_features(encoder, slot, batch->num_images, &features));
    TRY(mlp_backward(layers, &encoder->projector, &slot->projector, &scratch->projector,
                     class_token ? scratch->features_grad : scratch->grad, rows_grad, features,
                     batch->num_images * encoder->patches));
    if (class_token) {
        TRY(put_features_grad(encoder, scratch->grad, batch->num_images));
    }
    for (int i = encoder->num_blocks - 1; i >= 0; i--) {
        TRY(block_backward(layers, &encoder->blocks[i], &slot->blocks[i], &scratch->block,
                           &sequences, scratch->grad, block_input(slot, i)));
    }
    TRY(norm_backward(layers, &encoder->pre_norm, &slot->pre_norm, scratch->embed_grad,
                      scratch->grad, slot->embedded, sequences.num_tokens, false));
    return embed_backward(encoder, scratch->embed_grad, batch);
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
    .create = vision_create,
    .destroy = vision_destroy,
    .forward = vision_forward,
    .backward = vision_backward,
    .predict = vision_predict,
};
