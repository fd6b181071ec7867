#include "base/config.h"
#include "base/memory.h"
#include "cli/job_input.h"
#include "cli/modules.h"
#include "comm/comm_paper.h"
#include "job/job_layout.h"
#include "job/message.h"
#include "train/trainer.h"

#include <stdio.h>
#include <string.h>

typedef struct PlanFlags {
    const char *file;
    const char *format;
    ConfigList settings;
} PlanFlags;

/* One pipeline stage of a module: its first rank stands for all, since it has the largest parts. */
typedef struct PlanRow {
    int rank;
    char serves[64];
    TrainerAccount account;
} PlanRow;

typedef struct PlanTable {
    JobLayout layout;
    double bubble; /* share of the ranks' time without work */
    int num_rows;
    PlanRow *rows; /* at most one for each stage of each module */
} PlanTable;

static Status account_rank(const JobSpec *spec, const JobLayout *layout, int rank,
                           TrainerAccount *account_out, double *bubble_out)
{
    Device *device = NULL;
    Comm *world = NULL;
    TRY(device_open("cpu", 0, &device));
    Status status = comm_paper_create(layout->num_ranks, rank, "world", &world);
    if (status == STATUS_OK) {
        const TrainerOptions options = {.spec = spec,
                                        .world = world,
                                        .device = device,
                                        .modules = cli_modules,
                                        .num_modules = cli_num_modules};
        status = trainer_account(&options, account_out, bubble_out);
    }
    comm_destroy(world);
    device_close(device);
    return status;
}

static bool has_row(const PlanTable *plan, int rank)
{
    for (int i = 0; i < plan->num_rows; i++) {
        if (plan->rows[i].rank == rank) {
            return true;
        }
    }
    return false;
}

static void describe_rank(const JobLayout *layout, int rank, char *text, size_t size)
{
    size_t at = 0;
    text[0] = '\0';
    for (int i = 0; i < layout->num_modules; i++) {
        const JobLayoutModule *module = &layout->modules[i];
        int offset = rank - module->first_rank;
        if (offset >= 0 && offset < module->num_ranks && at < size) {
            int stage = offset / (module->num_ranks / module->spec->pp);
            at += (size_t)snprintf(text + at, size - at,
                                   module->spec->pp > 1 ? "%s%s stage %d" : "%s%s",
                                   at > 0 ? ", " : "", module->spec->name, stage);
        }
    }
}

static Status make_plan(const JobSpec *spec, PlanTable *plan)
{
    int stages = 0;
    plan->layout = job_layout_make(spec);
    for (int i = 0; i < plan->layout.num_modules; i++) {
        stages += plan->layout.modules[i].spec->pp;
    }
    TRY(MEMORY_NEW(&plan->rows, stages));
    for (int i = 0; i < plan->layout.num_modules; i++) {
        const JobLayoutModule *module = &plan->layout.modules[i];
        for (int s = 0; s < module->spec->pp; s++) {
            int rank = module->first_rank + s * (module->num_ranks / module->spec->pp);
            if (has_row(plan, rank)) {
                continue;
            }
            PlanRow *row = &plan->rows[plan->num_rows];
            row->rank = rank;
            describe_rank(&plan->layout, rank, row->serves, sizeof row->serves);
            TRY(account_rank(spec, &plan->layout, rank, &row->account,
                             plan->num_rows == 0 ? &plan->bubble : NULL));
            plan->num_rows++;
        }
    }
    return STATUS_OK;
}

static double mib(int64_t bytes)
{
    return (double)bytes / (1 << 20);
}

