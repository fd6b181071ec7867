#include "train/caption.h"

#include "base/clock.h"
#include "base/memory.h"

#include <string.h>

/* One sample on its way. */
typedef struct Draft {
    int32_t *ids; /* [num_tokens of the sample + max_new_tokens] prompt, then what was generated */
    int32_t num_prompt;
    int32_t num;
    bool is_done;
} Draft;

typedef struct Drafts {
    int num;
    Draft *drafts;
    int32_t *lasts; /* [num] token after which the next is asked for */
    int32_t *nexts; /* [num] */
} Drafts;

/* ---------------------------------------------------------------- text */

/* Bytes of the UTF-8 sequence that begins here; 0: it is none. */
static int sequence_bytes(const uint8_t *bytes, int left)
{
    uint8_t first = bytes[0];
    if (first < 0x80) {
        return first == 0 ? 0 : 1;
    }
    int length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
    if (first < 0xC2 || first > 0xF4 || length > left) {
        return 0;
    }
    for (int i = 1; i < length; i++) {
        if ((bytes[i] & 0xC0) != 0x80) {
            return 0;
        }
    }
    /* Longer than needed, a surrogate, or past U+10FFFF. */
    bool is_wrong = (first == 0xE0 && bytes[1] < 0xA0) || (first == 0xED && bytes[1] >= 0xA0) ||
                    (first == 0xF0 && bytes[1] < 0x90) || (first == 0xF4 && bytes[1] >= 0x90);
    return is_wrong ? 0 : length;
}

Status caption_text(const int32_t *ids, int num, char **text_out)
{
    static const char replacement[] = "\xEF\xBF\xBD"; /* U+FFFD */
    enum {
        REPLACEMENT_BYTES = sizeof replacement - 1
    };
    uint8_t *bytes = NULL;
    char *text = NULL;
    TRY(MEMORY_NEW(&bytes, num + 1));
    int num_bytes = 0;
    for (int i = 0; i < num; i++) {
        if (ids[i] >= 0 && ids[i] < TOKEN_BOS) {
            bytes[num_bytes++] = (uint8_t)ids[i];
        }
    }
    Status status = MEMORY_NEW(&text, REPLACEMENT_BYTES * num_bytes + 1);
    char *end = text;
    for (int i = 0; status == STATUS_OK && i < num_bytes;) {
        int length = sequence_bytes(bytes + i, num_bytes - i);
        int copied = length > 0 ? length : REPLACEMENT_BYTES;
        memcpy(end, length > 0 ? (const char *)bytes + i : replacement, (size_t)copied);
        end += copied;
        i += length > 0 ? length : 1;
    }
    memory_free(bytes);
    TRY(status);
    *text_out = text;
    return STATUS_OK;
}

/* ---------------------------------------------------------------- drafts */

static Status open_drafts(const CaptionRun *run, Range samples, Drafts *drafts)
{
    const StepPlan *plan = feed_plan(run->feed);
    const Dataset *dataset = feed_dataset(run->feed);
    drafts->num = (int)range_count(samples);
    TRY(MEMORY_NEW(&drafts->drafts, drafts->num));
    TRY(MEMORY_NEW(&drafts->lasts, drafts->num));
    TRY(MEMORY_NEW(&drafts->nexts, drafts->num));
    for (int i = 0; i < drafts->num; i++) {
        Draft *draft = &drafts->drafts[i];
        int64_t sample = plan->samples[samples.begin + i];
        int64_t capacity = dataset_sample(dataset, sample)->num_tokens + run->max_new_tokens;
        TRY(MEMORY_NEW(&draft->ids, capacity));
        TRY(dataset_read_prompt(dataset, sample, draft->ids, &draft->num_prompt));
        draft->num = draft->num_prompt;
    }
    return STATUS_OK;
}

static void close_drafts(Drafts *drafts)
{
    for (int i = 0; drafts->drafts && i < drafts->num; i++) {
        memory_free(drafts->drafts[i].ids);
    }
    memory_free(drafts->drafts);
    memory_free(drafts->lasts);
    memory_free(drafts->nexts);
}

