#include "train/verify.h"

#include "base/memory.h"
#include "comm/comm_local.h"
#include "job/message.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static const double loss_allowed = 1e-5;
static const double grad_allowed = 1e-4;
static const double grad_floor = 1e-6; /* of the largest gradient anywhere */
static const double weight_allowed = 1e-3;
static const double weight_floor = 1e-6;               /* of the largest change anywhere */
static const double weight_rounding = 1.0 / (1 << 22); /* two units in the last place */

static const double learning_rate = 0.1;
static const double max_grad_norm = 1.0;

/* What one process has of a module after each step. */
typedef struct WholeModule {
    ParamSet params;  /* specs and offsets only: values and grads are below */
    float *begin;     /* [count] weights before the first step */
    float *weights;   /* [steps, count] */
    float *grads;     /* [steps, trained_count] */
    int first_tensor; /* of the result's */
} WholeModule;

typedef struct Verify {
    VerifyOptions options;
    JobSpec *spec;       /* of the layout */
    JobSpec *whole_spec; /* of one process */
    JobLayout layout;
    WholeModule whole[JOB_MODULES_MAX];
    double grad_largest[VERIFY_STEPS_MAX];   /* anywhere */
    double change_largest[VERIFY_STEPS_MAX]; /* anywhere, since the beginning */
    pthread_mutex_t lock;                    /* of what follows */
    VerifyResult result;
    Status status; /* the first failure of a rank */
    char message[1024];
} Verify;

/* A thread that is one rank. */
typedef struct VerifyRank {
    Verify *verify;
    const JobSpec *spec;
    Comm *world;
    bool is_whole;
} VerifyRank;

/* ---------------------------------------------------------------- the two jobs */

/* Neither evaluates nor saves, and both compute all rows: one that finds the other's in the cache
 * would compare them with themselves. */
static Status make_layout_spec(Verify *verify)
{
    TRY(message_copy(&verify->options.spec->base, (ProtobufCMessage **)&verify->spec));
    JobSpec *spec = verify->spec;
    spec->training->steps = verify->options.steps;
    spec->optimizer->kind = VIADUCT__V1__OPTIMIZER_SPEC__KIND__SGD;
    spec->optimizer->learning_rate = learning_rate;
    spec->optimizer->min_learning_rate = learning_rate;
    spec->optimizer->warmup_steps = 0;
    spec->optimizer->max_grad_norm = max_grad_norm;
    message_drop_texts(spec->data->heldout, &spec->data->n_heldout);
    TRY(message_set_text(&spec->row_cache->directory, ""));
    return message_set_text(&spec->checkpoint->directory, "");
}

static Status make_whole_spec(Verify *verify)
{
    TRY(message_copy(&verify->spec->base, (ProtobufCMessage **)&verify->whole_spec));
    JobSpec *spec = verify->whole_spec;
    const ModuleSpec *decoder = job_spec_module(spec, "llm");
    for (size_t i = 0; i < spec->n_modules; i++) {
        ModuleSpec *module = spec->modules[i];
        module->tp = module->cp = module->pp = module->dp = module->virtual_stages = 1;
        module->sequence_parallel = false;
        module->recompute = VIADUCT__V1__MODULE_SPEC__RECOMPUTE__NONE;
        if (module != decoder) {
            TRY(message_set_text(&module->pool, decoder->pool));
        }
    }
    spec->training->microbatches = 1;
    spec->optimizer->sharding = VIADUCT__V1__OPTIMIZER_SPEC__SHARDING__NONE;
    return STATUS_OK;
}

/* ---------------------------------------------------------------- one process */

static double largest(const float *values, int64_t count)
{
    double value = 0.0;
    for (int64_t i = 0; i < count; i++) {
        value = fabs((double)values[i]) > value ? fabs((double)values[i]) : value;
    }
    return value;
}

static double largest_change(const float *from, const float *to, int64_t count)
{
    double change = 0.0;
    for (int64_t i = 0; i < count; i++) {
        double value = fabs((double)to[i] - (double)from[i]);
        change = value > change ? value : change;
    }
    return change;
}

static int64_t global_count(const ParamSpec *spec)
{
    int64_t count = 1;
    for (int i = 0; i < spec->num_dims; i++) {
        count *= spec->dims[i];
    }
    return count;
}

