#include "train/evaluation.h"

#include "base/clock.h"
#include "base/memory.h"
#include "train/caption.h"

#include <string.h>

typedef enum EvaluationPass {
    EVALUATION_RIGHT,
    EVALUATION_SHUFFLED,
    EVALUATION_CAPTIONS,
    EVALUATION_PASS_COUNT,
} EvaluationPass;

struct Evaluation {
    const JobSpec *spec;
    const Place *place;
    ScheduleGraph graph;
    Dataset *dataset;
    StepSample *samples;
    int64_t num_samples;
    int64_t *order;    /* [num_samples] all of them */
    int64_t *shuffled; /* [num_samples] whose images and clips each sample gets */
    int64_t *captions; /* [num_captions] samples spread over the data */
    int num_captions;
    StepSource sources[EVALUATION_PASS_COUNT];
    Schedule schedules[EVALUATION_PASS_COUNT];
};

/* ---------------------------------------------------------------- what is shown */

/* Which media a sample shows, as bits. */
static unsigned media_of(const StepSample *sample)
{
    unsigned media = 0;
    for (int32_t i = 0; i < sample->num_items; i++) {
        media |= 1U << sample->items[i].media;
    }
    return media;
}

/* Of the samples that show the same media each gets the items of the one half their list away:
 * neighbours are often alike. */
static Status shuffle_items(Evaluation *evaluation)
{
    int64_t *alike = NULL;
    TRY(MEMORY_NEW(&alike, evaluation->num_samples));
    for (unsigned media = 0; media < 1U << SAMPLE_MEDIA_COUNT; media++) {
        int64_t num = 0;
        for (int64_t i = 0; i < evaluation->num_samples; i++) {
            if (media_of(&evaluation->samples[i]) == media) {
                alike[num++] = i;
            }
        }
        for (int64_t i = 0; i < num; i++) {
            evaluation->shuffled[alike[i]] = alike[(i + (num + 1) / 2) % num];
        }
    }
    memory_free(alike);
    return STATUS_OK;
}

static void set_sources(Evaluation *evaluation)
{
    StepSource source = feed_source(evaluation->spec, evaluation->place, evaluation->samples,
                                    evaluation->num_samples);
    source.order = evaluation->order;
    source.num_ordered = evaluation->num_samples;
    evaluation->sources[EVALUATION_RIGHT] = source;
    source.items_from = evaluation->shuffled;
    evaluation->sources[EVALUATION_SHUFFLED] = source;
    source.items_from = NULL;
    source.order = evaluation->captions;
    source.num_ordered = evaluation->num_captions;
    source.batch = evaluation->num_captions > 0 ? evaluation->num_captions : 1;
    source.microbatches = 1;
    evaluation->sources[EVALUATION_CAPTIONS] = source;
}

static Status choose_samples(Evaluation *evaluation)
{
    int64_t count = evaluation->num_samples;
    int64_t wanted = evaluation->spec->evaluation->captions;
    evaluation->num_captions = (int)(wanted < count ? wanted : count);
    TRY(feed_read_sizes(evaluation->dataset, &evaluation->samples));
    TRY(MEMORY_NEW(&evaluation->order, count));
    TRY(MEMORY_NEW(&evaluation->shuffled, count));
    TRY(MEMORY_NEW(&evaluation->captions, evaluation->num_captions));
    for (int64_t i = 0; i < count; i++) {
        evaluation->order[i] = i;
    }
    for (int64_t i = 0; i < evaluation->num_captions; i++) {
        evaluation->captions[i] = i * count / evaluation->num_captions;
    }
    return shuffle_items(evaluation);
}

static Status open_all(Evaluation *evaluation)
{
    const DataSpec *data = evaluation->spec->data;
    TRY(feed_open_dataset(evaluation->spec, data->heldout, data->n_heldout, &evaluation->dataset));
    evaluation->num_samples = dataset_count(evaluation->dataset);
    if (evaluation->num_samples == 0) {
        return fail(STATUS_INVALID, "data.heldout has no samples");
    }
    TRY(choose_samples(evaluation));
    set_sources(evaluation);
    return STATUS_OK;
}

Status evaluation_open(const JobSpec *spec, const Place *place, Evaluation **evaluation_out)
{
    Evaluation *evaluation = NULL;
    TRY(MEMORY_NEW(&evaluation, 1));
    evaluation->spec = spec;
    evaluation->place = place;
    Status status = open_all(evaluation);
    if (status != STATUS_OK) {
        evaluation_close(evaluation);
        return status_trace(status, __FILE__, __LINE__);
    }
    *evaluation_out = evaluation;
    return STATUS_OK;
}

void evaluation_close(Evaluation *evaluation)
{
    if (!evaluation) {
        return;
    }
    for (int p = 0; p < EVALUATION_PASS_COUNT; p++) {
        schedule_done(&evaluation->schedules[p]);
    }
    dataset_close(evaluation->dataset);
    memory_free(evaluation->samples);
    memory_free(evaluation->order);
    memory_free(evaluation->shuffled);
    memory_free(evaluation->captions);
    memory_free(evaluation);
}

Status evaluation_schedule(Evaluation *evaluation, const ScheduleGraph *graph, int window)
{
    evaluation->graph = *graph;
    for (int p = 0; p < EVALUATION_PASS_COUNT; p++) {
        const ScheduleOptions options = {.graph = &evaluation->graph,
                                         .microbatches = evaluation->sources[p].microbatches,
                                         .window = window};
        TRY(schedule_make(&options, evaluation->place->rank, &evaluation->schedules[p]));
    }
    return STATUS_OK;
}

