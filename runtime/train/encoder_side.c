#include "train/encoder_side.h"

#include "base/memory.h"
#include "data/audio.h"

enum {
    NO_MICROBATCH = -1
};

typedef struct EncoderSlot {
    int microbatch;        /* whose input it holds */
    uint8_t *input;        /* pixels or frames; on the first stage */
    int32_t *frame_begins; /* [items + 1], host; audio only */
    ModuleBatch batch;
} EncoderSlot;

struct EncoderSide {
    EncoderSideOptions options;
    EncoderSlot *slots; /* [options.slots] */
    float **rows;       /* [options.row_slots] */
    float **rows_grads; /* [options.row_slots] */
};

static Status allocate_rows(EncoderSide *side)
{
    const EncoderSideOptions *options = &side->options;
    TRY(MEMORY_NEW(&side->rows, options->row_slots));
    TRY(MEMORY_NEW(&side->rows_grads, options->row_slots));
    for (int i = 0; i < options->row_slots; i++) {
        TRY(device_alloc(options->device, options->rows_bytes, (void **)&side->rows[i]));
        TRY(device_alloc(options->device, options->rows_bytes, (void **)&side->rows_grads[i]));
    }
    return STATUS_OK;
}

static Status allocate(EncoderSide *side)
{
    const EncoderSideOptions *options = &side->options;
    TRY(MEMORY_NEW(&side->slots, options->slots));
    for (int i = 0; i < options->slots; i++) {
        EncoderSlot *slot = &side->slots[i];
        if (place_is_first_stage(options->place)) {
            TRY(device_alloc(options->device, options->input_bytes, (void **)&slot->input));
        }
        if (options->media == SAMPLE_MEDIA_AUDIO) {
            TRY(MEMORY_NEW(&slot->frame_begins, options->items_max + 1));
        }
    }
    if (place_is_last_stage(options->place)) {
        TRY(allocate_rows(side));
    }
    encoder_side_begin(side);
    return STATUS_OK;
}

Status encoder_side_create(const EncoderSideOptions *options, EncoderSide **side_out)
{
    EncoderSide *side = NULL;
    TRY(MEMORY_NEW(&side, 1));
    side->options = *options;
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
        device_free(side->options.device, memory, size_bytes);
    }
}

void encoder_side_destroy(EncoderSide *side)
{
    if (!side) {
        return;
    }
    const EncoderSideOptions *options = &side->options;
    for (int i = 0; side->slots && i < options->slots; i++) {
        release(side, side->slots[i].input, options->input_bytes);
        memory_free(side->slots[i].frame_begins);
    }
    for (int i = 0; side->rows_grads && i < options->row_slots; i++) {
        release(side, side->rows[i], options->rows_bytes);
        release(side, side->rows_grads[i], options->rows_bytes);
    }
    memory_free((void *)side->rows);
    memory_free((void *)side->rows_grads);
    memory_free(side->slots);
    memory_free(side);
}

void encoder_side_begin(EncoderSide *side)
{
    for (int i = 0; i < side->options.slots; i++) {
        side->slots[i].microbatch = NO_MICROBATCH;
    }
}

static Status fill(EncoderSide *side, EncoderSlot *slot, Feed *feed, int microbatch, Stream *stream)
{
    const EncoderSideOptions *options = &side->options;
    const StepPlan *plan = feed_plan(feed);
    int dp = options->place->coords.at[GRID_AXIS_DP];
    Range items = plan->microbatches[microbatch].crossings[options->encoder].encoder_items[dp];
    bool is_audio = options->media == SAMPLE_MEDIA_AUDIO;
    slot->batch = (ModuleBatch){.num_items = range_count(items)};
    CHECK(slot->batch.num_items <= options->items_max);
    for (int64_t i = 0; is_audio && i < slot->batch.num_items; i++) {
        int64_t frames = audio_frames(plan->items[options->encoder][items.begin + i].rows);
        slot->frame_begins[i + 1] = slot->frame_begins[i] + (int32_t)frames;
    }
    slot->batch.frame_begins = slot->frame_begins;
    if (slot->input) {
        TRY(feed_take_items(feed, options->encoder, microbatch, slot->input, stream));
        slot->batch.pixels = is_audio ? NULL : slot->input;
        slot->batch.frames = is_audio ? (const float *)(const void *)slot->input : NULL;
    }
    slot->microbatch = microbatch;
    return STATUS_OK;
}

Status encoder_side_batch(EncoderSide *side, Feed *feed, int microbatch, Stream *stream,
                          const ModuleBatch **batch_out)
{
    EncoderSlot *slot = &side->slots[microbatch % side->options.slots];
    if (slot->microbatch != microbatch) {
        TRY(fill(side, slot, feed, microbatch, stream));
    }
    *batch_out = &slot->batch;
    return STATUS_OK;
}

float *encoder_side_rows(const EncoderSide *side, int microbatch)
{
    return side->rows ? side->rows[microbatch % side->options.row_slots] : NULL;
}

float *encoder_side_rows_grad(const EncoderSide *side, int microbatch)
{
    return side->rows_grads ? side->rows_grads[microbatch % side->options.row_slots] : NULL;
}
