#include "train/schedule.h"

#include "base/memory.h"

#include <math.h>
#include <stdint.h>

enum {
    /* How far a part without a backward may run ahead of the part that takes its output. */
    AHEAD = 2,
    GRAD_BUFFERS = 2, /* of a rank for each chunk: of microbatch m that numbered m % 2 */
};

/* Costs may be measured: ends that differ by less than this share of the smallest one are one
 * moment. */
static const double MOMENT = 1e-6;

/* Which work begins first where several pieces want the same ranks: what keeps the decoder going,
 * then the rest of the encoders'. */
typedef enum Urgency {
    URGENCY_DECODER_BACKWARD,
    URGENCY_AWAITED_ROWS, /* of the decoder's next microbatch */
    URGENCY_DECODER_FORWARD,
    URGENCY_REST,
} Urgency;

/* Forward or backward of one part for one microbatch: all ranks of its stage do it together. */
typedef struct Work {
    int module;
    int part;
    int microbatch;
    bool is_backward;
} Work;

/* Each part takes the microbatches in their order, so that counts say all. */
typedef struct PartProgress {
    int forwards_begun;
    int forwards;
    int backwards_begun;
    int backwards;
} PartProgress;

typedef struct StageProgress {
    int module;
    int stage;
    /* Stages of each module with a rank of this one, itself too: [begins, ends) of all stages. */
    int begins[SCHEDULE_MODULES_MAX];
    int ends[SCHEDULE_MODULES_MAX];
    int held;  /* forwards whose backward has not ended, over all chunks */
    Work work; /* under way */
    Work next; /* with is_ready: may begin as soon as the ranks are free */
    Urgency urgency;
    bool is_ready;
    bool is_stale;      /* `next` is to be chosen anew */
    int64_t held_round; /* the last round in which its ranks were held for urgent work */
} StageProgress;

typedef struct Planner {
    const ScheduleOptions *options;
    int decoder;
    int num_stages;
    int first_stages[SCHEDULE_MODULES_MAX + 1]; /* of `stages` */
    StageProgress *stages;
    double *end_times; /* [num_stages] of the work under way; INFINITY: idle */
    PartProgress *parts[SCHEDULE_MODULES_MAX];
    int groups[SCHEDULE_MODULES_MAX]; /* group_size */
    int64_t round;
    double now;
    double moment;
    int *queue; /* [num_stages] scratch: the ready ones */
    int64_t num_done;
    int64_t num_all;
    Work *order; /* [num_all] the total order, first num_done of them known */
} Planner;

/* ---------------------------------------------------------------- the graph */

const char *schedule_action_name(ActionKind kind)
{
    static const char *const names[ACTION_COUNT] = {
        [ACTION_ENCODE] = "ENCODE",
        [ACTION_SEND] = "SEND",
        [ACTION_RECV_GRAD] = "RECV_GRAD",
        [ACTION_ENCODE_BACKWARD] = "ENCODE_BACKWARD",
        [ACTION_RECV] = "RECV",
        [ACTION_FORWARD] = "FORWARD",
        [ACTION_BACKWARD] = "BACKWARD",
        [ACTION_SEND_GRAD] = "SEND_GRAD",
        [ACTION_SEND_ACTIVATIONS] = "SEND_ACTIVATIONS",
        [ACTION_RECV_ACTIVATIONS] = "RECV_ACTIVATIONS",
        [ACTION_SEND_ACTIVATIONS_GRAD] = "SEND_ACTIVATIONS_GRAD",
        [ACTION_RECV_ACTIVATIONS_GRAD] = "RECV_ACTIVATIONS_GRAD",
        [ACTION_REDUCE] = "REDUCE",
        [ACTION_VOTE] = "VOTE",
        [ACTION_UPDATE] = "UPDATE",
    };
    CHECK((unsigned)kind < ACTION_COUNT);
    return names[kind];
}

static const ScheduleModule *module_of(const ScheduleOptions *options, int module)
{
    return &options->graph->modules[module];
}