/* One forward pass over all drafts; finished ones stay in the batch, since the rows stand in their
 * order. */
static Status forward_drafts(const CaptionRun *run, const Drafts *drafts)
{
    Executor *executor = run->executor;
    TextBatch *text = llm_side_text(executor->llm_side);
    ModuleBatch batch;
    text_batch_begin(text);
    for (int i = 0; i < drafts->num; i++) {
        TRY(text_batch_add_ids(text, drafts->drafts[i].ids, drafts->drafts[i].num));
    }
    TRY(text_batch_upload(text, executor->stream, &batch));
    batch.rows = llm_side_rows(executor->llm_side, 0);
    return executor->module->ops->forward(executor->module, 0, &batch, NULL, NULL);
}

/* Asks for the next token of each draft that is not done; *left_out: how many go on. */
static Status extend_drafts(const CaptionRun *run, Drafts *drafts, int *left_out)
{
    const Executor *executor = run->executor;
    int num = 0;
    int32_t end = 0;
    for (int i = 0; i < drafts->num; i++) {
        end += drafts->drafts[i].num;
        if (!drafts->drafts[i].is_done) {
            drafts->lasts[num++] = end - 1;
        }
    }
    TRY(executor->module->ops->predict(executor->module, 0, drafts->lasts, num, drafts->nexts));
    int at = 0;
    int left = 0;
    for (int i = 0; i < drafts->num; i++) {
        Draft *draft = &drafts->drafts[i];
        if (draft->is_done) {
            continue;
        }
        int32_t next = drafts->nexts[at++];
        /* An image's place without a row would be nonsense to go on from. */
        draft->is_done = next == TOKEN_EOS || next == TOKEN_IMAGE;
        if (!draft->is_done) {
            draft->ids[draft->num++] = next;
            draft->is_done = draft->num >= run->max_tokens;
        }
        left += !draft->is_done;
    }
    *left_out = left;
    return STATUS_OK;
}

/* All ranks of the world go token by token together, the encoder's too: however long the captions
 * take, nobody waits longer than for one forward pass. */
static Status complete_drafts(const CaptionRun *run, Drafts *drafts)
{
    Executor *executor = run->executor;
    int left = drafts->num;
    for (int i = 0; i < run->max_new_tokens; i++) {
        double all_left = left;
        if (executor->events->progress) {
            executor->events->progress(executor->events->context, "CAPTION", run->step, -1);
        }
        TRY(vote_sum(executor->world, &executor->ballot_device->encoder_square, &all_left, 1,
                     executor->stream, executor->timeout_ms));
        if (all_left == 0.0) {
            break;
        }
        if (left > 0) {
            TRY(forward_drafts(run, drafts));
            TRY(extend_drafts(run, drafts, &left));
        }
    }
    return STATUS_OK;
}

/* ---------------------------------------------------------------- gathering */

/* A record is {number of ids, ids [max_new_tokens]}. records [num] of them; each replica has filled
 * its own. */
static Status gather(const CaptionRun *run, int32_t *records, int num)
{
    Comm *dp = run->dp;
    Executor *executor = run->executor;
    int64_t record_bytes = (1 + (int64_t)run->max_new_tokens) * (int64_t)sizeof *records;
    int64_t *begins = NULL;
    void *memory = NULL;
    TRY(MEMORY_NEW(&begins, dp->size + 1));
    for (int l = 0; l < dp->size; l++) {
        begins[l + 1] = range_part(num, dp->size, l).end * record_bytes;
    }
    Status status = device_alloc(executor->module->params.device, num * record_bytes, &memory);
    if (status == STATUS_OK) {
        status = stream_copy(executor->stream, memory, records, num * record_bytes);
    }
    if (status == STATUS_OK) {
        status = comm_all_gather(dp, memory, begins, executor->stream);
    }
    if (status == STATUS_OK) {
        status = stream_copy(executor->stream, records, memory, num * record_bytes);
    }
    if (status == STATUS_OK) {
        status = stream_wait(executor->stream, clock_deadline_in_ms(executor->timeout_ms));
    }
    if (memory) {
        device_free(executor->module->params.device, memory, num * record_bytes);
    }
    memory_free(begins);
    return status;
}

