#include "train/simulator.h"

#include "base/memory.h"

#include <math.h>

/* What has gone through a rank, of one chunk of a module or of one boundary: the counts say how
 * far, for every flow takes the microbatches in their order; the times say when. */
typedef enum Flow {
    FLOW_FORWARD,
    FLOW_BACKWARD,
    FLOW_SEND,
    FLOW_RECV,
    FLOW_SEND_GRAD,
    FLOW_RECV_GRAD,
    FLOW_COUNT,
} Flow;

typedef struct Port {
    int count;
    double *times; /* [microbatches] */
} Port;

enum {
    /* A rank's ports for a module: of its chunks, and of the boundary. */
    CELL_BOUNDARY = SCHEDULE_CHUNKS_MAX,
    CELL_COUNT,
    GRAD_BUFFERS = 2, /* of a rank for each chunk */
};

typedef struct RankProgress {
    int next; /* action */
    double clock;
    bool has_voted;
    bool has_reduced[SCHEDULE_MODULES_MAX];
    bool has_updated[SCHEDULE_MODULES_MAX];
    Port ports[SCHEDULE_MODULES_MAX][CELL_COUNT][FLOW_COUNT];
} RankProgress;

typedef struct Simulation {
    const ScheduleOptions *options;
    const Schedule *schedules;
    int num_ranks;
    int decoder;
    RankProgress *ranks; /* [num_ranks] */
    double *times;       /* of all ports */
    SimulatorResult result;
} Simulation;

/* One action of a rank: what it is about, and what comes of it. */
typedef struct Turn {
    Simulation *simulation;
    int rank;
    const Action *action;
    const ScheduleModule *module;
    int part;     /* of inner actions */
    double start; /* not before: grows with everything that is waited for */
    bool is_blocked;
} Turn;

/* ---------------------------------------------------------------- the graph */

static int stages_of(const ScheduleModule *module)
{
    return module->grid.sizes[GRID_AXIS_PP];
}

static int parts_of(const ScheduleModule *module)
{
    return stages_of(module) * module->chunks;
}

static int stage_of(const ScheduleModule *module, int rank)
{
    return grid_coords(&module->grid, rank).at[GRID_AXIS_PP];
}

static bool serves_stage(const ScheduleModule *module, int stage, int rank)
{
    return grid_contains(&module->grid, rank) && stage_of(module, rank) == stage;
}

/* First backward of the pass; parts_of when there is none. */
static int backward_begin(const ScheduleOptions *options, const ScheduleModule *module)
{
    return options->is_training ? module->backward_begin : parts_of(module);
}

static bool gives_gradients(const ScheduleOptions *options, const ScheduleModule *encoder)
{
    return backward_begin(options, encoder) < parts_of(encoder);
}

/* Which flow an action moves; FLOW_COUNT: none, it is of a step's end. */
static Flow flow_of(ActionKind kind)
{
    static const Flow flows[ACTION_COUNT] = {
        [ACTION_ENCODE] = FLOW_FORWARD,
        [ACTION_FORWARD] = FLOW_FORWARD,
        [ACTION_ENCODE_BACKWARD] = FLOW_BACKWARD,
        [ACTION_BACKWARD] = FLOW_BACKWARD,
        [ACTION_SEND] = FLOW_SEND,
        [ACTION_SEND_ACTIVATIONS] = FLOW_SEND,
        [ACTION_RECV] = FLOW_RECV,
        [ACTION_RECV_ACTIVATIONS] = FLOW_RECV,
        [ACTION_SEND_GRAD] = FLOW_SEND_GRAD,
        [ACTION_SEND_ACTIVATIONS_GRAD] = FLOW_SEND_GRAD,
        [ACTION_RECV_GRAD] = FLOW_RECV_GRAD,
        [ACTION_RECV_ACTIVATIONS_GRAD] = FLOW_RECV_GRAD,
        [ACTION_REDUCE] = FLOW_COUNT,
        [ACTION_VOTE] = FLOW_COUNT,
        [ACTION_UPDATE] = FLOW_COUNT,
    };
    return flows[kind];
}

static bool is_boundary(ActionKind kind)
{
    return kind == ACTION_SEND || kind == ACTION_RECV || kind == ACTION_SEND_GRAD ||
           kind == ACTION_RECV_GRAD;
}

static bool is_work(ActionKind kind)
{
    return kind == ACTION_ENCODE || kind == ACTION_ENCODE_BACKWARD || kind == ACTION_FORWARD ||
           kind == ACTION_BACKWARD;
}

