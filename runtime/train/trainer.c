#include "train/trainer.h"

#include "base/clock.h"
#include "base/hash.h"
#include "base/memory.h"
#include "checkpoint/checkpoint.h"
#include "data/audio.h"
#include "job/message.h"
#include "train/evaluation.h"
#include "train/executor.h"
#include "train/job_graph.h"
#include "train/simulator.h"

#include <inttypes.h>
#include <string.h>

enum {
    TRAINER_PATH_BYTES = 4096,
    TRAINER_CACHE_BYTES = 256 << 20 /* decoded images, and clips, that a rank may keep */
};

struct Trainer {
    TrainerOptions options;
    Place place;
    int window;
    StepBounds bounds;
    int64_t whole_rows; /* of a replica, for generation */
    Stream *stream;
    Dataset *dataset;
    StepSample *samples;
    StepSource source;
    Feed *feed;
    Evaluation *evaluation; /* NULL: no held-out data */
    ScheduleGraph graph;
    Schedule schedule;
    ScheduleSlots slots[JOB_MODULES_MAX]; /* for training and evaluation */
    RankModule modules[JOB_MODULES_MAX];
    Boundary *boundaries[STEP_ENCODERS_MAX];
    Executor executor;
    int64_t step; /* done, discarded ones included */
    int64_t evaluated_step;
    int64_t saved_step;
    atomic_bool stop;
};

/* ---------------------------------------------------------------- create */

static const ModuleOps *find_ops(const TrainerOptions *options, const char *name)
{
    for (int i = 0; i < options->num_modules; i++) {
        if (strcmp(options->modules[i]->name, name) == 0) {
            return options->modules[i];
        }
    }
    return NULL;
}

static Status open_data(Trainer *trainer)
{
    const JobSpec *spec = trainer->options.spec;
    TRY(feed_open_dataset(spec, spec->data->train, spec->data->n_train, &trainer->dataset));
    if (dataset_count(trainer->dataset) == 0) {
        return fail(STATUS_INVALID, "data.train has no samples");
    }
    TRY(feed_read_sizes(trainer->dataset, &trainer->samples));
    trainer->source =
        feed_source(spec, &trainer->place, trainer->samples, dataset_count(trainer->dataset));
    TRY(step_plan_bounds(&trainer->source, &trainer->bounds));
    if (spec->data->n_heldout == 0) {
        return STATUS_OK;
    }
    StepBounds bounds;
    TRY(evaluation_open(spec, &trainer->place, &trainer->evaluation));
    TRY(evaluation_bounds(trainer->evaluation, &bounds, &trainer->whole_rows));
    step_bounds_widen(&trainer->bounds, &bounds);
    return STATUS_OK;
}

static Status open_groups(Trainer *trainer)
{
    const TrainerOptions *options = &trainer->options;
    TRY(stream_create(options->device, &trainer->stream));
    TRY(device_alloc(options->device, (int64_t)sizeof(Ballot),
                     (void **)&trainer->executor.ballot_device));
    for (int i = 0; i < trainer->place.num_modules; i++) {
        TRY(rank_module_join(&trainer->modules[i], &trainer->place, i, options->world));
    }
    return STATUS_OK;
}

/* A program may link some modules only: those who have one tell the others what is trained in it.
 */
static Status find_trained(Trainer *trainer, int *first_trained)
{
    double firsts[JOB_MODULES_MAX] = {0};
    for (int i = 0; i < trainer->place.num_modules; i++) {
        const PlaceModule *place = &trainer->place.modules[i];
        const ModuleOps *ops = find_ops(&trainer->options, place->name);
        if (!ops && place->is_here) {
            return fail(STATUS_UNSUPPORTED,
                        "rank %d runs module \"%s\", which is not in this program",
                        trainer->place.rank, place->name);
        }
        if (ops) {
            int first = 0;
            const TrainingSpec *training = trainer->options.spec->training;
            const ModuleContext context = {.stages = place->grid.sizes[GRID_AXIS_PP],
                                           .chunks = place->chunks,
                                           .frozen = training->frozen,
                                           .num_frozen = training->n_frozen};
            TRY(ops->first_trained(trainer->options.spec->model, &context, &first));
            firsts[i] = first;
        }
    }
    TRY(vote_reduce(trainer->options.world, trainer->executor.ballot_device->squares, firsts,
                    trainer->place.num_modules, COMM_REDUCE_MAX, trainer->stream,
                    message_duration_ms(trainer->options.spec->timeouts->step)));
    for (int i = 0; i < trainer->place.num_modules; i++) {
        first_trained[i] = (int)firsts[i];
    }
    return STATUS_OK;
}

