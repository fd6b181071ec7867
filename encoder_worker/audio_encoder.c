/* Legend: M mel bands, T frames of the replica's clips, K their tokens (rows), N of them on this cp
 * rank, n between layers on this rank, D width, D2 width of the decoder. */
#include "encoder_worker/audio_encoder.h"

#include "base/clock.h"
#include "base/memory.h"
#include "nn/mlp.h"
#include "nn/norm.h"
#include "nn/stack.h"
#include "train/module_parts.h"

#include <math.h>

enum {
    CONV_WIDTH = 3, /* of both convolutions */
    CONV1_STRIDE = 1,
    CONV2_STRIDE = 2,           /* two frames make a row */
    COPY_TIMEOUT_MS = 60 * 1000 /* for host memory to be passed by the stream */
};

static const double longest_period = 10000; /* of the sinusoids, over 2 pi, in rows */

/* One convolution over time. Every rank has all of it and runs it over all clips of the replica,
 * but takes only its own tokens' gradient back through it: as with a norm, gradients are parts over
 * cp, and over tp where tokens are cut. */
typedef struct Conv {
    int weight; /* parameter index, [D, in, CONV_WIDTH] */
    int bias;   /* parameter index, [D] */
    int64_t in, out;
    int stride;
} Conv;

/* Kept from forward to backward of one microbatch in one chunk. */
typedef struct AudioSlot {
    StackActs stack;
    SequencesBuffer *buffer;
    Sequences sequences; /* of the last forward */
    int32_t *row_begins; /* [items + 1] host: first row of each clip */
    /* of the first part */
    float *conv1; /* [T, D] before the activation */
    float *conv2; /* [K, D] before the activation */
    /* of the last part */
    NormActs norm;
    MlpActs projector;
} AudioSlot;

typedef struct AudioChunk {
    Stack stack;
    int num_slots;
    AudioSlot *slots;
} AudioChunk;

/* One for all slots; members of different stages of a pass share memory. */
typedef struct AudioScratch {
    /* convolutions */
    float *unfolded; /* [T, 3 M] or [K, 3 D] */
    float *act;      /* [T, D]: after the first activation, or its gradient */
    float *whole; /* [K, D]: tokens of the replica, or their gradient; NULL where a rank has all */
    /* head */
    float *normed;      /* [n, D] */
    float *normed_grad; /* [n, D] */
    MlpScratch projector;
    StackShared stack;
} AudioScratch;

typedef struct AudioEncoder {
    Module module;
    LayerContext layers;
    ModuleParts parts;
    int backward_begin;
    Recompute recompute;
    int64_t mels;      /* M */
    int64_t width;     /* D */
    Conv conv1, conv2; /* of the first part */
    AudioChunk chunks[MODULE_CHUNKS_MAX];
    Norm norm; /* of the last part */
    Mlp projector;
    ModuleLimits limits;
    int64_t rows_max; /* K */
    LayerLimits layer_limits;
    float *positions; /* [rows_max, D] device; first part */
    AudioScratch scratch;
    void *memory; /* device: positions, all slots and the scratch */
    int64_t memory_bytes;
} AudioEncoder;

static AudioEncoder *encoder_of(Module *module)
{
    return (AudioEncoder *)module; /* its first member */
}

static Status check_model(const AudioSpec *audio)
{
    if (audio->heads <= 0 || audio->width % audio->heads != 0) {
        return fail(STATUS_INVALID, "model.audio: width %d is not a multiple of heads %d",
                    audio->width, audio->heads);
    }
    if (audio->width < 4 || audio->width % 2 != 0) {
        return fail(STATUS_INVALID,
                    "model.audio: width %d, expected an even number of at least 4: positions are "
                    "pairs of sine and cosine",
                    audio->width);
    }
    return STATUS_OK;
}

/* ---- parameters ---- */

