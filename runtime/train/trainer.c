#include "train/trainer.h"

#include "base/clock.h"
#include "base/hash.h"
#include "base/memory.h"
#include "checkpoint/checkpoint.h"
#include "job/message.h"
#include "reshard/reshard.h"
#include "train/evaluation.h"
#include "train/executor.h"

#include <inttypes.h>
#include <string.h>

enum {
    TRAINER_PATH_BYTES = 4096,
    TRAINER_CACHE_BYTES = 256 << 20 /* decoded images that an encoder rank may keep */
};

/* The modules of a job as the schedule sees them: the encoder feeds the decoder. */
static const ScheduleGraph trainer_graph = {
    .num_modules = 2,
    .modules = {{.feeds = 1, .is_trained = true}, {.feeds = -1, .is_trained = true}},
};

struct Trainer {
    TrainerOptions options;
    Place place;
    int window;
    StepBounds bounds;
    Comm *tp;
    Comm *dp;
    Stream *stream;
    Dataset *dataset;
    StepSample *samples;
    StepSource source;
    Feed *feed;
    Evaluation *evaluation; /* NULL: no held-out data */
    Boundary *boundary;
    Module *module;
    Gradients gradients;
    Optimizer optimizer;
    Schedule schedule;
    Executor executor;
    int64_t step; /* done, discarded ones included */
    int64_t evaluated_step;
    int64_t saved_step;
    atomic_bool stop;
};

/* ---------------------------------------------------------------- create */

