/* Testing: what tests of layers and modules share: ranks as threads, whole arrays cut as a rank's
 * parameter is, and a record of differences that threads can fill (a test framework's assertions
 * may not be used outside the main thread).
 *
 * Threading: run_ranks blocks until all its threads ended; a TestingReport belongs to one thread.
 */
#ifndef NN_TESTING_H
#define NN_TESTING_H

#include "comm/comm_local.h"
#include "nn/layer.h"

#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>

enum {
    TESTING_RANKS_MAX = 12,
    TESTING_TIMEOUT_MS = 60 * 1000
};

/* Values of -1 .. 1, a function of seed and index only. */
static inline float testing_value(uint64_t seed, int64_t index)
{
    uint64_t x = seed * 0x9E3779B97F4A7C15u + (uint64_t)index * 0xD1B54A32D192ED03u + 1;
    x = (x ^ (x >> 31)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 29)) * 0x94D049BB133111EBu;
    x ^= x >> 32;
    return (float)(x >> 40) * 0x1p-23f - 1.0f;
}

/* ---- differences ---- */

typedef struct TestingReport {
    int failures;
    char first[256]; /* the first failure in words */
} TestingReport;

__attribute__((format(printf, 2, 3))) static inline void testing_failed(TestingReport *report,
                                                                        const char *format, ...)
{
    if (report->failures++ == 0) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(report->first, sizeof report->first, format, arguments);
        va_end(arguments);
    }
}

static inline void testing_near(TestingReport *report, const char *what, int64_t index,
                                double found, double expected, double relative, double absolute)
{
    double allowed = relative * fabs(expected) + absolute;
    if (!(fabs(found - expected) <= allowed)) {
        testing_failed(report, "%s [%lld]: %.9g, expected %.9g", what, (long long)index, found,
                       expected);
    }
}

static inline void testing_ok(TestingReport *report, Status status)
{
    if (status != STATUS_OK) {
        testing_failed(report, "%s: %s (%s)", status_name(status), status_message(),
                       status_trail());
    }
}

/* ---- parameters ---- */

/* The index in the global array of element `local` of a rank's part: counted up dim by dim. */
static inline int64_t testing_global_index(const Param *param, int64_t local)
{
    int64_t global = 0;
    int64_t stride = 1;
    for (int i = param->spec.num_dims - 1; i >= 0; i--) {
        int64_t at = local % param->value.dims[i];
        local /= param->value.dims[i];
        at += i == param->spec.shard_dim ? param->spec.shard.begin : 0;
        global += at * stride;
        stride *= param->spec.dims[i];
    }
    return global;
}

/* What the trainer does once a step: gradients that every tp rank has a part of are summed, and all
 * of them over cp. */
static inline Status testing_sum_partial_grads(const LayerContext *context)
{
    ParamSet *set = context->params;
    for (int i = 0; i < set->num_params; i++) {
        const Param *param = &set->params[i];
        if (param->is_trained && param->spec.grad_is_partial) {
            TRY(layer_sum(context, tensor_f32(&param->grad), tensor_count(&param->grad)));
        }
    }
    if (layer_cp_size(context) == 1) {
        return STATUS_OK;
    }
    return comm_all_reduce(context->cp, set->grads, set->trained_count, DTYPE_F32, COMM_REDUCE_SUM,
                           context->stream);
}

/* ---- ranks ---- */

/* One rank's work on its own device and stream; context->params is not set. */
typedef Status (*TestingWork)(LayerContext *context, Device *device, void *argument,
                              TestingReport *report);

typedef struct TestingRank {
    Comm *comm; /* of all ranks: tp varies fastest */
    int rank, tp, cp;
    bool is_sequence_parallel;
    TestingWork work;
    void *argument;
    TestingReport report;
    pthread_t thread;
} TestingRank;

static inline Status testing_split(TestingRank *rank, LayerContext *context)
{
    int tp_ranks[TESTING_RANKS_MAX];
    int cp_ranks[TESTING_RANKS_MAX];
    int tp_rank = rank->rank % rank->tp;
    for (int i = 0; i < rank->tp; i++) {
        tp_ranks[i] = rank->rank - tp_rank + i;
    }
    for (int i = 0; i < rank->cp; i++) {
        cp_ranks[i] = tp_rank + i * rank->tp;
    }
    TRY(comm_split(rank->comm, tp_ranks, rank->tp, "tp", &context->tp));
    return comm_split(rank->comm, cp_ranks, rank->cp, "cp", &context->cp);
}

static inline Status testing_work(TestingRank *rank)
{
    Device *device = NULL;
    TRY(device_open("cpu", 0, &device));
    Stream *stream = NULL;
    TRY(stream_create(device, &stream));
    LayerContext context = {.kernels = kernels_for(device),
                            .stream = stream,
                            .is_sequence_parallel = rank->is_sequence_parallel};
    Status status = testing_split(rank, &context);
    if (status == STATUS_OK) {
        status = rank->work(&context, device, rank->argument, &rank->report);
    }
    comm_destroy(context.cp);
    comm_destroy(context.tp);
    stream_destroy(stream);
    device_close(device);
    return status;
}

static inline void *testing_thread(void *argument)
{
    TestingRank *rank = argument;
    Status status = testing_work(rank);
    testing_ok(&rank->report, status);
    if (status != STATUS_OK && rank->comm) {
        comm_abort(rank->comm, rank->report.first);
    }
    comm_destroy(rank->comm);
    return NULL;
}

/* Runs `work` on the tp * cp ranks of a replica. Returns the failures; prints the first of each
 * rank. */
static inline int testing_run_grid(int tp, int cp, bool is_sequence_parallel, TestingWork work,
                                   void *argument)
{
    int size = tp * cp;
    CHECK(size <= TESTING_RANKS_MAX);
    TestingRank ranks[TESTING_RANKS_MAX] = {0};
    Comm *comms[TESTING_RANKS_MAX] = {NULL};
    CHECK(comm_local_create(size, TESTING_TIMEOUT_MS, comms) == STATUS_OK);
    for (int i = 0; i < size; i++) {
        ranks[i] = (TestingRank){.comm = comms[i],
                                 .rank = i,
                                 .tp = tp,
                                 .cp = cp,
                                 .is_sequence_parallel = is_sequence_parallel,
                                 .work = work,
                                 .argument = argument};
        CHECK(pthread_create(&ranks[i].thread, NULL, testing_thread, &ranks[i]) == 0);
    }
    int failures = 0;
    for (int i = 0; i < size; i++) {
        CHECK(pthread_join(ranks[i].thread, NULL) == 0);
        failures += ranks[i].report.failures;
        if (ranks[i].report.failures > 0) {
            fprintf(stderr, "tp %d, cp %d, rank %d: %d failures, the first: %s\n", tp, cp, i,
                    ranks[i].report.failures, ranks[i].report.first);
        }
    }
    return failures;
}

/* The same on `size` ranks of one tensor-parallel group. */
static inline int testing_run_ranks(int size, TestingWork work, void *argument)
{
    return testing_run_grid(size, 1, false, work, argument);
}

#endif