static Status keep_begin(Verify *verify, Trainer *trainer)
{
    int steps = verify->options.steps;
    int num_tensors = 0;
    for (int k = 0; k < verify->layout.num_modules; k++) {
        const ParamSet *params = &trainer_module(trainer, k)->params;
        WholeModule *whole = &verify->whole[k];
        whole->params = (ParamSet){.num_params = params->num_params,
                                   .count = params->count,
                                   .trained_count = params->trained_count};
        whole->first_tensor = num_tensors;
        num_tensors += params->num_params;
        TRY(MEMORY_NEW(&whole->params.params, params->num_params));
        memcpy(whole->params.params, params->params,
               (size_t)params->num_params * sizeof *params->params);
        TRY(MEMORY_NEW(&whole->begin, params->count));
        TRY(MEMORY_NEW(&whole->weights, steps * params->count));
        TRY(MEMORY_NEW(&whole->grads, steps * params->trained_count));
        memcpy(whole->begin, params->values, (size_t)params->count * sizeof(float));
    }
    TRY(MEMORY_NEW(&verify->result.tensors, num_tensors));
    verify->result.num_tensors = num_tensors;
    for (int k = 0; k < verify->layout.num_modules; k++) {
        const WholeModule *whole = &verify->whole[k];
        for (int p = 0; p < whole->params.num_params; p++) {
            VerifyTensor *tensor = &verify->result.tensors[whole->first_tensor + p];
            const Param *param = &whole->params.params[p];
            snprintf(tensor->name, sizeof tensor->name, "%s", param->spec.name);
            tensor->module = verify->layout.modules[k].spec->name;
            tensor->is_trained = param->is_trained;
        }
    }
    return STATUS_OK;
}

static void keep_step(Verify *verify, Trainer *trainer, int number, const TrainerStep *step)
{
    double grad_largest = 0.0;
    double change_largest = 0.0;
    for (int k = 0; k < verify->layout.num_modules; k++) {
        const ParamSet *params = &trainer_module(trainer, k)->params;
        WholeModule *whole = &verify->whole[k];
        memcpy(whole->weights + number * params->count, params->values,
               (size_t)params->count * sizeof(float));
        if (params->trained_count > 0) {
            memcpy(whole->grads + number * params->trained_count, params->grads,
                   (size_t)params->trained_count * sizeof(float));
        }
        double value = largest(params->grads, params->trained_count);
        grad_largest = value > grad_largest ? value : grad_largest;
        value = largest_change(whole->begin, params->values, params->count);
        change_largest = value > change_largest ? value : change_largest;
    }
    verify->grad_largest[number] = grad_largest;
    verify->change_largest[number] = change_largest;
    verify->result.steps[number].whole_loss = step->loss;
    verify->result.steps[number].whole_grad_norm = step->grad_norm;
}

/* ---------------------------------------------------------------- comparing */

static int find_param(const ParamSet *params, const char *name)
{
    for (int p = 0; p < params->num_params; p++) {
        if (strcmp(params->params[p].spec.name, name) == 0) {
            return p;
        }
    }
    CHECK(!"the uncut module has every parameter");
    return -1;
}

/* The worst difference of `local` elements [valid) from the whole tensor, over what is allowed. */
static double compare(const Param *param, const float *local, Range valid, const float *whole,
                      double allowed)
{
    double worst = 0.0;
    for (int64_t i = valid.begin; i < valid.end; i++) {
        double expected = (double)whole[param_global_index(&param->spec, i)];
        double ratio = fabs((double)local[i] - expected) / allowed;
        worst = ratio <= worst ? worst : ratio; /* not a number counts as worse */
    }
    return worst;
}

static void raise(double *worst, double value)
{
    *worst = value <= *worst ? *worst : value;
}

