#include "tests/parity/faulty.h"

#include "encoder_worker/vision_encoder.h"
#include "llm_worker/llm.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

enum {
    PIXELS_MAX = 64 * 8 * 8 * 3,
    TOKENS_MAX = 2048,
    WEIGHTS_MAX = 1 << 16
};

static _Thread_local const ModelSpec *model_of_thread;
static _Thread_local int forwards;
static _Thread_local int backwards;
static _Thread_local uint8_t earlier[PIXELS_MAX];

static _Thread_local int cp_of_thread;
static _Thread_local float first_weights[WEIGHTS_MAX];

void faulty_begin(const ModelSpec *model, int cp_rank)
{
    cp_of_thread = cp_rank;
    model_of_thread = model;
    forwards = 0;
    backwards = 0;
    memset(earlier, 0, sizeof earlier);
}

static bool is_second_step(int calls)
{
    return calls / FAULTY_MICROBATCHES == 1;
}

static size_t pixels_bytes(const ModuleBatch *batch)
{
    int64_t size = model_of_thread->vision->image_size;
    size_t bytes = (size_t)(batch->num_items * size * size * 3);
    CHECK(bytes <= PIXELS_MAX);
    return bytes;
}

static int64_t rows_count(const Module *module, const ModuleBatch *batch)
{
    return vision_module_ops.count_rows(module, batch) * model_of_thread->llm->width;
}

/* ---- vision ---- */

static Status backward_doubled(Module *module, int chunk, int slot, const ModuleBatch *batch,
                               float *grad, float *rows_grad)
{
    for (int64_t i = 0; i < rows_count(module, batch); i++) {
        rows_grad[i] *= 2;
    }
    return vision_module_ops.backward(module, chunk, slot, batch, grad, rows_grad);
}

static Status forward_swapped(Module *module, int chunk, int slot, const ModuleBatch *batch,
                              float *rows_out, double *loss_sum_out)
{
    static _Thread_local uint8_t pixels[PIXELS_MAX];
    ModuleBatch swapped = *batch;
    if (batch->num_items >= 2) {
        size_t image_bytes = pixels_bytes(batch) / (size_t)batch->num_items;
        memcpy(pixels, batch->pixels, pixels_bytes(batch));
        memcpy(pixels, batch->pixels + image_bytes, image_bytes);
        memcpy(pixels + image_bytes, batch->pixels, image_bytes);
        swapped.pixels = pixels;
    }
    return vision_module_ops.forward(module, chunk, slot, &swapped, rows_out, loss_sum_out);
}

static Status forward_late(Module *module, int chunk, int slot, const ModuleBatch *batch,
                           float *rows_out, double *loss_sum_out)
{
    static _Thread_local uint8_t pixels[PIXELS_MAX];
    ModuleBatch late = *batch;
    memcpy(pixels, earlier, sizeof pixels);
    memcpy(earlier, batch->pixels, pixels_bytes(batch));
    late.pixels = pixels;
    return vision_module_ops.forward(module, chunk, slot, &late, rows_out, loss_sum_out);
}

static Status forward_dropped(Module *module, int chunk, int slot, const ModuleBatch *batch,
                              float *rows_out, double *loss_sum_out)
{
    TRY(vision_module_ops.forward(module, chunk, slot, batch, rows_out, loss_sum_out));
    int64_t width = model_of_thread->llm->width;
    int64_t count = rows_count(module, batch);
    if (count > 0) {
        memset(rows_out + count - width, 0, (size_t)width * sizeof *rows_out);
    }
    return STATUS_OK;
}

static Status vision_backward_not_finite(Module *module, int chunk, int slot,
                                         const ModuleBatch *batch, float *grad, float *rows_grad)
{
    TRY(vision_module_ops.backward(module, chunk, slot, batch, grad, rows_grad));
    if (is_second_step(backwards++)) {
        module->params.grads[3] = NAN;
    }
    return STATUS_OK;
}

static Status forward_bad_rows(Module *module, int chunk, int slot, const ModuleBatch *batch,
                               float *rows_out, double *loss_sum_out)
{
    TRY(vision_module_ops.forward(module, chunk, slot, batch, rows_out, loss_sum_out));
    if (is_second_step(forwards++) && batch->num_items > 0) {
        rows_out[1] = INFINITY;
    }
    return STATUS_OK;
}

/* ---- llm ---- */

