#include "train/verify.h"

#include "base/config.h"
#include "base/memory.h"
#include "cli/job_input.h"
#include "cli/modules.h"
#include "job/message.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SHOWN_TENSORS = 12 /* the worst ones; -o json and -o wide have all */
};

typedef struct VerifyFlags {
    const char *file;
    const char *format;
    ConfigList settings;
    int64_t steps;
} VerifyFlags;

static void show_progress(void *context, const char *what, int step)
{
    const VerifyFlags *values = context;
    if (isatty(STDERR_FILENO)) {
        fprintf(stderr, "\r%-12s step %d of %" PRId64 " ", what, step, values->steps);
        fflush(stderr);
    }
}

static double worst_of(const VerifyTensor *tensor)
{
    return tensor->grad > tensor->weight ? tensor->grad : tensor->weight;
}

static int by_worst(const void *a, const void *b)
{
    double x = worst_of(*(const VerifyTensor *const *)a);
    double y = worst_of(*(const VerifyTensor *const *)b);
    return (x < y) - (x > y);
}

static Status sort_tensors(const VerifyResult *result, const VerifyTensor ***sorted_out)
{
    const VerifyTensor **sorted = NULL;
    TRY(memory_alloc((size_t)result->num_tensors, sizeof(void *), (void **)&sorted));
    for (int i = 0; i < result->num_tensors; i++) {
        sorted[i] = &result->tensors[i];
    }
    qsort((void *)sorted, (size_t)result->num_tensors, sizeof(void *), by_worst);
    *sorted_out = sorted;
    return STATUS_OK;
}

static void print_verdict(const VerifyResult *result, FILE *file)
{
    fprintf(file,
            "%s: the worst differences are %.2g of what is allowed for losses (1e-5 of the loss), "
            "%.2g for gradients (1e-4 of a tensor's largest), %.2g for weights (1e-3 of their "
            "change)\n",
            result->is_equal ? "EQUAL" : "DIFFERENT", result->worst_loss, result->worst_grad,
            result->worst_weight);
}

static Status print_table(const VerifyFlags *values, const VerifyResult *result)
{
    const VerifyTensor **sorted = NULL;
    TRY(sort_tensors(result, &sorted));
    CHECK(sorted);
    bool is_wide = strcmp(values->format, "wide") == 0;
    int shown =
        is_wide || result->num_tensors < SHOWN_TENSORS ? result->num_tensors : SHOWN_TENSORS;
    printf("%d %s against one process, %d steps\n\n", result->num_ranks,
           result->num_ranks == 1 ? "rank" : "ranks", result->num_steps);
    printf("%4s  %-14s %-14s %-14s %-14s\n", "STEP", "LOSS", "IN ONE PROCESS", "GRADIENT NORM",
           "IN ONE PROCESS");
    for (int i = 0; i < result->num_steps; i++) {
        const VerifyStep *step = &result->steps[i];
        printf("%4d  %-14.9g %-14.9g %-14.9g %-14.9g\n", i + 1, step->loss, step->whole_loss,
               step->grad_norm, step->whole_grad_norm);
    }
    printf("\n%-72s %9s %9s\n", "TENSOR (differences over what is allowed)", "GRADIENT", "WEIGHT");
    for (int i = 0; i < shown; i++) {
        printf("%-72s ", sorted[i]->name);
        if (sorted[i]->is_trained) {
            printf("%9.2g %9.2g\n", sorted[i]->grad, sorted[i]->weight);
        } else {
            printf("%9s %9.2g\n", "frozen", sorted[i]->weight);
        }
    }
    if (shown < result->num_tensors) {
        printf("(the worst %d of %d; -o wide shows all)\n", shown, result->num_tensors);
    }
    printf("\n");
    print_verdict(result, stdout);
    memory_free((void *)sorted);
    return STATUS_OK;
}