static void print_table(const PlanTable *plan)
{
    const JobLayout *layout = &plan->layout;
    printf("%-8s %-12s %5s %4s %4s %4s %4s  %s\n", "MODULE", "POOL", "RANKS", "TP", "CP", "PP",
           "DP", "FIRST RANK");
    for (int i = 0; i < layout->num_modules; i++) {
        const JobLayoutModule *module = &layout->modules[i];
        const ModuleSpec *spec = module->spec;
        printf("%-8s %-12s %5d %4d %4d %4d %4d  %d%s\n", spec->name, spec->pool, module->num_ranks,
               spec->tp, spec->cp, spec->pp, spec->dp, module->first_rank,
               layout->pools[module->pool].num_modules > 1 ? " (shared pool)" : "");
    }
    printf("\n%5s  %-32s %12s %10s %10s %10s %12s\n", "RANK", "SERVES", "MEMORY MiB", "WEIGHTS",
           "GRADIENTS", "OPTIMIZER", "ACTIVATIONS");
    for (int i = 0; i < plan->num_rows; i++) {
        const PlanRow *row = &plan->rows[i];
        const TrainerAccount *account = &row->account;
        int64_t rest = account->bytes - account->weights - account->grads - account->optimizer;
        printf("%5d  %-32s %12.1f %10.1f %10.1f %10.1f %12.1f\n", row->rank, row->serves,
               mib(account->bytes), mib(account->weights), mib(account->grads),
               mib(account->optimizer), mib(rest));
    }
    printf("\n%d %s; ", layout->num_ranks, layout->num_ranks == 1 ? "rank" : "ranks");
    if (layout->num_modules > 1) {
        int window = plan->rows[0].account.window;
        printf("encoders hold up to %d %s; ", window, window == 1 ? "microbatch" : "microbatches");
    }
    printf("%.1f %% of the ranks' time in a step is without work (transfers not counted)\n",
           100.0 * plan->bubble);
}

static void print_json(const PlanTable *plan)
{
    printf("{\n  \"ranks\": %d,\n  \"window\": %d,\n  \"bubble\": %.6g,\n  \"memory\": [\n",
           plan->layout.num_ranks, plan->rows[0].account.window, plan->bubble);
    for (int i = 0; i < plan->num_rows; i++) {
        const PlanRow *row = &plan->rows[i];
        printf("    {\"rank\": %d, \"serves\": ", row->rank);
        message_print_quoted(stdout, row->serves);
        printf(
            ", \"bytes\": %lld, \"weights\": %lld, \"gradients\": %lld, \"optimizer\": %lld}%s\n",
            (long long)row->account.bytes, (long long)row->account.weights,
            (long long)row->account.grads, (long long)row->account.optimizer,
            i + 1 < plan->num_rows ? "," : "");
    }
    printf("  ]\n}\n");
}

static ExitCode show_plan(const PlanFlags *values, const JobSpec *spec)
{
    PlanTable plan = {0};
    Status status = make_plan(spec, &plan);
    if (status == STATUS_OK) {
        if (strcmp(values->format, "json") == 0) {
            print_json(&plan);
        } else {
            print_table(&plan);
        }
    }
    memory_free(plan.rows);
    return status == STATUS_OK ? EXIT_CODE_OK : verbs_fail_status(status);
}

ExitCode plan_verb(int argc, const char *const *argv)
{
    PlanFlags values = {.format = "table"};
    const ConfigFlag flags[] = {
        {"set", 0, CONFIG_KIND_LIST, &values.settings, "FIELD=VALUE", NULL,
         "changes one field, such as modules.llm.tp=2; may be repeated"},
        {"output", 'o', CONFIG_KIND_TEXT, &values.format, "FORMAT", NULL, "table or json"},
    };
    const ConfigCommand command = {
        "viaduct plan FILE [flags]",
        "Shows which ranks serve what in a job, the memory that each needs "
        "and how busy\nthe layout keeps them. Runs nothing.",
        flags,
        sizeof flags / sizeof *flags,
        0,
        1};
    ConfigList rest;
    bool help = false;
    Status status = config_parse(&command, argc, argv, &rest, &help);
    if (status == STATUS_OK && !help && rest.count == 0) {
        status = fail(STATUS_INVALID, "no job given; usage: %s", command.usage);
    }
    if (status == STATUS_OK && strcmp(values.format, "table") != 0 &&
        strcmp(values.format, "json") != 0) {
        status = fail(STATUS_INVALID, "--output is \"%s\", expected table or json", values.format);
    }
    if (status != STATUS_OK) {
        return verbs_fail_status(status);
    }
    if (help) {
        config_print_help(&command, stdout);
        return EXIT_CODE_OK;
    }
    JobSpec *spec = NULL;
    ExitCode code = job_input_read(rest.items[0], &values.settings, &spec);
    if (code == EXIT_CODE_OK) {
        code = show_plan(&values, spec);
        viaduct__v1__job_spec__free_unpacked(spec, NULL);
    }
    return code;
}