static Status make_schedules(Trainer *trainer)
{
    const JobSpec *spec = trainer->options.spec;
    int first_trained[JOB_MODULES_MAX];
    TRY(find_trained(trainer, first_trained));
    TRY(job_graph_make(spec, &trainer->place, &trainer->source, first_trained, &trainer->graph));
    trainer->window = job_graph_window(spec, &trainer->place);
    const ScheduleOptions options = {.graph = &trainer->graph,
                                     .microbatches = spec->training->microbatches,
                                     .window = trainer->window,
                                     .is_training = true};
    TRY(schedule_make(&options, trainer->place.rank, &trainer->schedule));
    memcpy(trainer->slots, trainer->schedule.slots, sizeof trainer->slots);
    if (trainer->evaluation) {
        TRY(evaluation_schedule(trainer->evaluation, &trainer->graph, trainer->window));
        evaluation_widen_slots(trainer->evaluation, trainer->slots);
    }
    return STATUS_OK;
}

/* Tokens of an encoder before each item's rows. */
static int extra_tokens(const Trainer *trainer, int encoder)
{
    bool is_vision = strcmp(trainer->place.modules[encoder].name, "vision") == 0;
    return is_vision && trainer->options.spec->model->vision->class_token ? 1 : 0;
}

static Status open_boundaries(Trainer *trainer)
{
    const TrainerOptions *options = &trainer->options;
    for (int e = 0; e < place_num_encoders(&trainer->place); e++) {
        const BoundaryOptions boundary = {.world = options->world,
                                          .device = options->device,
                                          .kernels = kernels_for(options->device),
                                          .place = &trainer->place,
                                          .encoder = e,
                                          .extra_tokens = extra_tokens(trainer, e),
                                          .width = options->spec->model->llm->width,
                                          .window = trainer->window};
        TRY(boundary_create(&boundary, &trainer->boundaries[e]));
    }
    return STATUS_OK;
}

/* Rows that a rank of the decoder's first stage gets in a microbatch at most, of all encoders. */
static int64_t decoder_rows_max(const Trainer *trainer)
{
    int64_t rows = 0;
    for (int e = 0; e < place_num_encoders(&trainer->place); e++) {
        rows += boundary_rows_max(&trainer->place, &trainer->bounds, e);
    }
    return rows;
}

static ModuleLimits module_limits(const Trainer *trainer, int index)
{
    ModuleLimits limits = {0};
    for (int c = 0; c < MODULE_CHUNKS_MAX; c++) {
        limits.slots[c] = trainer->slots[index].chunks[c];
    }
    if (index < place_num_encoders(&trainer->place)) {
        limits.items = trainer->bounds.encoder_items[index];
        limits.frames = trainer->bounds.encoder_rows[index] * AUDIO_FRAMES_A_ROW;
    } else {
        limits.keys = trainer->bounds.llm_tokens;
        limits.segments = trainer->bounds.llm_segments;
        limits.rows = decoder_rows_max(trainer);
    }
    return limits;
}

static Status open_encoder_side(Trainer *trainer, RankModule *rank_module)
{
    const ModelSpec *model = trainer->options.spec->model;
    int e = rank_module->index;
    SampleMedia media = trainer->source.encoders[e].media;
    int64_t items = trainer->bounds.encoder_items[e];
    int64_t rows = trainer->bounds.encoder_rows[e];
    const EncoderSideOptions options = {
        .device = trainer->options.device,
        .place = rank_module->place,
        .encoder = e,
        .media = media,
        .slots = trainer->slots[e].microbatches,
        .row_slots = trainer->slots[e].rows,
        .items_max = items,
        .input_bytes =
            media == SAMPLE_MEDIA_IMAGE
                ? items * model->vision->image_size * model->vision->image_size * 3
                : rows * AUDIO_FRAMES_A_ROW * model->audio->mels * (int64_t)sizeof(float),
        .rows_bytes = rows * model->llm->width * (int64_t)sizeof(float),
    };
    return encoder_side_create(&options, &rank_module->encoder);
}