static int stages_of(const ScheduleModule *module)
{
    return module->grid.sizes[GRID_AXIS_PP];
}

static int parts_of(const ScheduleModule *module)
{
    return stages_of(module) * module->chunks;
}

static bool is_encoder(const ScheduleModule *module)
{
    return module->feeds >= 0;
}

/* pp varies slowest: a stage is a run of ranks. */
static int stage_ranks(const ScheduleModule *module)
{
    return grid_size(&module->grid) / stages_of(module);
}

static bool serves_stage(const ScheduleModule *module, int stage, int rank)
{
    int ranks = stage_ranks(module);
    int begin = module->grid.first_rank + stage * ranks;
    return rank >= begin && rank < begin + ranks;
}

static bool has_backward(const ScheduleOptions *options, int module, int part)
{
    return options->is_training && part >= module_of(options, module)->backward_begin;
}

/* Gradients of its rows go to the encoder. */
static bool wants_gradients(const ScheduleOptions *options, int encoder)
{
    const ScheduleModule *module = module_of(options, encoder);
    return is_encoder(module) && has_backward(options, encoder, parts_of(module) - 1);
}

static int find_decoder(const ScheduleGraph *graph)
{
    int decoder = -1;
    for (int m = 0; m < graph->num_modules; m++) {
        if (!is_encoder(&graph->modules[m])) {
            CHECK(decoder < 0);
            decoder = m;
        }
    }
    CHECK(decoder >= 0);
    return decoder;
}

static void check_options(const ScheduleOptions *options)
{
    const ScheduleGraph *graph = options->graph;
    CHECK(graph->num_modules >= 1 && graph->num_modules <= SCHEDULE_MODULES_MAX);
    CHECK(options->microbatches >= 1 && options->window >= 1);
    int decoder = find_decoder(graph);
    for (int m = 0; m < graph->num_modules; m++) {
        const ScheduleModule *module = &graph->modules[m];
        CHECK(grid_size(&module->grid) >= 1 && module->grid.first_rank >= 0);
        CHECK(module->chunks >= 1 && module->chunks <= SCHEDULE_CHUNKS_MAX);
        CHECK(module->chunks == 1 || stages_of(module) > 1); /* chunks of one rank are one part */
        CHECK(module->forward_cost > 0 && module->backward_cost > 0);
        CHECK(module->backward_begin >= 0 && module->backward_begin <= parts_of(module));
        CHECK(!module->is_trained || module->backward_begin < parts_of(module));
        CHECK(!is_encoder(module) || module->feeds == decoder);
        CHECK(!wants_gradients(options, m) || graph->modules[decoder].backward_begin == 0);
    }
}

/* Chunks take turns after so many microbatches: `stages` keep the pipeline full. In a decoder no
 * more than an encoder lets through before it must have the first one's gradient back. */
static int group_size(const ScheduleOptions *options, int module)
{
    int size = stages_of(module_of(options, module));
    for (int e = 0; e < options->graph->num_modules; e++) {
        bool is_bound = wants_gradients(options, e) && module_of(options, e)->feeds == module;
        if (is_bound && options->window < size) {
            size = options->window;
        }
    }
    return size;
}

/* Forwards that a stage of the decoder may hold until their backward. One chunk: 1F1B. More: the
 * warm-up of the interleaved schedule (Narayanan et al. 2021, "Efficient large-scale language model
 * training on GPU clusters using Megatron-LM", section 2.2) and the one under way. */
static int held_max(const Planner *planner, int stage)
{
    const ScheduleModule *decoder = module_of(planner->options, planner->decoder);
    int after = stages_of(decoder) - stage - 1;
    if (decoder->chunks == 1) {
        return after + 1;
    }
    return 2 * after + (decoder->chunks - 1) * planner->groups[planner->decoder] + 1;
}

/* Place of (chunk, microbatch) among a stage's forwards; for backwards the chunks are counted from
 * the last. */
static int64_t turn_of(const Planner *planner, int module, int chunk, int microbatch)
{
    int64_t size = planner->groups[module];
    int64_t chunks = module_of(planner->options, module)->chunks;
    return ((microbatch / size) * chunks + chunk) * size + microbatch % size;
}

