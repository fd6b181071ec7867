#include "train/executor.h"

#include "base/clock.h"
#include "base/hash.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>

typedef Status (*ActionRun)(Executor *executor, const ExecutorPass *pass, const Action *action);

RankModule *executor_decoder(const Executor *executor)
{
    RankModule *decoder = &executor->modules[executor->place->num_modules - 1];
    return decoder->place ? decoder : NULL;
}

bool executor_counts_loss(const Executor *executor)
{
    const RankModule *decoder = executor_decoder(executor);
    return decoder && place_is_last_stage(decoder->place) &&
           decoder->place->coords.at[GRID_AXIS_TP] == 0;
}

/* ---------------------------------------------------------------- what an action works on */

static bool is_decoder(const Executor *executor, int module)
{
    return module == executor->place->num_modules - 1;
}

static RankModule *module_of(Executor *executor, const Action *action)
{
    RankModule *rank_module = &executor->modules[action->module];
    CHECK(rank_module->place);
    return rank_module;
}

static Status batch_of(Executor *executor, const ExecutorPass *pass, const Action *action,
                       const ModuleBatch **batch_out)
{
    RankModule *rank_module = module_of(executor, action);
    if (rank_module->encoder) {
        return encoder_side_batch(rank_module->encoder, pass->feed, action->microbatch,
                                  executor->stream, batch_out);
    }
    return llm_side_batch(rank_module->llm, pass->feed, action->microbatch, executor->loss_scale,
                          executor->stream, batch_out);
}

/* The gradient of a chunk's output, which backward turns into that of its input. */
static float *grad_of(const RankModule *rank_module, const Action *action)
{
    return rank_module->grads[action->chunk][action->microbatch % RANK_MODULE_GRADS];
}

/* ---------------------------------------------------------------- boundaries */

/* Elements of the decoder's buffer before the rows of an encoder. */
static int64_t rows_before(const Executor *executor, const ExecutorPass *pass, int encoder,
                           int microbatch)
{
    const StepPlan *plan = feed_plan(pass->feed);
    int dp = place_decoder(executor->place)->coords.at[GRID_AXIS_DP];
    int64_t rows = 0;
    for (int e = 0; e < encoder; e++) {
        rows += pass->is_generation
                    ? range_count(
                          step_plan_rows(plan, e, microbatch,
                                         plan->microbatches[microbatch].crossings[e].llm_items[dp]))
                    : boundary_count_rows(executor->boundaries[e], plan, microbatch);
    }
    return rows * executor->spec->model->llm->width;
}

static float *decoder_rows(const Executor *executor, const ExecutorPass *pass, int encoder,
                           int microbatch, BoundaryDirection direction)
{
    const LlmSide *side = executor_decoder(executor)->llm;
    float *rows = direction == BOUNDARY_GRADS ? llm_side_rows_grad(side, microbatch)
                  : pass->is_generation       ? llm_side_whole_rows(side)
                                              : llm_side_rows(side, microbatch);
    return rows + rows_before(executor, pass, encoder, microbatch);
}

static Status start_crossing(Executor *executor, const ExecutorPass *pass, int encoder,
                             int microbatch, BoundaryDirection direction)
{
    Boundary *boundary = executor->boundaries[encoder];
    bool is_rows = direction == BOUNDARY_ROWS;
    float *here = NULL;
    float *there = NULL;
    if (boundary_is_encoder(boundary)) {
        const EncoderSide *side = executor->modules[encoder].encoder;
        here = is_rows ? encoder_side_rows(side, microbatch)
                       : encoder_side_rows_grad(side, microbatch);
    }
    if (boundary_is_decoder(boundary)) {
        there = decoder_rows(executor, pass, encoder, microbatch, direction);
    }
    const BoundaryCrossing crossing = {.direction = direction,
                                       .plan = feed_plan(pass->feed),
                                       .microbatch = microbatch,
                                       .kind = feed_kind(pass->feed),
                                       .is_whole = pass->is_generation,
                                       .source = is_rows ? here : there,
                                       .destination = is_rows ? there : here};
    return boundary_start(boundary, &crossing, executor->stream);
}

