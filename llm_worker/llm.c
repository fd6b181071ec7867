/* Legend: N tokens, R visual rows, D width, V vocabulary, V/tp this rank's part of it. */
#include "llm_worker/llm.h"

#include "base/clock.h"
#include "base/memory.h"
#include "nn/block.h"
#include "nn/cross_entropy.h"
#include "nn/embedding.h"

#include <math.h>
#include <stdio.h>

enum {
    PREDICT_ROWS_MAX = 64,         /* tokens predicted at a time: bounds the logits */
    PREDICT_TIMEOUT_MS = 60 * 1000 /* for the answers to arrive on the host */
};

static const float embedding_std = 0.02f; /* initial standard deviation of tokens and positions */

/* Kept from forward to backward of one microbatch. */
typedef struct LlmSlot {
    float *embedded; /* [N, D] */
    BlockActs *blocks;
    NormActs norm;
    float *logits; /* [N, V/tp]; after forward, their gradient */
    CrossEntropy loss;
    double *loss_sum; /* [1] */
    bool has_loss;    /* the head ran: backward may */
} LlmSlot;

/* One for all slots; members of different stages share memory. */
typedef struct LlmScratch {
    float *grad; /* [N, D]: travels down through the blocks */
    /* head */
    float *normed;      /* [N, D] */
    float *normed_grad; /* [N, D] */
    /* rows */
    float *zeros; /* [R, D] */
    /* predict */
    int32_t *tokens;      /* [PREDICT_ROWS_MAX] */
    float *picked;        /* [PREDICT_ROWS_MAX, D] */
    float *picked_normed; /* [PREDICT_ROWS_MAX, D] */
    NormActs picked_norm;
    float *logits; /* [PREDICT_ROWS_MAX, V/tp] */
    float *values; /* [tp, PREDICT_ROWS_MAX] */
    int32_t *ids;  /* [tp, PREDICT_ROWS_MAX] */
    BlockScratch block;
} LlmScratch;

typedef struct Llm {
    Module module;
    LayerContext layers;
    int64_t width; /* D */
    Embedding embedding;
    int num_blocks;
    Block *blocks;
    Norm norm;
    Linear head;
    Range vocabulary; /* of V, this rank */
    ModuleLimits limits;
    LlmSlot *slots;
    LlmScratch scratch;
    void *memory; /* device: all slots and the scratch */
    int64_t memory_bytes;
    float *host_values; /* [tp, PREDICT_ROWS_MAX], host memory */
    int32_t *host_ids;  /* [tp, PREDICT_ROWS_MAX], host memory */
    int64_t *begins;    /* [tp + 1], host memory: parts of a gather */
} Llm;

static Llm *llm_of(Module *module)
{
    return (Llm *)module; /* its first member */
}

static Status check_model(const DecoderSpec *decoder, int tp_size)
{
    if (decoder->kv_heads <= 0 || decoder->heads % decoder->kv_heads != 0) {
        return fail(STATUS_INVALID, "model.llm: heads %d is not a multiple of kv_heads %d",
                    decoder->heads, decoder->kv_heads);
    }
    if (decoder->head_width <= 0 || decoder->head_width % 2 != 0) {
        return fail(STATUS_INVALID,
                    "model.llm: head_width %d, expected an even number: pairs rotate",
                    decoder->head_width);
    }
    if (decoder->vocabulary < tp_size) {
        return fail(STATUS_INVALID, "model.llm: vocabulary %d is less than tp %d",
                    decoder->vocabulary, tp_size);
    }
    return STATUS_OK;
}

static BlockSpec block_spec(const DecoderSpec *decoder)
{
    /* The sum of 2 L branches keeps the size of one (Radford et al. 2019). */
    float branch_gain = 1.0f / sqrtf(2.0f * (float)decoder->layers);
    return (BlockSpec){.norm1 = "input_layernorm",
                       .norm2 = "post_attention_layernorm",
                       .norm = NORM_KIND_RMS,
                       .norm_epsilon = (float)decoder->norm_epsilon,
                       .attention = {.q = "self_attn.q_proj",
                                     .k = "self_attn.k_proj",
                                     .v = "self_attn.v_proj",
                                     .o = "self_attn.o_proj",
                                     .width = decoder->width,
                                     .heads = decoder->heads,
                                     .kv_heads = decoder->kv_heads,
                                     .head_width = decoder->head_width,
                                     .rope_theta = (float)decoder->rope_theta,
                                     .causal = true,
                                     .o_gain = branch_gain},
                       .mlp = {.gate = "mlp.gate_proj",
                               .up = "mlp.up_proj",
                               .down = "mlp.down_proj",
                               .kind = MLP_KIND_SWIGLU,
                               .in = decoder->width,
                               .inner = decoder->mlp_width,
                               .out = decoder->width,
                               .down_gain = branch_gain}};
}