/* ---------------------------------------------------------------- what can be done */

/* Microbatches with which an encoder is through: their number. */
static int encoder_completed(const Planner *planner, int encoder)
{
    if (wants_gradients(planner->options, encoder)) {
        int last = module_of(planner->options, encoder)->backward_begin;
        return planner->parts[encoder][last].backwards;
    }
    return planner->parts[planner->decoder][0].forwards;
}

static bool has_all_rows(const Planner *planner, int microbatch)
{
    const ScheduleOptions *options = planner->options;
    for (int e = 0; e < options->graph->num_modules; e++) {
        int last = parts_of(module_of(options, e)) - 1;
        if (e != planner->decoder && planner->parts[e][last].forwards <= microbatch) {
            return false;
        }
    }
    return true;
}

/* What the part reads is there, and what it writes is free. Row buffers are then free too: an
 * encoder begins m when it is through with m - window, whose rows the decoder has used and whose
 * gradients have been received. */
static bool can_forward(const Planner *planner, const Work *work)
{
    const ScheduleOptions *options = planner->options;
    const ScheduleModule *module = module_of(options, work->module);
    const PartProgress *part = &planner->parts[work->module][work->part];
    bool has_input;
    if (work->part > 0) {
        has_input = part[-1].forwards > work->microbatch;
    } else if (is_encoder(module)) {
        int completed = encoder_completed(planner, work->module);
        has_input = work->microbatch < completed + options->window;
    } else {
        has_input = has_all_rows(planner, work->microbatch);
    }
    if (!has_input || work->part == parts_of(module) - 1 ||
        has_backward(options, work->module, work->part)) {
        return has_input;
    }
    /* The output waits in its slot until the next part's receive. That of a next chunk of the
     * decoder has its turn only after the other microbatches of the group. */
    int ahead = AHEAD;
    bool is_last_stage = work->part % stages_of(module) == stages_of(module) - 1;
    if (is_last_stage && planner->groups[work->module] > ahead) {
        ahead = planner->groups[work->module];
    }
    return work->microbatch < part[1].forwards_begun + ahead;
}

static bool can_backward(const Planner *planner, const Work *work)
{
    const ScheduleModule *module = module_of(planner->options, work->module);
    const PartProgress *part = &planner->parts[work->module][work->part];
    bool has_grad = true;
    if (work->part < parts_of(module) - 1) {
        has_grad = part[1].backwards > work->microbatch;
    } else if (is_encoder(module)) {
        has_grad = planner->parts[planner->decoder][0].backwards > work->microbatch;
    }
    bool is_free = work->part == module->backward_begin ||
                   work->microbatch < part[-1].backwards_begun + GRAD_BUFFERS;
    return part->forwards > work->microbatch && has_grad && is_free;
}

static bool find_backward(const Planner *planner, const StageProgress *stage, Work *work_out)
{
    const ScheduleOptions *options = planner->options;
    const ScheduleModule *module = module_of(options, stage->module);
    int64_t best = INT64_MAX;
    for (int c = 0; c < module->chunks; c++) {
        int part = c * stages_of(module) + stage->stage;
        int m = planner->parts[stage->module][part].backwards_begun;
        int64_t turn = turn_of(planner, stage->module, module->chunks - 1 - c, m);
        Work work = {stage->module, part, m, true};
        if (has_backward(options, stage->module, part) && m < options->microbatches &&
            turn < best && can_backward(planner, &work)) {
            best = turn;
            *work_out = work;
        }
    }
    return best < INT64_MAX;
}

/* The decoder's turns are kept, or forwards of early chunks would fill the stage. An encoder, which
 * is bound by its window, takes the first that can be done. */