static Port *port_of(const Simulation *simulation, int rank, int module, int cell, Flow flow)
{
    return &simulation->ranks[rank].ports[module][cell][flow];
}

static Port *chunk_port(const Turn *turn, int chunk, Flow flow)
{
    return port_of(turn->simulation, turn->rank, turn->action->module, chunk, flow);
}

/* The rank with the same tp, cp and dp that has another part of the module. */
static Port *peer_port(const Turn *turn, int part, Flow flow)
{
    const ScheduleModule *module = turn->module;
    GridCoords coords = grid_coords(&module->grid, turn->rank);
    coords.at[GRID_AXIS_PP] = part % stages_of(module);
    return port_of(turn->simulation, grid_rank(&module->grid, coords), turn->action->module,
                   part / stages_of(module), flow);
}

/* ---------------------------------------------------------------- conditions */

static Status refuse(const Turn *turn, const char *why)
{
    const Action *action = turn->action;
    return fail(STATUS_CONFLICT,
                "schedule: rank %d, action %d, %s module %d chunk %d microbatch %d: %s", turn->rank,
                turn->simulation->ranks[turn->rank].next, schedule_action_name(action->kind),
                action->module, action->chunk, action->microbatch, why);
}

/* The turn's own rank must have let m through, earlier in its list. m < 0: nothing is asked. */
static Status need_own(const Turn *turn, const Port *port, int m, const char *why)
{
    return port->count > m ? STATUS_OK : refuse(turn, why);
}

/* Another rank must; until then this one waits. */
static void wait_for(Turn *turn, const Port *port, int m)
{
    if (m < 0) {
        return;
    }
    if (port->count <= m) {
        turn->is_blocked = true;
    } else if (port->times[m] > turn->start) {
        turn->start = port->times[m];
    }
}

/* All ranks of a stage must have let boundary `encoder` through. */
static void wait_for_stage(Turn *turn, int module, int stage, int encoder, Flow flow, int m)
{
    const Simulation *simulation = turn->simulation;
    const Grid *grid = &simulation->options->graph->modules[module].grid;
    int ranks = grid_size(grid) / grid->sizes[GRID_AXIS_PP];
    for (int i = 0; i < ranks; i++) {
        int rank = grid->first_rank + stage * ranks + i; /* pp varies slowest */
        wait_for(turn, port_of(simulation, rank, encoder, CELL_BOUNDARY, flow), m);
    }
}

static void wait_for_encoder(Turn *turn, int encoder, Flow flow, int m)
{
    const ScheduleModule *module = &turn->simulation->options->graph->modules[encoder];
    wait_for_stage(turn, encoder, stages_of(module) - 1, encoder, flow, m);
}

static void wait_for_decoder(Turn *turn, int encoder, Flow flow, int m)
{
    wait_for_stage(turn, turn->simulation->decoder, 0, encoder, flow, m);
}

static int slots_of(const Turn *turn)
{
    return turn->simulation->schedules[turn->rank]
        .slots[turn->action->module]
        .chunks[turn->action->chunk];
}

static int rows_of(const Turn *turn, int encoder)
{
    return turn->simulation->schedules[turn->rank].slots[encoder].rows;
}

/* The rank's input buffer is free for microbatch m: it has run all of what was in it. */
static Status claim_input(const Turn *turn)
{
    const Simulation *simulation = turn->simulation;
    const ScheduleModule *module = turn->module;
    int stage = stage_of(module, turn->rank);
    int slots = simulation->schedules[turn->rank].slots[turn->action->module].microbatches;
    for (int c = 0; c < module->chunks; c++) {
        int part = c * stages_of(module) + stage;
        bool has_backward = part >= backward_begin(simulation->options, module);
        const Port *port = chunk_port(turn, c, has_backward ? FLOW_BACKWARD : FLOW_FORWARD);
        TRY(need_own(turn, port, turn->action->microbatch - slots, "the input's buffer is in use"));
    }
    return STATUS_OK;
}

/* The slot of the chunk is free for microbatch m: what it held has been used. */
static Status claim_slot(Turn *turn)
{
    int chunk = turn->action->chunk;
    int before = turn->action->microbatch - slots_of(turn);
    if (chunk == 0) {
        TRY(claim_input(turn));
    }
    if (turn->part >= backward_begin(turn->simulation->options, turn->module)) {
        return need_own(turn, chunk_port(turn, chunk, FLOW_BACKWARD), before,
                        "the slot waits for its backward");
    }
    TRY(need_own(turn, chunk_port(turn, chunk, FLOW_FORWARD), before,
                 "the slot waits for its forward"));
    if (turn->part < parts_of(turn->module) - 1) {
        wait_for(turn, peer_port(turn, turn->part + 1, FLOW_RECV), before);
    }
    return STATUS_OK;
}

