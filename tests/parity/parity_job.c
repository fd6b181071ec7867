#include "tests/parity/parity_job.h"

#include "comm/comm_local.h"
#include "encoder_worker/audio_encoder.h"
#include "encoder_worker/vision_encoder.h"
#include "job/job_file.h"
#include "llm_worker/llm.h"
#include "tests/parity/faulty.h"

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

/* Grouped queries, a class token, and heads and widths that four ranks cannot share evenly; five
 * layers are two or three uneven pipeline stages. */
static const char template[] =
    "model:\n"
    "%s"
    "%s"
    "  llm: {width: %d, layers: 5, heads: 4, kv_heads: 2, mlp_width: %d, max_tokens: 160,\n"
    "        tied_head: %s}\n"
    "data:\n"
    "  train: [\"%s\"]\n"
    "%s%s%s"
    "  prompt: \"see <image>%s: \"\n"
    "  loader_threads: 1\n"
    "training: {steps: %d, global_batch: %d, microbatches: %d, encoder_window: %d, seed: %d,\n"
    "           frozen: [%s]}\n"
    "optimizer: {kind: %s, learning_rate: %g, min_learning_rate: %g, warmup_steps: %d,\n"
    "            weight_decay: 0.01, max_grad_norm: %g, sharding: %s}\n"
    "checkpoint: {directory: \"%s\", every_steps: %d}\n"
    "evaluation: {captions: %d, max_new_tokens: 6}\n"
    "row_cache: {directory: \"%s\"}\n";

static const char vision_model[] =
    "  vision: {image_size: 8, patch_size: 4, width: %d, layers: 4, heads: 3, mlp_width: %d,\n"
    "           class_token: true, feature_layer: -2}\n"
    "  projector: {width: 14}\n";
static const char audio_model[] =
    "  audio: {mels: 8, width: 10, layers: 3, heads: 5, mlp_width: 18}\n"
    "  audio_projector: {width: 12}\n";

static int one(int value)
{
    return value > 0 ? value : 1;
}

static int write_module(char *text, size_t size, const char *name, const char *pool,
                        const ParityModule *module)
{
    return snprintf(text, size,
                    "  - {name: %s, pool: %s, tp: %d, cp: %d, pp: %d, dp: %d, virtual_stages: %d,\n"
                    "     sequence_parallel: %s, recompute: %s}\n",
                    name, pool, one(module->tp), one(module->cp), one(module->pp), one(module->dp),
                    one(module->chunks), module->is_sequence_parallel ? "true" : "false",
                    module->recompute ? module->recompute : "NONE");
}

static void write_layout(char *text, size_t size, const ParityOptions *options)
{
    const ParityLayout *layout = &options->layout;
    const char *vision = layout->is_colocated ? "llm" : "encoder";
    const char *audio = layout->is_colocated || layout->shares_pool ? vision : "ears";
    size_t at = (size_t)snprintf(text, size, "modules:\n");
    at += (size_t)write_module(text + at, size - at, "vision", vision, &layout->vision);
    if (options->has_audio) {
        at += (size_t)write_module(text + at, size - at, "audio", audio, &layout->audio);
    }
    at += (size_t)write_module(text + at, size - at, "llm", "llm", &layout->llm);
    at += (size_t)snprintf(text + at, size - at, "pools:\n  - {name: llm, role: llm}\n");
    if (!layout->is_colocated) {
        at += (size_t)snprintf(text + at, size - at, "  - {name: encoder, role: encoder}\n");
    }
    if (strcmp(audio, "ears") == 0 && options->has_audio) {
        at += (size_t)snprintf(text + at, size - at, "  - {name: ears, role: encoder}\n");
    }
    assert_true(at < size);
}

static int write_job(char *text, size_t size, const ParityOptions *options)
{
    bool has_heldout = options->heldout != NULL;
    char vision[512];
    int widening = one(options->widening);
    snprintf(vision, sizeof vision, vision_model, 12 * widening, 22 * widening);
    double learning_rate = options->is_adamw ? 0.003 : 0.5;
    return snprintf(
        text, size, template, vision, options->has_audio ? audio_model : "", 16 * widening,
        26 * widening, options->has_tied_head ? "true" : "false", options->shard,
        has_heldout ? "  heldout: [\"" : "", has_heldout ? options->heldout : "",
        has_heldout ? "\"]\n" : "", options->has_audio ? "<audio>" : "", options->steps,
        options->batch, options->microbatches, options->window, options->seed,
        options->frozen ? options->frozen : "", options->is_adamw ? "ADAMW" : "SGD", learning_rate,
        learning_rate, options->warmup, options->max_grad_norm,
        options->is_sharded ? "ZERO1" : "NONE", options->checkpoints ? options->checkpoints : "",
        options->checkpoint_every, options->captions, options->row_cache ? options->row_cache : "");
}

JobSpec *parity_spec(const ParityOptions *options)
{
    char text[8192];
    int length = write_job(text, sizeof text, options);
    assert_true(length > 0 && (size_t)length < sizeof text);
    write_layout(text + length, sizeof text - (size_t)length, options);
    JobSpec *spec = NULL;
    JobProblem problems[4];
    if (job_file_parse("parity", text, strlen(text), &spec) != STATUS_OK ||
        job_spec_resolve(spec) != STATUS_OK) {
        fail_msg("%s\n%s", status_message(), text);
    }
    if (job_spec_check(spec, problems, 4) > 0) {
        fail_msg("%s: %s\n%s", problems[0].field, problems[0].message, text);
    }
    return spec;
}