static Status declare_conv(const LayerContext *layers, const char *prefix, Conv *conv)
{
    int64_t inputs = conv->in * CONV_WIDTH;
    ParamSpec weight = {.num_dims = 3,
                        .dims = {conv->out, conv->in, CONV_WIDTH},
                        .shard_dim = -1,
                        .grad_is_partial = layers->is_sequence_parallel,
                        .decay = true,
                        .init = PARAM_INIT_NORMAL,
                        .init_std = 1.0f / sqrtf(3.0f * (float)inputs)};
    TRY(layer_add_param(layers, prefix, "weight", weight, &conv->weight));
    ParamSpec bias = {.num_dims = 1,
                      .dims = {conv->out},
                      .shard_dim = -1,
                      .grad_is_partial = layers->is_sequence_parallel,
                      .init = PARAM_INIT_ZEROS};
    return layer_add_param(layers, prefix, "bias", bias, &conv->bias);
}

static BlockSpec block_spec(const AudioSpec *audio)
{
    /* The sum of 2 L branches keeps the size of one (Radford et al. 2019). */
    float branch_gain = 1.0f / sqrtf(2.0f * (float)audio->layers);
    return (BlockSpec){.norm1 = "self_attn_layer_norm",
                       .norm2 = "final_layer_norm",
                       .norm = NORM_KIND_LAYER,
                       .norm_epsilon = (float)audio->norm_epsilon,
                       .attention = {.q = "self_attn.q_proj",
                                     .k = "self_attn.k_proj",
                                     .v = "self_attn.v_proj",
                                     .o = "self_attn.out_proj",
                                     .width = audio->width,
                                     .heads = audio->heads,
                                     .kv_heads = audio->heads,
                                     .head_width = audio->width / audio->heads,
                                     .bias = true,
                                     .o_gain = branch_gain},
                       .mlp = {.up = "fc1",
                               .down = "fc2",
                               .kind = MLP_KIND_GELU,
                               .in = audio->width,
                               .inner = audio->mlp_width,
                               .out = audio->width,
                               .bias = true,
                               .down_gain = branch_gain}};
}

static Status declare_head(AudioEncoder *encoder, const ModelSpec *model)
{
    const LayerContext *layers = &encoder->layers;
    TRY(norm_declare(layers, "audio_tower", "layer_norm", NORM_KIND_LAYER, encoder->width,
                     (float)model->audio->norm_epsilon, &encoder->norm));
    MlpSpec spec = {.up = "linear_1",
                    .down = "linear_2",
                    .kind = MLP_KIND_GELU,
                    .in = encoder->width,
                    .inner = model->audio_projector->width,
                    .out = model->llm->width,
                    .bias = true,
                    .down_gain = 1.0f};
    return mlp_declare(layers, "audio_projector", &spec, &encoder->projector);
}

static Status declare_chunk(AudioEncoder *encoder, const ModelSpec *model, int chunk)
{
    const BlockSpec spec = block_spec(model->audio);
    int num_parts = module_parts_count(&encoder->parts);
    CHECK(num_parts > 0);
    if (module_parts_is_first(&encoder->parts, chunk)) {
        TRY(declare_conv(&encoder->layers, "audio_tower.conv1", &encoder->conv1));
        TRY(declare_conv(&encoder->layers, "audio_tower.conv2", &encoder->conv2));
    }
    Range layers = module_part_layers(model->audio->layers, num_parts,
                                      module_parts_at(&encoder->parts, chunk));
    TRY(stack_init(&encoder->layers, "audio_tower.layers", &spec, layers, encoder->recompute,
                   &encoder->chunks[chunk].stack));
    if (module_parts_is_last(&encoder->parts, chunk)) {
        TRY(declare_head(encoder, model));
    }
    return STATUS_OK;
}

static void set_model(AudioEncoder *encoder, const AudioSpec *audio, const ModuleContext *context)
{
    encoder->parts = module_parts_of(context);
    encoder->backward_begin = context->backward_begin;
    encoder->recompute = context->recompute;
    encoder->mels = audio->mels;
    encoder->width = audio->width;
    encoder->conv1 = (Conv){.in = audio->mels, .out = audio->width, .stride = CONV1_STRIDE};
    encoder->conv2 = (Conv){.in = audio->width, .out = audio->width, .stride = CONV2_STRIDE};
    encoder->layers = (LayerContext){.kernels = context->kernels,
                                     .stream = context->stream,
                                     .tp = context->tp,
                                     .cp = context->cp,
                                     .is_sequence_parallel = context->is_sequence_parallel,
                                     .params = &encoder->module.params};
    param_set_freeze(&encoder->module.params, context->frozen, context->num_frozen);
}