/* Both ends know how many rows a microbatch brings: from the plan, and from its text. */
static Status check_rows(const Executor *executor, const ExecutorPass *pass, const Action *action)
{
    const RankModule *decoder = executor_decoder(executor);
    int64_t planned = boundary_count_rows(executor->boundaries[action->module],
                                          feed_plan(pass->feed), action->microbatch);
    int64_t found = llm_side_count_rows(decoder->llm, action->microbatch, action->module);
    if (planned != found) {
        return fail(STATUS_CORRUPT,
                    "the text has places for %" PRId64 " rows of %s, %" PRId64 " come", found,
                    executor->place->modules[action->module].name, planned);
    }
    return STATUS_OK;
}

static Status run_send(Executor *executor, const ExecutorPass *pass, const Action *action)
{
    return start_crossing(executor, pass, action->module, action->microbatch, BOUNDARY_ROWS);
}

/* The text is packed while the rows are on their way. */
static Status run_recv(Executor *executor, const ExecutorPass *pass, const Action *action)
{
    Boundary *boundary = executor->boundaries[action->module];
    int microbatch = action->microbatch;
    if (!boundary_is_encoder(boundary)) {
        TRY(start_crossing(executor, pass, action->module, microbatch, BOUNDARY_ROWS));
    }
    if (!pass->is_generation) {
        const ModuleBatch *batch = NULL;
        TRY(llm_side_batch(executor_decoder(executor)->llm, pass->feed, microbatch,
                           executor->loss_scale, executor->stream, &batch));
        TRY(check_rows(executor, pass, action));
    }
    int64_t begin_ns = clock_now_ns();
    TRY(boundary_finish(boundary, BOUNDARY_ROWS, microbatch + 1, executor->stream));
    executor->llm_wait_ns += clock_now_ns() - begin_ns;
    return STATUS_OK;
}

static Status run_send_grad(Executor *executor, const ExecutorPass *pass, const Action *action)
{
    return start_crossing(executor, pass, action->module, action->microbatch, BOUNDARY_GRADS);
}

static Status run_recv_grad(Executor *executor, const ExecutorPass *pass, const Action *action)
{
    Boundary *boundary = executor->boundaries[action->module];
    int64_t begin_ns = clock_now_ns();
    if (!boundary_is_decoder(boundary)) {
        TRY(start_crossing(executor, pass, action->module, action->microbatch, BOUNDARY_GRADS));
    }
    TRY(boundary_finish(boundary, BOUNDARY_GRADS, action->microbatch + 1, executor->stream));
    executor->encoder_wait_ns += clock_now_ns() - begin_ns;
    return STATUS_OK;
}

/* ---------------------------------------------------------------- pipeline */

static Status stage_message(Executor *executor, const ExecutorPass *pass, const Action *action,
                            StageFlow flow, StageMessage *message_out)
{
    const RankModule *rank_module = module_of(executor, action);
    const ModuleBatch *batch = NULL;
    TRY(batch_of(executor, pass, action, &batch));
    const Module *module = rank_module->module;
    uint64_t tag = hash_u64(HASH_SEED, feed_kind(pass->feed));
    tag = hash_u64(tag, (uint64_t)feed_plan(pass->feed)->step);
    tag = hash_u64(tag, (uint64_t)action->microbatch);
    *message_out = (StageMessage){
        .flow = flow,
        .chunk = action->chunk,
        .slot = flow == STAGE_FLOW_GRADS ? action->microbatch % RANK_MODULE_GRADS : action->slot,
        .count = module->ops->count_local(module, batch) * module->width,
        .tag = tag};
    return STATUS_OK;
}

static Status run_send_activations(Executor *executor, const ExecutorPass *pass,
                                   const Action *action)
{
    RankModule *rank_module = module_of(executor, action);
    Module *module = rank_module->module;
    StageMessage message = {0};
    TRY(stage_message(executor, pass, action, STAGE_FLOW_ACTIVATIONS, &message));
    message.data = (float *)module->ops->output(module, action->chunk, action->slot);
    return stage_link_send(rank_module->link, &message, executor->stream);
}