static Status declare(Llm *llm, const DecoderSpec *decoder)
{
    const LayerContext *layers = &llm->layers;
    TRY(embedding_declare(layers, "language_model.model", "embed_tokens", decoder->vocabulary,
                          decoder->width, embedding_std, &llm->embedding));
    BlockSpec spec = block_spec(decoder);
    for (int i = 0; i < llm->num_blocks; i++) {
        char prefix[64];
        snprintf(prefix, sizeof prefix, "language_model.model.layers.%d", i);
        TRY(block_declare(layers, prefix, &spec, &llm->blocks[i]));
    }
    TRY(norm_declare(layers, "language_model.model", "norm", NORM_KIND_RMS, decoder->width,
                     (float)decoder->norm_epsilon, &llm->norm));
    if (decoder->tied_head) {
        llm->head = embedding_as_head(&llm->embedding);
    } else {
        LinearSpec head = {.in = decoder->width,
                           .out = decoder->vocabulary,
                           .cut = LINEAR_CUT_OUT,
                           .part = llm->vocabulary,
                           .gain = 1.0f};
        TRY(linear_declare(layers, "language_model", "lm_head", &head, &llm->head));
    }
    return param_set_allocate(&llm->module.params);
}

static void carve_slot(Llm *llm, Arena *arena, LlmSlot *slot)
{
    int64_t n = llm->limits.tokens;
    slot->embedded = layer_take(arena, n, llm->width);
    for (int i = 0; i < llm->num_blocks; i++) {
        block_carve(&llm->blocks[i], arena, n, &slot->blocks[i]);
    }
    norm_carve(&llm->norm, arena, n, &slot->norm);
    slot->logits = layer_take(arena, n, llm->head.out);
    cross_entropy_carve(arena, n, &slot->loss);
    slot->loss_sum = arena_take(arena, (int64_t)sizeof(double));
}

static void carve_predict(Llm *llm, Arena *arena)
{
    LlmScratch *scratch = &llm->scratch;
    int64_t tp_size = layer_tp_size(&llm->layers);
    scratch->tokens = arena_take(arena, PREDICT_ROWS_MAX * (int64_t)sizeof(int32_t));
    scratch->picked = layer_take(arena, PREDICT_ROWS_MAX, llm->width);
    scratch->picked_normed = layer_take(arena, PREDICT_ROWS_MAX, llm->width);
    norm_carve(&llm->norm, arena, PREDICT_ROWS_MAX, &scratch->picked_norm);
    scratch->logits = layer_take(arena, PREDICT_ROWS_MAX, llm->head.out);
    scratch->values = layer_take(arena, tp_size, PREDICT_ROWS_MAX);
    scratch->ids = arena_take(arena, tp_size * PREDICT_ROWS_MAX * (int64_t)sizeof(int32_t));
}

/* The stages of a pass follow one another, so each begins at the same place. */
static void carve_scratch(Llm *llm, Arena *arena)
{
    LlmScratch *scratch = &llm->scratch;
    int64_t n = llm->limits.tokens;
    scratch->grad = layer_take(arena, n, llm->width);
    int64_t stage = arena->used;

    scratch->normed = layer_take(arena, n, llm->width);
    scratch->normed_grad = layer_take(arena, n, llm->width);
    int64_t end = arena->used;

    arena_rewind(arena, stage);
    scratch->zeros = layer_take(arena, llm->limits.rows, llm->width);
    end = arena->used > end ? arena->used : end;

    arena_rewind(arena, stage);
    carve_predict(llm, arena);
    end = arena->used > end ? arena->used : end;

    arena_rewind(arena, stage);
    for (int i = 0; i < llm->num_blocks; i++) { /* all alike: the same memory again */
        arena_rewind(arena, stage);
        block_carve_scratch(&llm->blocks[i], arena, n, &scratch->block);
    }
    if (arena->used < end) {
        arena_take(arena, end - arena->used);
    }
}