static Status backward_halved(Module *module, int chunk, int slot, const ModuleBatch *batch,
                              float *grad, float *rows_grad)
{
    TRY(llm_module_ops.backward(module, chunk, slot, batch, grad, rows_grad));
    for (int64_t i = 0; i < module->params.trained_count; i++) {
        module->params.grads[i] *= 0.5f;
    }
    return STATUS_OK;
}

static Status forward_unequal(Module *module, int chunk, int slot, const ModuleBatch *batch,
                              float *rows_out, double *loss_sum_out)
{
    ModuleBatch unequal = *batch;
    int labels = 0;
    for (int64_t n = 0; n < batch->sequences->rows.count; n++) {
        labels += batch->labels[n] >= 0;
    }
    unequal.loss_scale = labels > 0 ? 1.0f / (float)(FAULTY_MICROBATCHES * labels) : 0.0f;
    return llm_module_ops.forward(module, chunk, slot, &unequal, rows_out, loss_sum_out);
}

static Status backward_one_copy(Module *module, int chunk, int slot, const ModuleBatch *batch,
                                float *grad, float *rows_grad)
{
    TRY(llm_module_ops.backward(module, chunk, slot, batch, grad, rows_grad));
    for (int64_t i = 0; cp_of_thread > 0 && i < module->params.trained_count; i++) {
        module->params.grads[i] = 0;
    }
    return STATUS_OK;
}

static Status forward_skipped(Module *module, int chunk, int slot, const ModuleBatch *batch,
                              float *rows_out, double *loss_sum_out)
{
    size_t bytes = (size_t)module->params.count * sizeof(float);
    CHECK(bytes <= sizeof first_weights);
    if (forwards == 0) {
        memcpy(first_weights, module->params.values, bytes);
    } else if (forwards == FAULTY_MICROBATCHES) {
        memcpy(module->params.values, first_weights, bytes);
    }
    forwards++;
    return llm_module_ops.forward(module, chunk, slot, batch, rows_out, loss_sum_out);
}

static Status llm_backward_not_finite(Module *module, int chunk, int slot, const ModuleBatch *batch,
                                      float *grad, float *rows_grad)
{
    TRY(llm_module_ops.backward(module, chunk, slot, batch, grad, rows_grad));
    if (is_second_step(backwards++)) {
        module->params.grads[3] = NAN;
    }
    return STATUS_OK;
}

static Status forward_masked(Module *module, int chunk, int slot, const ModuleBatch *batch,
                             float *rows_out, double *loss_sum_out)
{
    static _Thread_local int32_t labels[TOKENS_MAX];
    ModuleBatch masked = *batch;
    CHECK(batch->sequences->rows.count <= TOKENS_MAX);
    if (forwards++ % FAULTY_MICROBATCHES == 0) {
        memset(labels, 0xff, sizeof labels); /* -1 */
        masked.labels = labels;
    }
    return llm_module_ops.forward(module, chunk, slot, &masked, rows_out, loss_sum_out);
}

/* ---- tables ---- */

static ModuleOps tables[FAULTY_KIND_COUNT];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void fill_tables(void)
{
    for (int i = 0; i < FAULTY_KIND_COUNT; i++) {
        tables[i] = i < FAULTY_LLM_HALVED ? vision_module_ops : llm_module_ops;
    }
    tables[FAULTY_VISION_DOUBLED].backward = backward_doubled;
    tables[FAULTY_VISION_SWAPPED].forward = forward_swapped;
    tables[FAULTY_VISION_LATE].forward = forward_late;
    tables[FAULTY_VISION_DROPPED].forward = forward_dropped;
    tables[FAULTY_VISION_NOT_FINITE].backward = vision_backward_not_finite;
    tables[FAULTY_VISION_BAD_ROWS].forward = forward_bad_rows;
    tables[FAULTY_LLM_HALVED].backward = backward_halved;
    tables[FAULTY_LLM_UNEQUAL].forward = forward_unequal;
    tables[FAULTY_LLM_ONE_COPY].backward = backward_one_copy;
    tables[FAULTY_LLM_SKIPPED].forward = forward_skipped;
    tables[FAULTY_LLM_NOT_FINITE].backward = llm_backward_not_finite;
    tables[FAULTY_LLM_MASKED].forward = forward_masked;
}

const ModuleOps *faulty_ops(FaultyKind kind)
{
    CHECK(pthread_once(&once, fill_tables) == 0);
    return &tables[kind];
}