static Status run_recv_activations(Executor *executor, const ExecutorPass *pass,
                                   const Action *action)
{
    RankModule *rank_module = module_of(executor, action);
    Module *module = rank_module->module;
    StageMessage message = {0};
    TRY(stage_message(executor, pass, action, STAGE_FLOW_ACTIVATIONS, &message));
    message.data = module->ops->input(module, action->chunk, action->slot);
    return stage_link_recv(rank_module->link, &message, executor->stream);
}

static Status run_send_activations_grad(Executor *executor, const ExecutorPass *pass,
                                        const Action *action)
{
    RankModule *rank_module = module_of(executor, action);
    StageMessage message = {0};
    TRY(stage_message(executor, pass, action, STAGE_FLOW_GRADS, &message));
    message.data = grad_of(rank_module, action);
    return stage_link_send(rank_module->link, &message, executor->stream);
}

static Status run_recv_activations_grad(Executor *executor, const ExecutorPass *pass,
                                        const Action *action)
{
    RankModule *rank_module = module_of(executor, action);
    StageMessage message = {0};
    TRY(stage_message(executor, pass, action, STAGE_FLOW_GRADS, &message));
    message.data = grad_of(rank_module, action);
    /* The buffer's last gradient has left. */
    TRY(stage_link_finish(rank_module->link, STAGE_FLOW_GRADS, action->chunk, message.slot,
                          executor->stream));
    return stage_link_recv(rank_module->link, &message, executor->stream);
}

/* ---------------------------------------------------------------- compute */

static bool is_last_part(const RankModule *rank_module, const Action *action)
{
    return rank_module_part(rank_module, action->chunk) == rank_module_parts(rank_module) - 1;
}

/* Before the chunk's output is written again, what was sent from it has left. */
static Status clear_output(Executor *executor, RankModule *rank_module, const Action *action)
{
    if (!rank_module->link || is_last_part(rank_module, action)) {
        return STATUS_OK;
    }
    return stage_link_finish(rank_module->link, STAGE_FLOW_ACTIVATIONS, action->chunk, action->slot,
                             executor->stream);
}

static Status run_encode(Executor *executor, const ExecutorPass *pass, const Action *action)
{
    RankModule *rank_module = module_of(executor, action);
    Module *module = rank_module->module;
    const ModuleBatch *batch = NULL;
    float *rows = NULL;
    TRY(clear_output(executor, rank_module, action));
    TRY(batch_of(executor, pass, action, &batch));
    if (is_last_part(rank_module, action)) {
        rows = encoder_side_rows(rank_module->encoder, action->microbatch);
        int window = pass->schedule->slots[action->module].rows;
        TRY(boundary_finish(executor->boundaries[action->module], BOUNDARY_ROWS,
                            action->microbatch - window + 1, executor->stream));
    }
    if (rank_module->cached) {
        TRY(cached_encoder_forward(rank_module->cached, action->slot, batch, rows));
    } else {
        TRY(module->ops->forward(module, action->chunk, action->slot, batch, rows, NULL));
    }
    if (!rows) {
        return STATUS_OK;
    }
    int64_t count = module->ops->count_rows(module, batch) * executor->spec->model->llm->width;
    return executor->kernels->sum_squares(&executor->ballot_device->rows_squares[action->module],
                                          rows, count, executor->stream);
}

static Status run_encode_backward(Executor *executor, const ExecutorPass *pass,
                                  const Action *action)
{
    RankModule *rank_module = module_of(executor, action);
    Module *module = rank_module->module;
    const ModuleBatch *batch = NULL;
    TRY(batch_of(executor, pass, action, &batch));
    float *rows_grad = NULL;
    if (is_last_part(rank_module, action)) {
        rows_grad = encoder_side_rows_grad(rank_module->encoder, action->microbatch);
        if (rank_module->link) { /* nothing was received into it: what was sent from it has left */
            TRY(stage_link_finish(rank_module->link, STAGE_FLOW_GRADS, action->chunk,
                                  action->microbatch % RANK_MODULE_GRADS, executor->stream));
        }
    }
    return module->ops->backward(module, action->chunk, action->slot, batch,
                                 grad_of(rank_module, action), rows_grad);
}

