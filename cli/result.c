#include "cli/result.h"

#include "cli/layout_text.h"
#include "job/job_spec.h"
#include "job/message.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

/* Quotes, and what a terminal would take for an order, made visible. */
static void print_caption(FILE *file, const char *label, const char *text)
{
    fprintf(file, "    %-10s", label);
    message_print_quoted(file, text);
    fputc('\n', file);
}

void result_print(FILE *file, const Viaduct__V1__Job *job)
{
    const Viaduct__V1__JobStatus *status = job->status;
    const Viaduct__V1__EvaluationReport *evaluation = status->latest_evaluation;
    fprintf(file, "job %s %s at step %" PRId64 ": %s\n",
            strncmp(job->name, "jobs/", 5) == 0 ? job->name + 5 : job->name,
            message_enum_name(&viaduct__v1__job_status__state__descriptor, (int)status->state),
            status->committed_step, status->message);
    const char *inputs = layout_text_inputs(job->spec);
    if (evaluation && evaluation->n_captions > 0) {
        fprintf(file, "captions of held-out %s:\n", inputs[0] ? inputs : "samples");
        for (size_t i = 0; i < evaluation->n_captions; i++) {
            const Viaduct__V1__Caption *caption = evaluation->captions[i];
            fprintf(file, "  %s\n", caption->sample);
            print_caption(file, "true", caption->truth);
            print_caption(file, "generated", caption->generated);
        }
    }
    if (evaluation) {
        fprintf(file, "held-out loss at step %" PRId64 ": %.4f nats per label", evaluation->step,
                evaluation->heldout_loss);
        if (inputs[0]) {
            fprintf(file, " with the right %s, %.4f with shuffled %s", inputs,
                    evaluation->heldout_loss_shuffled, inputs);
        }
        if (inputs[0] && evaluation->heldout_loss > 0) {
            fprintf(file, " (%.1f times)",
                    evaluation->heldout_loss_shuffled / evaluation->heldout_loss);
        }
        fputc('\n', file);
    }
    if (status->checkpoint[0]) {
        fprintf(file, "checkpoint: %s\n", status->checkpoint);
    }
}

static void write_real(FILE *file, const char *name, bool is_known, double value)
{
    if (is_known && isfinite(value)) {
        fprintf(file, "  \"%s\": %.9g,\n", name, value);
    } else {
        fprintf(file, "  \"%s\": null,\n", name);
    }
}

static double seconds_of(const Google__Protobuf__Timestamp *stamp)
{
    return (double)stamp->seconds + (double)stamp->nanos * 1e-9;
}

static void write_layouts(FILE *file, const JobSpec *spec)
{
    fprintf(file, "  \"layouts\": {");
    for (size_t i = 0; i < spec->n_modules; i++) {
        const ModuleSpec *module = spec->modules[i];
        fprintf(file, "%s\n    ", i ? "," : "");
        message_print_quoted(file, module->name);
        fprintf(file, ": {\"pool\": ");
        message_print_quoted(file, module->pool);
        fprintf(file, ", \"tp\": %d, \"cp\": %d, \"pp\": %d, \"dp\": %d", module->tp, module->cp,
                module->pp, module->dp);
        fprintf(file, ", \"virtual_stages\": %d, \"sequence_parallel\": %s, \"recompute\": \"%s\"}",
                module->virtual_stages, module->sequence_parallel ? "true" : "false",
                message_enum_name(&viaduct__v1__module_spec__recompute__descriptor,
                                  (int)module->recompute));
    }
    fprintf(file, "\n  }\n");
}

static void write_summary(FILE *file, const Viaduct__V1__Job *job)
{
    const Viaduct__V1__JobStatus *status = job->status;
    const Viaduct__V1__StepMetrics *latest = status->latest_metrics;
    const Viaduct__V1__StepMetrics *totals = status->totals;
    const Viaduct__V1__EvaluationReport *evaluation = status->latest_evaluation;
    bool has_time = status->start_time && status->last_progress_time;
    fprintf(file, "{\n  \"job\": ");
    message_print_quoted(file, job->name);
    fprintf(file, ",\n  \"state\": \"%s\",\n",
            message_enum_name(&viaduct__v1__job_status__state__descriptor, (int)status->state));
    fprintf(file, "  \"steps\": %" PRId64 ",\n", status->committed_step);
    write_real(file, "train_loss", latest != NULL, latest ? latest->loss : 0);
    write_real(file, "heldout_loss", evaluation != NULL, evaluation ? evaluation->heldout_loss : 0);
    write_real(file, "heldout_loss_shuffled", evaluation != NULL,
               evaluation ? evaluation->heldout_loss_shuffled : 0);
    bool has_rate = totals && totals->step_seconds > 0;
    write_real(file, "tokens_per_second", has_rate,
               has_rate ? (double)totals->tokens / totals->step_seconds : 0);
    write_real(file, "wall_seconds", has_time,
               has_time ? seconds_of(status->last_progress_time) - seconds_of(status->start_time)
                        : 0);
    write_real(file, "step_seconds", totals != NULL, totals ? totals->step_seconds : 0);
    write_real(file, "encoder_wait_seconds", totals != NULL,
               totals ? totals->encoder_wait_seconds : 0);
    write_real(file, "llm_wait_seconds", totals != NULL, totals ? totals->llm_wait_seconds : 0);
    fprintf(file, "  \"boundary_bytes\": %" PRId64 ",\n  \"boundary_bytes_min\": %" PRId64 ",\n",
            totals ? totals->boundary_bytes : 0, totals ? totals->boundary_bytes_min : 0);
    fprintf(file, "  \"checkpoint\": ");
    message_print_quoted(file, status->checkpoint);
    fprintf(file, ",\n");
    write_layouts(file, job->spec);
    fprintf(file, "}\n");
}

Status result_write_summary(const char *path, const Viaduct__V1__Job *job)
{
    FILE *file = fopen(path, "we");
    if (!file) {
        return fail(STATUS_IO, "%s: cannot create it: %s", path, strerror(errno));
    }
    write_summary(file, job);
    bool is_bad = ferror(file) != 0;
    if (fclose(file) != 0 || is_bad) {
        return fail(STATUS_IO, "%s: cannot write it: %s", path, strerror(errno));
    }
    return STATUS_OK;
}
