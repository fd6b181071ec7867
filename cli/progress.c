#include "cli/progress.h"

#include "base/clock.h"
#include "cli/layout_text.h"
#include "job/message.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define STATE(name) VIADUCT__V1__JOB_STATUS__STATE__##name

enum {
    BAR_CELLS = 24
};

static const int64_t window_min_ns = CLOCK_NS_PER_S;
static const int64_t redraw_ns = CLOCK_NS_PER_S / 10;
static const int64_t line_ns = 2 * CLOCK_NS_PER_S;

void progress_init(Progress *progress, FILE *file)
{
    *progress = (Progress){.file = file, .is_terminal = isatty(fileno(file)) == 1};
}

/* Rates over the last second or more: those of a single step jump about. */
static void take_rates(Progress *progress, const Viaduct__V1__JobStatus *status, int64_t now_ns)
{
    const Viaduct__V1__StepMetrics *totals = status->totals;
    if (!totals || (progress->window_ns != 0 && now_ns - progress->window_ns < window_min_ns)) {
        return;
    }
    double seconds = totals->step_seconds - progress->window_seconds;
    int64_t steps = status->committed_step - progress->window_step;
    if (progress->window_ns != 0 && seconds > 0 && steps > 0) {
        progress->step_seconds = seconds / (double)steps;
        progress->tokens_per_second = ((double)totals->tokens - progress->window_tokens) / seconds;
        progress->encoder_share =
            (totals->encoder_wait_seconds - progress->window_encoder) / seconds;
        progress->llm_share = (totals->llm_wait_seconds - progress->window_llm) / seconds;
    }
    progress->window_ns = now_ns;
    progress->window_step = status->committed_step;
    progress->window_tokens = (double)totals->tokens;
    progress->window_seconds = totals->step_seconds;
    progress->window_encoder = totals->encoder_wait_seconds;
    progress->window_llm = totals->llm_wait_seconds;
}

static void format_time(double seconds, char *text, size_t size)
{
    int64_t whole = (int64_t)(seconds + 0.5);
    if (whole >= 3600) {
        snprintf(text, size, "%" PRId64 ":%02d:%02d", whole / 3600, (int)(whole / 60 % 60),
                 (int)(whole % 60));
    } else {
        snprintf(text, size, "%d:%02d", (int)(whole / 60), (int)(whole % 60));
    }
}

/* "12345 tokens/s, 0:42 left"; "" before there is a rate. */
static void format_rates(const Progress *progress, const Viaduct__V1__Job *job, char *text,
                         size_t size)
{
    text[0] = '\0';
    if (progress->step_seconds > 0) {
        char left[32];
        int64_t steps = job->spec->training->steps - job->status->committed_step;
        format_time(progress->step_seconds * (double)(steps > 0 ? steps : 0), left, sizeof left);
        snprintf(text, size, ", %.0f tokens/s, %s left", progress->tokens_per_second, left);
    }
}

static void format_waits(const Progress *progress, const JobSpec *spec, char *text, size_t size)
{
    if (layout_text_has_encoder_pool(spec)) {
        snprintf(text, size, "encoder pool waits %.0f %% of the time, llm pool %.0f %%",
                 100 * progress->encoder_share, 100 * progress->llm_share);
    } else {
        snprintf(text, size, "the llm waits %.0f %% of the time", 100 * progress->llm_share);
    }
}

static const char *state_name(const Viaduct__V1__Job *job)
{
    return message_enum_name(&viaduct__v1__job_status__state__descriptor, (int)job->status->state);
}

static const char *short_name(const Viaduct__V1__Job *job)
{
    return strncmp(job->name, "jobs/", 5) == 0 ? job->name + 5 : job->name;
}

void progress_clear(Progress *progress)
{
    if (progress->lines_drawn > 0) {
        fprintf(progress->file, "\r\x1b[%dA\x1b[J", progress->lines_drawn);
        fflush(progress->file);
        progress->lines_drawn = 0;
    }
}

static void draw_block(Progress *progress, const Viaduct__V1__Job *job)
{
    const Viaduct__V1__JobStatus *status = job->status;
    int64_t steps = job->spec->training->steps;
    char bar[BAR_CELLS + 1];
    char rates[128];
    char waits[128];
    int full = steps > 0 ? (int)(status->committed_step * BAR_CELLS / steps) : 0;
    full = full > BAR_CELLS ? BAR_CELLS : full;
    memset(bar, '.', BAR_CELLS);
    memset(bar, '#', (size_t)full);
    bar[BAR_CELLS] = '\0';
    format_rates(progress, job, rates, sizeof rates);
    format_waits(progress, job->spec, waits, sizeof waits);
    progress_clear(progress);
    fprintf(progress->file, "%s  %s\n", short_name(job), state_name(job));
    if (status->latest_metrics) {
        fprintf(progress->file, "[%s] step %" PRId64 "/%" PRId64 ", loss %.4f%s\n", bar,
                status->committed_step, steps, status->latest_metrics->loss, rates);
        fprintf(progress->file, "%s\n", waits);
    } else {
        fprintf(progress->file, "[%s] %.70s\n\n", bar, status->message);
    }
    progress->lines_drawn = 3;
    fflush(progress->file);
}

static void print_line(Progress *progress, const Viaduct__V1__Job *job)
{
    const Viaduct__V1__JobStatus *status = job->status;
    if (status->state != STATE(RUNNING) || !status->latest_metrics) {
        fprintf(progress->file, "job %s is %s: %s\n", short_name(job), state_name(job),
                status->message);
    } else {
        char rates[128];
        char waits[128];
        format_rates(progress, job, rates, sizeof rates);
        format_waits(progress, job->spec, waits, sizeof waits);
        fprintf(progress->file, "step %" PRId64 "/%" PRId64 ", loss %.4f%s; %s\n",
                status->committed_step, job->spec->training->steps, status->latest_metrics->loss,
                rates, waits);
    }
    fflush(progress->file);
}

void progress_show(Progress *progress, const Viaduct__V1__Job *job)
{
    int64_t now_ns = clock_now_ns();
    take_rates(progress, job->status, now_ns);
    bool is_new_state = progress->last_state != (int)job->status->state;
    int64_t pause_ns = progress->is_terminal ? redraw_ns : line_ns;
    bool is_due = now_ns - progress->last_draw_ns >= pause_ns;
    if (!is_new_state && !is_due) {
        return;
    }
    progress->last_state = (int)job->status->state;
    progress->last_draw_ns = now_ns;
    if (progress->is_terminal) {
        draw_block(progress, job);
    } else {
        print_line(progress, job);
    }
}