static Status run_forward(Executor *executor, const ExecutorPass *pass, const Action *action)
{
    RankModule *rank_module = module_of(executor, action);
    Module *module = rank_module->module;
    const ModuleBatch *batch = NULL;
    TRY(clear_output(executor, rank_module, action));
    TRY(batch_of(executor, pass, action, &batch));
    return module->ops->forward(module, action->chunk, action->slot, batch, NULL,
                                is_last_part(rank_module, action) ? &executor->loss_sum : NULL);
}

static Status run_backward(Executor *executor, const ExecutorPass *pass, const Action *action)
{
    RankModule *rank_module = module_of(executor, action);
    Module *module = rank_module->module;
    const ModuleBatch *batch = NULL;
    float *rows_grad = NULL;
    TRY(batch_of(executor, pass, action, &batch));
    if (rank_module_part(rank_module, action->chunk) == 0 && executor->wants_rows_grad) {
        rows_grad = llm_side_rows_grad(rank_module->llm, action->microbatch);
        for (int e = 0; e < place_num_encoders(executor->place); e++) {
            /* The buffer's last gradients have left. */
            int window = pass->schedule->slots[e].rows;
            TRY(boundary_finish(executor->boundaries[e], BOUNDARY_GRADS,
                                action->microbatch - window + 1, executor->stream));
        }
    }
    if (is_last_part(rank_module, action) && rank_module->link) {
        TRY(stage_link_finish(rank_module->link, STAGE_FLOW_GRADS, action->chunk,
                              action->microbatch % RANK_MODULE_GRADS, executor->stream));
    }
    return module->ops->backward(module, action->chunk, action->slot, batch,
                                 grad_of(rank_module, action), rows_grad);
}

/* ---------------------------------------------------------------- the end of a step */

static Status run_reduce(Executor *executor, const ExecutorPass *pass, const Action *action)
{
    (void)pass;
    RankModule *rank_module = module_of(executor, action);
    TRY(gradients_reduce(&rank_module->gradients, executor->stream));
    return gradients_add_square(&rank_module->gradients, executor->kernels,
                                &executor->ballot_device->squares[action->module],
                                executor->stream);
}

static BoundaryCounts take_counts(const Executor *executor)
{
    BoundaryCounts all = {0};
    for (int e = 0; e < place_num_encoders(executor->place); e++) {
        BoundaryCounts counts = boundary_take_counts(executor->boundaries[e]);
        all.bytes += counts.bytes;
        all.bytes_minimum += counts.bytes_minimum;
    }
    return all;
}

/* Time that links have waited counts for their modules. */
static void take_link_waits(const Executor *executor, double *encoder_wait, double *llm_wait)
{
    *encoder_wait = (double)executor->encoder_wait_ns / (double)CLOCK_NS_PER_S;
    *llm_wait = (double)executor->llm_wait_ns / (double)CLOCK_NS_PER_S;
    for (int i = 0; i < executor->place->num_modules; i++) {
        StageLink *link = executor->modules[i].link;
        double wait = link ? stage_link_take_wait(link) : 0.0;
        *(is_decoder(executor, i) ? llm_wait : encoder_wait) += wait;
    }
}