static Status open_data(Trainer *trainer)
{
    const JobSpec *spec = trainer->options.spec;
    const DatasetOptions options = {
        .patterns = spec->data->train,
        .num_patterns = (int)spec->data->n_train,
        .prompt = spec->data->prompt,
        .rows_per_image = module_rows_per_image(spec->model),
        .image_size = spec->model->vision->image_size,
        .max_tokens = spec->model->llm->max_tokens,
    };
    TRY(dataset_open(&options, &trainer->dataset));
    if (dataset_count(trainer->dataset) == 0) {
        return fail(STATUS_INVALID, "data.train has no samples");
    }
    TRY(feed_read_sizes(trainer->dataset, &trainer->samples));
    trainer->source = (StepSource){
        .seed = spec->training->seed,
        .samples = trainer->samples,
        .num_samples = dataset_count(trainer->dataset),
        .batch = spec->training->global_batch,
        .microbatches = spec->training->microbatches,
        .encoder_dp = trainer->place.encoder.sizes[GRID_AXIS_DP],
        .llm_dp = trainer->place.llm.sizes[GRID_AXIS_DP],
        .rows_per_image = options.rows_per_image,
    };
    return step_plan_bounds(&trainer->source, &trainer->bounds);
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static Status open_evaluation(Trainer *trainer)
{
    const EvaluationOptions options = {.spec = trainer->options.spec,
                                       .graph = &trainer_graph,
                                       .place = &trainer->place,
                                       .dp = trainer->dp,
                                       .window = trainer->window};
    if (options.spec->data->n_heldout == 0) {
        return STATUS_OK;
    }
    TRY(evaluation_open(&options, &trainer->evaluation));
    StepBounds bounds;
    TRY(evaluation_bounds(trainer->evaluation, &bounds));
    StepBounds *all = &trainer->bounds;
    *all = (StepBounds){.encoder_images = larger(all->encoder_images, bounds.encoder_images),
                        .llm_segments = larger(all->llm_segments, bounds.llm_segments),
                        .llm_tokens = larger(all->llm_tokens, bounds.llm_tokens),
                        .llm_rows = larger(all->llm_rows, bounds.llm_rows)};
    return STATUS_OK;
}

static Status open_groups(Trainer *trainer)
{
    const TrainerOptions *options = &trainer->options;
    TRY(place_split(&trainer->place, options->world, GRID_AXIS_TP, &trainer->tp));
    TRY(place_split(&trainer->place, options->world, GRID_AXIS_DP, &trainer->dp));
    TRY(stream_create(options->device, &trainer->stream));
    const BoundaryOptions boundary = {.world = options->world,
                                      .device = options->device,
                                      .kernels = kernels_for(options->device),
                                      .place = &trainer->place,
                                      .width = options->spec->model->llm->width,
                                      .window = trainer->window};
    return boundary_create(&boundary, &trainer->boundary);
}

static Status open_module(Trainer *trainer)
{
    const TrainerOptions *options = &trainer->options;
    const char *name = place_module(&trainer->place);
    const ModuleOps *ops = NULL;
    for (int i = 0; i < options->num_modules; i++) {
        ops = strcmp(options->modules[i]->name, name) == 0 ? options->modules[i] : ops;
    }
    if (!ops) {
        return fail(STATUS_UNSUPPORTED, "rank %d runs module \"%s\", which is not in this program",
                    trainer->place.rank, name);
    }
    const ModuleContext context = {.device = options->device,
                                   .kernels = kernels_for(options->device),
                                   .stream = trainer->stream,
                                   .tp = trainer->tp};
    const ModuleLimits limits = {.slots = trainer->place.is_encoder ? trainer->window : 1,
                                 .images = trainer->bounds.encoder_images,
                                 .tokens = trainer->bounds.llm_tokens,
                                 .segments = trainer->bounds.llm_segments,
                                 .rows = trainer->bounds.llm_rows};
    TRY(ops->create(options->spec->model, &context, &limits, &trainer->module));
    ParamSet *params = &trainer->module->params;
    TRY(param_set_fill(params, options->spec->training->seed, trainer->stream));
    TRY(gradients_init(&trainer->gradients, params, trainer->tp, trainer->dp));
    return optimizer_init(&trainer->optimizer, options->spec->optimizer, params, context.kernels);
}

static Status open_side(Trainer *trainer)
{
    const TrainerOptions *options = &trainer->options;
    const SideContext context = {
        .device = options->device,
        .stream = trainer->stream,
        .kernels = kernels_for(options->device),
        .place = &trainer->place,
        .boundary = trainer->boundary,
        .module = trainer->module,
        .window = trainer->window,
        .width = options->spec->model->llm->width,
        .bounds = trainer->bounds,
        .rows_per_image = module_rows_per_image(options->spec->model),
        .image_size = options->spec->model->vision->image_size,
    };
    if (trainer->place.is_encoder) {
        return encoder_side_create(&context, &trainer->executor.encoder_side);
    }
    return llm_side_create(&context, &trainer->executor.llm_side);
}

static Status open_executor(Trainer *trainer)
{
    const TrainerOptions *options = &trainer->options;
    Executor *executor = &trainer->executor;
    TRY(open_side(trainer));
    executor->place = &trainer->place;
    executor->world = options->world;
    executor->stream = trainer->stream;
    executor->kernels = kernels_for(options->device);
    executor->module = trainer->module;
    executor->boundary = trainer->boundary;
    executor->gradients = &trainer->gradients;
    executor->optimizer = &trainer->optimizer;
    executor->spec = options->spec;
    executor->events = &trainer->options.events;
    executor->stop = &trainer->stop;
    executor->timeout_ms = message_duration_ms(options->spec->timeouts->step);
    TRY(device_alloc(options->device, (int64_t)sizeof(Ballot), (void **)&executor->ballot_device));
    const ScheduleOptions schedule = {.graph = &trainer_graph,
                                      .microbatches = options->spec->training->microbatches,
                                      .window = trainer->window,
                                      .is_training = true};
    return schedule_make(&schedule, trainer->place.is_encoder ? 0 : 1, &trainer->schedule);
}

static CheckpointPart checkpoint_part(Trainer *trainer)
{
    return (CheckpointPart){.module = place_module(&trainer->place),
                            .params = &trainer->module->params,
                            .m = trainer->optimizer.m,
                            .v = trainer->optimizer.v,
                            .writes = trainer->place.dp == 0};
}

static Status resume(Trainer *trainer)
{
    const TrainingSpec *training = trainer->options.spec->training;
    const char *path = trainer->options.resume_from;
    if (!path) {
        return STATUS_OK;
    }
    CheckpointPart part = checkpoint_part(trainer);
    CheckpointState state;
    TRY(checkpoint_load(path, &part, &state, trainer->stream));
    if (state.seed != training->seed) {
        return fail(STATUS_INVALID, "%s: written with seed %" PRIu64 ", this job has seed %" PRIu64,
                    path, state.seed, training->seed);
    }
    if (state.data_hash != dataset_hash(trainer->dataset)) {
        return fail(STATUS_INVALID, "%s: written while training on other data than data.train now",
                    path);
    }
    if (state.step < 0 || state.samples < 0 || state.samples % training->global_batch != 0) {
        return fail(STATUS_INVALID,
                    "%s: %" PRId64 " samples in %" PRId64
                    " steps, expected a multiple of global_batch %d",
                    path, state.samples, state.step, training->global_batch);
    }
    trainer->step = state.step;
    trainer->saved_step = state.step;
    trainer->executor.updates = state.samples / training->global_batch;
    return STATUS_OK;
}

static Status spec_hash(const JobSpec *spec, uint64_t *hash_out)
{
    size_t size_bytes = viaduct__v1__job_spec__get_packed_size(spec);
    uint8_t *bytes = NULL;
    TRY(MEMORY_NEW(&bytes, size_bytes + 1));
    viaduct__v1__job_spec__pack(spec, bytes);
    *hash_out = hash_bytes(HASH_SEED, bytes, size_bytes);
    memory_free(bytes);
    return STATUS_OK;
}

/* Plans are made on each rank by itself: what they are made from must be the same everywhere. */
static Status agree(Trainer *trainer)
{
    const Executor *executor = &trainer->executor;
    double *values = &executor->ballot_device->encoder_square;
    uint64_t job = 0;
    TRY(spec_hash(trainer->options.spec, &job));
    TRY(vote_agree(executor->world, values, job, "job", trainer->stream, executor->timeout_ms));
    uint64_t data = dataset_hash(trainer->dataset);
    if (trainer->evaluation) {
        data = hash_u64(data, evaluation_data_hash(trainer->evaluation));
    }
    TRY(vote_agree(executor->world, values, data, "data", trainer->stream, executor->timeout_ms));
    uint64_t begin = hash_u64((uint64_t)trainer->step, (uint64_t)executor->updates);
    return vote_agree(executor->world, values, begin, "checkpoint to begin from", trainer->stream,
                      executor->timeout_ms);
}

static Status open_feed(Trainer *trainer)
{
    const JobSpec *spec = trainer->options.spec;
    const FeedOptions options = {
        .dataset = trainer->dataset,
        .source = &trainer->source,
        .place = &trainer->place,
        .loader_threads = spec->data->loader_threads,
        .cache_bytes = TRAINER_CACHE_BYTES,
        .first_step = trainer->step + 1,
        .last_step = spec->training->steps,
        .timeout_ms = trainer->executor.timeout_ms,
        .stop = &trainer->stop,
    };
    return feed_create(&options, &trainer->feed);
}

static Status build(Trainer *trainer)
{
    const TrainingSpec *training = trainer->options.spec->training;
    TRY(place_make(trainer->options.spec, trainer->options.world, &trainer->place));
    /* More microbatches ahead than the boundary can keep apart, or than there are, gain nothing. */
    trainer->window =
        (int)smaller(smaller(training->encoder_window, training->microbatches), RESHARD_WINDOW_MAX);
    TRY(open_groups(trainer));
    TRY(open_data(trainer));
    TRY(open_evaluation(trainer));
    TRY(open_module(trainer));
    TRY(open_executor(trainer));
    TRY(resume(trainer));
    TRY(agree(trainer));
    return open_feed(trainer);
}

/* No rank may wait for one that cannot go on. */
static Status give_up(Trainer *trainer, Status status)
{
    comm_abort(trainer->options.world, status_message());
    return status_trace(status, __FILE__, __LINE__);
}

Status trainer_create(const TrainerOptions *options, Trainer **trainer_out)
{
    Trainer *trainer = NULL;
    TRY(MEMORY_NEW(&trainer, 1));
    trainer->options = *options;
    atomic_init(&trainer->stop, false);
    Status status = build(trainer);
    if (status != STATUS_OK) {
        comm_abort(options->world, status_message());
        trainer_destroy(trainer);
        return status_trace(status, __FILE__, __LINE__);
    }
    *trainer_out = trainer;
    return STATUS_OK;
}

void trainer_destroy(Trainer *trainer)
{
    if (!trainer) {
        return;
    }
    feed_destroy(trainer->feed);
    evaluation_close(trainer->evaluation);
    dataset_close(trainer->dataset);
    memory_free(trainer->samples);
    encoder_side_destroy(trainer->executor.encoder_side);
    llm_side_destroy(trainer->executor.llm_side);
    if (trainer->executor.ballot_device) {
        device_free(trainer->options.device, trainer->executor.ballot_device,
                    (int64_t)sizeof(Ballot));
    }
    schedule_done(&trainer->schedule);
    optimizer_done(&trainer->optimizer);
    gradients_done(&trainer->gradients);
    if (trainer->module) {
        trainer->module->ops->destroy(trainer->module);
    }
    boundary_destroy(trainer->boundary);
    comm_destroy(trainer->dp);
    comm_destroy(trainer->tp);
    if (trainer->stream) {
        stream_destroy(trainer->stream);
    }
    memory_free(trainer);
}

/* ---------------------------------------------------------------- run */

static Status run_step(Trainer *trainer, TrainerStep *step)
{
    Executor *executor = &trainer->executor;
    step->step = trainer->step + 1;
    executor->step = step;
    if (executor->mark_ns == 0) {
        executor->mark_ns = clock_now_ns();
    }
    feed_begin(trainer->feed, step->step);
    const ExecutorPass pass = {
        .schedule = &trainer->schedule, .feed = trainer->feed, .step = step->step, .label = ""};
    TRY(gradients_zero(&trainer->gradients, trainer->stream));
    TRY(executor_run(executor, &pass));
    trainer->step++;
    return STATUS_OK;
}

Status trainer_step(Trainer *trainer, TrainerStep *step_out)
{
    if (trainer->step >= trainer->options.spec->training->steps) {
        return fail(STATUS_NOT_FOUND, "all %" PRId64 " steps are done",
                    trainer->options.spec->training->steps);
    }
    TrainerStep step = {0};
    Status status = run_step(trainer, &step);
    if (status != STATUS_OK) {
        return give_up(trainer, status);
    }
    if (step_out) {
        *step_out = step;
    }
    return STATUS_OK;
}

static bool is_first_llm(const Trainer *trainer)
{
    return trainer->place.rank == trainer->place.llm.first_rank;
}

static bool is_due(const Trainer *trainer, int64_t every_steps)
{
    bool is_last = trainer->step >= trainer->options.spec->training->steps;
    return is_last || (every_steps > 0 && trainer->step % every_steps == 0);
}

static Status evaluate(Trainer *trainer)
{
    const TrainerEvents *events = &trainer->options.events;
    if (!trainer->evaluation || trainer->evaluated_step == trainer->step ||
        !is_due(trainer, trainer->options.spec->evaluation->every_steps)) {
        return STATUS_OK;
    }
    TrainerEvaluation result;
    TRY(evaluation_run(trainer->evaluation, &trainer->executor, trainer->step, &result));
    trainer->evaluated_step = trainer->step;
    if (events->evaluation && is_first_llm(trainer)) {
        events->evaluation(events->context, &result);
    }
    evaluation_result_done(&result);
    trainer->executor.mark_ns = 0; /* no step's time */
    return STATUS_OK;
}

static Status save(Trainer *trainer)
{
    const TrainerOptions *options = &trainer->options;
    const CheckpointSpec *spec = options->spec->checkpoint;
    if (!spec->directory[0] || trainer->saved_step == trainer->step ||
        !is_due(trainer, spec->every_steps)) {
        return STATUS_OK;
    }
    if (options->events.progress) {
        options->events.progress(options->events.context, "CHECKPOINT", trainer->step, -1);
    }
    const CheckpointPart part = checkpoint_part(trainer);
    const CheckpointState state = {.step = trainer->step,
                                   .seed = options->spec->training->seed,
                                   .data_hash = dataset_hash(trainer->dataset),
                                   .samples = trainer->executor.updates *
                                              options->spec->training->global_batch};
    char path[TRAINER_PATH_BYTES];
    Status status = checkpoint_save(spec->directory, spec->keep, &part, &state, options->world,
                                    trainer->stream, path, sizeof path);
    if (status != STATUS_OK) {
        return executor_fail(status, "", "CHECKPOINT", trainer->step, -1);
    }
    trainer->saved_step = trainer->step;
    if (options->events.checkpoint && is_first_llm(trainer)) {
        options->events.checkpoint(options->events.context, trainer->step, path);
    }
    trainer->executor.mark_ns = 0;
    return STATUS_OK;
}

static Status run_all(Trainer *trainer)
{
    const TrainerOptions *options = &trainer->options;
    while (trainer->step < options->spec->training->steps) {
        TrainerStep step = {0};
        TRY(run_step(trainer, &step));
        if (options->events.step) {
            options->events.step(options->events.context, &step);
        }
        TRY(evaluate(trainer));
        TRY(save(trainer));
    }
    return evaluate(trainer); /* of a job that had no step left */
}

Status trainer_run(Trainer *trainer)
{
    Status status = run_all(trainer);
    if (status != STATUS_OK) {
        return give_up(trainer, status);
    }
    return STATUS_OK;
}

void trainer_stop(Trainer *trainer, const char *reason)
{
    atomic_store(&trainer->stop, true);
    comm_abort(trainer->options.world, reason);
}

Module *trainer_module(Trainer *trainer)
{
    return trainer->module;
}
