#include "train/schedule.h"

#include "base/memory.h"

const char *schedule_action_name(ActionKind kind)
{
    static const char *const names[ACTION_COUNT] = {
        [ACTION_ENCODE] = "ENCODE",       [ACTION_SEND] = "SEND",
        [ACTION_RECV] = "RECV",           [ACTION_FORWARD] = "FORWARD",
        [ACTION_BACKWARD] = "BACKWARD",   [ACTION_SEND_GRAD] = "SEND_GRAD",
        [ACTION_RECV_GRAD] = "RECV_GRAD", [ACTION_ENCODE_BACKWARD] = "ENCODE_BACKWARD",
        [ACTION_REDUCE] = "REDUCE",       [ACTION_VOTE] = "VOTE",
        [ACTION_UPDATE] = "UPDATE",
    };
    CHECK((unsigned)kind < ACTION_COUNT);
    return names[kind];
}

static void add(Schedule *schedule, ActionKind kind, int module, int microbatch)
{
    schedule->actions[schedule->num_actions++] = (Action){kind, module, microbatch};
}

/* Fills the window, then encodes one more for each gradient that has come back. */
static void add_encoder(const ScheduleOptions *options, int module, Schedule *schedule)
{
    bool has_gradient = options->is_training && options->graph->modules[module].is_trained;
    int ahead = has_gradient ? options->window : options->microbatches;
    for (int m = 0; m < options->microbatches + ahead; m++) {
        if (has_gradient && m >= ahead) {
            add(schedule, ACTION_RECV_GRAD, module, m - ahead);
            add(schedule, ACTION_ENCODE_BACKWARD, module, m - ahead);
        }
        if (m < options->microbatches) {
            add(schedule, ACTION_ENCODE, module, m);
            add(schedule, ACTION_SEND, module, m);
        }
    }
}

/* Adds an action for each encoder that feeds the module. */
static void add_boundaries(const ScheduleOptions *options, int module, ActionKind kind,
                           int microbatch, Schedule *schedule)
{
    for (int e = 0; e < options->graph->num_modules; e++) {
        const ScheduleModule *encoder = &options->graph->modules[e];
        if (encoder->feeds == module && (kind == ACTION_RECV || encoder->is_trained)) {
            add(schedule, kind, e, microbatch);
        }
    }
}

static void add_decoder(const ScheduleOptions *options, int module, Schedule *schedule)
{
    for (int m = 0; m < options->microbatches; m++) {
        add_boundaries(options, module, ACTION_RECV, m, schedule);
        add(schedule, ACTION_FORWARD, module, m);
        if (options->is_training) {
            add(schedule, ACTION_BACKWARD, module, m);
            add_boundaries(options, module, ACTION_SEND_GRAD, m, schedule);
        }
    }
}

Status schedule_make(const ScheduleOptions *options, int module, Schedule *schedule_out)
{
    const ScheduleGraph *graph = options->graph;
    CHECK(graph->num_modules <= SCHEDULE_MODULES_MAX && module < graph->num_modules);
    CHECK(options->microbatches >= 1 && options->window >= 1);
    Schedule schedule = {0};
    int each = 2 + 2 * graph->num_modules; /* the most a module does for one microbatch */
    TRY(MEMORY_NEW(&schedule.actions, options->microbatches * each + 3));
    if (graph->modules[module].feeds >= 0) {
        add_encoder(options, module, &schedule);
    } else {
        add_decoder(options, module, &schedule);
    }
    if (options->is_training) {
        bool is_trained = graph->modules[module].is_trained;
        if (is_trained) {
            add(&schedule, ACTION_REDUCE, module, -1);
        }
        add(&schedule, ACTION_VOTE, module, -1);
        if (is_trained) {
            add(&schedule, ACTION_UPDATE, module, -1);
        }
    }
    *schedule_out = schedule;
    return STATUS_OK;
}

void schedule_done(Schedule *schedule)
{
    memory_free(schedule->actions);
    *schedule = (Schedule){0};
}
