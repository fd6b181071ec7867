#include "train/llm_side.h"

#include "base/memory.h"

enum {
    NO_MICROBATCH = -1
};

typedef struct LlmSlot {
    int microbatch; /* whose text it holds */
    TextBatch *text;
    ModuleBatch batch;
} LlmSlot;

struct LlmSide {
    LlmSideOptions options;
    LlmSlot *slots;     /* [options.slots] */
    float **rows;       /* [options.row_slots] */
    float **rows_grads; /* [options.row_slots] */
    float *whole_rows;
};

static int64_t rows_bytes(const LlmSide *side)
{
    return side->options.text.rows_max * side->options.width * (int64_t)sizeof(float);
}

static int64_t whole_bytes(const LlmSide *side)
{
    return side->options.whole_rows * side->options.width * (int64_t)sizeof(float);
}

static Status allocate_rows(LlmSide *side)
{
    Device *device = side->options.text.device;
    TRY(MEMORY_NEW(&side->rows, side->options.row_slots));
    TRY(MEMORY_NEW(&side->rows_grads, side->options.row_slots));
    for (int i = 0; i < side->options.row_slots; i++) {
        TRY(device_alloc(device, rows_bytes(side), (void **)&side->rows[i]));
        TRY(device_alloc(device, rows_bytes(side), (void **)&side->rows_grads[i]));
    }
    return device_alloc(device, whole_bytes(side), (void **)&side->whole_rows);
}

static Status allocate(LlmSide *side)
{
    TRY(MEMORY_NEW(&side->slots, side->options.slots));
    for (int i = 0; i < side->options.slots; i++) {
        TRY(text_batch_create(&side->options.text, &side->slots[i].text));
    }
    if (place_is_first_stage(side->options.place)) {
        TRY(allocate_rows(side));
    }
    llm_side_begin(side);
    return STATUS_OK;
}

Status llm_side_create(const LlmSideOptions *options, LlmSide **side_out)
{
    LlmSide *side = NULL;
    TRY(MEMORY_NEW(&side, 1));
    side->options = *options;
    Status status = allocate(side);
    if (status != STATUS_OK) {
        llm_side_destroy(side);
        return status_trace(status, __FILE__, __LINE__);
    }
    *side_out = side;
    return STATUS_OK;
}

static void release(const LlmSide *side, float *memory, int64_t size_bytes)
{
    if (memory) {
        device_free(side->options.text.device, memory, size_bytes);
    }
}

void llm_side_destroy(LlmSide *side)
{
    if (!side) {
        return;
    }
    for (int i = 0; side->slots && i < side->options.slots; i++) {
        text_batch_destroy(side->slots[i].text);
    }
    for (int i = 0; side->rows_grads && i < side->options.row_slots; i++) {
        release(side, side->rows[i], rows_bytes(side));
        release(side, side->rows_grads[i], rows_bytes(side));
    }
    release(side, side->whole_rows, whole_bytes(side));
    memory_free((void *)side->rows);
    memory_free((void *)side->rows_grads);
    memory_free(side->slots);
    memory_free(side);
}

void llm_side_begin(LlmSide *side)
{
    for (int i = 0; i < side->options.slots; i++) {
        side->slots[i].microbatch = NO_MICROBATCH;
    }
}

static LlmSlot *slot_of(const LlmSide *side, int microbatch)
{
    return &side->slots[microbatch % side->options.slots];
}

static Status pack(LlmSide *side, LlmSlot *slot, const Feed *feed, int microbatch, Stream *stream)
{
    const StepPlan *plan = feed_plan(feed);
    int dp = side->options.place->coords.at[GRID_AXIS_DP];
    Range samples = plan->microbatches[microbatch].llm_samples[dp];
    text_batch_begin(slot->text);
    for (int64_t i = samples.begin; i < samples.end; i++) {
        TRY(text_batch_add(slot->text, feed_dataset(feed), plan->samples[i]));
    }
    TRY(text_batch_upload(slot->text, stream, &slot->batch));
    slot->microbatch = microbatch;
    return STATUS_OK;
}

Status llm_side_batch(LlmSide *side, Feed *feed, int microbatch, float loss_scale, Stream *stream,
                      const ModuleBatch **batch_out)
{
    LlmSlot *slot = slot_of(side, microbatch);
    if (slot->microbatch != microbatch) {
        TRY(pack(side, slot, feed, microbatch, stream));
        slot->batch.rows = llm_side_rows(side, microbatch);
        slot->batch.loss_scale = loss_scale;
    }
    *batch_out = &slot->batch;
    return STATUS_OK;
}

int64_t llm_side_count_rows(const LlmSide *side, int microbatch, int encoder)
{
    return text_batch_count_rows(slot_of(side, microbatch)->text, encoder);
}

float *llm_side_rows(const LlmSide *side, int microbatch)
{
    return side->rows ? side->rows[microbatch % side->options.row_slots] : NULL;
}

float *llm_side_rows_grad(const LlmSide *side, int microbatch)
{
    return side->rows_grads ? side->rows_grads[microbatch % side->options.row_slots] : NULL;
}

float *llm_side_whole_rows(const LlmSide *side)
{
    return side->whole_rows;
}

TextBatch *llm_side_text(LlmSide *side)
{
    return side->slots[0].text;
}