/* The buffer of this chunk for gradients of activations is free. */
static Status claim_grad(Turn *turn)
{
    int before = turn->action->microbatch - GRAD_BUFFERS;
    if (turn->part > turn->module->backward_begin) {
        wait_for(turn, peer_port(turn, turn->part - 1, FLOW_RECV_GRAD), before);
    }
    return need_own(turn, chunk_port(turn, turn->action->chunk, FLOW_BACKWARD), before,
                    "the buffer of the gradient waits for its backward");
}

/* ---------------------------------------------------------------- actions */

/* A decoder's stage holds no more than 1F1B and the interleaved schedule do, an encoder's chunk no
 * more than the window. */
static Status check_bounds(Turn *turn)
{
    const ScheduleOptions *options = turn->simulation->options;
    const ScheduleModule *module = turn->module;
    int stages = stages_of(module);
    int begin = backward_begin(options, module);
    int held = 0;
    for (int c = 0; c < module->chunks; c++) {
        bool counts = c * stages + turn->part % stages >= begin;
        int in_chunk = chunk_port(turn, c, FLOW_FORWARD)->count -
                       chunk_port(turn, c, FLOW_BACKWARD)->count + (c == turn->action->chunk);
        held += counts ? in_chunk : 0;
        if (counts && module->feeds >= 0 && in_chunk > options->window) {
            return refuse(turn, "more microbatches in flight than the window");
        }
    }
    int after = stages - 1 - turn->part % stages;
    int most = module->chunks == 1 ? after + 1 : 2 * after + (module->chunks - 1) * stages + 1;
    if (module->feeds < 0 && turn->part >= begin && held > most) {
        return refuse(turn, "more forwards in flight than the pipeline needs");
    }
    return STATUS_OK;
}

static Status run_forward(Turn *turn)
{
    Simulation *simulation = turn->simulation;
    const ScheduleGraph *graph = simulation->options->graph;
    int m = turn->action->microbatch;
    bool is_decoder = turn->module->feeds < 0;
    TRY(claim_slot(turn));
    TRY(check_bounds(turn));
    if (turn->part > 0) {
        TRY(need_own(turn, chunk_port(turn, turn->action->chunk, FLOW_RECV), m,
                     "its activations have not been received"));
    }
    for (int e = 0; turn->part == 0 && is_decoder && e < graph->num_modules; e++) {
        const Port *rows = port_of(simulation, turn->rank, e, CELL_BOUNDARY, FLOW_RECV);
        if (e != simulation->decoder) {
            TRY(need_own(turn, rows, m, "rows have not been received"));
        }
    }
    if (turn->part == parts_of(turn->module) - 1 && !is_decoder) {
        wait_for_decoder(turn, turn->action->module, FLOW_RECV,
                         m - rows_of(turn, turn->action->module));
    }
    return STATUS_OK;
}

static Status run_backward(Turn *turn)
{
    Simulation *simulation = turn->simulation;
    const ScheduleGraph *graph = simulation->options->graph;
    int m = turn->action->microbatch;
    int chunk = turn->action->chunk;
    bool is_decoder = turn->module->feeds < 0;
    TRY(need_own(turn, chunk_port(turn, chunk, FLOW_FORWARD), m, "its forward has not been run"));
    TRY(claim_grad(turn));
    if (turn->part < parts_of(turn->module) - 1) {
        TRY(need_own(turn, chunk_port(turn, chunk, FLOW_RECV_GRAD), m,
                     "its gradient has not been received"));
    } else if (!is_decoder) {
        TRY(need_own(turn, chunk_port(turn, CELL_BOUNDARY, FLOW_RECV_GRAD), m,
                     "its rows' gradient has not been received"));
    }
    for (int e = 0; turn->part == 0 && is_decoder && e < graph->num_modules; e++) {
        if (e != simulation->decoder && gives_gradients(simulation->options, &graph->modules[e])) {
            wait_for_encoder(turn, e, FLOW_RECV_GRAD, m - rows_of(turn, e));
        }
    }
    return STATUS_OK;
}