static bool find_forward(const Planner *planner, const StageProgress *stage, Work *work_out)
{
    const ScheduleOptions *options = planner->options;
    const ScheduleModule *module = module_of(options, stage->module);
    int64_t best = INT64_MAX;
    for (int c = 0; c < module->chunks; c++) {
        int part = c * stages_of(module) + stage->stage;
        int m = planner->parts[stage->module][part].forwards_begun;
        int64_t turn = turn_of(planner, stage->module, c, m);
        Work work = {stage->module, part, m, false};
        if (m < options->microbatches && turn < best &&
            (!is_encoder(module) || can_forward(planner, &work))) {
            best = turn;
            *work_out = work;
        }
    }
    if (best == INT64_MAX || is_encoder(module)) {
        return best < INT64_MAX;
    }
    bool is_full = has_backward(options, stage->module, work_out->part) &&
                   stage->held >= held_max(planner, stage->stage);
    return !is_full && can_forward(planner, work_out);
}

static Urgency urgency_of(const Planner *planner, const Work *work)
{
    if (work->module == planner->decoder) {
        return work->is_backward ? URGENCY_DECODER_BACKWARD : URGENCY_DECODER_FORWARD;
    }
    int awaited = planner->parts[planner->decoder][0].forwards_begun;
    bool is_awaited = !work->is_backward && work->microbatch <= awaited;
    return is_awaited ? URGENCY_AWAITED_ROWS : URGENCY_REST;
}

/* A backward, else a forward. The interleaved stage takes forwards as long as it may hold more, so
 * that after the warm-up the two alternate: with backwards first it would run out of forwards at
 * the end of each group. */
static void choose(const Planner *planner, StageProgress *stage)
{
    bool is_interleaved =
        stage->module == planner->decoder && module_of(planner->options, stage->module)->chunks > 1;
    stage->is_stale = false;
    stage->is_ready = is_interleaved && find_forward(planner, stage, &stage->next);
    stage->is_ready = stage->is_ready || find_backward(planner, stage, &stage->next) ||
                      find_forward(planner, stage, &stage->next);
}

/* ---------------------------------------------------------------- the ranks on paper */

/* Work of a stage concerns its neighbours, and across boundaries first and last stages. */
static void make_stale(Planner *planner, const StageProgress *stage)
{
    const ScheduleGraph *graph = planner->options->graph;
    int begin = planner->first_stages[stage->module];
    int count = planner->first_stages[stage->module + 1] - begin;
    planner->stages[begin + stage->stage].is_stale = true;
    planner->stages[begin + (stage->stage + 1) % count].is_stale = true;
    planner->stages[begin + (stage->stage + count - 1) % count].is_stale = true;
    for (int m = 0; m < graph->num_modules; m++) {
        planner->stages[planner->first_stages[m]].is_stale = true;
        planner->stages[planner->first_stages[m + 1] - 1].is_stale = true;
    }
}

static void begin_work(Planner *planner, StageProgress *stage)
{
    const ScheduleModule *module = module_of(planner->options, stage->module);
    Work work = stage->next;
    PartProgress *part = &planner->parts[work.module][work.part];
    if (work.is_backward) {
        part->backwards_begun++;
    } else {
        part->forwards_begun++;
        stage->held += has_backward(planner->options, work.module, work.part);
    }
    stage->work = work;
    planner->end_times[stage - planner->stages] =
        planner->now + (work.is_backward ? module->backward_cost : module->forward_cost);
    planner->order[planner->num_done++] = work;
    make_stale(planner, stage);
}

static void end_work(Planner *planner, StageProgress *stage)
{
    PartProgress *part = &planner->parts[stage->module][stage->work.part];
    if (stage->work.is_backward) {
        part->backwards++;
        stage->held--;
    } else {
        part->forwards++;
    }
    planner->end_times[stage - planner->stages] = INFINITY;
    make_stale(planner, stage);
}

/* No stage that shares a rank with it is at work or has its ranks held for more urgent work. */
static bool is_free(const Planner *planner, const StageProgress *stage)
{
    for (int m = 0; m < planner->options->graph->num_modules; m++) {
        for (int s = stage->begins[m]; s < stage->ends[m]; s++) {
            if (planner->end_times[s] < INFINITY ||
                planner->stages[s].held_round == planner->round) {
                return false;
            }
        }
    }
    return true;
}

