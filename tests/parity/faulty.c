#include "tests/parity/faulty.h"

#include "encoder_worker/vision_encoder.h"
#include "llm_worker/llm.h"

#include <math.h>
#include <string.h>

enum {
    PIXELS_MAX = 64 * 8 * 8 * 3,
    TOKENS_MAX = 1024
};

/* Each rank is a thread with one module, made and used once. */
static _Thread_local const ModelSpec *model_of_thread;
static _Thread_local int forwards;
static _Thread_local int backwards;

static Status create(const ModuleOps *real, const ModuleOps *faulty, const ModelSpec *model,
                     const ModuleContext *context, const ModuleLimits *limits, Module **module_out)
{
    TRY(real->create(model, context, limits, module_out));
    (*module_out)->ops = faulty;
    model_of_thread = model;
    forwards = 0;
    backwards = 0;
    return STATUS_OK;
}

static int64_t rows_count(const ModuleBatch *batch)
{
    return batch->num_images * module_rows_per_image(model_of_thread);
}

static bool is_second_step(int calls)
{
    return calls / FAULTY_MICROBATCHES == 1;
}

/* ---- vision ---- */

static Status backward_doubled(Module *module, int slot, const ModuleBatch *batch, float *rows_grad)
{
    for (int64_t i = 0; i < rows_count(batch) * model_of_thread->llm->width; i++) {
        rows_grad[i] *= 2;
    }
    return vision_module_ops.backward(module, slot, batch, rows_grad);
}

static Status forward_swapped(Module *module, int slot, const ModuleBatch *batch, float *rows_out,
                              double *loss_sum_out)
{
    static _Thread_local uint8_t pixels[PIXELS_MAX];
    int64_t size = model_of_thread->vision->image_size;
    size_t image_bytes = (size_t)(size * size * 3);
    ModuleBatch swapped = *batch;
    CHECK((size_t)batch->num_images * image_bytes <= sizeof pixels);
    if (batch->num_images >= 2) {
        memcpy(pixels, batch->pixels, (size_t)batch->num_images * image_bytes);
        memcpy(pixels, batch->pixels + image_bytes, image_bytes);
        memcpy(pixels + image_bytes, batch->pixels, image_bytes);
        swapped.pixels = pixels;
    }
    return vision_module_ops.forward(module, slot, &swapped, rows_out, loss_sum_out);
}

static Status forward_dropped(Module *module, int slot, const ModuleBatch *batch, float *rows_out,
                              double *loss_sum_out)
{
    TRY(vision_module_ops.forward(module, slot, batch, rows_out, loss_sum_out));
    int64_t width = model_of_thread->llm->width;
    if (batch->num_images > 0) {
        memset(rows_out + (rows_count(batch) - 1) * width, 0, (size_t)width * sizeof *rows_out);
    }
    return STATUS_OK;
}

static Status vision_backward_not_finite(Module *module, int slot, const ModuleBatch *batch,
                                         float *rows_grad)
{
    TRY(vision_module_ops.backward(module, slot, batch, rows_grad));
    if (is_second_step(backwards++)) {
        module->params.grads[3] = NAN;
    }
    return STATUS_OK;
}

static Status forward_bad_rows(Module *module, int slot, const ModuleBatch *batch, float *rows_out,
                               double *loss_sum_out)
{
    TRY(vision_module_ops.forward(module, slot, batch, rows_out, loss_sum_out));
    if (is_second_step(forwards++) && batch->num_images > 0) {
        rows_out[1] = INFINITY;
    }
    return STATUS_OK;
}

/* ---- llm ---- */

static Status backward_halved(Module *module, int slot, const ModuleBatch *batch, float *rows_grad)
{
    TRY(llm_module_ops.backward(module, slot, batch, rows_grad));
    for (int64_t i = 0; i < module->params.count; i++) {
        module->params.grads[i] *= 0.5f;
    }
    return STATUS_OK;
}

static Status llm_backward_not_finite(Module *module, int slot, const ModuleBatch *batch,
                                      float *rows_grad)
{
    TRY(llm_module_ops.backward(module, slot, batch, rows_grad));
    if (is_second_step(backwards++)) {
        module->params.grads[3] = NAN;
    }
    return STATUS_OK;
}

static Status forward_masked(Module *module, int slot, const ModuleBatch *batch, float *rows_out,
                             double *loss_sum_out)
{
    static _Thread_local int32_t labels[TOKENS_MAX];
    ModuleBatch masked = *batch;
    CHECK(batch->num_tokens <= TOKENS_MAX);
    if (forwards++ % FAULTY_MICROBATCHES == 0) {
        memset(labels, 0xff, sizeof labels); /* -1 */
        masked.labels = labels;
    }
    return llm_module_ops.forward(module, slot, &masked, rows_out, loss_sum_out);
}