static Status run_inner(Turn *turn)
{
    int m = turn->action->microbatch;
    int chunk = turn->action->chunk;
    switch (turn->action->kind) {
    case ACTION_SEND_ACTIVATIONS:
        return need_own(turn, chunk_port(turn, chunk, FLOW_FORWARD), m,
                        "its forward has not been run");
    case ACTION_RECV_ACTIVATIONS:
        wait_for(turn, peer_port(turn, turn->part - 1, FLOW_SEND), m);
        return claim_slot(turn);
    case ACTION_SEND_ACTIVATIONS_GRAD:
        return need_own(turn, chunk_port(turn, chunk, FLOW_BACKWARD), m,
                        "its backward has not been run");
    case ACTION_RECV_ACTIVATIONS_GRAD:
        wait_for(turn, peer_port(turn, turn->part + 1, FLOW_SEND_GRAD), m);
        return claim_grad(turn);
    case ACTION_ENCODE_BACKWARD:
    case ACTION_BACKWARD:
        return run_backward(turn);
    default:
        return run_forward(turn);
    }
}

/* A crossing may begin when those of m - rows have ended on this rank, in both directions. */
static void wait_for_crossings(Turn *turn)
{
    int encoder = turn->action->module;
    int before = turn->action->microbatch - rows_of(turn, encoder);
    if (before < 0) {
        return;
    }
    if (chunk_port(turn, CELL_BOUNDARY, FLOW_SEND)->count > before) {
        wait_for_decoder(turn, encoder, FLOW_RECV, before);
    }
    if (chunk_port(turn, CELL_BOUNDARY, FLOW_SEND_GRAD)->count > before) {
        wait_for_encoder(turn, encoder, FLOW_RECV_GRAD, before);
    }
}

/* A rank at both ends has its receiving buffer written from its own send on. */
static Status run_boundary(Turn *turn)
{
    const Simulation *simulation = turn->simulation;
    const ScheduleModule *encoder = turn->module;
    const ScheduleModule *decoder = &simulation->options->graph->modules[simulation->decoder];
    int m = turn->action->microbatch;
    int last = encoder->chunks - 1;
    bool is_encoder = serves_stage(encoder, stages_of(encoder) - 1, turn->rank);
    bool is_decoder = serves_stage(decoder, 0, turn->rank);
    bool is_rows = turn->action->kind == ACTION_SEND || turn->action->kind == ACTION_RECV;
    bool is_send = turn->action->kind == ACTION_SEND || turn->action->kind == ACTION_SEND_GRAD;
    Flow work = is_rows ? FLOW_FORWARD : FLOW_BACKWARD;
    const Port *of_encoder = chunk_port(turn, last, work);
    const Port *of_decoder = port_of(simulation, turn->rank, simulation->decoder, 0, work);
    if (is_rows == is_send ? !is_encoder : !is_decoder) {
        return refuse(turn, "the rank is not at that end of the boundary");
    }
    wait_for_crossings(turn);
    if (is_send) {
        TRY(need_own(turn, is_rows ? of_encoder : of_decoder, m, "what it sends is not there"));
    } else if (is_rows) {
        wait_for_encoder(turn, turn->action->module, FLOW_SEND, m);
    } else {
        wait_for_decoder(turn, turn->action->module, FLOW_SEND_GRAD, m);
    }
    bool is_receiver = is_rows ? is_decoder : is_encoder;
    int before = is_receiver ? m - rows_of(turn, turn->action->module) : -1;
    return need_own(turn, is_rows ? of_decoder : of_encoder, before,
                    "the buffer it is received into is in use");
}

/* Which parts an action exists for. */
static bool is_due(const Turn *turn)
{
    const ScheduleOptions *options = turn->simulation->options;
    int begin = backward_begin(options, turn->module);
    int last = parts_of(turn->module) - 1;
    bool is_decoder = turn->module->feeds < 0;
    switch (turn->action->kind) {
    case ACTION_ENCODE:
        return !is_decoder;
    case ACTION_FORWARD:
        return is_decoder;
    case ACTION_ENCODE_BACKWARD:
        return !is_decoder && turn->part >= begin;
    case ACTION_BACKWARD:
        return is_decoder && turn->part >= begin;
    case ACTION_SEND_ACTIVATIONS:
        return turn->part < last;
    case ACTION_RECV_ACTIVATIONS:
        return turn->part > 0;
    case ACTION_SEND_ACTIVATIONS_GRAD:
        return turn->part > begin;
    case ACTION_RECV_ACTIVATIONS_GRAD:
        return turn->part >= begin && turn->part < last;
    case ACTION_SEND:
    case ACTION_RECV:
        return !is_decoder;
    default:
        return !is_decoder && begin <= last;
    }
}