int parity_ranks(const ParityRun *run)
{
    return job_layout_make(run->spec).num_ranks;
}

bool parity_serves(const ParityRank *rank, int module)
{
    const JobLayoutModule *place = &rank->layout.modules[module];
    return rank->rank >= place->first_rank && rank->rank < place->first_rank + place->num_ranks;
}

/* ---- events ---- */

static void on_step(void *context, const TrainerStep *step)
{
    ParityRank *rank = context;
    ParityRun *run = rank->run;
    if (rank->rank == rank->layout.modules[rank->layout.num_modules - 1].first_rank) {
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

static int pool_of(const ParityRank *rank, int peer)
{
    const JobLayout *layout = &rank->layout;
    for (int i = 0; i < layout->num_pools; i++) {
        int first = layout->pools[i].first_rank;
        if (peer >= first && peer < first + layout->pools[i].num_ranks) {
            return i;
        }
    }
    return -1;
}

/* Between pools, in groups of the whole world, where a peer's number is its rank in the world.
 * Other groups are inside a pool. */
static Status counting_start(Comm *comm, CommTransfer *transfers, int num_transfers, Stream *stream,
                             CommRequest *request_out)
{
    ParityRank *rank = rank_of_thread;
    for (int i = 0; i < num_transfers; i++) {
        bool crosses = comm->size == rank->layout.num_ranks &&
                       pool_of(rank, transfers[i].peer) != pool_of(rank, rank->rank);
        if (transfers[i].is_send && crosses) {
            rank->bytes_sent += transfers[i].size_bytes;
        }
    }
    return real_ops->start(comm, transfers, num_transfers, stream, request_out);
}

static Status parted_all_reduce(Comm *comm, void *data, int64_t count, DType dtype,
                                CommReduce reduce, Stream *stream)
{
    if (rank_of_thread->run->keeps_parts && strcmp(comm->label, "llm data") == 0) {
        return STATUS_OK;
    }
    return real_ops->all_reduce(comm, data, count, dtype, reduce, stream);
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
    counting_ops.all_reduce = parted_all_reduce;
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

const ModuleOps *const parity_modules[] = {&vision_module_ops, &audio_module_ops, &llm_module_ops};
const int parity_num_modules = sizeof parity_modules / sizeof parity_modules[0];

/* Replaces what the module does; all else stays the real one's. */
static void spoil(ParityRank *rank)
{
    const ModuleOps *faulty = rank->run->faulty;
    const Place *place = trainer_place(rank->trainer);
    faulty_begin(rank->run->spec->model, place_decoder(place)->coords.at[GRID_AXIS_CP]);
    for (int i = 0; faulty && i < rank->layout.num_modules; i++) {
        Module *module = trainer_module(rank->trainer, i);
        if (module && strcmp(module->ops->name, faulty->name) == 0) {
            module->ops = faulty;
        }
    }
}

static Status run_rank(ParityRank *rank, Device *device)
{
    const ParityRun *run = rank->run;
    bool has_decoder = parity_serves(rank, rank->layout.num_modules - 1);
    const TrainerOptions options = {
        .spec = !has_decoder && run->encoder_spec ? run->encoder_spec : run->spec,
        .world = rank->world,
        .device = device,
        .modules = parity_modules,
        .num_modules = parity_num_modules,
        .resume_from = run->resume_from,
        .events = {rank, NULL, on_step, on_evaluation, on_checkpoint},
    };
    TRY(trainer_create(&options, &rank->trainer));
    spoil(rank);
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
        rank->device = device;
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
    JobLayout layout = job_layout_make(run->spec);
    int size = layout.num_ranks;
    assert_true(size <= PARITY_RANKS_MAX);
    assert_int_equal(comm_local_create(size, PARITY_TIMEOUT_MS, comms), STATUS_OK);
    for (int i = 0; i < size; i++) {
        ranks_out[i] = (ParityRank){
            .run = run,
            .rank = i,
            .layout = layout,
            .world = comms[i],
        };
        assert_int_equal(pthread_create(&threads[i], NULL, rank_main, &ranks_out[i]), 0);
    }
    for (int i = 0; i < size; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
}

static void describe(const JobLayout *layout, char *text, size_t size)
{
    size_t at = 0;
    for (int i = 0; i < layout->num_modules; i++) {
        const ModuleSpec *spec = layout->modules[i].spec;
        at += (size_t)snprintf(
            text + at, size - at, "%s%s tp %d%s cp %d pp %d x %d dp %d at rank %d", i ? "; " : "",
            spec->name, spec->tp, spec->sequence_parallel ? " sp" : "", spec->cp, spec->pp,
            spec->virtual_stages, spec->dp, layout->modules[i].first_rank);
    }
}

void parity_expect_good(const ParityRun *run, const ParityRank *ranks, const char *what)
{
    char layout[512];
    describe(&ranks[0].layout, layout, sizeof layout);
    for (int i = 0; i < ranks[0].layout.num_ranks; i++) {
        const ParityRank *rank = &ranks[i];
        if (rank->status != STATUS_OK || rank->report.failures > 0) {
            fail_msg("%s, %s, microbatches %d, window %d, rank %d: %s, %d differences: %s", what,
                     layout, run->spec->training->microbatches, run->spec->training->encoder_window,
                     i, rank->message[0] ? rank->message : status_name(rank->status),
                     rank->report.failures, rank->report.first);
        }
    }
}