static Status write_captions(const CaptionRun *run, const int32_t *records, int num,
                             TrainerCaption *captions)
{
    const Dataset *dataset = feed_dataset(run->feed);
    for (int i = 0; i < num; i++) {
        int64_t sample = feed_plan(run->feed)->samples[i];
        const int32_t *record = records + i * (1 + (int64_t)run->max_new_tokens);
        TRY(memory_copy_text(dataset_sample(dataset, sample)->key, &captions[i].sample));
        TRY(dataset_read_caption(dataset, sample, &captions[i].truth));
        TRY(caption_text(record + 1, record[0], &captions[i].generated));
    }
    return STATUS_OK;
}

static void record_drafts(const CaptionRun *run, const Drafts *drafts, Range samples,
                          int32_t *records)
{
    for (int i = 0; i < drafts->num; i++) {
        const Draft *draft = &drafts->drafts[i];
        int32_t *record = records + (samples.begin + i) * (1 + (int64_t)run->max_new_tokens);
        record[0] = draft->num - draft->num_prompt;
        memcpy(record + 1, draft->ids + draft->num_prompt, (size_t)record[0] * sizeof *record);
    }
}

static Status generate(const CaptionRun *run, int32_t *records, int num)
{
    const Place *place = run->executor->place;
    Range samples = feed_plan(run->feed)->microbatches[0].llm_samples[place->dp];
    Drafts drafts = {0};
    Status status = llm_side_recv_rows(run->executor->llm_side, run->feed, 0);
    if (status == STATUS_OK) {
        status = open_drafts(run, samples, &drafts);
    }
    if (status == STATUS_OK) {
        status = complete_drafts(run, &drafts);
    }
    if (status == STATUS_OK) {
        record_drafts(run, &drafts, samples, records);
        status = gather(run, records, num);
    }
    close_drafts(&drafts);
    return status;
}

static Status generate_and_write(const CaptionRun *run, TrainerCaption **captions_out, int *num_out)
{
    const Place *place = run->executor->place;
    int num = (int)feed_plan(run->feed)->num_samples;
    int32_t *records = NULL;
    TRY(MEMORY_NEW(&records, num * (1 + (int64_t)run->max_new_tokens)));
    Status status = generate(run, records, num);
    TrainerCaption *captions = NULL;
    if (status == STATUS_OK && place->rank == place->llm.first_rank) {
        status = MEMORY_NEW(&captions, num);
        if (status == STATUS_OK) {
            status = write_captions(run, records, num, captions);
        }
    }
    memory_free(records);
    if (status != STATUS_OK) {
        caption_free(captions, captions ? num : 0);
        return status_trace(status, __FILE__, __LINE__);
    }
    *captions_out = captions;
    *num_out = captions ? num : 0;
    return STATUS_OK;
}

static Status follow(const CaptionRun *run)
{
    Drafts none = {0};
    return complete_drafts(run, &none);
}

Status caption_generate(const CaptionRun *run, TrainerCaption **captions_out, int *num_out)
{
    Executor *executor = run->executor;
    *captions_out = NULL;
    *num_out = 0;
    if (executor->place->is_encoder) {
        const ExecutorPass pass = {
            .schedule = run->encode, .feed = run->feed, .step = run->step, .label = "captions "};
        TRY(executor_run(executor, &pass));
    }
    Status status =
        executor->place->is_encoder ? follow(run) : generate_and_write(run, captions_out, num_out);
    if (status != STATUS_OK) {
        return executor_fail(status, "", "CAPTION", run->step, -1);
    }
    return STATUS_OK;
}

void caption_free(TrainerCaption *captions, int num)
{
    for (int i = 0; i < num; i++) {
        memory_free(captions[i].sample);
        memory_free(captions[i].truth);
        memory_free(captions[i].generated);
    }
    memory_free(captions);
}