static void carve(Llm *llm, Arena *arena)
{
    for (int i = 0; i < llm->limits.slots; i++) {
        carve_slot(llm, arena, &llm->slots[i]);
    }
    carve_scratch(llm, arena);
}

static Status allocate_activations(Llm *llm)
{
    TRY(MEMORY_NEW(&llm->slots, llm->limits.slots));
    for (int i = 0; i < llm->limits.slots; i++) {
        TRY(MEMORY_NEW(&llm->slots[i].blocks, llm->num_blocks));
    }
    int answers = layer_tp_size(&llm->layers) * PREDICT_ROWS_MAX;
    TRY(MEMORY_NEW(&llm->host_values, answers));
    TRY(MEMORY_NEW(&llm->host_ids, answers));
    TRY(MEMORY_NEW(&llm->begins, layer_tp_size(&llm->layers) + 1));
    Arena arena;
    arena_init_measure(&arena);
    carve(llm, &arena);
    llm->memory_bytes = arena.peak;
    TRY(device_alloc(llm->module.params.device, llm->memory_bytes, &llm->memory));
    arena_init(&arena, llm->memory, llm->memory_bytes);
    carve(llm, &arena);
    return STATUS_OK;
}

static void llm_destroy(Module *module)
{
    if (!module) {
        return;
    }
    Llm *llm = llm_of(module);
    if (llm->memory) {
        device_free(module->params.device, llm->memory, llm->memory_bytes);
    }
    for (int i = 0; llm->slots && i < llm->limits.slots; i++) {
        memory_free(llm->slots[i].blocks);
    }
    memory_free(llm->slots);
    memory_free(llm->host_values);
    memory_free(llm->host_ids);
    memory_free(llm->begins);
    memory_free(llm->blocks);
    param_set_done(&module->params);
    memory_free(llm);
}

static Status build(Llm *llm, const DecoderSpec *decoder)
{
    llm->width = decoder->width;
    llm->vocabulary = layer_tp_part(&llm->layers, decoder->vocabulary);
    llm->num_blocks = decoder->layers;
    TRY(MEMORY_NEW(&llm->blocks, llm->num_blocks));
    TRY(declare(llm, decoder));
    return allocate_activations(llm);
}

static Status llm_create(const ModelSpec *model, const ModuleContext *context,
                         const ModuleLimits *limits, Module **module_out)
{
    CHECK(limits->slots > 0 && limits->tokens >= 0 && limits->tokens <= INT32_MAX);
    CHECK(limits->rows >= 0);
    TRY(check_model(model->llm, context->tp ? context->tp->size : 1));
    Llm *llm = NULL;
    TRY(MEMORY_NEW(&llm, 1));
    llm->module.ops = &llm_module_ops;
    param_set_init(&llm->module.params, context->device);
    llm->layers = (LayerContext){.kernels = context->kernels,
                                 .stream = context->stream,
                                 .tp = context->tp,
                                 .params = &llm->module.params};
    llm->limits = *limits;
    Status status = build(llm, model->llm);
    if (status != STATUS_OK) {
        llm_destroy(&llm->module);
        return status_trace(status, __FILE__, __LINE__);
    }
    *module_out = &llm->module;
    return STATUS_OK;
}

static Sequences sequences_of(const ModuleBatch *batch)
{
    return (Sequences){.num_tokens = batch->num_tokens,
                       .num_segments = batch->num_segments,
                       .segment_begins = batch->segment_begins,
                       .positions = batch->positions};
}

static const float *block_input(const LlmSlot *slot, int block)
{
    return block == 0 ? slot->embedded : slot->blocks[block - 1].out;
}

static void check_batch(const Llm *llm, int slot, const ModuleBatch *batch)
{
    CHECK(slot >= 0 && slot < llm->limits.slots);
    CHECK(batch->num_tokens >= 0 && batch->num_tokens <= llm->limits.tokens);
    CHECK(batch->num_rows >= 0 && batch->num_rows <= llm->limits.rows);
}