static bool is_before(const StageProgress *a, const StageProgress *b)
{
    if (a->urgency != b->urgency) {
        return a->urgency < b->urgency;
    }
    if (a->next.microbatch != b->next.microbatch) {
        return a->next.microbatch < b->next.microbatch;
    }
    return a < b;
}

/* The stages with something to do, the most urgent first. */
static int fill_queue(Planner *planner)
{
    int count = 0;
    for (int s = 0; s < planner->num_stages; s++) {
        StageProgress *stage = &planner->stages[s];
        if (planner->end_times[s] < INFINITY) {
            continue;
        }
        if (stage->is_stale) {
            choose(planner, stage);
        }
        if (!stage->is_ready) {
            continue;
        }
        stage->urgency = urgency_of(planner, &stage->next);
        int at = count++;
        for (; at > 0 && is_before(stage, &planner->stages[planner->queue[at - 1]]); at--) {
            planner->queue[at] = planner->queue[at - 1];
        }
        planner->queue[at] = s;
    }
    return count;
}

/* Begins what can begin now; false: nothing. An encoder whose stage lies across several of the
 * decoder's would hardly ever find all its ranks idle: for the most urgent work they are kept free.
 */
static bool begin_ready(Planner *planner)
{
    bool has_begun = false;
    int count = fill_queue(planner);
    planner->round++;
    for (int i = 0; i < count; i++) {
        StageProgress *stage = &planner->stages[planner->queue[i]];
        if (is_free(planner, stage)) {
            begin_work(planner, stage);
            has_begun = true;
        } else if (stage->urgency <= URGENCY_AWAITED_ROWS) {
            stage->held_round = planner->round;
        }
    }
    return has_begun;
}

static void end_next(Planner *planner)
{
    double first = INFINITY;
    for (int s = 0; s < planner->num_stages; s++) {
        first = planner->end_times[s] < first ? planner->end_times[s] : first;
    }
    CHECK(first < INFINITY); /* see plan_order */
    planner->now = first;
    for (int s = 0; s < planner->num_stages; s++) {
        double end = planner->end_times[s];
        if (end <= first + planner->moment) {
            planner->now = end > planner->now ? end : planner->now;
            end_work(planner, &planner->stages[s]);
        }
    }
}

/* Never blocks: when no rank is at work and work is left, something can begin. Let u be the oldest
 * microbatch that is not done everywhere, W the window and G the decoder's group_size, at most W
 * where an encoder waits for gradients.
 * - Backwards wait for backwards of later parts, for the part before to have taken the gradient of
 *   m - 2, and for their own forward. So of u, the last part without its backward can do it, if
 *   forwarded.
 * - Encoders may begin every m < u + W (one without gradients: every m less than W from the
 *   decoder's next forward), and within them wait for the parts before and for older microbatches
 *   only.
 * - The decoder: the forwards of u stand in the turns of u's group, of microbatches below u + G,
 *   whose rows come by the above. Take the smallest turn that some stage has not done, and the
 *   first such stage: its input is there, for that was an earlier turn or an earlier stage; the
 *   part that takes its output has had microbatch m - ahead, also an earlier turn. With r = u % G,
 *   at most (V - 1) G + r + V (u - r) forwards have earlier turns than the last of u, and at least
 *   V u backwards are done: so (V - 1) (G - r) are held, less than held_max.
 * Ranks held for urgent work are given to it as soon as others are through. */
static void plan_order(Planner *planner)
{
    while (planner->num_done < planner->num_all) {
        while (begin_ready(planner)) {
        }
        end_next(planner);
    }
}

/* ---------------------------------------------------------------- set up */