/* Whole-job values from the sum of all ballots. */
static void judge(Executor *executor, const StepPlan *plan, const Ballot *sum)
{
    const Place *place = executor->place;
    TrainerStep *step = executor->step;
    int culprit = vote_culprit(sum, place->num_modules);
    double square = 0.0;
    int encoder_ranks = 0;
    for (int i = 0; i < place->num_modules; i++) {
        square += sum->squares[i];
        encoder_ranks += is_decoder(executor, i) ? 0 : grid_size(&place->modules[i].grid);
    }
    step->committed = culprit < 0;
    snprintf(step->module, sizeof step->module, "%s",
             culprit < 0 ? "" : place->modules[culprit].name);
    step->samples = plan->num_samples;
    step->tokens = plan->num_tokens;
    step->labels = plan->num_labels;
    step->loss = plan->num_labels > 0 ? sum->loss_sum / (double)plan->num_labels : 0.0;
    step->grad_norm = sqrt(square);
    step->step_seconds = sum->seconds / executor->world->size;
    step->encoder_wait_seconds = encoder_ranks > 0 ? sum->encoder_wait / encoder_ranks : 0.0;
    step->llm_wait_seconds = sum->llm_wait / grid_size(&place_decoder(place)->grid);
    step->boundary_bytes = (int64_t)sum->bytes;
    step->boundary_bytes_min = (int64_t)sum->bytes_minimum;
}

static Status run_vote(Executor *executor, const ExecutorPass *pass, const Action *action)
{
    (void)action;
    const Place *place = executor->place;
    BoundaryCounts counts = take_counts(executor);
    bool is_first = place->rank == place_decoder(place)->grid.first_rank;
    /* The loss is computed on the stream. */
    TRY(stream_wait(executor->stream, clock_deadline_in_ms(executor->timeout_ms)));
    Ballot ballot = {
        .loss_sum = executor_counts_loss(executor) ? executor->loss_sum : 0.0,
        .seconds = (double)(clock_now_ns() - executor->mark_ns) / (double)CLOCK_NS_PER_S,
        .bytes = (double)counts.bytes,
        .bytes_minimum = is_first ? (double)counts.bytes_minimum : 0.0,
    };
    take_link_waits(executor, &ballot.encoder_wait, &ballot.llm_wait);
    TRY(vote_run(executor->world, executor->ballot_device->squares, &ballot, executor->stream,
                 executor->timeout_ms));
    executor->mark_ns = clock_now_ns();
    judge(executor, feed_plan(pass->feed), &ballot);
    /* A step without a single label changes nothing: there is no gradient, and weight decay alone
     * is not training. */
    TrainerStep *step = executor->step;
    step->learning_rate = optimizer_learning_rate(
        executor->spec->optimizer, executor->spec->training->steps, feed_plan(pass->feed)->step);
    executor->updates += step->committed && step->labels > 0;
    return STATUS_OK;
}

static Status run_update(Executor *executor, const ExecutorPass *pass, const Action *action)
{
    (void)pass;
    const TrainerStep *step = executor->step;
    if (!step->committed || step->labels == 0) {
        return STATUS_OK;
    }
    const OptimizerStep update = {
        .learning_rate = step->learning_rate,
        .grad_scale = optimizer_grad_scale(executor->spec->optimizer, step->grad_norm),
        .number = executor->updates,
    };
    return optimizer_update(&module_of(executor, action)->optimizer, &update, executor->stream);
}

/* ---------------------------------------------------------------- the loop */

Status executor_drain(Executor *executor)
{
    for (int e = 0; e < place_num_encoders(executor->place); e++) {
        for (int d = 0; d < BOUNDARY_DIRECTION_COUNT; d++) {
            TRY(boundary_finish(executor->boundaries[e], d, INT_MAX, executor->stream));
        }
    }
    for (int i = 0; i < executor->place->num_modules; i++) {
        if (executor->modules[i].link) {
            TRY(stage_link_drain(executor->modules[i].link, executor->stream));
        }
    }
    return STATUS_OK;
}

Status executor_fail(Status status, const char *label, const char *operation, int64_t step,
                     int microbatch)
{
    char message[1024];
    char place[96] = "";
    snprintf(message, sizeof message, "%s", status_message());
    if (microbatch >= 0) {
        snprintf(place, sizeof place, ", microbatch %d", microbatch);
    }
    return fail(status, "step %" PRId64 "%s, %s%s: %s", step, place, label, operation, message);
}

/* Both ends know the samples of a microbatch; where what they know differs, people want to see it.
 * */