/* Token vectors, with visual rows in place of the placeholders' own. */
static Status embed_forward(Llm *llm, LlmSlot *slot, const ModuleBatch *batch)
{
    const LayerContext *layers = &llm->layers;
    TRY(embedding_forward(layers, &llm->embedding, slot->embedded, batch->ids, batch->num_tokens));
    return layers->kernels->scatter_rows(slot->embedded, batch->rows, batch->row_tokens,
                                         batch->num_rows, llm->width, layers->stream);
}

/* rows_grad [R, D] = grad [N, D] at the placeholders, which then give nothing to the table. */
static Status embed_backward(Llm *llm, float *grad, const ModuleBatch *batch, float *rows_grad)
{
    const LayerContext *layers = &llm->layers;
    const Kernels *kernels = layers->kernels;
    float *zeros = llm->scratch.zeros;
    int64_t rows = batch->num_rows;
    TRY(kernels->gather_rows(rows_grad, grad, batch->row_tokens, rows, llm->width, layers->stream));
    TRY(stream_zero(layers->stream, zeros, rows * llm->width * (int64_t)sizeof(float)));
    TRY(kernels->scatter_rows(grad, zeros, batch->row_tokens, rows, llm->width, layers->stream));
    return embedding_backward(layers, &llm->embedding, grad, batch->ids, batch->num_tokens);
}

/* Logits, losses and the logits' gradient; adds the losses to *loss_sum_out. */
static Status head_forward(Llm *llm, LlmSlot *slot, const ModuleBatch *batch, double *loss_sum_out)
{
    const LayerContext *layers = &llm->layers;
    int64_t n = batch->num_tokens;
    float *normed = llm->scratch.normed;
    TRY(norm_forward(layers, &llm->norm, &slot->norm, normed, block_input(slot, llm->num_blocks),
                     n));
    TRY(linear_forward(layers, &llm->head, slot->logits, normed, n));
    TRY(cross_entropy_forward(layers, &slot->loss, slot->logits, batch->labels, n, llm->vocabulary,
                              batch->loss_scale));
    TRY(stream_copy(layers->stream, slot->loss_sum, loss_sum_out, (int64_t)sizeof(double)));
    TRY(layers->kernels->sum(slot->loss_sum, slot->loss.losses, n, layers->stream));
    return stream_copy(layers->stream, loss_sum_out, slot->loss_sum, (int64_t)sizeof(double));
}

/* scratch.grad [N, D] = gradient of the last block's output. */
static Status head_backward(Llm *llm, LlmSlot *slot, int64_t n)
{
    const LayerContext *layers = &llm->layers;
    LlmScratch *scratch = &llm->scratch;
    const float *x = block_input(slot, llm->num_blocks);
    TRY(norm_forward(layers, &llm->norm, &slot->norm, scratch->normed, x, n));
    TRY(linear_backward(layers, &llm->head, scratch->normed_grad, slot->logits, scratch->normed, n,
                        false));
    TRY(layer_sum(layers, scratch->normed_grad, n * llm->width));
    return norm_backward(layers, &llm->norm, &slot->norm, scratch->grad, scratch->normed_grad, x, n,
                         false);
}

// NOLINTBEGIN(readability-non-const-parameter): the signature is the contract's
static Status llm_forward(Module *module, int slot_index, const ModuleBatch *batch, float *rows_out,
                          double *loss_sum_out)
{
    (void)rows_out;
    Llm *llm = llm_of(module);
    check_batch(llm, slot_index, batch);
    if (batch->num_tokens == 0) {
        return STATUS_OK;
    }
    LlmSlot *slot = &llm->slots[slot_index];
    Sequences sequences = sequences_of(batch);
    TRY(embed_forward(llm, slot, batch));
    for (int i = 0; i < llm->num_blocks; i++) {
        TRY(block_forward(&llm->layers, &llm->blocks[i], &slot->blocks[i], &llm->scratch.block,
                          &sequences, block_input(slot, i)));
    }
    slot->has_loss = loss_sum_out != NULL;
    return slot->has_loss ? head_forward(llm, slot, batch, loss_sum_out) : STATUS_OK;
}

// NOLINTEND(readability-non-const-parameter)