/* ---- what is right ---- */

static void vision_destroy(Module *module)
{
    vision_module_ops.destroy(module);
}

static Status vision_forward(Module *module, int slot, const ModuleBatch *batch, float *rows_out,
                             double *loss_sum_out)
{
    return vision_module_ops.forward(module, slot, batch, rows_out, loss_sum_out);
}

static Status vision_backward(Module *module, int slot, const ModuleBatch *batch, float *rows_grad)
{
    return vision_module_ops.backward(module, slot, batch, rows_grad);
}

static void llm_destroy(Module *module)
{
    llm_module_ops.destroy(module);
}

static Status llm_forward(Module *module, int slot, const ModuleBatch *batch, float *rows_out,
                          double *loss_sum_out)
{
    return llm_module_ops.forward(module, slot, batch, rows_out, loss_sum_out);
}

static Status llm_backward(Module *module, int slot, const ModuleBatch *batch, float *rows_grad)
{
    return llm_module_ops.backward(module, slot, batch, rows_grad);
}

/* ---- tables ---- */

static Status create_vision_doubled(const ModelSpec *model, const ModuleContext *context,
                                    const ModuleLimits *limits, Module **module_out)
{
    return create(&vision_module_ops, &faulty_vision_doubled, model, context, limits, module_out);
}

const ModuleOps faulty_vision_doubled = {
    .name = "vision",
    .create = create_vision_doubled,
    .destroy = vision_destroy,
    .forward = vision_forward,
    .backward = backward_doubled,
};

static Status create_vision_swapped(const ModelSpec *model, const ModuleContext *context,
                                    const ModuleLimits *limits, Module **module_out)
{
    return create(&vision_module_ops, &faulty_vision_swapped, model, context, limits, module_out);
}

const ModuleOps faulty_vision_swapped = {
    .name = "vision",
    .create = create_vision_swapped,
    .destroy = vision_destroy,
    .forward = forward_swapped,
    .backward = vision_backward,
};

static Status create_vision_dropped(const ModelSpec *model, const ModuleContext *context,
                                    const ModuleLimits *limits, Module **module_out)
{
    return create(&vision_module_ops, &faulty_vision_dropped, model, context, limits, module_out);
}

const ModuleOps faulty_vision_dropped = {
    .name = "vision",
    .create = create_vision_dropped,
    .destroy = vision_destroy,
    .forward = forward_dropped,
    .backward = vision_backward,
};

static Status create_vision_not_finite(const ModelSpec *model, const ModuleContext *context,
                                       const ModuleLimits *limits, Module **module_out)
{
    return create(&vision_module_ops, &faulty_vision_not_finite, model, context, limits,
                  module_out);
}

const ModuleOps faulty_vision_not_finite = {
    .name = "vision",
    .create = create_vision_not_finite,
    .destroy = vision_destroy,
    .forward = vision_forward,
    .backward = vision_backward_not_finite,
};

static Status create_vision_bad_rows(const ModelSpec *model, const ModuleContext *context,
                                     const ModuleLimits *limits, Module **module_out)
{
    return create(&vision_module_ops, &faulty_vision_bad_rows, model, context, limits, module_out);
}

const ModuleOps faulty_vision_bad_rows = {
    .name = "vision",
    .create = create_vision_bad_rows,
    .destroy = vision_destroy,
    .forward = forward_bad_rows,
    .backward = vision_backward,
};

static Status create_llm_halved(const ModelSpec *model, const ModuleContext *context,
                                const ModuleLimits *limits, Module **module_out)
{
    return create(&llm_module_ops, &faulty_llm_halved, model, context, limits, module_out);
}

const ModuleOps faulty_llm_halved = {
    .name = "llm",
    .create = create_llm_halved,
    .destroy = llm_destroy,
    .forward = llm_forward,
    .backward = backward_halved,
};

static Status create_llm_not_finite(const ModelSpec *model, const ModuleContext *context,
                                    const ModuleLimits *limits, Module **module_out)
{
    return create(&llm_module_ops, &faulty_llm_not_finite, model, context, limits, module_out);
}

const ModuleOps faulty_llm_not_finite = {
    .name = "llm",
    .create = create_llm_not_finite,
    .destroy = llm_destroy,
    .forward = llm_forward,
    .backward = llm_backward_not_finite,
};

static Status create_llm_masked(const ModelSpec *model, const ModuleContext *context,
                                const ModuleLimits *limits, Module **module_out)
{
    return create(&llm_module_ops, &faulty_llm_masked, model, context, limits, module_out);
}

const ModuleOps faulty_llm_masked = {
    .name = "llm",
    .create = create_llm_masked,
    .destroy = llm_destroy,
    .forward = forward_masked,
    .backward = llm_backward,
};