static Status open_llm_side(Trainer *trainer, RankModule *rank_module)
{
    const PlaceModule *place = rank_module->place;
    bool is_cut = place->spec->sequence_parallel;
    int row_slots = 1; /* also where no encoder is */
    LlmSideOptions options = {
        .text = {.device = trainer->options.device,
                 .shard = {.cp_size = place->grid.sizes[GRID_AXIS_CP],
                           .cp_rank = place->coords.at[GRID_AXIS_CP],
                           .tp_size = is_cut ? place->grid.sizes[GRID_AXIS_TP] : 1,
                           .tp_rank = is_cut ? place->coords.at[GRID_AXIS_TP] : 0},
                 .tokens_max = trainer->bounds.llm_tokens,
                 .segments_max = trainer->bounds.llm_segments,
                 .rows_max = decoder_rows_max(trainer),
                 .num_encoders = trainer->source.num_encoders,
                 .timeout_ms = message_duration_ms(trainer->options.spec->timeouts->step)},
        .place = place,
        .slots = trainer->slots[rank_module->index].microbatches,
        .width = trainer->options.spec->model->llm->width,
        .whole_rows = trainer->whole_rows,
    };
    for (int e = 0; e < trainer->source.num_encoders; e++) {
        options.text.media[e] = trainer->source.encoders[e].media;
        row_slots = trainer->slots[e].rows > row_slots ? trainer->slots[e].rows : row_slots;
    }
    options.row_slots = row_slots;
    return llm_side_create(&options, &rank_module->llm);
}

static Status open_modules(Trainer *trainer)
{
    for (int i = 0; i < trainer->place.num_modules; i++) {
        RankModule *rank_module = &trainer->modules[i];
        if (!rank_module->place) {
            continue;
        }
        const RankModuleOptions options = {
            .spec = trainer->options.spec,
            .device = trainer->options.device,
            .kernels = kernels_for(trainer->options.device),
            .stream = trainer->stream,
            .ops = find_ops(&trainer->options, rank_module->place->name),
            .limits = module_limits(trainer, i),
            .schedule = &trainer->graph.modules[i],
            .slots = &trainer->slots[i],
        };
        TRY(rank_module_open(rank_module, &options));
        if (i < place_num_encoders(&trainer->place)) {
            TRY(open_encoder_side(trainer, rank_module));
        } else {
            TRY(open_llm_side(trainer, rank_module));
        }
    }
    return STATUS_OK;
}

static void set_executor(Trainer *trainer)
{
    const TrainerOptions *options = &trainer->options;
    Executor *executor = &trainer->executor;
    executor->place = &trainer->place;
    executor->world = options->world;
    executor->stream = trainer->stream;
    executor->kernels = kernels_for(options->device);
    executor->modules = trainer->modules;
    executor->boundaries = trainer->boundaries;
    executor->spec = options->spec;
    executor->events = &trainer->options.events;
    executor->stop = &trainer->stop;
    executor->timeout_ms = message_duration_ms(options->spec->timeouts->step);
    for (int e = 0; e < place_num_encoders(&trainer->place); e++) {
        executor->wants_rows_grad =
            executor->wants_rows_grad || trainer->graph.modules[e].is_trained;
    }
}

/* Whether the module's rows may be kept on disk: its weights never change, and each rank makes
 * whole rows. */
static bool is_cacheable(const Trainer *trainer, int index)
{
    const PlaceModule *place = &trainer->place.modules[index];
    return index < place_num_encoders(&trainer->place) &&
           !trainer->graph.modules[index].is_trained && place->spec->cp == 1 &&
           place->spec->pp == 1 && !place->spec->sequence_parallel;
}

static Status hash_message(const ProtobufCMessage *message, uint64_t *hash_out)
{
    size_t size_bytes = protobuf_c_message_get_packed_size(message);
    uint8_t *bytes = NULL;
    TRY(MEMORY_NEW(&bytes, size_bytes + 1));
    protobuf_c_message_pack(message, bytes);
    *hash_out = hash_bytes(HASH_SEED, bytes, size_bytes);
    memory_free(bytes);
    return STATUS_OK;
}