Status evaluation_bounds(const Evaluation *evaluation, StepBounds *bounds_out,
                         int64_t *whole_rows_out)
{
    StepBounds all = {0};
    int64_t whole_rows = 0;
    for (int p = 0; p < EVALUATION_PASS_COUNT; p++) {
        StepBounds bounds;
        TRY(step_plan_bounds(&evaluation->sources[p], &bounds));
        if (p == EVALUATION_CAPTIONS) {
            bounds.llm_tokens += bounds.llm_segments * evaluation->spec->evaluation->max_new_tokens;
            for (int e = 0; e < place_num_encoders(evaluation->place); e++) {
                whole_rows += evaluation->num_captions > 0 ? bounds.llm_rows[e] : 0;
            }
        }
        step_bounds_widen(&all, &bounds);
    }
    *bounds_out = all;
    *whole_rows_out = whole_rows;
    return STATUS_OK;
}

static int larger(int a, int b)
{
    return a > b ? a : b;
}

void evaluation_widen_slots(const Evaluation *evaluation, ScheduleSlots *slots)
{
    for (int p = 0; p < EVALUATION_PASS_COUNT; p++) {
        for (int i = 0; i < evaluation->place->num_modules; i++) {
            const ScheduleSlots *needed = &evaluation->schedules[p].slots[i];
            for (int c = 0; c < SCHEDULE_CHUNKS_MAX; c++) {
                slots[i].chunks[c] = larger(slots[i].chunks[c], needed->chunks[c]);
            }
            slots[i].microbatches = larger(slots[i].microbatches, needed->microbatches);
            slots[i].rows = larger(slots[i].rows, needed->rows);
        }
    }
}

uint64_t evaluation_data_hash(const Evaluation *evaluation)
{
    return dataset_hash(evaluation->dataset);
}

/* ---------------------------------------------------------------- passes */

static Status open_feed(const Evaluation *evaluation, const Executor *executor, EvaluationPass pass,
                        Feed **feed_out)
{
    const StepSource *source = &evaluation->sources[pass];
    const FeedOptions options = {
        .dataset = evaluation->dataset,
        .source = source,
        .place = evaluation->place,
        .loader_threads = evaluation->spec->data->loader_threads,
        .first_step = 1,
        .last_step = step_plan_count(source),
        .kind = 1 + (uint64_t)pass, /* 0 is training */
        .timeout_ms = executor->timeout_ms,
        .stop = executor->stop,
    };
    return feed_create(&options, feed_out);
}

/* Adds up the losses of this rank's replica over the whole data; every rank counts all labels. */
static Status run_steps(Evaluation *evaluation, Executor *executor, EvaluationPass kind, Feed *feed,
                        int64_t step, double *loss_sum, int64_t *labels)
{
    const ExecutorPass pass = {.schedule = &evaluation->schedules[kind],
                               .feed = feed,
                               .step = step,
                               .label = "evaluation "};
    int64_t steps = step_plan_count(&evaluation->sources[kind]);
    for (int64_t i = 1; i <= steps; i++) {
        feed_begin(feed, i);
        TRY(executor_run(executor, &pass));
        TRY(stream_wait(executor->stream, clock_deadline_in_ms(executor->timeout_ms)));
        *loss_sum += executor_counts_loss(executor) ? executor->loss_sum : 0.0;
        *labels += feed_plan(feed)->num_labels;
    }
    return STATUS_OK;
}

static Status run_loss(Evaluation *evaluation, Executor *executor, EvaluationPass kind,
                       int64_t step, double *loss_out, int64_t *labels_out)
{
    Feed *feed = NULL;
    TRY(open_feed(evaluation, executor, kind, &feed));
    double loss_sum = 0.0;
    int64_t labels = 0;
    Status status = run_steps(evaluation, executor, kind, feed, step, &loss_sum, &labels);
    feed_destroy(feed);
    TRY(status);
    TRY(vote_reduce(executor->world, executor->ballot_device->squares, &loss_sum, 1,
                    COMM_REDUCE_SUM, executor->stream, executor->timeout_ms));
    *loss_out = labels > 0 ? loss_sum / (double)labels : 0.0;
    *labels_out = labels;
    return STATUS_OK;
}

static Status run_captions(Evaluation *evaluation, Executor *executor, int64_t step,
                           TrainerEvaluation *result)
{
    if (evaluation->num_captions == 0) {
        return STATUS_OK;
    }
    Feed *feed = NULL;
    TRY(open_feed(evaluation, executor, EVALUATION_CAPTIONS, &feed));
    feed_begin(feed, 1);
    const CaptionRun run = {.executor = executor,
                            .feed = feed,
                            .encode = &evaluation->schedules[EVALUATION_CAPTIONS],
                            .step = step,
                            .max_new_tokens = evaluation->spec->evaluation->max_new_tokens,
                            .max_tokens = evaluation->spec->model->llm->max_tokens};
    Status status = caption_generate(&run, &result->captions, &result->num_captions);
    feed_destroy(feed);
    TRY(status);
    return STATUS_OK;
}

Status evaluation_run(Evaluation *evaluation, Executor *executor, int64_t step,
                      TrainerEvaluation *result_out)
{
    TrainerEvaluation result = {.step = step};
    TRY(run_loss(evaluation, executor, EVALUATION_RIGHT, step, &result.heldout_loss,
                 &result.labels));
    TRY(run_loss(evaluation, executor, EVALUATION_SHUFFLED, step, &result.heldout_loss_shuffled,
                 &result.labels));
    TRY(run_captions(evaluation, executor, step, &result));
    *result_out = result;
    return STATUS_OK;
}

void evaluation_result_done(TrainerEvaluation *result)
{
    caption_free(result->captions, result->num_captions);
    *result = (TrainerEvaluation){0};
}