static Status check_action(Turn *turn)
{
    const Simulation *simulation = turn->simulation;
    const ScheduleGraph *graph = simulation->options->graph;
    const Action *action = turn->action;
    if (action->module < 0 || action->module >= graph->num_modules || action->microbatch < 0 ||
        action->microbatch >= simulation->options->microbatches) {
        return refuse(turn, "no such module or microbatch");
    }
    turn->module = &graph->modules[action->module];
    if (is_boundary(action->kind)) {
        int rows = rows_of(turn, action->module);
        return rows > 0 && action->slot == action->microbatch % rows && is_due(turn)
                   ? STATUS_OK
                   : refuse(turn, "not due, or a wrong slot");
    }
    if (!grid_contains(&turn->module->grid, turn->rank) || action->chunk < 0 ||
        action->chunk >= turn->module->chunks) {
        return refuse(turn, "the rank does not have that part");
    }
    turn->part = action->chunk * stages_of(turn->module) + stage_of(turn->module, turn->rank);
    int slots = slots_of(turn);
    return slots > 0 && action->slot == action->microbatch % slots && is_due(turn)
               ? STATUS_OK
               : refuse(turn, "not due, or a wrong slot");
}

static const Action *next_action(const Simulation *simulation, int rank)
{
    const Schedule *schedule = &simulation->schedules[rank];
    int next = simulation->ranks[rank].next;
    return next < schedule->num_actions ? &schedule->actions[next] : NULL;
}

static bool is_same(const Action *a, const Action *b)
{
    return a && a->kind == b->kind && a->module == b->module && a->chunk == b->chunk &&
           a->microbatch == b->microbatch;
}

static void finish(Turn *turn, double end)
{
    const Action *action = turn->action;
    RankProgress *rank = &turn->simulation->ranks[turn->rank];
    int cell = is_boundary(action->kind) ? CELL_BOUNDARY : action->chunk;
    Port *port = chunk_port(turn, cell, flow_of(action->kind));
    port->times[port->count++] = end;
    rank->clock = end;
    rank->next++;
}

/* Checks the turn of one rank; turn_out->is_blocked: it waits for others. */
static Status take_turn(Simulation *simulation, int rank, Turn *turn_out)
{
    *turn_out = (Turn){.simulation = simulation,
                       .rank = rank,
                       .action = next_action(simulation, rank),
                       .start = simulation->ranks[rank].clock};
    const Action *action = turn_out->action;
    TRY(check_action(turn_out));
    int cell = is_boundary(action->kind) ? CELL_BOUNDARY : action->chunk;
    if (chunk_port(turn_out, cell, flow_of(action->kind))->count != action->microbatch) {
        return refuse(turn_out, "out of the order of microbatches");
    }
    return is_boundary(action->kind) ? run_boundary(turn_out) : run_inner(turn_out);
}

/* All ranks of one tp x cp group, which stand side by side, do their work together. */
static Status run_work(Simulation *simulation, int rank, const Turn *first, bool *is_done_out)
{
    const ScheduleModule *module = first->module;
    int size = module->grid.sizes[GRID_AXIS_TP] * module->grid.sizes[GRID_AXIS_CP];
    int begin = rank - (rank - module->grid.first_rank) % size;
    double start = 0;
    Turn turn;
    for (int r = begin; r < begin + size; r++) {
        if (!is_same(next_action(simulation, r), first->action)) {
            return STATUS_OK;
        }
        TRY(take_turn(simulation, r, &turn));
        if (turn.is_blocked) {
            return STATUS_OK;
        }
        start = turn.start > start ? turn.start : start;
    }
    bool is_forward = flow_of(first->action->kind) == FLOW_FORWARD;
    double cost = is_forward ? module->forward_cost : module->backward_cost;
    simulation->result.modules[first->action->module].busy += size * cost;
    for (int r = begin; r < begin + size; r++) {
        TRY(take_turn(simulation, r, &turn));
        finish(&turn, start + cost);
    }
    *is_done_out = true;
    return STATUS_OK;
}

/* ---------------------------------------------------------------- the end of a step */

