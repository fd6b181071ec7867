#include "tests/parity/parity_job.h"

#include "comm/comm_local.h"
#include "encoder_worker/vision_encoder.h"
#include "job/job_file.h"
#include "llm_worker/llm.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

/* Grouped queries, a class token, and heads and widths that four ranks cannot share evenly. */
static const char template[] =
    "model:\n"
    "  vision: {image_size: 8, patch_size: 4, width: 12, layers: 2, heads: 3, mlp_width: 22,\n"
    "           class_token: true, feature_layer: -2}\n"
    "  projector: {width: 14}\n"
    "  llm: {width: 16, layers: 2, heads: 4, kv_heads: 2, mlp_width: 26, max_tokens: 96}\n"
    "data:\n"
    "  train: [\"%s\"]\n"
    "%s%s%s"
    "  prompt: \"see <image>: \"\n"
    "  loader_threads: 1\n"
    "modules:\n"
    "  - {name: vision, pool: encoder, tp: %d, dp: %d}\n"
    "  - {name: llm, pool: llm, tp: %d, dp: %d}\n"
    "pools:\n"
    "  - {name: encoder, role: encoder}\n"
    "  - {name: llm, role: llm}\n"
    "training: {steps: %d, global_batch: %d, microbatches: %d, encoder_window: %d, seed: %d}\n"
    "optimizer: {kind: %s, learning_rate: %g, min_learning_rate: %g, warmup_steps: %d,\n"
    "            weight_decay: 0.01, max_grad_norm: %g}\n"
    "checkpoint: {directory: \"%s\", every_steps: %d}\n"
    "evaluation: {captions: %d, max_new_tokens: 6}\n";

JobSpec *parity_spec(const ParityOptions *options)
{
    char text[4096];
    const ParityLayout *layout = &options->layout;
    bool has_heldout = options->heldout != NULL;
    double learning_rate = options->is_adamw ? 0.003 : 0.5;
    int length = snprintf(
        text, sizeof text, template, options->shard, has_heldout ? "  heldout: [\"" : "",
        has_heldout ? options->heldout : "", has_heldout ? "\"]\n" : "", layout->encoder_tp,
        layout->encoder_dp, layout->llm_tp, layout->llm_dp, options->steps, options->batch,
        options->microbatches, options->window, options->seed, options->is_adamw ? "ADAMW" : "SGD",
        learning_rate, learning_rate, options->warmup, options->max_grad_norm,
        options->checkpoints ? options->checkpoints : "", options->checkpoint_every,
        options->captions);
    assert_true(length > 0 && (size_t)length < sizeof text);
    JobSpec *spec = NULL;
    JobProblem problems[4];
    if (job_file_parse("parity", text, (size_t)length, &spec) != STATUS_OK ||
        job_spec_resolve(spec) != STATUS_OK) {
        fail_msg("%s", status_message());
    }
    if (job_spec_check(spec, problems, 4) > 0) {
        fail_msg("%s: %s", problems[0].field, problems[0].message);
    }
    return spec;
}

int parity_ranks(ParityLayout layout)
{
    return layout.encoder_tp * layout.encoder_dp + layout.llm_tp * layout.llm_dp;
}

/* ---- events ---- */

static void on_step(void *context, const TrainerStep *step)
{
    ParityRank *rank = context;
    ParityRun *run = rank->run;
    if (rank->rank == run->layout.encoder_tp * run->layout.encoder_dp) {
        CHECK(run->num_steps < PARITY_STEPS_MAX);
        run->steps[run->num_steps++] = *step;
    }
}

static void on_evaluation(void *context, const TrainerEvaluation *evaluation)
{
    ParityRun *run = ((ParityRank *)context)->run;
    run->heldout_loss = evaluation->heldout_loss;
    run->heldout_loss_shuffled = evaluation->heldout_loss_shuffled;
    run->num_captions = evaluation->num_captions;
    for (int i = 0; i < evaluation->num_captions && i < 8; i++) {
        snprintf(run->captions[i], sizeof run->captions[i], "%.20s|%.20s|%.20s",
                 evaluation->captions[i].sample, evaluation->captions[i].truth,
                 evaluation->captions[i].generated);
    }
}

static void on_checkpoint(void *context, int64_t step, const char *directory)
{
    (void)step;
    ParityRun *run = ((ParityRank *)context)->run;
    if (!run->checkpoint[0]) {
        snprintf(run->checkpoint, sizeof run->checkpoint, "%s", directory);
    }
}

/* ---- what the transport is given ---- */

static _Thread_local ParityRank *rank_of_thread;
static _Thread_local const CommOps *real_ops;
static _Thread_local CommOps counting_ops;

