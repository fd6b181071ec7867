#include "train/encoder_side.h"

#include "base/clock.h"
#include "base/memory.h"

typedef struct EncoderSlot {
    uint8_t *pixels; /* [images, S, S, 3] */
    float *rows;     /* [images * rows_per_image, D] */
    ModuleBatch batch;
} EncoderSlot;

struct EncoderSide {
    SideContext context;
    EncoderSlot *slots; /* [window] */
    float *rows_grad;   /* [images * rows_per_image, D]: used up by the action that follows */
    int64_t pixels_bytes;
    int64_t rows_bytes;
    int64_t wait_ns;
};

static Status allocate(EncoderSide *side)
{
    const SideContext *context = &side->context;
    int64_t images = context->bounds.encoder_images;
    int64_t size = context->image_size;
    side->pixels_bytes = images * size * size * 3;
    side->rows_bytes = images * context->rows_per_image * context->width * (int64_t)sizeof(float);
    TRY(MEMORY_NEW(&side->slots, context->window));
    for (int i = 0; i < context->window; i++) {
        EncoderSlot *slot = &side->slots[i];
        TRY(device_alloc(context->device, side->pixels_bytes, (void **)&slot->pixels));
        TRY(device_alloc(context->device, side->rows_bytes, (void **)&slot->rows));
    }
    return device_alloc(context->device, side->rows_bytes, (void **)&side->rows_grad);
}

Status encoder_side_create(const SideContext *context, EncoderSide **side_out)
{
    EncoderSide *side = NULL;
    TRY(MEMORY_NEW(&side, 1));
    side->context = *context;
    Status status = allocate(side);
    if (status != STATUS_OK) {
        encoder_side_destroy(side);
        return status_trace(status, __FILE__, __LINE__);
    }
    *side_out = side;
    return STATUS_OK;
}

static void release(const EncoderSide *side, void *memory, int64_t size_bytes)
{
    if (memory) {
        device_free(side->context.device, memory, size_bytes);
    }
}

void encoder_side_destroy(EncoderSide *side)
{
    if (!side) {
        return;
    }
    for (int i = 0; side->slots && i < side->context.window; i++) {
        release(side, side->slots[i].pixels, side->pixels_bytes);
        release(side, side->slots[i].rows, side->rows_bytes);
    }
    release(side, side->rows_grad, side->rows_bytes);
    memory_free(side->slots);
    memory_free(side);
}

static EncoderSlot *slot_of(EncoderSide *side, int microbatch)
{
    return &side->slots[microbatch % side->context.window];
}

Status encoder_side_encode(EncoderSide *side, Feed *feed, int microbatch, double *rows_square)
{
    const SideContext *context = &side->context;
    EncoderSlot *slot = slot_of(side, microbatch);
    /* The slot's last rows have left. */
    TRY(boundary_finish(context->boundary, BOUNDARY_ROWS, microbatch - context->window + 1,
                        context->stream));
    TRY(feed_take_images(feed, microbatch, slot->pixels, context->stream));
    const StepMicrobatch *part = &feed_plan(feed)->microbatches[microbatch];
    int64_t images = range_count(part->encoder_items[context->place->dp]);
    slot->batch = (ModuleBatch){.num_images = images, .pixels = slot->pixels};
    TRY(context->module->ops->forward(context->module, microbatch % context->window, &slot->batch,
                                      slot->rows, NULL));
    return context->kernels->sum_squares(rows_square, slot->rows,
                                         images * context->rows_per_image * context->width,
                                         context->stream);
}

Status encoder_side_send(EncoderSide *side, Feed *feed, int microbatch)
{
    const BoundaryCrossing crossing = {.direction = BOUNDARY_ROWS,
                                       .plan = feed_plan(feed),
                                       .microbatch = microbatch,
                                       .kind = feed_kind(feed),
                                       .source = slot_of(side, microbatch)->rows};
    return boundary_start(side->context.boundary, &crossing, side->context.stream);
}

Status encoder_side_recv_grad(EncoderSide *side, Feed *feed, int microbatch)
{
    const BoundaryCrossing crossing = {.direction = BOUNDARY_GRADS,
                                       .plan = feed_plan(feed),
                                       .microbatch = microbatch,
                                       .kind = feed_kind(feed),
                                       .destination = side->rows_grad};
    int64_t begin_ns = clock_now_ns();
    TRY(boundary_start(side->context.boundary, &crossing, side->context.stream));
    TRY(boundary_finish(side->context.boundary, BOUNDARY_GRADS, microbatch + 1,
                        side->context.stream));
    side->wait_ns += clock_now_ns() - begin_ns;
    return STATUS_OK;
}

Status encoder_side_backward(EncoderSide *side, int microbatch)
{
    const SideContext *context = &side->context;
    return context->module->ops->backward(context->module, microbatch % context->window,
                                          &slot_of(side, microbatch)->batch, side->rows_grad);
}

double encoder_side_take_wait(EncoderSide *side)
{
    double seconds = (double)side->wait_ns / (double)CLOCK_NS_PER_S;
    side->wait_ns = 0;
    return seconds;
}