/* Declares one part alone, to look at its parameters. */
static Status look_at_part(const ModelSpec *model, const ModuleContext *context, int part,
                           bool *is_trained_out)
{
    AudioEncoder *encoder = NULL;
    ModuleParts parts = module_parts_of(context);
    ModuleContext alone = *context;
    alone.tp = NULL;
    alone.cp = NULL;
    alone.stage = part % parts.stages;
    TRY(MEMORY_NEW(&encoder, 1));
    param_set_init(&encoder->module.params, NULL);
    set_model(encoder, model->audio, &alone);
    int chunk = part / parts.stages;
    Status status = declare_chunk(encoder, model, chunk);
    *is_trained_out = module_parts_any_trained(&encoder->module.params);
    stack_done(&encoder->chunks[chunk].stack);
    param_set_done(&encoder->module.params);
    memory_free(encoder);
    TRY(status);
    return STATUS_OK;
}

static Status audio_first_trained(const ModelSpec *model, const ModuleContext *context,
                                  int *part_out)
{
    ModuleParts parts = module_parts_of(context);
    CHECK(parts.chunks <= MODULE_CHUNKS_MAX);
    int part = 0;
    bool is_trained = false;
    while (part < module_parts_count(&parts) && !is_trained) {
        TRY(look_at_part(model, context, part, &is_trained));
        part += !is_trained;
    }
    *part_out = part;
    return STATUS_OK;
}

/* ---- memory ---- */

/* True where each rank has all tokens of the replica between layers. */
static bool has_whole(const AudioEncoder *encoder)
{
    return layer_cp_size(&encoder->layers) == 1 && !layer_cuts_rows(&encoder->layers);
}