/* A rank of the module has run all that it has to. */
static Status check_complete(const Turn *turn, int module)
{
    const Simulation *simulation = turn->simulation;
    const ScheduleModule *shape = &simulation->options->graph->modules[module];
    int all = simulation->options->microbatches;
    for (int c = 0; c < shape->chunks; c++) {
        int part = c * stages_of(shape) + stage_of(shape, turn->rank);
        bool has_backward = part >= backward_begin(simulation->options, shape);
        if (port_of(simulation, turn->rank, module, c, FLOW_BACKWARD)->count !=
            (has_backward ? all : 0)) {
            return refuse(turn, "before the last backward");
        }
    }
    return STATUS_OK;
}

/* All ranks of [first, first + count) have come to the same action. */
static bool have_all_come(const Simulation *simulation, int first, int count, const Action *action)
{
    for (int r = first; r < first + count; r++) {
        if (!is_same(next_action(simulation, r), action)) {
            return false;
        }
    }
    return true;
}

/* A collective of [first, first + count): all leave it at the same time. */
static void leave(Simulation *simulation, int first, int count)
{
    double last = 0;
    for (int r = first; r < first + count; r++) {
        last = simulation->ranks[r].clock > last ? simulation->ranks[r].clock : last;
    }
    for (int r = first; r < first + count; r++) {
        simulation->ranks[r].clock = last;
        simulation->ranks[r].next++;
    }
}

static Status run_vote(Turn *turn, bool *is_done_out)
{
    Simulation *simulation = turn->simulation;
    const ScheduleGraph *graph = simulation->options->graph;
    const RankProgress *rank = &simulation->ranks[turn->rank];
    for (int m = 0; m < graph->num_modules; m++) {
        const ScheduleModule *module = &graph->modules[m];
        bool is_trained = module->is_trained && grid_contains(&module->grid, turn->rank);
        if (rank->has_voted || rank->has_reduced[m] != is_trained) {
            return refuse(turn, "a second vote, or one before the gradients are summed");
        }
    }
    if (have_all_come(simulation, 0, simulation->num_ranks, turn->action)) {
        for (int r = 0; r < simulation->num_ranks; r++) {
            simulation->ranks[r].has_voted = true;
        }
        leave(simulation, 0, simulation->num_ranks);
        *is_done_out = true;
    }
    return STATUS_OK;
}

static Status run_step_end(Simulation *simulation, int rank, bool *is_done_out)
{
    const ScheduleGraph *graph = simulation->options->graph;
    const Action *action = next_action(simulation, rank);
    RankProgress *progress = &simulation->ranks[rank];
    Turn turn = {.simulation = simulation, .rank = rank, .action = action};
    if (!simulation->options->is_training || action->microbatch >= 0) {
        return refuse(&turn, "not in an evaluation, and once a step");
    }
    if (action->kind == ACTION_VOTE) {
        return run_vote(&turn, is_done_out);
    }
    if (action->module < 0 || action->module >= graph->num_modules ||
        !graph->modules[action->module].is_trained ||
        !grid_contains(&graph->modules[action->module].grid, rank)) {
        return refuse(&turn, "the rank has nothing of the module to train");
    }
    const Grid *grid = &graph->modules[action->module].grid;
    bool is_reduce = action->kind == ACTION_REDUCE;
    bool *has_done = is_reduce ? progress->has_reduced : progress->has_updated;
    if (has_done[action->module] || progress->has_voted == is_reduce) {
        return refuse(&turn, "twice, or on the wrong side of the vote");
    }
    TRY(check_complete(&turn, action->module));
    if (!is_reduce) {
        progress->has_updated[action->module] = true;
        progress->next++;
        *is_done_out = true;
    } else if (have_all_come(simulation, grid->first_rank, grid_size(grid), action)) {
        for (int r = grid->first_rank; r < grid->first_rank + grid_size(grid); r++) {
            simulation->ranks[r].has_reduced[action->module] = true;
        }
        leave(simulation, grid->first_rank, grid_size(grid));
        *is_done_out = true;
    }
    return STATUS_OK;
}

/* ---------------------------------------------------------------- all lists */

/* The rank's next action, if it need not wait. */
static Status run_next(Simulation *simulation, int rank, bool *is_done_out)
{
    const Action *action = next_action(simulation, rank);
    Turn turn;
    *is_done_out = false;
    CHECK((unsigned)action->kind < ACTION_COUNT);
    if (flow_of(action->kind) == FLOW_COUNT) {
        return run_step_end(simulation, rank, is_done_out);
    }
    TRY(take_turn(simulation, rank, &turn));
    if (turn.is_blocked) {
        return STATUS_OK;
    }
    if (is_work(action->kind)) {
        return run_work(simulation, rank, &turn, is_done_out);
    }
    finish(&turn, turn.start);
    *is_done_out = true;
    return STATUS_OK;
}