/* Once the weights are what they stay. */
static Status open_cache(Trainer *trainer, RankModule *rank_module)
{
    const JobSpec *spec = trainer->options.spec;
    const ModelSpec *model = spec->model;
    int e = rank_module->index;
    bool is_image = trainer->source.encoders[e].media == SAMPLE_MEDIA_IMAGE;
    int64_t image =
        is_image ? (int64_t)model->vision->image_size * model->vision->image_size * 3 : 0;
    int64_t frame = is_image ? 0 : model->audio->mels * (int64_t)sizeof(float);
    int64_t items = trainer->bounds.encoder_items[e];
    int64_t rows = trainer->bounds.encoder_rows[e];
    uint64_t hash = 0;
    TRY(hash_message(is_image ? &model->vision->base : &model->audio->base, &hash));
    const CachedEncoderOptions options = {
        .module = rank_module->module,
        .tp = rank_module->groups[PLACE_GROUP_TP],
        .stream = trainer->stream,
        .spec = spec->row_cache,
        .model = hash,
        .width = model->llm->width,
        .items_max = items,
        .input_bytes = items * image + rows * AUDIO_FRAMES_A_ROW * frame,
        .rows_bytes = rows * model->llm->width * (int64_t)sizeof(float),
        .item_bytes = image,
        .frame_bytes = frame,
        .timeout_ms = trainer->executor.timeout_ms,
    };
    return cached_encoder_create(&options, &rank_module->cached);
}

static Status open_caches(Trainer *trainer)
{
    const RowCacheSpec *spec = trainer->options.spec->row_cache;
    bool is_any = false;
    if (!spec->directory[0]) {
        return STATUS_OK;
    }
    for (int i = 0; i < trainer->place.num_modules; i++) {
        is_any = is_any || is_cacheable(trainer, i);
        if (trainer->modules[i].module && is_cacheable(trainer, i)) {
            TRY(open_cache(trainer, &trainer->modules[i]));
        }
    }
    if (!is_any) {
        return fail(STATUS_INVALID,
                    "row_cache.directory is set, but no encoder's rows can be cached: "
                    "expected an encoder with all parameters frozen, cp 1, pp 1 and "
                    "no sequence_parallel");
    }
    return STATUS_OK;
}

/* Parts in the order of modules. Returns their number. */
static int checkpoint_parts(Trainer *trainer, CheckpointPart *parts)
{
    int num = 0;
    for (int i = 0; i < trainer->place.num_modules; i++) {
        RankModule *rank_module = &trainer->modules[i];
        if (!rank_module->place) {
            continue;
        }
        bool is_first = rank_module->groups[PLACE_GROUP_DATA]->rank == 0;
        parts[num] = (CheckpointPart){.module = rank_module->place->name,
                                      .params = &rank_module->module->params,
                                      .writes_weights = is_first};
        if (rank_module->is_trained) {
            const Optimizer *optimizer = &rank_module->optimizer;
            parts[num].state = state_shard_range(&optimizer->shard);
            parts[num].m = optimizer->m;
            parts[num].v = optimizer->v;
            parts[num].writes_state = is_first || optimizer->shard.num_parts > 1;
        }
        num++;
    }
    return num;
}