static void print_json(const VerifyResult *result)
{
    printf(
        "{\n  \"equal\": %s,\n  \"ranks\": %d,\n  \"worst\": {\"loss\": %.6g, \"gradient\": %.6g, "
        "\"weight\": %.6g},\n  \"steps\": [\n",
        result->is_equal ? "true" : "false", result->num_ranks, result->worst_loss,
        result->worst_grad, result->worst_weight);
    for (int i = 0; i < result->num_steps; i++) {
        const VerifyStep *step = &result->steps[i];
        printf("    {\"step\": %d, \"loss\": %.17g, \"loss_one_process\": %.17g, "
               "\"gradient_norm\": %.17g, \"gradient_norm_one_process\": %.17g}%s\n",
               i + 1, step->loss, step->whole_loss, step->grad_norm, step->whole_grad_norm,
               i + 1 < result->num_steps ? "," : "");
    }
    printf("  ],\n  \"tensors\": [\n");
    for (int i = 0; i < result->num_tensors; i++) {
        const VerifyTensor *tensor = &result->tensors[i];
        printf("    {\"module\": ");
        message_print_quoted(stdout, tensor->module);
        printf(", \"name\": ");
        message_print_quoted(stdout, tensor->name);
        printf(", \"trained\": %s, \"gradient\": %.6g, \"weight\": %.6g}%s\n",
               tensor->is_trained ? "true" : "false", tensor->grad, tensor->weight,
               i + 1 < result->num_tensors ? "," : "");
    }
    printf("  ]\n}\n");
}

static ExitCode verify(VerifyFlags *values, JobSpec *spec)
{
    const VerifyOptions options = {.spec = spec,
                                   .modules = cli_modules,
                                   .num_modules = cli_num_modules,
                                   .steps = (int)values->steps,
                                   .context = values,
                                   .progress = show_progress};
    VerifyResult result;
    Status status = verify_run(&options, &result);
    if (isatty(STDERR_FILENO)) {
        fprintf(stderr, "\r\033[K");
    }
    if (status != STATUS_OK) {
        return verbs_fail_status(status);
    }
    if (strcmp(values->format, "json") == 0) {
        print_json(&result);
    } else {
        status = print_table(values, &result);
    }
    ExitCode code = result.is_equal ? EXIT_CODE_OK : EXIT_CODE_FAILED;
    verify_result_done(&result);
    return status == STATUS_OK ? code : verbs_fail_status(status);
}

static Status check_flags(const VerifyFlags *values, const char *usage)
{
    bool is_known = strcmp(values->format, "table") == 0 || strcmp(values->format, "wide") == 0 ||
                    strcmp(values->format, "json") == 0;
    if (!values->file) {
        return fail(STATUS_INVALID, "no job given; usage: %s", usage);
    }
    if (values->steps < 1 || values->steps > VERIFY_STEPS_MAX) {
        return fail(STATUS_INVALID, "--steps is %" PRId64 ", expected 1 to %d", values->steps,
                    VERIFY_STEPS_MAX);
    }
    if (!is_known) {
        return fail(STATUS_INVALID, "--output is \"%s\", expected table, wide or json",
                    values->format);
    }
    return STATUS_OK;
}

ExitCode verify_verb(int argc, const char *const *argv)
{
    VerifyFlags values = {.format = "table", .steps = 3};
    const ConfigFlag flags[] = {
        {"set", 0, CONFIG_KIND_LIST, &values.settings, "FIELD=VALUE", NULL,
         "changes one field, such as modules.llm.tp=2; may be repeated"},
        {"steps", 0, CONFIG_KIND_INTEGER, &values.steps, "NUMBER", NULL,
         "how many steps are compared (default 3)"},
        {"output", 'o', CONFIG_KIND_TEXT, &values.format, "FORMAT", NULL, "table, wide or json"},
    };
    const ConfigCommand command = {"viaduct verify FILE [flags]",
                                   "Runs the first steps of a job twice, in one process and in the "
                                   "job's layout with every rank\n"
                                   "a thread, and compares losses, gradients and weights tensor by "
                                   "tensor. Exit status 0: equal,\n"
                                   "1: different.",
                                   flags,
                                   sizeof flags / sizeof *flags,
                                   0,
                                   1};
    ConfigList rest;
    bool help = false;
    Status status = config_parse(&command, argc, argv, &rest, &help);
    values.file = status == STATUS_OK && rest.count > 0 ? rest.items[0] : NULL;
    if (status == STATUS_OK && !help) {
        status = check_flags(&values, command.usage);
    }
    if (status != STATUS_OK) {
        return verbs_fail_status(status);
    }
    if (help) {
        config_print_help(&command, stdout);
        return EXIT_CODE_OK;
    }
    JobSpec *spec = NULL;
    ExitCode code = job_input_read(values.file, &values.settings, &spec);
    if (code == EXIT_CODE_OK) {
        code = verify(&values, spec);
        viaduct__v1__job_spec__free_unpacked(spec, NULL);
    }
    return code;
}