static void carve_slot(AudioEncoder *encoder, Arena *arena, int chunk, AudioSlot *slot)
{
    const LayerLimits *limits = &encoder->layer_limits;
    if (module_parts_is_first(&encoder->parts, chunk)) {
        slot->conv1 = layer_take(arena, encoder->limits.frames, encoder->width);
        slot->conv2 = layer_take(arena, encoder->rows_max, encoder->width);
    }
    stack_carve(&encoder->layers, &encoder->chunks[chunk].stack, arena, limits,
                &encoder->scratch.stack, &slot->stack);
    if (module_parts_is_last(&encoder->parts, chunk)) {
        norm_carve(&encoder->norm, arena, limits->local, &slot->norm);
        mlp_carve(&encoder->projector, arena, limits->tokens, &slot->projector);
    }
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static void carve_convolutions(AudioEncoder *encoder, Arena *arena)
{
    AudioScratch *scratch = &encoder->scratch;
    int64_t frames = encoder->limits.frames;
    int64_t inputs = larger(frames * encoder->mels, encoder->rows_max * encoder->width);
    scratch->unfolded = layer_take(arena, inputs, CONV_WIDTH);
    scratch->act = layer_take(arena, frames, encoder->width);
    scratch->whole =
        has_whole(encoder) ? NULL : layer_take(arena, encoder->rows_max, encoder->width);
}

static void carve_head(AudioEncoder *encoder, Arena *arena)
{
    AudioScratch *scratch = &encoder->scratch;
    const LayerLimits *limits = &encoder->layer_limits;
    scratch->normed = layer_take(arena, limits->local, encoder->width);
    scratch->normed_grad = layer_take(arena, limits->local, encoder->width);
    mlp_carve_scratch(&encoder->layers, &encoder->projector, arena, limits->tokens,
                      &scratch->projector);
}

/* The stages of a pass follow one another, so each begins at the same place. */
static void carve_scratch(AudioEncoder *encoder, Arena *arena)
{
    int64_t stage = arena->used;
    int64_t end = stage;
    if (module_parts_is_first(&encoder->parts, 0)) {
        carve_convolutions(encoder, arena);
        end = larger(end, arena->used);
        arena_rewind(arena, stage);
    }
    if (module_parts_is_last(&encoder->parts, encoder->parts.chunks - 1)) {
        carve_head(encoder, arena);
        end = larger(end, arena->used);
        arena_rewind(arena, stage);
    }
    arena_take(arena, end - arena->used);
}

/* The largest of the chunks serves all: their blocks are alike. */
static void carve_stack(AudioEncoder *encoder, Arena *arena)
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

static void carve(AudioEncoder *encoder, Arena *arena)
{
    if (module_parts_is_first(&encoder->parts, 0)) {
        encoder->positions = layer_take(arena, encoder->rows_max, encoder->width);
    }
    carve_stack(encoder, arena);
    carve_scratch(encoder, arena);
    for (int c = 0; c < encoder->parts.chunks; c++) {
        for (int i = 0; i < encoder->chunks[c].num_slots; i++) {
            carve_slot(encoder, arena, c, &encoder->chunks[c].slots[i]);
        }
    }
}

static Status allocate_slots(AudioEncoder *encoder, int c)
{
    AudioChunk *chunk = &encoder->chunks[c];
    Device *device = encoder->module.params.device;
    ShardRank rank = layer_shard_rank(&encoder->layers);
    chunk->num_slots = encoder->limits.slots[c];
    TRY(MEMORY_NEW(&chunk->slots, chunk->num_slots));
    for (int i = 0; i < chunk->num_slots; i++) {
        AudioSlot *slot = &chunk->slots[i];
        TRY(stack_acts_init(&chunk->stack, &slot->stack));
        TRY(MEMORY_NEW(&slot->row_begins, encoder->limits.items + 1));
        TRY(sequences_buffer_create(device, rank, encoder->rows_max, encoder->limits.items, false,
                                    &slot->buffer));
    }
    return STATUS_OK;
}

static Status allocate_activations(AudioEncoder *encoder)
{
    for (int c = 0; c < encoder->parts.chunks; c++) {
        TRY(allocate_slots(encoder, c));
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

/* Whisper's table: [sin | cos] of row * longest_period^(-i / (D/2 - 1)). */
static void make_positions(float *positions_out, int64_t rows, int64_t width)
{
    int64_t half = width / 2;
    for (int64_t i = 0; i < half; i++) {
        double rate = exp(-log(longest_period) * (double)i / (double)(half - 1));
        for (int64_t row = 0; row < rows; row++) {
            positions_out[row * width + i] = (float)sin((double)row * rate);
            positions_out[row * width + half + i] = (float)cos((double)row * rate);
        }
    }
}

static Status fill_positions(const AudioEncoder *encoder)
{
    Device *device = encoder->module.params.device;
    int64_t size_bytes = encoder->rows_max * encoder->width * (int64_t)sizeof(float);
    void *host = NULL;
    TRY(device_alloc_host(device, size_bytes, &host));
    make_positions(host, encoder->rows_max, encoder->width);
    Status status = stream_copy(encoder->layers.stream, encoder->positions, host, size_bytes);
    if (status == STATUS_OK) {
        status = stream_wait(encoder->layers.stream, clock_deadline_in_ms(COPY_TIMEOUT_MS));
    }
    device_free_host(device, host, size_bytes);
    TRY(status);
    return STATUS_OK;
}

static void audio_destroy(Module *module)
{
    if (!module) {
        return;
    }
    AudioEncoder *encoder = encoder_of(module);
    if (encoder->memory) {
        device_free(module->params.device, encoder->memory, encoder->memory_bytes);
    }
    for (int c = 0; c < MODULE_CHUNKS_MAX; c++) {
        AudioChunk *chunk = &encoder->chunks[c];
        for (int i = 0; chunk->slots && i < chunk->num_slots; i++) {
            stack_acts_done(&chunk->slots[i].stack);
            memory_free(chunk->slots[i].row_begins);
            sequences_buffer_destroy(chunk->slots[i].buffer);
        }
        memory_free(chunk->slots);
        stack_done(&chunk->stack);
    }
    param_set_done(&module->params);
    memory_free(encoder);
}

static Status build(AudioEncoder *encoder, const ModelSpec *model)
{
    for (int c = 0; c < encoder->parts.chunks; c++) {
        TRY(declare_chunk(encoder, model, c));
    }
    TRY(param_set_allocate(&encoder->module.params));
    /* Each clip is rounded up to whole rows. */
    encoder->rows_max = (encoder->limits.frames + encoder->limits.items) / CONV2_STRIDE;
    encoder->layer_limits =
        module_parts_limits(&encoder->layers, encoder->rows_max, encoder->limits.items);
    encoder->module.width = encoder->width;
    encoder->module.local_max = encoder->layer_limits.local;
    TRY(allocate_activations(encoder));
    if (module_parts_is_first(&encoder->parts, 0)) {
        TRY(fill_positions(encoder));
    }
    return STATUS_OK;
}

static Status audio_create(const ModelSpec *model, const ModuleContext *context,
                           const ModuleLimits *limits, Module **module_out)
{
    CHECK(limits->items >= 0 && limits->items < INT32_MAX / SHARD_CHUNKS);
    CHECK(limits->frames >= 0 && limits->frames < INT32_MAX);
    CHECK(context->chunks <= MODULE_CHUNKS_MAX);
    TRY(check_model(model->audio));
    AudioEncoder *encoder = NULL;
    TRY(MEMORY_NEW(&encoder, 1));
    encoder->module.ops = &audio_module_ops;
    param_set_init(&encoder->module.params, context->device);
    set_model(encoder, model->audio, context);
    encoder->limits = *limits;
    Status status = build(encoder, model);
    if (status != STATUS_OK) {
        audio_destroy(&encoder->module);
        return status_trace(status, __FILE__, __LINE__);
    }
    *module_out = &encoder->module;
    return STATUS_OK;
}

/* ---- tokens ---- */

static AudioSlot *slot_of(AudioEncoder *encoder, int chunk, int slot)
{
    CHECK(chunk >= 0 && chunk < encoder->parts.chunks);
    CHECK(slot >= 0 && slot < encoder->chunks[chunk].num_slots);
    return &encoder->chunks[chunk].slots[slot];
}

static int64_t clip_rows(const ModuleBatch *batch, int64_t clip)
{
    int64_t frames = (int64_t)batch->frame_begins[clip + 1] - batch->frame_begins[clip];
    CHECK(frames >= 0);
    return (frames + CONV2_STRIDE - 1) / CONV2_STRIDE;
}

static int64_t audio_count_local(const Module *module, const ModuleBatch *batch)
{
    ShardRank rank = layer_shard_rank(&((const AudioEncoder *)module)->layers);
    int64_t tokens = 0;
    for (int64_t i = 0; i < batch->num_items; i++) {
        tokens += shard_chunks_count(clip_rows(batch, i), rank.cp_size, rank.cp_rank);
    }
    return range_count(range_part(tokens, rank.tp_size, rank.tp_rank));
}

static float *audio_input(Module *module, int chunk, int slot)
{
    return stack_input(&slot_of(encoder_of(module), chunk, slot)->stack);
}

static const float *audio_output(Module *module, int chunk, int slot)
{
    AudioEncoder *encoder = encoder_of(module);
    return stack_output(&encoder->chunks[chunk].stack, &slot_of(encoder, chunk, slot)->stack);
}

/* Each clip attends to itself. */
static Status set_sequences(const AudioEncoder *encoder, AudioSlot *slot, const ModuleBatch *batch)
{
    int64_t items = batch->num_items;
    Stream *stream = encoder->layers.stream;
    if (slot->sequences.runs) { /* made before: the stream may yet read what is written again */
        TRY(stream_wait(stream, clock_deadline_in_ms(COPY_TIMEOUT_MS)));
    }
    CHECK(items >= 0 && items <= encoder->limits.items);
    slot->row_begins[0] = 0;
    for (int64_t i = 0; i < items; i++) {
        slot->row_begins[i + 1] = slot->row_begins[i] + (int32_t)clip_rows(batch, i);
    }
    CHECK(items == 0 || batch->frame_begins[items] <= encoder->limits.frames);
    return sequences_make(slot->buffer, slot->row_begins, (int32_t)items, stream, &slot->sequences);
}

/* x [n, D] = this rank's of the tokens whole [K, D]. */
static Status take_own(const AudioEncoder *encoder, const Sequences *sequences, float *x,
                       const float *whole)
{
    const LayerContext *layers = &encoder->layers;
    const ShardRows *rows = &sequences->rows;
    int64_t n = range_count(rows->part);
    if (sequences->cp_begins) {
        const int32_t *places = sequences->key_places + sequences->cp_begins[layers->cp->rank];
        return layers->kernels->gather_rows(x, whole, places + rows->part.begin, n, encoder->width,
                                            layers->stream);
    }
    return stream_copy(layers->stream, x, whole + rows->part.begin * encoder->width,
                       n * encoder->width * (int64_t)sizeof(float));
}

/* whole [K, D] = x [n, D] at this rank's tokens, 0 at the others. */
static Status put_own(const AudioEncoder *encoder, const Sequences *sequences, float *whole,
                      const float *x)
{
    const LayerContext *layers = &encoder->layers;
    const ShardRows *rows = &sequences->rows;
    int64_t n = range_count(rows->part);
    int64_t row_bytes = encoder->width * (int64_t)sizeof(float);
    TRY(stream_zero(layers->stream, whole, sequences->num_keys * row_bytes));
    if (sequences->cp_begins) {
        const int32_t *places = sequences->key_places + sequences->cp_begins[layers->cp->rank];
        return layers->kernels->scatter_rows(whole, x, places + rows->part.begin, n, encoder->width,
                                             layers->stream);
    }
    return stream_copy(layers->stream, whole + rows->part.begin * encoder->width, x, n * row_bytes);
}

/* ---- convolutions ---- */

/* out [rows, out] from the frames or tokens x of all clips. */
static Status conv_forward(const AudioEncoder *encoder, const Conv *conv, float *out,
                           const float *x, const ModuleBatch *batch, int64_t rows)
{
    const LayerContext *layers = &encoder->layers;
    TRY(layers->kernels->unfold(encoder->scratch.unfolded, x, batch->frame_begins,
                                (int)batch->num_items, conv->in, CONV_WIDTH, conv->stride,
                                layers->stream));
    MatMul product = {.a = encoder->scratch.unfolded,
                      .b = layer_value(layers, conv->weight),
                      .bias = layer_value(layers, conv->bias),
                      .m = rows,
                      .n = conv->out,
                      .k = conv->in * CONV_WIDTH,
                      .transpose_b = true};
    product.c = out;
    return layers->kernels->matmul(&product, layers->stream);
}

/* Parameter gradients += ; leaves x unfolded in scratch. */
static Status conv_backward_params(const AudioEncoder *encoder, const Conv *conv,
                                   const float *out_grad, const float *x, const ModuleBatch *batch,
                                   int64_t rows)
{
    const LayerContext *layers = &encoder->layers;
    const Kernels *kernels = layers->kernels;
    if (layer_is_trained(layers, conv->bias)) {
        TRY(kernels->bias_backward(layer_grad(layers, conv->bias), out_grad, rows, conv->out,
                                   layers->stream));
    }
    if (!layer_is_trained(layers, conv->weight)) {
        return STATUS_OK;
    }
    TRY(kernels->unfold(encoder->scratch.unfolded, x, batch->frame_begins, (int)batch->num_items,
                        conv->in, CONV_WIDTH, conv->stride, layers->stream));
    MatMul product = {.c = layer_grad(layers, conv->weight),
                      .a = out_grad,
                      .b = encoder->scratch.unfolded,
                      .m = conv->out,
                      .n = conv->in * CONV_WIDTH,
                      .k = rows,
                      .transpose_a = true,
                      .accumulate = true};
    return kernels->matmul(&product, layers->stream);
}

/* x_grad = ; may be what x was. */
static Status conv_backward_x(const AudioEncoder *encoder, const Conv *conv, float *x_grad,
                              const float *out_grad, const ModuleBatch *batch, int64_t rows)
{
    const LayerContext *layers = &encoder->layers;
    MatMul product = {.c = encoder->scratch.unfolded,
                      .a = out_grad,
                      .b = layer_value(layers, conv->weight),
                      .m = rows,
                      .n = conv->in * CONV_WIDTH,
                      .k = conv->out};
    TRY(layers->kernels->matmul(&product, layers->stream));
    return layers->kernels->unfold_backward(x_grad, encoder->scratch.unfolded, batch->frame_begins,
                                            (int)batch->num_items, conv->in, CONV_WIDTH,
                                            conv->stride, layers->stream);
}

static bool conv_is_trained(const AudioEncoder *encoder, const Conv *conv)
{
    return layer_is_trained(&encoder->layers, conv->weight) ||
           layer_is_trained(&encoder->layers, conv->bias);
}

/* x [n, D]: both convolutions and positions, of this rank's tokens. */
static Status embed_forward(AudioEncoder *encoder, AudioSlot *slot, const ModuleBatch *batch)
{
    const LayerContext *layers = &encoder->layers;
    const Kernels *kernels = layers->kernels;
    AudioScratch *scratch = &encoder->scratch;
    int64_t frames = batch->frame_begins[batch->num_items];
    int64_t keys = slot->sequences.num_keys;
    int64_t width = encoder->width;
    float *x = stack_input(&slot->stack);
    float *whole = has_whole(encoder) ? x : scratch->whole;
    TRY(conv_forward(encoder, &encoder->conv1, slot->conv1, batch->frames, batch, frames));
    TRY(kernels->activation_forward(scratch->act, slot->conv1, frames * width,
                                    KERNEL_ACTIVATION_GELU, layers->stream));
    TRY(conv_forward(encoder, &encoder->conv2, slot->conv2, scratch->act, batch, keys));
    TRY(kernels->activation_forward(whole, slot->conv2, keys * width, KERNEL_ACTIVATION_GELU,
                                    layers->stream));
    for (int64_t i = 0; i < batch->num_items; i++) {
        int64_t begin = slot->row_begins[i];
        TRY(kernels->add_table(whole + begin * width, encoder->positions, 1,
                               slot->row_begins[i + 1] - begin, width, layers->stream));
    }
    return whole == x ? STATUS_OK : take_own(encoder, &slot->sequences, x, whole);
}

/* grad [n, D] of x; destroyed. Frames have no gradient. */
static Status embed_backward(AudioEncoder *encoder, const AudioSlot *slot, const ModuleBatch *batch,
                             float *grad)
{
    const LayerContext *layers = &encoder->layers;
    const Kernels *kernels = layers->kernels;
    AudioScratch *scratch = &encoder->scratch;
    int64_t frames = batch->frame_begins[batch->num_items];
    int64_t keys = slot->sequences.num_keys;
    int64_t width = encoder->width;
    float *whole = has_whole(encoder) ? grad : scratch->whole;
    if (whole != grad) {
        TRY(put_own(encoder, &slot->sequences, whole, grad));
    }
    TRY(kernels->activation_backward(whole, whole, slot->conv2, keys * width,
                                     KERNEL_ACTIVATION_GELU, layers->stream));
    TRY(kernels->activation_forward(scratch->act, slot->conv1, frames * width,
                                    KERNEL_ACTIVATION_GELU, layers->stream));
    TRY(conv_backward_params(encoder, &encoder->conv2, whole, scratch->act, batch, keys));
    if (!conv_is_trained(encoder, &encoder->conv1)) {
        return STATUS_OK;
    }
    TRY(conv_backward_x(encoder, &encoder->conv2, scratch->act, whole, batch, keys));
    TRY(kernels->activation_backward(scratch->act, scratch->act, slot->conv1, frames * width,
                                     KERNEL_ACTIVATION_GELU, layers->stream));
    return conv_backward_params(encoder, &encoder->conv1, scratch->act, batch->frames, batch,
                                frames);
}

/* ---- forward and backward ---- */

static Status head_forward(AudioEncoder *encoder, const AudioSlot *slot, const float *x,
                           float *rows_out)
{
    const LayerContext *layers = &encoder->layers;
    AudioScratch *scratch = &encoder->scratch;
    const ShardRows *rows = &slot->sequences.rows;
    TRY(norm_forward(layers, &encoder->norm, &slot->norm, scratch->normed, x,
                     range_count(rows->part)));
    return mlp_forward(layers, &encoder->projector, &slot->projector, &scratch->projector, rows,
                       rows_out, scratch->normed, NULL);
}

/* grad [n, D] = gradient of the last block's output x [n, D], where somebody below wants it. */
static Status head_backward(AudioEncoder *encoder, const AudioSlot *slot, const float *x,
                            float *grad, const float *rows_grad, bool wants_x)
{
    const LayerContext *layers = &encoder->layers;
    AudioScratch *scratch = &encoder->scratch;
    const ShardRows *rows = &slot->sequences.rows;
    int64_t n = range_count(rows->part);
    bool wants_normed = wants_x || norm_is_trained(layers, &encoder->norm);
    TRY(norm_forward(layers, &encoder->norm, &slot->norm, scratch->normed, x, n));
    TRY(mlp_backward(layers, &encoder->projector, &slot->projector, &scratch->projector, rows,
                     wants_normed ? scratch->normed_grad : NULL, rows_grad, scratch->normed));
    if (!wants_normed) {
        return STATUS_OK;
    }
    return norm_backward(layers, &encoder->norm, &slot->norm, grad, scratch->normed_grad, x, n,
                         false);
}

// NOLINTBEGIN(readability-non-const-parameter): the signatures are the contract's
static Status audio_forward(Module *module, int chunk, int slot_index, const ModuleBatch *batch,
                            float *rows_out, double *loss_sum_out)
{
    (void)loss_sum_out;
    AudioEncoder *encoder = encoder_of(module);
    AudioSlot *slot = slot_of(encoder, chunk, slot_index);
    const Stack *stack = &encoder->chunks[chunk].stack;
    TRY(set_sequences(encoder, slot, batch));
    if (slot->sequences.num_keys == 0) {
        return STATUS_OK; /* on all ranks of the replica */
    }
    if (module_parts_is_first(&encoder->parts, chunk)) {
        TRY(embed_forward(encoder, slot, batch));
    }
    TRY(stack_forward(&encoder->layers, stack, &slot->stack, &encoder->scratch.stack,
                      &slot->sequences));
    if (!module_parts_is_last(&encoder->parts, chunk)) {
        return STATUS_OK;
    }
    return head_forward(encoder, slot, stack_output(stack, &slot->stack), rows_out);
}

static Status audio_backward(Module *module, int chunk, int slot_index, const ModuleBatch *batch,
                             float *grad, float *rows_grad)
{
    AudioEncoder *encoder = encoder_of(module);
    AudioSlot *slot = slot_of(encoder, chunk, slot_index);
    const Stack *stack = &encoder->chunks[chunk].stack;
    if (slot->sequences.num_keys == 0) {
        return STATUS_OK;
    }
    bool is_first = module_parts_is_first(&encoder->parts, chunk);
    bool wants_input_grad =
        is_first
            ? conv_is_trained(encoder, &encoder->conv1) || conv_is_trained(encoder, &encoder->conv2)
            : module_parts_at(&encoder->parts, chunk) > encoder->backward_begin;
    if (module_parts_is_last(&encoder->parts, chunk)) {
        bool wants_x = wants_input_grad || stack->first_trained < stack->num_blocks;
        TRY(head_backward(encoder, slot, stack_output(stack, &slot->stack), grad, rows_grad,
                          wants_x));
    }
    TRY(stack_backward(&encoder->layers, stack, &slot->stack, &encoder->scratch.stack,
                       &slot->sequences, grad, wants_input_grad));
    return is_first && wants_input_grad ? embed_backward(encoder, slot, batch, grad) : STATUS_OK;
}

static Status audio_predict(Module *module, int slot, const int32_t *tokens, int32_t num,
                            int32_t *ids_out)
{
    (void)module;
    (void)slot;
    (void)tokens;
    (void)num;
    (void)ids_out;
    return fail(STATUS_UNSUPPORTED, "an audio encoder does not predict tokens");
}

// NOLINTEND(readability-non-const-parameter)

const ModuleOps audio_module_ops = {
    .name = "audio",
    .first_trained = audio_first_trained,
    .create = audio_create,
    .destroy = audio_destroy,
    .count_local = audio_count_local,
    .count_rows = audio_count_local, /* every token is a row */
    .input = audio_input,
    .output = audio_output,
    .forward = audio_forward,
    .backward = audio_backward,
    .predict = audio_predict,
};