static Status resume(Trainer *trainer)
{
    const TrainingSpec *training = trainer->options.spec->training;
    const char *path = trainer->options.resume_from;
    if (!path) {
        return STATUS_OK;
    }
    CheckpointPart parts[JOB_MODULES_MAX];
    int num_parts = checkpoint_parts(trainer, parts);
    CheckpointState state;
    TRY(checkpoint_check(path, parts, num_parts, trainer->options.world, trainer->stream));
    TRY(checkpoint_load(path, parts, num_parts, &state, trainer->stream));
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

/* Plans are made on each rank by itself: what they are made from must be the same everywhere. */
static Status agree(Trainer *trainer)
{
    const Executor *executor = &trainer->executor;
    double *values = executor->ballot_device->squares;
    uint64_t job = 0;
    TRY(hash_message(&trainer->options.spec->base, &job));
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

static Status fill_weights(Trainer *trainer)
{
    for (int i = 0; i < trainer->place.num_modules; i++) {
        if (trainer->modules[i].module) {
            TRY(param_set_fill(&trainer->modules[i].module->params,
                               trainer->options.spec->training->seed, trainer->stream));
        }
    }
    return STATUS_OK;
}

/* All that is allocated for the job's life. */
static Status allocate(Trainer *trainer)
{
    trainer->place = place_make(trainer->options.spec, trainer->options.world->rank);
    TRY(place_check_world(&trainer->place, trainer->options.world));
    TRY(open_groups(trainer));
    TRY(open_data(trainer));
    TRY(make_schedules(trainer));
    TRY(open_boundaries(trainer));
    return open_modules(trainer);
}

static Status build(Trainer *trainer)
{
    TRY(allocate(trainer));
    TRY(fill_weights(trainer));
    set_executor(trainer);
    TRY(resume(trainer));
    TRY(open_caches(trainer));
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
    Status status = MEMORY_NEW(&trainer, 1);
    if (status == STATUS_OK) {
        trainer->options = *options;
        atomic_init(&trainer->stop, false);
        status = build(trainer);
    }
    if (status != STATUS_OK) {
        comm_abort(options->world, status_message()); /* no rank may wait for this one */
        trainer_destroy(trainer);
        return status_trace(status, __FILE__, __LINE__);
    }
    *trainer_out = trainer;
    return STATUS_OK;
}

/* Share of all ranks' time in a step without work. */
static Status simulate(const Trainer *trainer, double *bubble_out)
{
    const ScheduleOptions options = {.graph = &trainer->graph,
                                     .microbatches = trainer->options.spec->training->microbatches,
                                     .window = trainer->window,
                                     .is_training = true};
    SimulatorResult simulated;
    TRY(simulator_run(&options, trainer->place.world_size, &simulated));
    *bubble_out = simulated.bubble > 0.0 ? simulated.bubble : 0.0; /* rounding */
    return STATUS_OK;
}

static Status account(Trainer *trainer, TrainerAccount *account_out, double *bubble_out)
{
    TRY(allocate(trainer));
    TrainerAccount result = {.bytes = trainer->options.device->peak_bytes,
                             .window = trainer->window};
    for (int i = 0; i < trainer->place.num_modules; i++) {
        const RankModule *rank_module = &trainer->modules[i];
        if (rank_module->module) {
            const ParamSet *params = &rank_module->module->params;
            const Optimizer *optimizer = &rank_module->optimizer;
            int64_t state = optimizer->m ? range_count(state_shard_range(&optimizer->shard)) : 0;
            result.weights += params->count * (int64_t)sizeof(float);
            result.grads += params->trained_count * (int64_t)sizeof(float);
            result.optimizer += 2 * state * (int64_t)sizeof(float);
        }
    }
    if (bubble_out) {
        TRY(simulate(trainer, bubble_out));
    }
    *account_out = result;
    return STATUS_OK;
}

Status trainer_account(const TrainerOptions *options, TrainerAccount *account_out,
                       double *bubble_out)
{
    Trainer *trainer = NULL;
    TRY(MEMORY_NEW(&trainer, 1));
    trainer->options = *options;
    Status status = account(trainer, account_out, bubble_out);
    trainer_destroy(trainer);
    TRY(status);
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
    for (int e = 0; e < STEP_ENCODERS_MAX; e++) {
        boundary_destroy(trainer->boundaries[e]);
    }
    for (int i = 0; i < JOB_MODULES_MAX; i++) {
        rank_module_close(&trainer->modules[i]);
    }
    if (trainer->executor.ballot_device) {
        device_free(trainer->options.device, trainer->executor.ballot_device,
                    (int64_t)sizeof(Ballot));
    }
    schedule_done(&trainer->schedule);
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
    for (int i = 0; i < trainer->place.num_modules; i++) {
        if (trainer->modules[i].is_trained) {
            TRY(gradients_zero(&trainer->modules[i].gradients, trainer->stream));
        }
    }
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
    return trainer->place.rank == place_decoder(&trainer->place)->grid.first_rank;
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
    CheckpointPart parts[JOB_MODULES_MAX];
    int num_parts = checkpoint_parts(trainer, parts);
    const CheckpointState state = {.step = trainer->step,
                                   .seed = options->spec->training->seed,
                                   .data_hash = dataset_hash(trainer->dataset),
                                   .samples = trainer->executor.updates *
                                              options->spec->training->global_batch};
    char path[TRAINER_PATH_BYTES];
    Status status = checkpoint_save(spec->directory, spec->keep, parts, num_parts, &state,
                                    options->world, trainer->stream, path, sizeof path);
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

const Place *trainer_place(const Trainer *trainer)
{
    return &trainer->place;
}

Module *trainer_module(Trainer *trainer, int module)
{
    return trainer->modules[module].module;
}

Range trainer_summed_grads(const Trainer *trainer, int module)
{
    const RankModule *rank_module = &trainer->modules[module];
    return rank_module->is_trained ? state_shard_range(&rank_module->gradients.shard)
                                   : (Range){0, 0};
}