/* In groups of the whole world, where a peer's number is its rank in the world. */
static Status counting_start(Comm *comm, CommTransfer *transfers, int num_transfers, Stream *stream,
                             CommRequest *request_out)
{
    ParityRank *rank = rank_of_thread;
    int encoders = rank->run->layout.encoder_tp * rank->run->layout.encoder_dp;
    CHECK(comm->size == parity_ranks(rank->run->layout));
    for (int i = 0; i < num_transfers; i++) {
        if (transfers[i].is_send && (transfers[i].peer < encoders) != rank->is_encoder) {
            rank->bytes_sent += transfers[i].size_bytes;
        }
    }
    return real_ops->start(comm, transfers, num_transfers, stream, request_out);
}

static Status counting_split(Comm *comm, const int *ranks, int num_ranks, const char *label,
                             Comm **comm_out)
{
    TRY(real_ops->split(comm, ranks, num_ranks, label, comm_out));
    (*comm_out)->ops = &counting_ops;
    return STATUS_OK;
}

static void count_bytes(ParityRank *rank)
{
    rank_of_thread = rank;
    real_ops = rank->world->ops;
    counting_ops = *real_ops;
    counting_ops.start = counting_start;
    counting_ops.split = counting_split;
    rank->world->ops = &counting_ops;
}

/* ---- ranks ---- */

static Status run_steps(ParityRank *rank)
{
    ParityRun *run = rank->run;
    if (run->is_whole) {
        TRY(trainer_run(rank->trainer));
        if (run->visit) {
            run->visit(rank, NULL);
        }
        return STATUS_OK;
    }
    for (int64_t i = 0; i < run->spec->training->steps; i++) {
        TrainerStep step;
        TRY(trainer_step(rank->trainer, &step));
        on_step(rank, &step);
        if (run->visit) {
            run->visit(rank, &step);
        }
    }
    if (trainer_step(rank->trainer, NULL) != STATUS_NOT_FOUND) {
        parity_report_fail(&rank->report, "a step after the last was not refused");
    }
    return STATUS_OK;
}

static Status run_rank(ParityRank *rank, Device *device)
{
    const ParityRun *run = rank->run;
    const ModuleOps *modules[2] = {run->vision ? run->vision : &vision_module_ops,
                                   run->llm ? run->llm : &llm_module_ops};
    const TrainerOptions options = {
        .spec = rank->is_encoder && run->encoder_spec ? run->encoder_spec : run->spec,
        .world = rank->world,
        .device = device,
        .modules = modules,
        .num_modules = 2,
        .resume_from = run->resume_from,
        .events = {rank, NULL, on_step, on_evaluation, on_checkpoint},
    };
    TRY(trainer_create(&options, &rank->trainer));
    Status status = run_steps(rank);
    if (status != STATUS_OK) {
        snprintf(rank->message, sizeof rank->message, "%s (%s)", status_message(), status_trail());
    }
    trainer_destroy(rank->trainer);
    return status;
}

static void *rank_main(void *context)
{
    ParityRank *rank = context;
    Device *device = NULL;
    count_bytes(rank);
    rank->status = device_open("cpu", 0, &device);
    if (rank->status == STATUS_OK) {
        rank->status = run_rank(rank, device);
        device_close(device);
    }
    if (rank->status != STATUS_OK && !rank->message[0]) {
        snprintf(rank->message, sizeof rank->message, "%s (%s)", status_message(), status_trail());
    }
    comm_destroy(rank->world);
    return NULL;
}

void parity_run(ParityRun *run, ParityRank *ranks_out)
{
    Comm *comms[PARITY_RANKS_MAX];
    pthread_t threads[PARITY_RANKS_MAX];
    int size = parity_ranks(run->layout);
    assert_true(size <= PARITY_RANKS_MAX);
    assert_int_equal(comm_local_create(size, PARITY_TIMEOUT_MS, comms), STATUS_OK);
    for (int i = 0; i < size; i++) {
        ranks_out[i] = (ParityRank){
            .run = run,
            .rank = i,
            .is_encoder = i < run->layout.encoder_tp * run->layout.encoder_dp,
            .world = comms[i],
        };
        assert_int_equal(pthread_create(&threads[i], NULL, rank_main, &ranks_out[i]), 0);
    }
    for (int i = 0; i < size; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
}

void parity_expect_good(const ParityRun *run, const ParityRank *ranks, const char *what)
{
    const ParityLayout *layout = &run->layout;
    for (int i = 0; i < parity_ranks(*layout); i++) {
        const ParityRank *rank = &ranks[i];
        if (rank->status != STATUS_OK || rank->report.failures > 0) {
            fail_msg("%s, encoder %dx%d, llm %dx%d, rank %d: %s, %d differences: %s", what,
                     layout->encoder_tp, layout->encoder_dp, layout->llm_tp, layout->llm_dp, i,
                     rank->message[0] ? rank->message : status_name(rank->status),
                     rank->report.failures, rank->report.first);
        }
    }
}