/* How many microbatches must go through a port of a rank. */
static int expected_count(const Simulation *simulation, int rank, int index, int cell, Flow flow)
{
    static const ActionKind inner[FLOW_COUNT] = {
        ACTION_FORWARD,
        ACTION_BACKWARD,
        ACTION_SEND_ACTIVATIONS,
        ACTION_RECV_ACTIVATIONS,
        ACTION_SEND_ACTIVATIONS_GRAD,
        ACTION_RECV_ACTIVATIONS_GRAD,
    };
    const ScheduleGraph *graph = simulation->options->graph;
    const ScheduleModule *module = &graph->modules[index];
    Action action = {.kind = inner[flow]};
    Turn turn = {.simulation = (Simulation *)simulation, .action = &action, .module = module};
    bool is_due_here = false;
    if (cell < module->chunks && grid_contains(&module->grid, rank)) {
        action.kind = flow == FLOW_FORWARD && module->feeds >= 0 ? ACTION_ENCODE : action.kind;
        action.kind =
            flow == FLOW_BACKWARD && module->feeds >= 0 ? ACTION_ENCODE_BACKWARD : action.kind;
        turn.part = cell * stages_of(module) + stage_of(module, rank);
        is_due_here = is_due(&turn);
    } else if (cell == CELL_BOUNDARY && module->feeds >= 0) {
        bool is_encoder = serves_stage(module, stages_of(module) - 1, rank);
        bool is_decoder = serves_stage(&graph->modules[simulation->decoder], 0, rank);
        bool has_grad = gives_gradients(simulation->options, module);
        is_due_here = (flow == FLOW_SEND && is_encoder) || (flow == FLOW_RECV && is_decoder) ||
                      (flow == FLOW_SEND_GRAD && is_decoder && has_grad) ||
                      (flow == FLOW_RECV_GRAD && is_encoder && has_grad);
    }
    return is_due_here ? simulation->options->microbatches : 0;
}

/* At the end of all lists nothing is missing. */
static Status check_rank(const Simulation *simulation, int rank)
{
    const ScheduleGraph *graph = simulation->options->graph;
    const RankProgress *progress = &simulation->ranks[rank];
    for (int i = 0; i < graph->num_modules * CELL_COUNT * FLOW_COUNT; i++) {
        int m = i / (CELL_COUNT * FLOW_COUNT);
        int cell = i / FLOW_COUNT % CELL_COUNT;
        Flow flow = i % FLOW_COUNT;
        int expected = expected_count(simulation, rank, m, cell, flow);
        int count = progress->ports[m][cell][flow].count;
        if (count != expected) {
            return fail(
                STATUS_CONFLICT,
                "schedule: rank %d, module %d, chunk %d: flow %d has %d microbatches, expected %d",
                rank, m, cell, (int)flow, count, expected);
        }
    }
    bool is_training = simulation->options->is_training;
    for (int m = 0; m < graph->num_modules; m++) {
        const ScheduleModule *module = &graph->modules[m];
        bool must_update = is_training && module->is_trained && grid_contains(&module->grid, rank);
        if (progress->has_updated[m] != must_update || progress->has_voted != is_training) {
            return fail(STATUS_CONFLICT,
                        "schedule: rank %d: vote or update of module %d is missing", rank, m);
        }
    }
    return STATUS_OK;
}

static Status run_lists(Simulation *simulation)
{
    bool has_moved = true;
    while (has_moved) {
        has_moved = false;
        for (int r = 0; r < simulation->num_ranks; r++) {
            bool is_done = true;
            while (is_done && next_action(simulation, r)) {
                TRY(run_next(simulation, r, &is_done));
                has_moved |= is_done;
            }
        }
    }
    for (int r = 0; r < simulation->num_ranks; r++) {
        if (next_action(simulation, r)) {
            Turn turn = {.simulation = simulation, .rank = r, .action = next_action(simulation, r)};
            return refuse(&turn, "waits for ever");
        }
    }
    for (int r = 0; r < simulation->num_ranks; r++) {
        TRY(check_rank(simulation, r));
    }
    return STATUS_OK;
}