static void compare_param(Verify *verify, int module, const Param *param, Range valid_grads,
                          int number)
{
    const WholeModule *whole = &verify->whole[module];
    int p = find_param(&whole->params, param->spec.name);
    int64_t offset = whole->params.params[p].offset;
    int64_t count = global_count(&param->spec);
    const float *weights = whole->weights + number * whole->params.count + offset;
    double allowed = weight_allowed * largest_change(whole->begin + offset, weights, count) +
                     weight_rounding * largest(weights, count) +
                     weight_floor * verify->change_largest[number] + 1e-30;
    double weight = compare(param, tensor_f32(&param->value),
                            (Range){0, tensor_count(&param->value)}, weights, allowed);
    double grad = 0.0;
    if (param->is_trained) {
        const float *grads = whole->grads + number * whole->params.trained_count + offset;
        allowed = grad_allowed * largest(grads, count) + grad_floor * verify->grad_largest[number] +
                  1e-30;
        grad = compare(param, tensor_f32(&param->grad), valid_grads, grads, allowed);
    }
    pthread_mutex_lock(&verify->lock);
    VerifyTensor *tensor = &verify->result.tensors[whole->first_tensor + p];
    raise(&tensor->grad, grad);
    raise(&tensor->weight, weight);
    raise(&verify->result.worst_grad, grad);
    raise(&verify->result.worst_weight, weight);
    pthread_mutex_unlock(&verify->lock);
}

static Range clip(Range range, int64_t offset, int64_t count)
{
    Range part = {range.begin - offset, range.end - offset};
    part.begin = part.begin < 0 ? 0 : part.begin;
    part.end = part.end > count ? count : part.end;
    part.end = part.end < part.begin ? part.begin : part.end;
    return part;
}

static double relative(double found, double expected)
{
    return fabs(found - expected) / (loss_allowed * fabs(expected) + 1e-30);
}

static void compare_step(Verify *verify, Trainer *trainer, int number, const TrainerStep *step)
{
    for (int k = 0; k < verify->layout.num_modules; k++) {
        const Module *module = trainer_module(trainer, k);
        if (!module) {
            continue;
        }
        Range summed = trainer_summed_grads(trainer, k);
        for (int p = 0; p < module->params.num_params; p++) {
            const Param *param = &module->params.params[p];
            compare_param(verify, k, param,
                          clip(summed, param->offset, tensor_count(&param->value)), number);
        }
    }
    pthread_mutex_lock(&verify->lock);
    VerifyStep *both = &verify->result.steps[number];
    both->loss = step->loss;
    both->grad_norm = step->grad_norm;
    raise(&verify->result.worst_loss, relative(step->loss, both->whole_loss));
    raise(&verify->result.worst_loss, relative(step->grad_norm, both->whole_grad_norm));
    pthread_mutex_unlock(&verify->lock);
}

/* ---------------------------------------------------------------- runs */

static Status run_steps(VerifyRank *rank, Trainer *trainer)
{
    Verify *verify = rank->verify;
    const VerifyOptions *options = &verify->options;
    if (rank->is_whole) {
        TRY(keep_begin(verify, trainer));
    } else if (options->spoil) {
        options->spoil(options->context, trainer);
    }
    for (int i = 0; i < options->steps; i++) {
        TrainerStep step;
        TRY(trainer_step(trainer, &step));
        if (!step.committed) {
            return fail(STATUS_INVALID, "step %d: a value of module \"%s\" is not finite", i + 1,
                        step.module);
        }
        if (rank->is_whole) {
            keep_step(verify, trainer, i, &step);
        } else {
            compare_step(verify, trainer, i, &step);
        }
        if (options->progress && rank->world->rank == 0) {
            options->progress(options->context, rank->is_whole ? "one process" : "layout", i + 1);
        }
    }
    return STATUS_OK;
}

static Status run_trainer(VerifyRank *rank)
{
    const VerifyOptions *options = &rank->verify->options;
    Device *device = NULL;
    Trainer *trainer = NULL;
    TRY(device_open("cpu", 0, &device));
    const TrainerOptions trainer_options = {.spec = rank->spec,
                                            .world = rank->world,
                                            .device = device,
                                            .modules = options->modules,
                                            .num_modules = options->num_modules};
    Status status = trainer_create(&trainer_options, &trainer);
    if (status == STATUS_OK) {
        status = run_steps(rank, trainer);
    }
    if (status != STATUS_OK) { /* no rank may wait for this one */
        comm_abort(rank->world, status_message());
    }
    trainer_destroy(trainer);
    device_close(device);
    return status;
}

static void *rank_main(void *context)
{
    VerifyRank *rank = context;
    Verify *verify = rank->verify;
    Status status = run_trainer(rank);
    if (status != STATUS_OK) {
        pthread_mutex_lock(&verify->lock);
        bool is_first = verify->status == STATUS_OK || verify->status == STATUS_ABORTED;
        if (is_first && (status != STATUS_ABORTED || verify->status == STATUS_OK)) {
            verify->status = status;
            snprintf(verify->message, sizeof verify->message, "%s, rank %d: %s",
                     rank->is_whole ? "in one process" : "in the layout", rank->world->rank,
                     status_message());
        }
        pthread_mutex_unlock(&verify->lock);
    }
    comm_destroy(rank->world);
    return NULL;
}

