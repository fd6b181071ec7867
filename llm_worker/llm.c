/* Legend: N tokens, R visual rows, D width, V vocabulary, V/tp this rank's part of it. */
#include "llm_worker/llm.h"

#include "base/clock.h"
#include "base/memory.h"
#include "nn/cross_entropy.h"
#include "nn/embedding.h"
#include "nn/stack.h"
#include "train/module_parts.h"

#include <math.h>
#include <stdio.h>

enum {
    PREDICT_ROWS_MAX = 64,         /* tokens predicted at a time: bounds the logits */
    PREDICT_TIMEOUT_MS = 60 * 1000 /* for the answers to arrive on the host */
};

static const float embedding_std = 0.02f; /* initial standard deviation of tokens and positions */

/* Kept from forward to backward of one microbatch in one chunk. */
typedef struct LlmSlot {
    StackActs stack;
    ShardRows rows; /* of the last forward */
    /* of the last part */
    NormActs norm;
    float *logits; /* [N, V/tp]; after forward, their gradient */
    CrossEntropy loss;
    double *loss_sum; /* [1] */
    bool has_loss;    /* the head ran: backward may */
} LlmSlot;

typedef struct LlmChunk {
    Stack stack;
    int num_slots;
    LlmSlot *slots;
} LlmChunk;

/* One for all slots; members of different stages of a pass share memory. */
typedef struct LlmScratch {
    /* embedding */
    float *embedded; /* [N, D]: rows that are cut over tp, put together; NULL when not cut */
    float *zeros;    /* [R, D] */
    /* head */
    float *normed;      /* [N, D] */
    float *normed_grad; /* [N, D] */
    /* predict, after normed */
    int32_t *tokens; /* [PREDICT_ROWS_MAX] */
    float *picked;   /* [PREDICT_ROWS_MAX, D] */
    float *logits;   /* [PREDICT_ROWS_MAX, V/tp] */
    float *values;   /* [tp, PREDICT_ROWS_MAX] */
    int32_t *ids;    /* [tp, PREDICT_ROWS_MAX] */
    StackShared stack;
} LlmScratch;

