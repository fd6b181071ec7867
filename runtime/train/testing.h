/* Testing: a module cut over tp, cp, stages and chunks, run by hand on the ranks of one replica, to
 * be compared with the same module in one piece. A rank's thread holds all stages.
 *
 * Threading: one thread for each TestingStages; TestingGrads may be read by many.
 */
#ifndef TRAIN_TESTING_H
#define TRAIN_TESTING_H

#include "base/hash.h"
#include "base/memory.h"
#include "nn/testing.h"
#include "train/module.h"

#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>

enum {
    TESTING_STAGES_MAX = 4,
    TESTING_BATCHES = 2, /* microbatches in flight */
    TESTING_FROZEN_MAX = 4
};

/* Of the largest of an array: what float32 (6e-8) loses over some tens of sums in another order. */
static const double testing_relative = 1e-5;

typedef struct TestingLayout {
    int tp, cp;
    bool is_sequence_parallel;
    int stages, chunks;
    Recompute recompute;
    const char *const *frozen; /* [TESTING_FROZEN_MAX], NULL where there are fewer */
    bool wants_rows_grad;      /* of a decoder */
} TestingLayout;

/* ---- values and gradients ---- */

/* Matrices and biases around 0, norms around 1: a function of the name and the index in the whole
 * array, so that all layouts have the same. */
static inline void testing_fill(ParamSet *params)
{
    for (int p = 0; p < params->num_params; p++) {
        Param *param = &params->params[p];
        float middle = param->spec.init == PARAM_INIT_ONES ? 1.0f : 0.0f;
        uint64_t seed = hash_text(param->spec.name);
        for (int64_t i = 0; i < tensor_count(&param->value); i++) {
            tensor_f32(&param->value)[i] =
                middle + 0.4f * testing_value(seed, testing_global_index(param, i));
        }
    }
}

static inline double testing_largest(const float *values, int64_t count)
{
    double largest = 0;
    for (int64_t i = 0; i < count; i++) {
        largest = fmax(largest, fabs((double)values[i]));
    }
    return largest;
}

typedef struct TestingGrad {
    char name[sizeof((ParamSpec *)0)->name];
    float *whole;
    double largest;
} TestingGrad;

/* Gradients of a module in one piece with nothing frozen. */
typedef struct TestingGrads {
    int num;
    TestingGrad *grads;
    int64_t count; /* elements of all parameters */
    double largest;
} TestingGrads;

static inline void testing_grads_done(TestingGrads *grads)
{
    for (int i = 0; i < grads->num; i++) {
        memory_free(grads->grads[i].whole);
    }
    memory_free(grads->grads);
    *grads = (TestingGrads){0};
}

static inline Status testing_grads_keep(const ParamSet *params, TestingGrads *grads)
{
    TRY(MEMORY_NEW(&grads->grads, params->num_params));
    grads->num = params->num_params;
    grads->count = params->count;
    for (int p = 0; p < grads->num; p++) {
        const Param *param = &params->params[p];
        TestingGrad *grad = &grads->grads[p];
        snprintf(grad->name, sizeof grad->name, "%s", param->spec.name);
        CHECK(param->is_trained);
        int64_t count = tensor_count(&param->grad);
        TRY(MEMORY_NEW(&grad->whole, count));
        memcpy(grad->whole, param->grad.data, (size_t)count * sizeof(float));
        grad->largest = testing_largest(grad->whole, count);
        grads->largest = fmax(grads->largest, grad->largest);
    }
    return STATUS_OK;
}

static inline const TestingGrad *testing_grads_find(const TestingGrads *grads, const char *name)
{
    for (int i = 0; i < grads->num; i++) {
        if (strcmp(grads->grads[i].name, name) == 0) {
            return &grads->grads[i];
        }
    }
    return NULL;
}

/* ---- parts ---- */

static inline int testing_parts(const TestingLayout *layout)
{
    return layout->stages * layout->chunks;
}

/* The part that a parameter belongs to, by its name; `layers` run. */
static inline int testing_part_of(const TestingLayout *layout, const char *name, int layers)
{
    static const char *const ends[] = {"language_model.lm_head.", "language_model.model.norm.",
                                       "multi_modal_projector."};
    int parts = testing_parts(layout);
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        if (strncmp(name, ends[i], strlen(ends[i])) == 0) {
            return parts - 1;
        }
    }
    const char *number = strstr(name, ".layers.");
    if (!number) {
        return 0;
    }
    int layer = (int)strtol(number + strlen(".layers."), NULL, 10);
    int part = 0;
    for (int end = 0; part < parts; part++) { /* the first `layers % parts` have one more */
        end += layers / parts + (part < layers % parts);
        if (layer < end) {
            break;
        }
    }
    return part;
}