static void find_overlaps(Planner *planner, StageProgress *stage)
{
    const ScheduleModule *mine = module_of(planner->options, stage->module);
    int begin = mine->grid.first_rank + stage->stage * stage_ranks(mine);
    int end = begin + stage_ranks(mine);
    for (int m = 0; m < planner->options->graph->num_modules; m++) {
        const ScheduleModule *module = module_of(planner->options, m);
        int first = module->grid.first_rank;
        int last = first + grid_size(&module->grid);
        int common_begin = begin > first ? begin : first;
        int common_end = end < last ? end : last;
        if (common_begin < common_end) {
            int ranks = stage_ranks(module);
            int base = planner->first_stages[m];
            stage->begins[m] = base + (common_begin - first) / ranks;
            stage->ends[m] = base + (common_end - 1 - first) / ranks + 1;
        }
    }
}

static Status allocate(Planner *planner)
{
    const ScheduleOptions *options = planner->options;
    for (int m = 0; m < options->graph->num_modules; m++) {
        const ScheduleModule *module = module_of(options, m);
        int parts = parts_of(module);
        int backwards = options->is_training ? parts - module->backward_begin : 0;
        planner->first_stages[m + 1] = planner->first_stages[m] + stages_of(module);
        planner->num_all += (int64_t)options->microbatches * (parts + backwards);
        TRY(MEMORY_NEW(&planner->parts[m], parts));
    }
    planner->num_stages = planner->first_stages[options->graph->num_modules];
    TRY(MEMORY_NEW(&planner->stages, planner->num_stages));
    TRY(MEMORY_NEW(&planner->end_times, planner->num_stages));
    TRY(MEMORY_NEW(&planner->queue, planner->num_stages));
    return MEMORY_NEW(&planner->order, planner->num_all);
}

static void set_up(Planner *planner)
{
    const ScheduleGraph *graph = planner->options->graph;
    double smallest = INFINITY;
    for (int m = 0; m < graph->num_modules; m++) {
        const ScheduleModule *module = &graph->modules[m];
        smallest = module->forward_cost < smallest ? module->forward_cost : smallest;
        smallest = module->backward_cost < smallest ? module->backward_cost : smallest;
        planner->groups[m] = group_size(planner->options, m);
        for (int s = planner->first_stages[m]; s < planner->first_stages[m + 1]; s++) {
            StageProgress *stage = &planner->stages[s];
            stage->module = m;
            stage->stage = s - planner->first_stages[m];
            stage->is_stale = true;
            find_overlaps(planner, stage);
            planner->end_times[s] = INFINITY;
        }
    }
    planner->moment = MOMENT * smallest;
}

static void planner_done(Planner *planner)
{
    for (int m = 0; m < SCHEDULE_MODULES_MAX; m++) {
        memory_free(planner->parts[m]);
    }
    memory_free(planner->stages);
    memory_free(planner->end_times);
    memory_free(planner->queue);
    memory_free(planner->order);
}

/* After a failure too planner_done is the caller's. */
static Status planner_run(Planner *planner, const ScheduleOptions *options)
{
    check_options(options);
    *planner = (Planner){.options = options, .decoder = find_decoder(options->graph)};
    TRY(allocate(planner));
    set_up(planner);
    plan_order(planner);
    return STATUS_OK;
}

/* ---------------------------------------------------------------- buffers of a rank */

/* How many are begun and not ended; most_out: the most so far. */
typedef struct Holding {
    int now;
    int most;
} Holding;

static void hold(Holding *holding)
{
    holding->now++;
    holding->most = holding->now > holding->most ? holding->now : holding->most;
}

/* The last thing that a stage does for a microbatch. */
static bool ends_microbatch(const ScheduleOptions *options, int stage, const Work *work)
{
    const ScheduleModule *module = module_of(options, work->module);
    int last_forward = (module->chunks - 1) * stages_of(module) + stage;
    if (!has_backward(options, work->module, last_forward)) {
        return !work->is_backward && work->part == last_forward;
    }
    return work->is_backward && work->part - stages_of(module) < module->backward_begin;
}

/* Microbatches enter and leave each chunk in their order: with as many slots as there were in it at
 * the same time, m % slots is free when m comes. */