static Status start_and_join(Verify *verify, const JobSpec *spec, bool is_whole, VerifyRank *ranks,
                             pthread_t *threads, Comm **comms)
{
    int num_ranks = job_layout_make(spec).num_ranks;
    TRY(comm_local_create(num_ranks, message_duration_ms(spec->timeouts->step), comms));
    int started = 0;
    for (int i = 0; i < num_ranks; i++) {
        ranks[i] =
            (VerifyRank){.verify = verify, .spec = spec, .world = comms[i], .is_whole = is_whole};
        if (pthread_create(&threads[i], NULL, rank_main, &ranks[i]) != 0) {
            comm_abort(comms[i], "no thread for a rank");
            comm_destroy(comms[i]);
            continue;
        }
        threads[started++] = threads[i];
    }
    for (int i = 0; i < started; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    if (started < num_ranks) {
        return fail(STATUS_NO_MEMORY, "no threads for %d ranks", num_ranks);
    }
    if (verify->status != STATUS_OK) {
        return fail(verify->status, "%s", verify->message);
    }
    return STATUS_OK;
}

static Status run_ranks(Verify *verify, const JobSpec *spec, bool is_whole)
{
    int num_ranks = job_layout_make(spec).num_ranks;
    VerifyRank *ranks = NULL;
    pthread_t *threads = NULL;
    Comm **comms = NULL;
    Status status = MEMORY_NEW(&ranks, num_ranks);
    status = status == STATUS_OK ? MEMORY_NEW(&threads, num_ranks) : status;
    status = status == STATUS_OK ? memory_alloc((size_t)num_ranks, sizeof(void *), (void **)&comms)
                                 : status;
    if (status == STATUS_OK) {
        status = start_and_join(verify, spec, is_whole, ranks, threads, comms);
    }
    memory_free(ranks);
    memory_free(threads);
    memory_free((void *)comms);
    TRY(status);
    return STATUS_OK;
}

static Status run_both(Verify *verify)
{
    TRY(make_layout_spec(verify));
    TRY(make_whole_spec(verify));
    verify->layout = job_layout_make(verify->options.spec);
    if (verify->layout.num_ranks > VERIFY_RANKS_MAX) {
        return fail(STATUS_INVALID,
                    "the layout has %d ranks, which would all be threads here, expected at most "
                    "%d: verify it with fewer replicas (dp)",
                    verify->layout.num_ranks, VERIFY_RANKS_MAX);
    }
    verify->result.num_ranks = verify->layout.num_ranks;
    verify->result.num_steps = verify->options.steps;
    TRY(run_ranks(verify, verify->whole_spec, true));
    TRY(run_ranks(verify, verify->spec, false));
    VerifyResult *result = &verify->result;
    result->is_equal =
        result->worst_loss <= 1.0 && result->worst_grad <= 1.0 && result->worst_weight <= 1.0;
    return STATUS_OK;
}

Status verify_run(const VerifyOptions *options, VerifyResult *result_out)
{
    CHECK(options->steps >= 1 && options->steps <= VERIFY_STEPS_MAX);
    Verify verify = {.options = *options};
    CHECK(pthread_mutex_init(&verify.lock, NULL) == 0);
    Status status = run_both(&verify);
    for (int k = 0; k < JOB_MODULES_MAX; k++) {
        memory_free(verify.whole[k].params.params);
        memory_free(verify.whole[k].begin);
        memory_free(verify.whole[k].weights);
        memory_free(verify.whole[k].grads);
    }
    if (verify.spec) {
        viaduct__v1__job_spec__free_unpacked(verify.spec, NULL);
    }
    if (verify.whole_spec) {
        viaduct__v1__job_spec__free_unpacked(verify.whole_spec, NULL);
    }
    (void)pthread_mutex_destroy(&verify.lock);
    if (status != STATUS_OK) {
        verify_result_done(&verify.result);
        return status_trace(status, __FILE__, __LINE__);
    }
    *result_out = verify.result;
    return STATUS_OK;
}

void verify_result_done(VerifyResult *result)
{
    memory_free(result->tensors);
    *result = (VerifyResult){0};
}
