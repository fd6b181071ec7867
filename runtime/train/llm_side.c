#include "train/llm_side.h"

#include "base/clock.h"
#include "base/memory.h"

struct LlmSide {
    SideContext context;
    TextBatch text;
    ModuleBatch batch;  /* of the microbatch at hand */
    float **rows;       /* [window] of [rows, D] */
    float **rows_grads; /* [window] of [rows, D] */
    int64_t rows_bytes;
    int64_t wait_ns;
};

static Status allocate(LlmSide *side)
{
    const SideContext *context = &side->context;
    const StepBounds *bounds = &context->bounds;
    side->rows_bytes = bounds->llm_rows * context->width * (int64_t)sizeof(float);
    TRY(text_batch_init(&side->text, context->device, bounds->llm_tokens,
                        (int32_t)bounds->llm_segments, bounds->llm_rows));
    TRY(MEMORY_NEW(&side->rows, context->window));
    TRY(MEMORY_NEW(&side->rows_grads, context->window));
    for (int i = 0; i < context->window; i++) {
        TRY(device_alloc(context->device, side->rows_bytes, (void **)&side->rows[i]));
        TRY(device_alloc(context->device, side->rows_bytes, (void **)&side->rows_grads[i]));
    }
    return STATUS_OK;
}

Status llm_side_create(const SideContext *context, LlmSide **side_out)
{
    LlmSide *side = NULL;
    TRY(MEMORY_NEW(&side, 1));
    side->context = *context;
    Status status = allocate(side);
    if (status != STATUS_OK) {
        llm_side_destroy(side);
        return status_trace(status, __FILE__, __LINE__);
    }
    *side_out = side;
    return STATUS_OK;
}

static void release(const LlmSide *side, float **buffers)
{
    for (int i = 0; buffers && i < side->context.window; i++) {
        if (buffers[i]) {
            device_free(side->context.device, buffers[i], side->rows_bytes);
        }
    }
    memory_free((void *)buffers);
}

void llm_side_destroy(LlmSide *side)
{
    if (!side) {
        return;
    }
    release(side, side->rows);
    release(side, side->rows_grads);
    text_batch_done(&side->text);
    memory_free(side);
}

/* ---------------------------------------------------------------- rows and text */

static Status start_rows(LlmSide *side, Feed *feed, int microbatch)
{
    const SideContext *context = &side->context;
    const BoundaryCrossing crossing = {.direction = BOUNDARY_ROWS,
                                       .plan = feed_plan(feed),
                                       .microbatch = microbatch,
                                       .kind = feed_kind(feed),
                                       .destination = side->rows[microbatch % context->window]};
    return boundary_start(context->boundary, &crossing, context->stream);
}

static Status finish_rows(LlmSide *side, int microbatch)
{
    int64_t begin_ns = clock_now_ns();
    TRY(boundary_finish(side->context.boundary, BOUNDARY_ROWS, microbatch + 1,
                        side->context.stream));
    side->wait_ns += clock_now_ns() - begin_ns;
    return STATUS_OK;
}

static Status pack(LlmSide *side, const Feed *feed, int microbatch)
{
    const SideContext *context = &side->context;
    const StepPlan *plan = feed_plan(feed);
    Range samples = plan->microbatches[microbatch].llm_samples[context->place->dp];
    text_batch_begin(&side->text);
    for (int64_t i = samples.begin; i < samples.end; i++) {
        int64_t images = plan->source.samples[plan->samples[i]].num_images;
        TRY(text_batch_add(&side->text, feed_dataset(feed), plan->samples[i],
                           images * context->rows_per_image));
    }
    return text_batch_upload(&side->text, context->stream, &side->batch);
}

Status llm_side_recv_rows(LlmSide *side, Feed *feed, int microbatch)
{
    TRY(start_rows(side, feed, microbatch));
    return finish_rows(side, microbatch);
}

Status llm_side_recv(LlmSide *side, Feed *feed, int microbatch)
{
    TRY(start_rows(side, feed, microbatch));
    TRY(pack(side, feed, microbatch));
    return finish_rows(side, microbatch);
}

/* ---------------------------------------------------------------- compute */

Status llm_side_forward(LlmSide *side, int microbatch, float loss_scale, double *loss_sum)
{
    const SideContext *context = &side->context;
    side->batch.rows = side->rows[microbatch % context->window];
    side->batch.loss_scale = loss_scale;
    return context->module->ops->forward(context->module, 0, &side->batch, NULL, loss_sum);
}

Status llm_side_backward(LlmSide *side, int microbatch)
{
    const SideContext *context = &side->context;
    /* The buffer's last gradients have left. */
    TRY(boundary_finish(context->boundary, BOUNDARY_GRADS, microbatch - context->window + 1,
                        context->stream));
    return context->module->ops->backward(context->module, 0, &side->batch,
                                          side->rows_grads[microbatch % context->window]);
}

Status llm_side_send_grad(LlmSide *side, Feed *feed, int microbatch)
{
    const SideContext *context = &side->context;
    const BoundaryCrossing crossing = {.direction = BOUNDARY_GRADS,
                                       .plan = feed_plan(feed),
                                       .microbatch = microbatch,
                                       .kind = feed_kind(feed),
                                       .source = side->rows_grads[microbatch % context->window]};
    return boundary_start(context->boundary, &crossing, context->stream);
}

TextBatch *llm_side_text(LlmSide *side)
{
    return &side->text;
}

const float *llm_side_rows(const LlmSide *side, int microbatch)
{
    return side->rows[microbatch % side->context.window];
}

double llm_side_take_wait(LlmSide *side)
{
    double seconds = (double)side->wait_ns / (double)CLOCK_NS_PER_S;
    side->wait_ns = 0;
    return seconds;
}
