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
    int64_t *lasts;   /* [num] token of the packed batch after which the next is asked for */
    int32_t *tokens;  /* [num] those of them that this cp rank has, in its own count */
    int32_t *answers; /* [num] */
    double *nexts;    /* [num] ids, exact in a double; device and host alike */
    double *nexts_device;
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

static Device *device_of(const CaptionRun *run)
{
    return executor_decoder(run->executor)->module->params.device;
}

static int64_t nexts_bytes(const Drafts *drafts)
{
    return drafts->num * (int64_t)sizeof(double);
}

static Status open_drafts(const CaptionRun *run, Range samples, Drafts *drafts)
{
    const StepPlan *plan = feed_plan(run->feed);
    const Dataset *dataset = feed_dataset(run->feed);
    drafts->num = (int)range_count(samples);
    TRY(MEMORY_NEW(&drafts->drafts, drafts->num));
    TRY(MEMORY_NEW(&drafts->lasts, drafts->num));
    TRY(MEMORY_NEW(&drafts->tokens, drafts->num));
    TRY(MEMORY_NEW(&drafts->answers, drafts->num));
    TRY(MEMORY_NEW(&drafts->nexts, drafts->num));
    TRY(device_alloc(device_of(run), nexts_bytes(drafts), (void **)&drafts->nexts_device));
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

static void close_drafts(const CaptionRun *run, Drafts *drafts)
{
    for (int i = 0; drafts->drafts && i < drafts->num; i++) {
        memory_free(drafts->drafts[i].ids);
    }
    memory_free(drafts->drafts);
    memory_free(drafts->lasts);
    memory_free(drafts->tokens);
    memory_free(drafts->answers);
    memory_free(drafts->nexts);
    if (drafts->nexts_device) {
        device_free(device_of(run), drafts->nexts_device, nexts_bytes(drafts));
    }
}

/* All drafts as one batch; finished ones stay in it, since the rows stand in their order. The rows
 * that this rank's tokens take are picked from those of the replica. */
static Status pack_drafts(const CaptionRun *run, const Drafts *drafts, ModuleBatch *batch)
{
    Executor *executor = run->executor;
    const RankModule *decoder = executor_decoder(executor);
    TextBatch *text = llm_side_text(decoder->llm);
    text_batch_begin(text);
    for (int i = 0; i < drafts->num; i++) {
        TRY(text_batch_add_ids(text, drafts->drafts[i].ids, drafts->drafts[i].num));
    }
    TRY(text_batch_upload(text, executor->stream, batch));
    float *rows = llm_side_rows(decoder->llm, 0);
    batch->rows = rows;
    if (!rows) {
        return STATUS_OK;
    }
    return executor->kernels->gather_rows(rows, llm_side_whole_rows(decoder->llm),
                                          text_batch_row_sources(text), batch->num_rows,
                                          executor->spec->model->llm->width, executor->stream);
}

/* One forward pass through all parts, one after another. */
static Status forward_drafts(const CaptionRun *run, const ModuleBatch *batch)
{
    Executor *executor = run->executor;
    RankModule *decoder = executor_decoder(executor);
    Module *module = decoder->module;
    int last = rank_module_parts(decoder) - 1;
    StageMessage message = {.flow = STAGE_FLOW_ACTIVATIONS,
                            .count = module->ops->count_local(module, batch) * module->width,
                            .tag = feed_kind(run->feed)};
    for (int c = 0; c < decoder->place->chunks; c++) {
        int part = rank_module_part(decoder, c);
        message.chunk = c;
        if (part > 0) {
            message.data = module->ops->input(module, c, 0);
            TRY(stage_link_recv(decoder->link, &message, executor->stream));
        }
        if (part < last && decoder->link) {
            TRY(stage_link_finish(decoder->link, STAGE_FLOW_ACTIVATIONS, c, 0, executor->stream));
        }
        TRY(module->ops->forward(module, c, 0, batch, NULL, NULL));
        if (part < last) {
            message.data = (float *)module->ops->output(module, c, 0);
            TRY(stage_link_send(decoder->link, &message, executor->stream));
        }
    }
    return STATUS_OK;
}

/* nexts [num]: the likeliest id after each draft's last token, 0 for drafts that are done. The
 * ranks of the last stage that have the tokens know; sums over cp and a broadcast over the stages
 * tell all. */
static Status predict_nexts(const CaptionRun *run, Drafts *drafts)
{
    Executor *executor = run->executor;
    const RankModule *decoder = executor_decoder(executor);
    const TextBatch *text = llm_side_text(decoder->llm);
    Stream *stream = executor->stream;
    Comm *cp = decoder->groups[PLACE_GROUP_CP];
    Comm *pp = decoder->groups[PLACE_GROUP_PP];
    memset(drafts->nexts, 0, (size_t)nexts_bytes(drafts));
    if (place_is_last_stage(decoder->place)) {
        int32_t num = 0;
        for (int i = 0; i < drafts->num; i++) {
            int32_t token = text_batch_find(text, drafts->lasts[i]);
            if (!drafts->drafts[i].is_done && token >= 0) {
                drafts->tokens[num++] = token;
            }
        }
        TRY(decoder->module->ops->predict(decoder->module, 0, drafts->tokens, num,
                                          drafts->answers));
        for (int i = drafts->num - 1; i >= 0; i--) {
            if (!drafts->drafts[i].is_done && text_batch_find(text, drafts->lasts[i]) >= 0) {
                drafts->nexts[i] = drafts->answers[--num];
            }
        }
    }
    TRY(stream_copy(stream, drafts->nexts_device, drafts->nexts, nexts_bytes(drafts)));
    if (place_is_last_stage(decoder->place)) {
        TRY(comm_all_reduce(cp, drafts->nexts_device, drafts->num, DTYPE_F64, COMM_REDUCE_SUM,
                            stream));
    }
    TRY(comm_broadcast(pp, drafts->nexts_device, nexts_bytes(drafts), pp->size - 1, stream));
    TRY(stream_copy(stream, drafts->nexts, drafts->nexts_device, nexts_bytes(drafts)));
    return stream_wait(stream, clock_deadline_in_ms(executor->timeout_ms));
}

/* Asks for the next token of each draft that is not done; *left_out: how many go on. */
static Status extend_drafts(const CaptionRun *run, Drafts *drafts, int *left_out)
{
    ModuleBatch batch;
    TRY(pack_drafts(run, drafts, &batch));
    TRY(forward_drafts(run, &batch));
    int64_t end = 0;
    for (int i = 0; i < drafts->num; i++) {
        end += drafts->drafts[i].num;
        drafts->lasts[i] = end - 1;
    }
    TRY(predict_nexts(run, drafts));
    int left = 0;
    for (int i = 0; i < drafts->num; i++) {
        Draft *draft = &drafts->drafts[i];
        if (draft->is_done) {
            continue;
        }
        int32_t next = (int32_t)drafts->nexts[i];
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

/* All ranks of the world go token by token together, the encoders' too: however long the captions
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
        TRY(vote_reduce(executor->world, executor->ballot_device->squares, &all_left, 1,
                        COMM_REDUCE_SUM, executor->stream, executor->timeout_ms));
        if (all_left == 0.0) {
            break;
        }
        if (left > 0) {
            TRY(extend_drafts(run, drafts, &left));
        }
    }
    return STATUS_OK;
}

/* ---------------------------------------------------------------- gathering */

/* A record is {number of ids, ids [max_new_tokens]}. records [num] of them; each replica has filled
 * its own, and of its ranks those with cp 0 bring them (data group: cp varies faster than dp). */
static Status gather(const CaptionRun *run, int32_t *records, int num)
{
    Executor *executor = run->executor;
    const RankModule *decoder = executor_decoder(executor);
    Comm *data = decoder->groups[PLACE_GROUP_DATA];
    const Range *samples = feed_plan(run->feed)->microbatches[0].llm_samples;
    int cp_size = decoder->place->grid.sizes[GRID_AXIS_CP];
    int64_t record_bytes = (1 + (int64_t)run->max_new_tokens) * (int64_t)sizeof *records;
    int64_t *begins = NULL;
    void *memory = NULL;
    TRY(MEMORY_NEW(&begins, data->size + 1));
    for (int i = 0; i < data->size; i++) {
        begins[i + 1] = samples[i / cp_size].end * record_bytes;
    }
    Status status = device_alloc(device_of(run), num * record_bytes, &memory);
    if (status == STATUS_OK) {
        status = stream_copy(executor->stream, memory, records, num * record_bytes);
    }
    if (status == STATUS_OK) {
        status = comm_all_gather(data, memory, begins, executor->stream);
    }
    if (status == STATUS_OK) {
        status = stream_copy(executor->stream, records, memory, num * record_bytes);
    }
    if (status == STATUS_OK) {
        status = stream_wait(executor->stream, clock_deadline_in_ms(executor->timeout_ms));
    }
    if (memory) {
        device_free(device_of(run), memory, num * record_bytes);
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
    const PlaceModule *place = executor_decoder(run->executor)->place;
    Range samples =
        feed_plan(run->feed)->microbatches[0].llm_samples[place->coords.at[GRID_AXIS_DP]];
    Drafts drafts = {0};
    Status status = open_drafts(run, samples, &drafts);
    if (status == STATUS_OK) {
        status = complete_drafts(run, &drafts);
    }
    if (status == STATUS_OK) {
        status = executor_drain(run->executor);
    }
    if (status == STATUS_OK) {
        record_drafts(run, &drafts, samples, records);
        status = gather(run, records, num);
    }
    close_drafts(run, &drafts);
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
    if (status == STATUS_OK && place->rank == place_decoder(place)->grid.first_rank) {
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
    const ExecutorPass pass = {.schedule = run->encode,
                               .feed = run->feed,
                               .step = run->step,
                               .label = "captions ",
                               .is_generation = true};
    TRY(executor_run(executor, &pass));
    Status status =
        executor_decoder(executor) ? generate_and_write(run, captions_out, num_out) : follow(run);
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