static void count_slots(const Planner *planner, int index, int stage, ScheduleSlots *slots)
{
    const ScheduleOptions *options = planner->options;
    const ScheduleModule *module = module_of(options, index);
    int stages = stages_of(module);
    Holding chunks[SCHEDULE_CHUNKS_MAX] = {0};
    Holding microbatches = {0};
    for (int64_t i = 0; i < planner->num_done; i++) {
        const Work *work = &planner->order[i];
        int source = work->part - 1; /* its output has been taken */
        if (work->module == index && !work->is_backward && source >= 0 &&
            source % stages == stage && !has_backward(options, index, source)) {
            chunks[source / stages].now--;
        }
        if (work->module != index || work->part % stages != stage) {
            continue;
        }
        if (!work->is_backward) {
            hold(&chunks[work->part / stages]);
        }
        if (!work->is_backward && work->part == stage) {
            hold(&microbatches);
        }
        bool is_over = work->is_backward || (work->part == parts_of(module) - 1 &&
                                             !has_backward(options, index, work->part));
        chunks[work->part / stages].now -= is_over;
        microbatches.now -= ends_microbatch(options, stage, work);
    }
    for (int c = 0; c < module->chunks; c++) {
        slots->chunks[c] = chunks[c].most;
    }
    slots->microbatches = microbatches.most;
}

static void find_slots(const Planner *planner, int rank, ScheduleSlots *slots)
{
    const ScheduleOptions *options = planner->options;
    const ScheduleModule *decoder = module_of(options, planner->decoder);
    int rows = options->window < options->microbatches ? options->window : options->microbatches;
    for (int m = 0; m < options->graph->num_modules; m++) {
        const ScheduleModule *module = module_of(options, m);
        for (int s = 0; s < stages_of(module); s++) {
            if (serves_stage(module, s, rank)) {
                count_slots(planner, m, s, &slots[m]);
            }
        }
        if (is_encoder(module) &&
            (serves_stage(module, stages_of(module) - 1, rank) || serves_stage(decoder, 0, rank))) {
            slots[m].rows = rows;
        }
    }
}

/* ---------------------------------------------------------------- the list of a rank */

typedef struct List {
    const Planner *planner;
    Schedule schedule;
    size_t capacity;
} List;

static Status add(List *list, Action action)
{
    Schedule *schedule = &list->schedule;
    TRY(memory_grow((void **)&schedule->actions, &list->capacity, (size_t)schedule->num_actions + 1,
                    sizeof *schedule->actions));
    schedule->actions[schedule->num_actions++] = action;
    return STATUS_OK;
}

/* Work, and transfers between parts. */
static Status add_inner(List *list, ActionKind kind, const Work *work)
{
    const ScheduleModule *module = module_of(list->planner->options, work->module);
    int chunk = work->part / stages_of(module);
    int slots = list->schedule.slots[work->module].chunks[chunk];
    CHECK(slots > 0);
    return add(list, (Action){.kind = kind,
                              .module = work->module,
                              .chunk = chunk,
                              .microbatch = work->microbatch,
                              .slot = work->microbatch % slots});
}

static Status add_boundary(List *list, ActionKind kind, int encoder, int microbatch)
{
    int rows = list->schedule.slots[encoder].rows;
    CHECK(rows > 0);
    return add(list, (Action){.kind = kind,
                              .module = encoder,
                              .microbatch = microbatch,
                              .slot = microbatch % rows});
}

/* One for each encoder that it concerns. */
static Status add_boundaries(List *list, ActionKind kind, int microbatch)
{
    const ScheduleOptions *options = list->planner->options;
    for (int e = 0; e < options->graph->num_modules; e++) {
        bool concerns =
            kind == ACTION_RECV ? e != list->planner->decoder : wants_gradients(options, e);
        if (concerns) {
            TRY(add_boundary(list, kind, e, microbatch));
        }
    }
    return STATUS_OK;
}