typedef struct Llm {
    Module module;
    LayerContext layers;
    ModuleParts parts;
    int backward_begin;
    Recompute recompute;
    bool is_tied;
    int64_t width;    /* D */
    Range vocabulary; /* of V, this rank */
    LlmChunk chunks[MODULE_CHUNKS_MAX];
    Embedding embedding; /* of the first part, and of a last one whose head is tied to it */
    Norm norm;           /* of the last part */
    Linear head;
    ModuleLimits limits;
    LayerLimits layer_limits;
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

static Status declare_table(Llm *llm, const DecoderSpec *decoder)
{
    return embedding_declare(&llm->layers, "language_model.model", "embed_tokens",
                             decoder->vocabulary, decoder->width, embedding_std, &llm->embedding);
}

/* A head that is tied to a table on another stage has a copy of it; the first stage's counts. */
static Status declare_head(Llm *llm, const DecoderSpec *decoder)
{
    const LayerContext *layers = &llm->layers;
    TRY(norm_declare(layers, "language_model.model", "norm", NORM_KIND_RMS, decoder->width,
                     (float)decoder->norm_epsilon, &llm->norm));
    if (!decoder->tied_head) {
        LinearSpec head = {.in = decoder->width,
                           .out = decoder->vocabulary,
                           .cut = LINEAR_CUT_OUT,
                           .part = llm->vocabulary,
                           .gain = 1.0f};
        return linear_declare(layers, "language_model", "lm_head", &head, &llm->head);
    }
    if (llm->parts.stages > 1) {
        TRY(declare_table(llm, decoder));
        Param *table = &layers->params->params[llm->embedding.table];
        table->spec.is_tied = true;
        table->counts = false;
    }
    llm->head = embedding_as_head(&llm->embedding);
    return STATUS_OK;
}

static Status declare_chunk(Llm *llm, const DecoderSpec *decoder, int chunk)
{
    const BlockSpec spec = block_spec(decoder);
    if (module_parts_is_first(&llm->parts, chunk)) {
        TRY(declare_table(llm, decoder));
        if (decoder->tied_head && llm->parts.stages > 1) {
            llm->layers.params->params[llm->embedding.table].spec.is_tied = true;
        }
    }
    Range layers = module_part_layers(decoder->layers, module_parts_count(&llm->parts),
                                      module_parts_at(&llm->parts, chunk));
    TRY(stack_init(&llm->layers, "language_model.model.layers", &spec, layers, llm->recompute,
                   &llm->chunks[chunk].stack));
    if (module_parts_is_last(&llm->parts, chunk)) {
        TRY(declare_head(llm, decoder));
    }
    return STATUS_OK;
}

static void set_model(Llm *llm, const DecoderSpec *decoder, const ModuleContext *context)
{
    llm->parts = module_parts_of(context);
    llm->backward_begin = context->backward_begin;
    llm->recompute = context->recompute;
    llm->width = decoder->width;
    llm->layers = (LayerContext){.kernels = context->kernels,
                                 .stream = context->stream,
                                 .tp = context->tp,
                                 .cp = context->cp,
                                 .is_sequence_parallel = context->is_sequence_parallel,
                                 .params = &llm->module.params};
    llm->vocabulary = layer_tp_part(&llm->layers, decoder->vocabulary);
    param_set_freeze(&llm->module.params, context->frozen, context->num_frozen);
}

/* Declares one part alone, to look at its parameters. */
static Status look_at_part(const DecoderSpec *decoder, const ModuleContext *context, int part,
                           bool *is_trained_out)
{
    Llm *llm = NULL;
    ModuleContext alone = *context;
    alone.tp = NULL;
    alone.cp = NULL;
    TRY(MEMORY_NEW(&llm, 1));
    ModuleParts parts = module_parts_of(context);
    alone.stage = part % parts.stages;
    param_set_init(&llm->module.params, NULL);
    set_model(llm, decoder, &alone);
    Status status = declare_chunk(llm, decoder, part / parts.stages);
    *is_trained_out = module_parts_any_trained(&llm->module.params);
    stack_done(&llm->chunks[part / parts.stages].stack);
    param_set_done(&llm->module.params);
    memory_free(llm);
    return status;
}

static Status llm_first_trained(const ModelSpec *model, const ModuleContext *context, int *part_out)
{
    ModuleParts parts = module_parts_of(context);
    int part = 0;
    bool is_trained = false;
    for (; part < module_parts_count(&parts) && !is_trained; part++) {
        TRY(look_at_part(model->llm, context, part, &is_trained));
    }
    *part_out = is_trained ? part - 1 : part;
    return STATUS_OK;
}

static void carve_slot(Llm *llm, Arena *arena, int chunk, LlmSlot *slot)
{
    const LayerLimits *limits = &llm->layer_limits;
    stack_carve(&llm->layers, &llm->chunks[chunk].stack, arena, limits, &llm->scratch.stack,
                &slot->stack);
    if (module_parts_is_last(&llm->parts, chunk)) {
        norm_carve(&llm->norm, arena, limits->local, &slot->norm);
        slot->logits = layer_take(arena, limits->tokens, llm->head.out);
        cross_entropy_carve(arena, limits->tokens, &slot->loss);
        slot->loss_sum = arena_take(arena, (int64_t)sizeof(double));
    }
}

static void carve_predict(Llm *llm, Arena *arena)
{
    LlmScratch *scratch = &llm->scratch;
    int64_t tp_size = layer_tp_size(&llm->layers);
    scratch->tokens = arena_take(arena, PREDICT_ROWS_MAX * (int64_t)sizeof(int32_t));
    scratch->picked = layer_take(arena, PREDICT_ROWS_MAX, llm->width);
    scratch->logits = layer_take(arena, PREDICT_ROWS_MAX, llm->head.out);
    scratch->values = layer_take(arena, tp_size, PREDICT_ROWS_MAX);
    scratch->ids = arena_take(arena, tp_size * PREDICT_ROWS_MAX * (int64_t)sizeof(int32_t));
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* The stages of a pass follow one another, so each begins at the same place. */
static void carve_scratch(Llm *llm, Arena *arena)
{
    LlmScratch *scratch = &llm->scratch;
    int64_t n = llm->layer_limits.tokens;
    int64_t stage = arena->used;
    int64_t end = stage;
    int last = llm->parts.chunks - 1;
    if (module_parts_is_first(&llm->parts, 0)) {
        scratch->embedded = layer_cuts_rows(&llm->layers) ? layer_take(arena, n, llm->width) : NULL;
        scratch->zeros = layer_take(arena, llm->limits.rows, llm->width);
        end = larger(end, arena->used);
        arena_rewind(arena, stage);
    }
    if (module_parts_is_last(&llm->parts, last)) {
        scratch->normed = layer_take(arena, n, llm->width);
        int64_t after = arena->used;
        scratch->normed_grad = layer_take(arena, n, llm->width);
        end = larger(end, arena->used);
        arena_rewind(arena, after);
        carve_predict(llm, arena);
        end = larger(end, arena->used);
        arena_rewind(arena, stage);
    }
    if (arena->used < end) {
        arena_take(arena, end - arena->used);
    }
}

/* The largest of the chunks serves all: their blocks are alike. */
static void carve_stack(Llm *llm, Arena *arena)
{
    int most = 0;
    for (int c = 1; c < llm->parts.chunks; c++) {
        if (llm->chunks[c].stack.num_blocks > llm->chunks[most].stack.num_blocks) {
            most = c;
        }
    }
    stack_carve_shared(&llm->layers, &llm->chunks[most].stack, arena, &llm->layer_limits,
                       &llm->scratch.stack);
}

static void carve(Llm *llm, Arena *arena)
{
    carve_stack(llm, arena);
    carve_scratch(llm, arena);
    for (int c = 0; c < llm->parts.chunks; c++) {
        for (int i = 0; i < llm->chunks[c].num_slots; i++) {
            carve_slot(llm, arena, c, &llm->chunks[c].slots[i]);
        }
    }
}

static Status allocate_activations(Llm *llm)
{
    for (int c = 0; c < llm->parts.chunks; c++) {
        LlmChunk *chunk = &llm->chunks[c];
        chunk->num_slots = llm->limits.slots[c];
        TRY(MEMORY_NEW(&chunk->slots, chunk->num_slots));
        for (int i = 0; i < chunk->num_slots; i++) {
            TRY(stack_acts_init(&chunk->stack, &chunk->slots[i].stack));
        }
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
    for (int c = 0; c < MODULE_CHUNKS_MAX; c++) {
        LlmChunk *chunk = &llm->chunks[c];
        for (int i = 0; chunk->slots && i < chunk->num_slots; i++) {
            stack_acts_done(&chunk->slots[i].stack);
        }
        memory_free(chunk->slots);
        stack_done(&chunk->stack);
    }
    memory_free(llm->host_values);
    memory_free(llm->host_ids);
    memory_free(llm->begins);
    param_set_done(&module->params);
    memory_free(llm);
}

static Status build(Llm *llm, const DecoderSpec *decoder)
{
    for (int c = 0; c < llm->parts.chunks; c++) {
        TRY(declare_chunk(llm, decoder, c));
    }
    TRY(param_set_allocate(&llm->module.params));
    llm->layer_limits = module_parts_limits(&llm->layers, llm->limits.keys, llm->limits.segments);
    llm->module.width = llm->width;
    llm->module.local_max = llm->layer_limits.local;
    return allocate_activations(llm);
}

static Status llm_create(const ModelSpec *model, const ModuleContext *context,
                         const ModuleLimits *limits, Module **module_out)
{
    CHECK(limits->keys >= 0 && limits->keys <= INT32_MAX && limits->rows >= 0);
    CHECK(context->chunks <= MODULE_CHUNKS_MAX);
    TRY(check_model(model->llm, context->tp ? context->tp->size : 1));
    Llm *llm = NULL;
    TRY(MEMORY_NEW(&llm, 1));
    llm->module.ops = &llm_module_ops;
    param_set_init(&llm->module.params, context->device);
    set_model(llm, model->llm, context);
    llm->limits = *limits;
    Status status = build(llm, model->llm);
    if (status != STATUS_OK) {
        llm_destroy(&llm->module);
        return status_trace(status, __FILE__, __LINE__);
    }
    *module_out = &llm->module;
    return STATUS_OK;
}

/* ---- forward and backward ---- */

static LlmSlot *slot_of(Llm *llm, int chunk, int slot)
{
    CHECK(chunk >= 0 && chunk < llm->parts.chunks);
    CHECK(slot >= 0 && slot < llm->chunks[chunk].num_slots);
    return &llm->chunks[chunk].slots[slot];
}

static int64_t llm_count_local(const Module *module, const ModuleBatch *batch)
{
    (void)module;
    return range_count(batch->sequences->rows.part);
}

static int64_t llm_count_rows(const Module *module, const ModuleBatch *batch)
{
    (void)module;
    (void)batch;
    return 0;
}

static float *llm_input(Module *module, int chunk, int slot)
{
    return stack_input(&slot_of(llm_of(module), chunk, slot)->stack);
}

static const float *llm_output(Module *module, int chunk, int slot)
{
    Llm *llm = llm_of(module);
    return stack_output(&llm->chunks[chunk].stack, &slot_of(llm, chunk, slot)->stack);
}

static void check_batch(const Llm *llm, const ModuleBatch *batch)
{
    CHECK(batch->sequences->num_keys <= llm->limits.keys);
    CHECK(batch->sequences->rows.count <= llm->layer_limits.tokens);
    CHECK(batch->num_rows >= 0 && batch->num_rows <= llm->limits.rows);
}

/* x [n, D] = token vectors, with rows of encoders in place of the placeholders' own. */
static Status embed_forward(Llm *llm, float *x, const ModuleBatch *batch)
{
    const LayerContext *layers = &llm->layers;
    TRY(embedding_forward(layers, &llm->embedding, &batch->sequences->rows, x,
                          llm->scratch.embedded, batch->ids));
    return layers->kernels->scatter_rows(x, batch->rows, batch->row_tokens, batch->num_rows,
                                         llm->width, layers->stream);
}

/* rows_grad [R, D] = grad [n, D] at the placeholders, which then give nothing to the table. */
static Status embed_backward(Llm *llm, float *grad, const ModuleBatch *batch, float *rows_grad)
{
    const LayerContext *layers = &llm->layers;
    const Kernels *kernels = layers->kernels;
    float *zeros = llm->scratch.zeros;
    int64_t rows = batch->num_rows;
    if (rows_grad) {
        TRY(kernels->gather_rows(rows_grad, grad, batch->row_tokens, rows, llm->width,
                                 layers->stream));
    }
    if (!layer_is_trained(layers, llm->embedding.table)) {
        return STATUS_OK;
    }
    TRY(stream_zero(layers->stream, zeros, rows * llm->width * (int64_t)sizeof(float)));
    TRY(kernels->scatter_rows(grad, zeros, batch->row_tokens, rows, llm->width, layers->stream));
    return embedding_backward(layers, &llm->embedding, &batch->sequences->rows, grad,
                              llm->scratch.embedded, batch->ids);
}

/* scratch.normed [N, D] = norm(x [n, D]), put together over tp. */
static Status norm_whole(Llm *llm, const LlmSlot *slot, const ShardRows *rows, const float *x)
{
    const LayerContext *layers = &llm->layers;
    float *own = llm->scratch.normed + rows->part.begin * llm->width;
    TRY(norm_forward(layers, &llm->norm, &slot->norm, own, x, range_count(rows->part)));
    return layer_gather(layers, rows, llm->scratch.normed, llm->width);
}

/* Logits, losses and the logits' gradient; adds the losses to *loss_sum_out. */
static Status head_forward(Llm *llm, LlmSlot *slot, const float *x, const ModuleBatch *batch,
                           double *loss_sum_out)
{
    const LayerContext *layers = &llm->layers;
    const ShardRows *rows = &batch->sequences->rows;
    TRY(norm_whole(llm, slot, rows, x));
    TRY(linear_forward(layers, &llm->head, slot->logits, llm->scratch.normed, rows->count));
    TRY(cross_entropy_forward(layers, &slot->loss, slot->logits, batch->labels, rows->count,
                              llm->vocabulary, batch->loss_scale));
    TRY(stream_copy(layers->stream, slot->loss_sum, loss_sum_out, (int64_t)sizeof(double)));
    TRY(layers->kernels->sum(slot->loss_sum, slot->loss.losses, rows->count, layers->stream));
    return stream_copy(layers->stream, loss_sum_out, slot->loss_sum, (int64_t)sizeof(double));
}

/* grad [n, D] = gradient of the last block's output x [n, D]. */
static Status head_backward(Llm *llm, LlmSlot *slot, const float *x, const ShardRows *rows,
                            float *grad)
{
    const LayerContext *layers = &llm->layers;
    LlmScratch *scratch = &llm->scratch;
    if (layer_is_trained(layers, llm->head.weight)) {
        TRY(norm_whole(llm, slot, rows, x));
    }
    TRY(linear_backward(layers, &llm->head, scratch->normed_grad, slot->logits, scratch->normed,
                        rows->count, false));
    TRY(layer_reduce(layers, rows, scratch->normed_grad, llm->width));
    return norm_backward(layers, &llm->norm, &slot->norm, grad,
                         scratch->normed_grad + rows->part.begin * llm->width, x,
                         range_count(rows->part), false);
}

// NOLINTBEGIN(readability-non-const-parameter): the signature is the contract's
static Status llm_forward(Module *module, int chunk, int slot_index, const ModuleBatch *batch,
                          float *rows_out, double *loss_sum_out)
{
    (void)rows_out;
    Llm *llm = llm_of(module);
    LlmSlot *slot = slot_of(llm, chunk, slot_index);
    const Stack *stack = &llm->chunks[chunk].stack;
    check_batch(llm, batch);
    slot->rows = batch->sequences->rows;
    slot->has_loss = false;
    if (batch->sequences->num_keys == 0) {
        return STATUS_OK; /* on all ranks of the replica */
    }
    if (module_parts_is_first(&llm->parts, chunk)) {
        TRY(embed_forward(llm, stack_input(&slot->stack), batch));
    }
    TRY(stack_forward(&llm->layers, stack, &slot->stack, &llm->scratch.stack, batch->sequences));
    if (!module_parts_is_last(&llm->parts, chunk) || !loss_sum_out) {
        return STATUS_OK;
    }
    slot->has_loss = true;
    return head_forward(llm, slot, stack_output(stack, &slot->stack), batch, loss_sum_out);
}

// NOLINTEND(readability-non-const-parameter)

static Status llm_backward(Module *module, int chunk, int slot_index, const ModuleBatch *batch,
                           float *grad, float *rows_grad)
{
    Llm *llm = llm_of(module);
    LlmSlot *slot = slot_of(llm, chunk, slot_index);
    const Stack *stack = &llm->chunks[chunk].stack;
    const Sequences *sequences = batch->sequences;
    check_batch(llm, batch);
    if (sequences->num_keys == 0) {
        return STATUS_OK;
    }
    if (module_parts_is_last(&llm->parts, chunk)) {
        CHECK(slot->has_loss);
        TRY(head_backward(llm, slot, stack_output(stack, &slot->stack), &sequences->rows, grad));
    }
    bool is_first = module_parts_is_first(&llm->parts, chunk);
    bool wants_input_grad = is_first
                                ? rows_grad || layer_is_trained(&llm->layers, llm->embedding.table)
                                : module_parts_at(&llm->parts, chunk) > llm->backward_begin;
    TRY(stack_backward(&llm->layers, stack, &slot->stack, &llm->scratch.stack, sequences, grad,
                       wants_input_grad));
    return is_first && wants_input_grad ? embed_backward(llm, grad, batch, rows_grad) : STATUS_OK;
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
static Status best_of_parts(Llm *llm, const int32_t *tokens, int64_t num)
{
    const LayerContext *layers = &llm->layers;
    LlmScratch *scratch = &llm->scratch;
    int64_t own = layer_tp_rank(layers) * num;
    TRY(stream_copy(layers->stream, scratch->tokens, tokens, num * (int64_t)sizeof(int32_t)));
    TRY(layers->kernels->gather_rows(scratch->picked, scratch->normed, scratch->tokens, num,
                                     llm->width, layers->stream));
    TRY(linear_forward(layers, &llm->head, scratch->logits, scratch->picked, num));
    return layers->kernels->argmax_rows(scratch->values + own, scratch->ids + own, scratch->logits,
                                        num, llm->head.out, (int32_t)llm->vocabulary.begin,
                                        layers->stream);
}

static Status predict_some(Llm *llm, const int32_t *tokens, int64_t num, int32_t *ids_out)
{
    const LayerContext *layers = &llm->layers;
    int64_t tp_size = layer_tp_size(layers);
    int64_t answers = tp_size * num;
    TRY(best_of_parts(llm, tokens, num));
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
    int last = llm->parts.chunks - 1;
    CHECK(module_parts_is_last(&llm->parts, last) && num >= 0);
    LlmSlot *slot = slot_of(llm, last, slot_index);
    if (num == 0) {
        return STATUS_OK;
    }
    TRY(norm_whole(llm, slot, &slot->rows, stack_output(&llm->chunks[last].stack, &slot->stack)));
    for (int32_t first = 0; first < num; first += PREDICT_ROWS_MAX) {
        int32_t some = num - first < PREDICT_ROWS_MAX ? num - first : PREDICT_ROWS_MAX;
        TRY(predict_some(llm, tokens + first, some, ids_out + first));
    }
    return STATUS_OK;
}

const ModuleOps llm_module_ops = {
    .name = "llm",
    .first_trained = llm_first_trained,
    .create = llm_create,
    .destroy = llm_destroy,
    .count_local = llm_count_local,
    .count_rows = llm_count_rows,
    .input = llm_input,
    .output = llm_output,
    .forward = llm_forward,
    .backward = llm_backward,
    .predict = llm_predict,
};