static Status allocate(Simulation *simulation)
{
    const ScheduleOptions *options = simulation->options;
    TRY(MEMORY_NEW(&simulation->ranks, simulation->num_ranks));
    int64_t cells = options->graph->num_modules; /* boundaries */
    for (int m = 0; m < options->graph->num_modules; m++) {
        cells += options->graph->modules[m].chunks;
    }
    TRY(MEMORY_NEW(&simulation->times,
                   simulation->num_ranks * cells * FLOW_COUNT * options->microbatches));
    double *next = simulation->times;
    for (int r = 0; r < simulation->num_ranks; r++) {
        for (int m = 0; m < options->graph->num_modules; m++) {
            for (int c = 0; c < CELL_COUNT; c++) {
                if (c >= options->graph->modules[m].chunks && c != CELL_BOUNDARY) {
                    continue;
                }
                for (int f = 0; f < FLOW_COUNT; f++) {
                    port_of(simulation, r, m, c, f)->times = next;
                    next += options->microbatches;
                }
            }
        }
    }
    return STATUS_OK;
}

/* When the chunk's slot of a microbatch becomes free; NULL: with the end of its forward. */
static const Port *release_port(Turn *turn, int chunk)
{
    turn->part = chunk * stages_of(turn->module) + stage_of(turn->module, turn->rank);
    if (turn->part >= backward_begin(turn->simulation->options, turn->module)) {
        return chunk_port(turn, chunk, FLOW_BACKWARD);
    }
    bool is_last = turn->part == parts_of(turn->module) - 1;
    return is_last ? NULL : peer_port(turn, turn->part + 1, FLOW_RECV);
}

/* The most microbatches of a chunk between the begin of their forward and the release. */
static int count_in_flight(const Simulation *simulation, int rank, int module, int chunk)
{
    const Action action = {.module = module};
    Turn turn = {.simulation = (Simulation *)simulation,
                 .rank = rank,
                 .action = &action,
                 .module = &simulation->options->graph->modules[module]};
    const Port *forwards = port_of(simulation, rank, module, chunk, FLOW_FORWARD);
    const Port *releases = release_port(&turn, chunk);
    int most = 1;
    int released = 0;
    for (int m = 0; releases && m < forwards->count; m++) {
        double begin = forwards->times[m] - turn.module->forward_cost / 2; /* while it runs */
        while (released < releases->count && releases->times[released] <= begin) {
            released++;
        }
        most = m + 1 - released > most ? m + 1 - released : most;
    }
    return most;
}

static void sum_up(Simulation *simulation)
{
    const ScheduleGraph *graph = simulation->options->graph;
    SimulatorResult *result = &simulation->result;
    double busy = 0;
    for (int m = 0; m < graph->num_modules; m++) {
        const ScheduleModule *module = &graph->modules[m];
        int begin = module->grid.first_rank;
        busy += result->modules[m].busy;
        for (int i = 0; i < grid_size(&module->grid) * module->chunks; i++) {
            int held =
                count_in_flight(simulation, begin + i / module->chunks, m, i % module->chunks);
            int most = result->modules[m].in_flight;
            result->modules[m].in_flight = held > most ? held : most;
        }
    }
    for (int r = 0; r < simulation->num_ranks; r++) {
        double clock = simulation->ranks[r].clock;
        result->makespan = clock > result->makespan ? clock : result->makespan;
    }
    result->bubble = 1 - busy / (simulation->num_ranks * result->makespan);
}

Status simulator_run_lists(const ScheduleOptions *options, const Schedule *schedules, int num_ranks,
                           SimulatorResult *result_out)
{
    Simulation simulation = {.options = options, .schedules = schedules, .num_ranks = num_ranks};
    for (int m = 0; m < options->graph->num_modules; m++) {
        const ScheduleModule *module = &options->graph->modules[m];
        CHECK(module->grid.first_rank + grid_size(&module->grid) <= num_ranks);
        simulation.decoder = module->feeds < 0 ? m : simulation.decoder;
    }
    Status status = allocate(&simulation);
    if (status == STATUS_OK) {
        status = run_lists(&simulation);
    }
    if (status == STATUS_OK) {
        sum_up(&simulation);
        *result_out = simulation.result;
    }
    memory_free(simulation.ranks);
    memory_free(simulation.times);
    return status;
}

Status simulator_run(const ScheduleOptions *options, int num_ranks, SimulatorResult *result_out)
{
    Schedule *schedules = NULL;
    TRY(MEMORY_NEW(&schedules, num_ranks));
    Status status = schedule_make_all(options, num_ranks, schedules);
    if (status == STATUS_OK) {
        status = simulator_run_lists(options, schedules, num_ranks, result_out);
        for (int r = 0; r < num_ranks; r++) {
            schedule_done(&schedules[r]);
        }
    }
    memory_free(schedules);
    return status;
}
