#include "train/executor.h"

#include "base/clock.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>

typedef Status (*ActionRun)(Executor *executor, Feed *feed, int microbatch);

/* ---------------------------------------------------------------- the encoder's */

static Status run_encode(Executor *executor, Feed *feed, int microbatch)
{
    return encoder_side_encode(executor->encoder_side, feed, microbatch,
                               &executor->ballot_device->rows_square);
}

static Status run_send(Executor *executor, Feed *feed, int microbatch)
{
    return encoder_side_send(executor->encoder_side, feed, microbatch);
}

static Status run_recv_grad(Executor *executor, Feed *feed, int microbatch)
{
    return encoder_side_recv_grad(executor->encoder_side, feed, microbatch);
}

static Status run_encode_backward(Executor *executor, Feed *feed, int microbatch)
{
    (void)feed;
    return encoder_side_backward(executor->encoder_side, microbatch);
}

/* ---------------------------------------------------------------- the decoder's */

static Status run_recv(Executor *executor, Feed *feed, int microbatch)
{
    return llm_side_recv(executor->llm_side, feed, microbatch);
}

static Status run_forward(Executor *executor, Feed *feed, int microbatch)
{
    (void)feed;
    return llm_side_forward(executor->llm_side, microbatch, executor->loss_scale,
                            &executor->loss_sum);
}

static Status run_backward(Executor *executor, Feed *feed, int microbatch)
{
    (void)feed;
    return llm_side_backward(executor->llm_side, microbatch);
}

static Status run_send_grad(Executor *executor, Feed *feed, int microbatch)
{
    return llm_side_send_grad(executor->llm_side, feed, microbatch);
}

/* ---------------------------------------------------------------- the end of a step */

static Status run_reduce(Executor *executor, Feed *feed, int microbatch)
{
    (void)feed;
    (void)microbatch;
    TRY(gradients_reduce(executor->gradients, executor->stream));
    Ballot *ballot = executor->ballot_device;
    return gradients_add_square(executor->gradients, executor->kernels,
                                executor->place->is_encoder ? &ballot->encoder_square
                                                            : &ballot->llm_square,
                                executor->stream);
}

/* Whole-job values from the sum of all ballots. */
static void judge(Executor *executor, const StepPlan *plan, const Ballot *sum)
{
    TrainerStep *step = executor->step;
    const char *culprit = vote_culprit(sum);
    step->committed = culprit == NULL;
    snprintf(step->module, sizeof step->module, "%s", culprit ? culprit : "");
    step->samples = plan->num_samples;
    step->tokens = plan->num_tokens;
    step->labels = plan->num_labels;
    step->loss = plan->num_labels > 0 ? sum->loss_sum / (double)plan->num_labels : 0.0;
    step->grad_norm = sqrt(sum->encoder_square + sum->llm_square);
    step->step_seconds = sum->seconds / executor->world->size;
    step->encoder_wait_seconds = sum->encoder_wait / grid_size(&executor->place->encoder);
    step->llm_wait_seconds = sum->llm_wait / grid_size(&executor->place->llm);
    step->boundary_bytes = (int64_t)sum->bytes;
}

static Status run_vote(Executor *executor, Feed *feed, int microbatch)
{
    (void)microbatch;
    const Place *place = executor->place;
    BoundaryCounts counts = boundary_take_counts(executor->boundary);
    /* The loss is computed on the stream. */
    TRY(stream_wait(executor->stream, clock_deadline_in_ms(executor->timeout_ms)));
    Ballot ballot = {
        /* All tp ranks of a replica have the same loss. */
        .loss_sum = place->tp == 0 ? executor->loss_sum : 0.0,
        .seconds = (double)(clock_now_ns() - executor->mark_ns) / (double)CLOCK_NS_PER_S,
        .bytes = (double)counts.bytes,
    };
    if (place->is_encoder) {
        ballot.encoder_wait = encoder_side_take_wait(executor->encoder_side);
    } else {
        ballot.llm_wait = llm_side_take_wait(executor->llm_side);
    }
    TRY(vote_run(executor->world, &executor->ballot_device->encoder_square, &ballot,
                 executor->stream, executor->timeout_ms));
    executor->mark_ns = clock_now_ns();
    executor->step->boundary_bytes_min = counts.bytes_minimum;
    judge(executor, feed_plan(feed), &ballot);
    return STATUS_OK;
}

/* A step without a single label changes nothing: there is no gradient, and weight decay alone is
 * not training. */
static Status run_update(Executor *executor, Feed *feed, int microbatch)
{
    (void)microbatch;
    TrainerStep *step = executor->step;
    step->learning_rate = optimizer_learning_rate(
        executor->spec->optimizer, executor->spec->training->steps, feed_plan(feed)->step);
    if (!step->committed || step->labels == 0) {
        return STATUS_OK;
    }
    executor->updates++;
    const OptimizerStep update = {
        .learning_rate = step->learning_rate,
        .grad_scale = optimizer_grad_scale(executor->spec->optimizer, step->grad_norm),
        .number = executor->updates,
    };
    return optimizer_update(executor->optimizer, &update, executor->stream);
}

/* ---------------------------------------------------------------- the loop */

Status executor_drain(Executor *executor)
{
    for (int d = 0; d < BOUNDARY_DIRECTION_COUNT; d++) {
        TRY(boundary_finish(executor->boundary, d, INT_MAX, executor->stream));
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
    (void)boundary_take_counts(executor->boundary); /* an evaluation's do not count */
    if (executor->place->is_encoder) {
        (void)encoder_side_take_wait(executor->encoder_side);
    } else {
        (void)llm_side_take_wait(executor->llm_side);
    }
    executor->loss_sum = 0.0;
    executor->loss_scale = plan->num_labels > 0 ? (float)(1.0 / (double)plan->num_labels) : 0.0F;
    return stream_zero(executor->stream, executor->ballot_device, (int64_t)sizeof(Ballot));
}

Status executor_run(Executor *executor, const ExecutorPass *pass)
{
    static const ActionRun runs[ACTION_COUNT] = {
        [ACTION_ENCODE] = run_encode,       [ACTION_SEND] = run_send,
        [ACTION_RECV] = run_recv,           [ACTION_FORWARD] = run_forward,
        [ACTION_BACKWARD] = run_backward,   [ACTION_SEND_GRAD] = run_send_grad,
        [ACTION_RECV_GRAD] = run_recv_grad, [ACTION_ENCODE_BACKWARD] = run_encode_backward,
        [ACTION_REDUCE] = run_reduce,       [ACTION_VOTE] = run_vote,
        [ACTION_UPDATE] = run_update,
    };
    TRY(begin_pass(executor, feed_plan(pass->feed)));
    for (int i = 0; i < pass->schedule->num_actions; i++) {
        const Action *action = &pass->schedule->actions[i];
        const char *name = schedule_action_name(action->kind);
        if (executor->events->progress) {
            executor->events->progress(executor->events->context, name, pass->step,
                                       action->microbatch);
        }
        Status status = check_stop(executor);
        if (status == STATUS_OK) {
            status = runs[action->kind](executor, pass->feed, action->microbatch);
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