static Status llm_backward(Module *module, int slot_index, const ModuleBatch *batch,
                           float *rows_grad)
{
    Llm *llm = llm_of(module);
    check_batch(llm, slot_index, batch);
    if (batch->num_tokens == 0) {
        return STATUS_OK;
    }
    LlmSlot *slot = &llm->slots[slot_index];
    Sequences sequences = sequences_of(batch);
    CHECK(slot->has_loss);
    TRY(head_backward(llm, slot, batch->num_tokens));
    for (int i = llm->num_blocks - 1; i >= 0; i--) {
        TRY(block_backward(&llm->layers, &llm->blocks[i], &slot->blocks[i], &llm->scratch.block,
                           &sequences, llm->scratch.grad, block_input(slot, i)));
    }
    return embed_backward(llm, llm->scratch.grad, batch, rows_grad);
}

/* ---- predict ---- */

/* Part [rank] of `data` [tp, num] of 4-byte elements is this rank's; all get all. */
static Status gather_answers(Llm *llm, void *data, int64_t num)
{
    int tp_size = layer_tp_size(&llm->layers);
    if (tp_size == 1) {
        return STATUS_OK;
    }
    for (int i = 0; i <= tp_size; i++) {
        llm->begins[i] = i * num * 4;
    }
    return comm_all_gather(llm->layers.tp, data, llm->begins, llm->layers.stream);
}

/* scratch values, ids [tp, num]: the best of every rank's part of the vocabulary. */
static Status best_of_parts(Llm *llm, const LlmSlot *slot, const int32_t *tokens, int64_t num)
{
    const LayerContext *layers = &llm->layers;
    LlmScratch *scratch = &llm->scratch;
    int64_t own = layer_tp_rank(layers) * num;
    TRY(stream_copy(layers->stream, scratch->tokens, tokens, num * (int64_t)sizeof(int32_t)));
    TRY(layers->kernels->gather_rows(scratch->picked, block_input(slot, llm->num_blocks),
                                     scratch->tokens, num, llm->width, layers->stream));
    TRY(norm_forward(layers, &llm->norm, &scratch->picked_norm, scratch->picked_normed,
                     scratch->picked, num));
    TRY(linear_forward(layers, &llm->head, scratch->logits, scratch->picked_normed, num));
    return layers->kernels->argmax_rows(scratch->values + own, scratch->ids + own, scratch->logits,
                                        num, llm->head.out, (int32_t)llm->vocabulary.begin,
                                        layers->stream);
}

static Status predict_some(Llm *llm, const LlmSlot *slot, const int32_t *tokens, int64_t num,
                           int32_t *ids_out)
{
    const LayerContext *layers = &llm->layers;
    int64_t tp_size = layer_tp_size(layers);
    int64_t answers = tp_size * num;
    TRY(best_of_parts(llm, slot, tokens, num));
    TRY(gather_answers(llm, llm->scratch.values, num));
    TRY(gather_answers(llm, llm->scratch.ids, num));
    TRY(stream_copy(layers->stream, llm->host_values, llm->scratch.values, answers * 4));
    TRY(stream_copy(layers->stream, llm->host_ids, llm->scratch.ids, answers * 4));
    TRY(stream_wait(layers->stream, clock_deadline_in_ms(PREDICT_TIMEOUT_MS)));
    for (int64_t i = 0; i < num; i++) {
        int64_t best = i;
        for (int64_t at = i + num; at < answers; at += num) { /* equals: the lower id, as argmax */
            best = llm->host_values[at] > llm->host_values[best] ? at : best;
        }
        ids_out[i] = llm->host_ids[best];
    }
    return STATUS_OK;
}

static Status llm_predict(Module *module, int slot_index, const int32_t *tokens, int32_t num,
                          int32_t *ids_out)
{
    Llm *llm = llm_of(module);
    CHECK(slot_index >= 0 && slot_index < llm->limits.slots && num >= 0);
    for (int32_t first = 0; first < num; first += PREDICT_ROWS_MAX) {
        int32_t some = num - first < PREDICT_ROWS_MAX ? num - first : PREDICT_ROWS_MAX;
        TRY(predict_some(llm, &llm->slots[slot_index], tokens + first, some, ids_out + first));
    }
    return STATUS_OK;
}

const ModuleOps llm_module_ops = {
    .name = "llm",
    .create = llm_create,
    .destroy = llm_destroy,
    .forward = llm_forward,
    .backward = llm_backward,
    .predict = llm_predict,
};