static inline bool testing_is_frozen(const TestingLayout *layout, const char *name)
{
    for (int i = 0; i < TESTING_FROZEN_MAX && layout->frozen[i]; i++) {
        if (fnmatch(layout->frozen[i], name, 0) == 0) {
            return true;
        }
    }
    return false;
}

static inline int testing_first_trained(const TestingLayout *layout, const TestingGrads *grads,
                                        int layers)
{
    int first = testing_parts(layout);
    for (int i = 0; i < grads->num; i++) {
        const char *name = grads->grads[i].name;
        int part = testing_part_of(layout, name, layers);
        first = part < first && !testing_is_frozen(layout, name) ? part : first;
    }
    return first;
}

/* ---- a module on one rank ---- */

typedef struct TestingStages {
    const ModuleOps *ops;
    const TestingLayout *layout;
    LayerContext layers;
    int first_trained;
    int backward_begin;
    Module *modules[TESTING_STAGES_MAX];
} TestingStages;

static inline void testing_stages_close(TestingStages *stages)
{
    for (int s = 0; s < TESTING_STAGES_MAX; s++) {
        stages->ops->destroy(stages->modules[s]);
    }
}

/* Sets ops, layout and layers first. */
static inline Status testing_stages_open(TestingStages *stages, const ModelSpec *model,
                                         Device *device, ModuleLimits limits)
{
    const TestingLayout *layout = stages->layout;
    size_t num_frozen = 0;
    while (num_frozen < TESTING_FROZEN_MAX && layout->frozen[num_frozen]) {
        num_frozen++;
    }
    ModuleContext context = {.device = device,
                             .kernels = stages->layers.kernels,
                             .stream = stages->layers.stream,
                             .tp = stages->layers.tp,
                             .cp = stages->layers.cp,
                             .is_sequence_parallel = layout->is_sequence_parallel,
                             .stages = layout->stages,
                             .chunks = layout->chunks,
                             .recompute = layout->recompute,
                             .frozen = (char *const *)layout->frozen,
                             .num_frozen = num_frozen};
    TRY(stages->ops->first_trained(model, &context, &stages->first_trained));
    stages->backward_begin = layout->wants_rows_grad ? 0 : stages->first_trained;
    context.backward_begin = stages->backward_begin;
    for (int c = 0; c < layout->chunks; c++) {
        limits.slots[c] = TESTING_BATCHES;
    }
    for (context.stage = 0; context.stage < layout->stages; context.stage++) {
        Module **module = &stages->modules[context.stage];
        TRY(stages->ops->create(model, &context, &limits, module));
        testing_fill(&(*module)->params);
    }
    return STATUS_OK;
}

static inline Status testing_stages_forward(TestingStages *stages, int slot,
                                            const ModuleBatch *batch, float *rows_out,
                                            double *loss_sum_out)
{
    const ModuleOps *ops = stages->ops;
    int num_stages = stages->layout->stages;
    for (int part = 0; part < testing_parts(stages->layout); part++) {
        Module *module = stages->modules[part % num_stages];
        int64_t n = ops->count_local(module, batch);
        CHECK(n <= module->local_max);
        if (part > 0) {
            Module *below = stages->modules[(part - 1) % num_stages];
            TRY(stream_copy(stages->layers.stream, ops->input(module, part / num_stages, slot),
                            ops->output(below, (part - 1) / num_stages, slot),
                            n * module->width * (int64_t)sizeof(float)));
        }
        TRY(ops->forward(module, part / num_stages, slot, batch, rows_out, loss_sum_out));
    }
    return STATUS_OK;
}

/* grad [n, D] is scratch. */
static inline Status testing_stages_backward(TestingStages *stages, int slot,
                                             const ModuleBatch *batch, float *grad,
                                             float *rows_grad)
{
    int num_stages = stages->layout->stages;
    int64_t count = stages->ops->count_local(stages->modules[0], batch) * stages->modules[0]->width;
    for (int64_t i = 0; i < count; i++) {
        grad[i] = NAN; /* the last part does not read it */
    }
    for (int part = testing_parts(stages->layout) - 1; part >= stages->backward_begin; part--) {
        TRY(stages->ops->backward(stages->modules[part % num_stages], part / num_stages, slot,
                                  batch, grad, rows_grad));
    }
    return STATUS_OK;
}