static Status fail_action(const ExecutorPass *pass, const Action *action, Status status)
{
    const char *name = schedule_action_name(action->kind);
    char operation[256];
    snprintf(operation, sizeof operation, "%s", name);
    if (status == STATUS_CORRUPT && action->microbatch >= 0) {
        const StepPlan *plan = feed_plan(pass->feed);
        Range samples = plan->microbatches[action->microbatch].samples;
        if (range_count(samples) > 0) {
            const Dataset *dataset = feed_dataset(pass->feed);
            snprintf(operation, sizeof operation, "%s of samples \"%.80s\" to \"%.80s\"", name,
                     dataset_sample(dataset, plan->samples[samples.begin])->key,
                     dataset_sample(dataset, plan->samples[samples.end - 1])->key);
        }
    }
    return executor_fail(status, pass->label, operation, pass->step, action->microbatch);
}

static Status check_stop(const Executor *executor)
{
    if (atomic_load(executor->stop)) {
        return fail(STATUS_ABORTED, "stopped");
    }
    return STATUS_OK;
}

static Status begin_pass(Executor *executor, const StepPlan *plan)
{
    double ignored = 0.0;
    (void)take_counts(executor); /* an evaluation's do not count */
    take_link_waits(executor, &ignored, &ignored);
    executor->encoder_wait_ns = 0;
    executor->llm_wait_ns = 0;
    executor->loss_sum = 0.0;
    executor->loss_scale = plan->num_labels > 0 ? (float)(1.0 / (double)plan->num_labels) : 0.0F;
    for (int i = 0; i < executor->place->num_modules; i++) {
        RankModule *rank_module = &executor->modules[i];
        if (rank_module->encoder) {
            encoder_side_begin(rank_module->encoder);
        }
        if (rank_module->llm) {
            llm_side_begin(rank_module->llm);
        }
    }
    return stream_zero(executor->stream, executor->ballot_device, (int64_t)sizeof(Ballot));
}

static Status run_action(Executor *executor, const ExecutorPass *pass, const Action *action)
{
    static const ActionRun runs[ACTION_COUNT] = {
        [ACTION_ENCODE] = run_encode,
        [ACTION_SEND] = run_send,
        [ACTION_RECV_GRAD] = run_recv_grad,
        [ACTION_ENCODE_BACKWARD] = run_encode_backward,
        [ACTION_RECV] = run_recv,
        [ACTION_FORWARD] = run_forward,
        [ACTION_BACKWARD] = run_backward,
        [ACTION_SEND_GRAD] = run_send_grad,
        [ACTION_SEND_ACTIVATIONS] = run_send_activations,
        [ACTION_RECV_ACTIVATIONS] = run_recv_activations,
        [ACTION_SEND_ACTIVATIONS_GRAD] = run_send_activations_grad,
        [ACTION_RECV_ACTIVATIONS_GRAD] = run_recv_activations_grad,
        [ACTION_REDUCE] = run_reduce,
        [ACTION_VOTE] = run_vote,
        [ACTION_UPDATE] = run_update,
    };
    bool is_skipped =
        pass->is_generation && action->module >= 0 && is_decoder(executor, action->module);
    return is_skipped ? STATUS_OK : runs[action->kind](executor, pass, action);
}

Status executor_run(Executor *executor, const ExecutorPass *pass)
{
    TRY(begin_pass(executor, feed_plan(pass->feed)));
    for (int i = 0; i < pass->schedule->num_actions; i++) {
        const Action *action = &pass->schedule->actions[i];
        if (executor->events->progress) {
            executor->events->progress(executor->events->context,
                                       schedule_action_name(action->kind), pass->step,
                                       action->microbatch);
        }
        Status status = check_stop(executor);
        if (status == STATUS_OK) {
            status = run_action(executor, pass, action);
        }
        if (status != STATUS_OK) {
            return fail_action(pass, action, status);
        }
    }
    Status status = executor_drain(executor);
    if (status != STATUS_OK) {
        return executor_fail(status, pass->label, "DRAIN", pass->step, -1);
    }
    return STATUS_OK;
}