static Status add_forward(List *list, const Work *work)
{
    const ScheduleModule *module = module_of(list->planner->options, work->module);
    if (work->part > 0) {
        TRY(add_inner(list, ACTION_RECV_ACTIVATIONS, work));
    } else if (!is_encoder(module)) {
        TRY(add_boundaries(list, ACTION_RECV, work->microbatch));
    }
    TRY(add_inner(list, is_encoder(module) ? ACTION_ENCODE : ACTION_FORWARD, work));
    if (work->part < parts_of(module) - 1) {
        TRY(add_inner(list, ACTION_SEND_ACTIVATIONS, work));
    } else if (is_encoder(module)) {
        TRY(add_boundary(list, ACTION_SEND, work->module, work->microbatch));
    }
    return STATUS_OK;
}

static Status add_backward(List *list, const Work *work)
{
    const ScheduleModule *module = module_of(list->planner->options, work->module);
    if (work->part < parts_of(module) - 1) {
        TRY(add_inner(list, ACTION_RECV_ACTIVATIONS_GRAD, work));
    } else if (is_encoder(module)) {
        TRY(add_boundary(list, ACTION_RECV_GRAD, work->module, work->microbatch));
    }
    TRY(add_inner(list, is_encoder(module) ? ACTION_ENCODE_BACKWARD : ACTION_BACKWARD, work));
    if (work->part > module->backward_begin) {
        TRY(add_inner(list, ACTION_SEND_ACTIVATIONS_GRAD, work));
    } else if (work->part == 0 && !is_encoder(module)) {
        TRY(add_boundaries(list, ACTION_SEND_GRAD, work->microbatch));
    }
    return STATUS_OK;
}

/* The action for each trained module of the rank. */
static Status add_trained(List *list, ActionKind kind, int rank)
{
    const ScheduleGraph *graph = list->planner->options->graph;
    for (int m = 0; m < graph->num_modules; m++) {
        const ScheduleModule *module = &graph->modules[m];
        if (module->is_trained && grid_contains(&module->grid, rank)) {
            TRY(add(list, (Action){.kind = kind, .module = m, .microbatch = -1}));
        }
    }
    return STATUS_OK;
}

static Status add_all(List *list, int rank)
{
    const Planner *planner = list->planner;
    for (int64_t i = 0; i < planner->num_done; i++) {
        const Work *work = &planner->order[i];
        const ScheduleModule *module = module_of(planner->options, work->module);
        if (serves_stage(module, work->part % stages_of(module), rank)) {
            TRY(work->is_backward ? add_backward(list, work) : add_forward(list, work));
        }
    }
    if (planner->options->is_training) {
        TRY(add_trained(list, ACTION_REDUCE, rank));
        TRY(add(list, (Action){.kind = ACTION_VOTE, .module = -1, .microbatch = -1}));
        TRY(add_trained(list, ACTION_UPDATE, rank));
    }
    return STATUS_OK;
}

static Status make_list(const Planner *planner, int rank, Schedule *schedule_out)
{
    List list = {.planner = planner};
    find_slots(planner, rank, list.schedule.slots);
    Status status = add_all(&list, rank);
    if (status != STATUS_OK) {
        schedule_done(&list.schedule);
        return status_trace(status, __FILE__, __LINE__);
    }
    *schedule_out = list.schedule;
    return STATUS_OK;
}

Status schedule_make(const ScheduleOptions *options, int rank, Schedule *schedule_out)
{
    Planner planner;
    Status status = planner_run(&planner, options);
    if (status == STATUS_OK) {
        status = make_list(&planner, rank, schedule_out);
    }
    planner_done(&planner);
    return status;
}

Status schedule_make_all(const ScheduleOptions *options, int num_ranks, Schedule *schedules_out)
{
    Planner planner;
    int made = 0;
    Status status = planner_run(&planner, options);
    while (status == STATUS_OK && made < num_ranks) {
        status = make_list(&planner, made, &schedules_out[made]);
        made += status == STATUS_OK;
    }
    planner_done(&planner);
    while (status != STATUS_OK && made > 0) {
        schedule_done(&schedules_out[--made]);
    }
    return status;
}

void schedule_done(Schedule *schedule)
{
    memory_free(schedule->actions);
    *schedule = (Schedule){0};
}