/* A parameter that the first and the last stage hold must be tied on both, and no other; both
 * gradients become their sum. */
static inline void testing_sum_tied(TestingStages *stages, TestingReport *report)
{
    int num_stages = stages->layout->stages;
    ParamSet *first = &stages->modules[0]->params;
    ParamSet *last = &stages->modules[num_stages - 1]->params;
    int num_tied = 0;
    for (int s = 0; s < num_stages; s++) {
        for (int p = 0; p < stages->modules[s]->params.num_params; p++) {
            num_tied += stages->modules[s]->params.params[p].spec.is_tied;
        }
    }
    for (int i = 0; num_stages > 1 && i < first->num_params * last->num_params; i++) {
        Param *table = &first->params[i / last->num_params];
        Param *head = &last->params[i % last->num_params];
        if (strcmp(table->spec.name, head->spec.name) != 0) {
            continue;
        }
        num_tied -= table->spec.is_tied && head->spec.is_tied ? 2 : -2;
        CHECK(tensor_count(&table->value) == tensor_count(&head->value));
        float *a = tensor_f32(&table->grad);
        float *b = tensor_f32(&head->grad);
        for (int64_t j = 0; a && b && j < tensor_count(&table->grad); j++) {
            a[j] += b[j];
            b[j] = a[j];
        }
    }
    if (num_tied != 0) {
        testing_failed(report, "tied parameters and those held twice are not the same");
    }
}

/* What the trainer does once a step. */
static inline Status testing_stages_sum(TestingStages *stages, TestingReport *report)
{
    for (int s = 0; s < stages->layout->stages; s++) {
        LayerContext layers = stages->layers;
        layers.params = &stages->modules[s]->params;
        TRY(testing_sum_partial_grads(&layers));
    }
    testing_sum_tied(stages, report);
    return STATUS_OK;
}

/* A key's bias shifts all scores of a query alike: its gradient is what rounding leaves of 0. */
static inline void testing_compare_grad(const TestingLayout *layout, const Param *param,
                                        const TestingGrads *expected, TestingReport *report)
{
    const char *name = param->spec.name;
    const TestingGrad *grad = testing_grads_find(expected, name);
    if (!grad || param->is_trained == testing_is_frozen(layout, name)) {
        testing_failed(report, "%s: is_trained %d", name, param->is_trained);
        return;
    }
    double largest = strstr(name, "k_proj.bias") ? expected->largest : grad->largest;
    for (int64_t i = 0; param->is_trained && i < tensor_count(&param->grad); i++) {
        testing_near(report, name, i, tensor_f32(&param->grad)[i],
                     grad->whole[testing_global_index(param, i)], 0, testing_relative * largest);
    }
}

/* Gradients, which stage holds what, and that each element counts once over tp and stages. */
static inline Status testing_stages_compare(TestingStages *stages, const TestingGrads *expected,
                                            int layers, TestingReport *report)
{
    const TestingLayout *layout = stages->layout;
    float counted = 0; /* exact below 2^24 */
    for (int s = 0; s < layout->stages; s++) {
        const ParamSet *params = &stages->modules[s]->params;
        for (int p = 0; p < params->num_params; p++) {
            const Param *param = &params->params[p];
            bool is_here = testing_part_of(layout, param->spec.name, layers) % layout->stages == s;
            bool is_copy = param->spec.is_tied && s == layout->stages - 1;
            if (!is_here && !is_copy) {
                testing_failed(report, "%s on stage %d", param->spec.name, s);
            }
            counted += param->counts ? (float)tensor_count(&param->value) : 0;
            testing_compare_grad(layout, param, expected, report);
        }
    }
    TRY(layer_sum(&stages->layers, &counted, 1));
    testing_near(report, "elements that count", 0, counted, (double)expected->count, 0, 0);
    int first = testing_first_trained(layout, expected, layers);
    if (stages->first_trained != first) {
        testing_failed(report, "first trained part %d, expected %d", stages->first_trained, first);
    }
    return STATUS_OK;
}

/* Compares arrays within testing_relative of the largest expected one. */
static inline void testing_compare(TestingReport *report, const char *what, const float *found,
                                   const float *expected, int64_t count, double largest)
{
    for (int64_t i = 0; i < count; i++) {
        testing_near(report, what, i, found[i], expected[i], 0, testing_relative * largest);
    }
}

#endif
