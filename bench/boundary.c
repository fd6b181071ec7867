/* Rows of one microbatch from an encoder pool to a decoder replica with tensor parallelism, between
 * processes: through the boundary's mechanism, as a plain copy of the bytes that must cross, and in
 * the pattern "one leader sends, receivers broadcast".
 *
 * Usage: bench_boundary [rounds]   prints a line for each case: senders, receivers, bytes, then the
 * median seconds of one microbatch: ours, plain copy, leader; bytes across over the minimum; and
 * the medians of the ratios of neighbouring measurements: copy / ours and leader / ours
 */
#include "base/clock.h"
#include "base/memory.h"
#include "comm/comm_host.h"
#include "reshard/reshard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define MUST(call) CHECK((call) == STATUS_OK)

enum {
    SENDERS = 2,
    RANKS_MAX = 6,
    WIDTH = 1024, /* elements of a row: 4 KiB */
    ROUNDS_MAX = 400,
    TIMEOUT_MS = 60 * 1000,
    TARGET_BYTES = 16 << 20 /* a measurement repeats small microbatches up to about so many */
};

typedef enum Method {
    METHOD_OURS,
    METHOD_COPY,
    METHOD_LEADER,
    METHOD_COUNT,
} Method;

/* Between the processes. */
typedef struct Shared {
    char addresses[RANKS_MAX][80];
    double seconds[METHOD_COUNT][ROUNDS_MAX]; /* of one microbatch, written by the first receiver */
    int64_t crossed;                          /* bytes, as planned */
    int64_t minimum;
} Shared;

typedef struct Rank {
    Shared *shared;
    int rank;
    int receivers;
    int64_t rows;
    int rounds;
    Comm *world;
    Comm *sides; /* this rank's pool */
    Device *device;
    Stream *stream;
    Reshard *reshard;
    Layout source;
    Layout destination;
    Plan plan;
    float *here;  /* a sender's rows */
    float *whole; /* [rows, WIDTH] of a receiver */
    uint64_t tag;
} Rank;

static bool is_sender(const Rank *rank)
{
    return rank->rank < SENDERS;
}

static Range sent_rows(const Rank *rank, int sender)
{
    return range_part(rank->rows, SENDERS, sender);
}

static void open_layouts(Rank *rank)
{
    const int64_t dims[2] = {rank->rows, WIDTH};
    layout_init(&rank->source, 2, dims, LAYOUT_COPIES_REPLICATE);
    layout_init(&rank->destination, 2, dims, LAYOUT_COPIES_REPLICATE);
    for (int s = 0; s < SENDERS; s++) {
        MUST(layout_add_rows(&rank->source, s, sent_rows(rank, s)));
    }
    for (int r = 0; r < rank->receivers; r++) {
        MUST(layout_add_rows(&rank->destination, SENDERS + r, (Range){0, rank->rows}));
    }
    MUST(plan_make(&rank->source, &rank->destination, &rank->plan));
}

static void run_ours(Rank *rank)
{
    const ReshardJob job = {.source = &rank->source,
                            .destination = &rank->destination,
                            .plan = &rank->plan,
                            .source_data = rank->here,
                            .destination_data = rank->whole,
                            .tag = rank->tag++};
    MUST(reshard_start(rank->reshard, &job, rank->stream));
    MUST(reshard_finish(rank->reshard, rank->stream));
}

/* The bytes that must cross, and nothing else: of each sender's rows each receiver takes its share.
 */
static void run_copy(Rank *rank)
{
    CommTransfer transfers[RANKS_MAX];
    int num = 0;
    for (int s = 0; s < SENDERS; s++) {
        Range rows = sent_rows(rank, s);
        for (int r = 0; r < rank->receivers; r++) {
            Range share = range_part(range_count(rows), rank->receivers, r);
            bool is_mine = is_sender(rank) ? rank->rank == s : rank->rank == SENDERS + r;
            if (!is_mine) {
                continue;
            }
            float *data = is_sender(rank) ? rank->here + share.begin * WIDTH
                                          : rank->whole + (rows.begin + share.begin) * WIDTH;
            transfers[num++] =
                (CommTransfer){.peer = is_sender(rank) ? SENDERS + r : s,
                               .is_send = is_sender(rank),
                               .data = data,
                               .size_bytes = range_count(share) * WIDTH * (int64_t)sizeof(float),
                               .tag = rank->tag};
        }
    }
    rank->tag++;
    MUST(comm_exchange(rank->world, transfers, num, rank->stream));
}

static void run_leader(Rank *rank)
{
    CommTransfer transfers[SENDERS];
    int num = 0;
    int leader = SENDERS;
    for (int s = 0; s < SENDERS; s++) {
        Range rows = sent_rows(rank, s);
        bool is_mine = is_sender(rank) ? rank->rank == s : rank->rank == leader;
        if (is_mine) {
            transfers[num++] = (CommTransfer){
                .peer = is_sender(rank) ? leader : s,
                .is_send = is_sender(rank),
                .data = is_sender(rank) ? rank->here : rank->whole + rows.begin * WIDTH,
                .size_bytes = range_count(rows) * WIDTH * (int64_t)sizeof(float),
                .tag = rank->tag};
        }
    }
    rank->tag++;
    if (num > 0) {
        MUST(comm_exchange(rank->world, transfers, num, rank->stream));
    }
    if (!is_sender(rank)) {
        MUST(comm_broadcast(rank->sides, rank->whole, rank->rows * WIDTH * (int64_t)sizeof(float),
                            0, rank->stream));
    }
}

/* Seconds of one microbatch, from when all have begun to when all have all. */
static double measure(Rank *rank, Method method)
{
    void (*const runs[METHOD_COUNT])(Rank *) = {run_ours, run_copy, run_leader};
    int64_t bytes = rank->rows * WIDTH * (int64_t)sizeof(float);
    int repeats = bytes < TARGET_BYTES ? (int)(TARGET_BYTES / bytes) : 1;
    repeats = repeats > 64 ? 64 : repeats;
    MUST(comm_barrier(rank->world, rank->stream));
    int64_t begin_ns = clock_now_ns();
    for (int i = 0; i < repeats; i++) {
        runs[method](rank);
    }
    MUST(comm_barrier(rank->world, rank->stream));
    return (double)(clock_now_ns() - begin_ns) / (double)CLOCK_NS_PER_S / repeats;
}

/* What was sent is what has come. */
static void check(Rank *rank)
{
    for (int64_t i = 0; !is_sender(rank) && i < rank->rows; i++) {
        CHECK(rank->whole[i * WIDTH] == (float)i && rank->whole[i * WIDTH + WIDTH - 1] == (float)i);
    }
}

static void split_sides(Rank *rank)
{
    int ranks[RANKS_MAX];
    int first = is_sender(rank) ? 0 : SENDERS;
    int num = is_sender(rank) ? SENDERS : rank->receivers;
    for (int i = 0; i < num; i++) {
        ranks[i] = first + i;
    }
    MUST(comm_split(rank->world, ranks, num, is_sender(rank) ? "senders" : "receivers",
                    &rank->sides));
}

static void allocate(Rank *rank)
{
    Range own = is_sender(rank) ? sent_rows(rank, rank->rank) : (Range){0, 0};
    MUST(MEMORY_NEW(&rank->here, range_count(own) * WIDTH + 1));
    MUST(MEMORY_NEW(&rank->whole, is_sender(rank) ? 1 : rank->rows * WIDTH));
    for (int64_t i = own.begin; i < own.end; i++) {
        for (int64_t c = 0; c < WIDTH; c++) {
            rank->here[(i - own.begin) * WIDTH + c] = (float)i;
        }
    }
}

static int64_t crossed_bytes(const Rank *rank)
{
    int64_t count = 0;
    for (int phase = 0; phase < PLAN_PHASE_COUNT; phase++) {
        for (int i = 0; i < rank->plan.num_transfers[phase]; i++) {
            const PlanTransfer *transfer = &rank->plan.transfers[phase][i];
            bool crosses = (transfer->source < SENDERS) != (transfer->destination < SENDERS);
            count += crosses ? transfer->count : 0;
        }
    }
    return count * (int64_t)sizeof(float);
}

static void run_rank(Rank *rank)
{
    MUST(device_open("cpu", 0, &rank->device));
    MUST(stream_create(rank->device, &rank->stream));
    split_sides(rank);
    allocate(rank);
    open_layouts(rank);
    MUST(reshard_create(rank->world, rank->device, kernels_for(rank->device), "rows", 1,
                        &rank->reshard));
    for (int round = -1; round < rank->rounds; round++) { /* one to warm up */
        for (int method = 0; method < METHOD_COUNT; method++) {
            double seconds = measure(rank, method);
            if (round < 0 && method != METHOD_COPY) {
                check(rank);
            }
            if (round >= 0 && rank->rank == SENDERS) {
                rank->shared->seconds[method][round] = seconds;
            }
        }
    }
    rank->shared->crossed = crossed_bytes(rank);
    rank->shared->minimum =
        plan_minimum_count(&rank->source, &rank->destination) * (int64_t)sizeof(float);
    reshard_destroy(rank->reshard);
    plan_done(&rank->plan);
    layout_done(&rank->source);
    layout_done(&rank->destination);
    memory_free(rank->here);
    memory_free(rank->whole);
    comm_destroy(rank->sides);
    stream_destroy(rank->stream);
    device_close(rank->device);
}

/* ---- processes ---- */

static void child_main(Rank *rank, int num_ranks, int to_parent, int from_parent)
{
    CommEndpoint *endpoint = NULL;
    const char *addresses[RANKS_MAX];
    char go = 0;
    MUST(comm_endpoint_open("127.0.0.1:0", &endpoint));
    snprintf(rank->shared->addresses[rank->rank], sizeof rank->shared->addresses[0], "%s",
             comm_endpoint_address(endpoint));
    CHECK(write(to_parent, &go, 1) == 1);
    CHECK(read(from_parent, &go, 1) == 1);
    for (int i = 0; i < num_ranks; i++) {
        addresses[i] = rank->shared->addresses[i];
    }
    const CommHostWorld world = {.addresses = addresses,
                                 .size = num_ranks,
                                 .rank = rank->rank,
                                 .key = 1,
                                 .timeout_ms = TIMEOUT_MS,
                                 .connect_timeout_ms = TIMEOUT_MS};
    MUST(comm_host_create(endpoint, &world, &rank->world));
    run_rank(rank);
    comm_destroy(rank->world);
    comm_endpoint_close(endpoint);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const double *values, int num)
{
    double sorted[ROUNDS_MAX];
    memcpy(sorted, values, (size_t)num * sizeof *sorted);
    qsort(sorted, (size_t)num, sizeof *sorted, ascending);
    return sorted[num / 2];
}

static double median_ratio(const double *above, const double *below, int num)
{
    double ratios[ROUNDS_MAX];
    for (int i = 0; i < num; i++) {
        ratios[i] = above[i] / below[i];
    }
    return median(ratios, num);
}

static void run_case(Shared *shared, int receivers, int64_t rows, int rounds)
{
    int to_parent[2];
    int to_children[2];
    int num_ranks = SENDERS + receivers;
    char bytes[RANKS_MAX] = {0};
    CHECK(num_ranks > 0 && num_ranks <= RANKS_MAX);
    CHECK(pipe(to_parent) == 0 && pipe(to_children) == 0);
    for (int i = 0; i < num_ranks; i++) {
        if (fork() == 0) {
            Rank rank = {.shared = shared,
                         .rank = i,
                         .receivers = receivers,
                         .rows = rows,
                         .rounds = rounds};
            child_main(&rank, num_ranks, to_parent[1], to_children[0]);
            _exit(0);
        }
    }
    for (int i = 0; i < num_ranks; i++) {
        CHECK(read(to_parent[0], bytes, 1) == 1);
    }
    CHECK(write(to_children[1], bytes, (size_t)num_ranks) == num_ranks);
    for (int i = 0; i < num_ranks; i++) {
        int status = 0;
        CHECK(wait(&status) > 0 && status == 0);
    }
    for (int i = 0; i < 2; i++) {
        close(to_parent[i]);
        close(to_children[i]);
    }
    double(*seconds)[ROUNDS_MAX] = shared->seconds;
    int64_t bytes_all = rows * WIDTH * (int64_t)sizeof(float);
    printf("%d %d %lld %.6g %.6g %.6g %.4f %.4f %.4f\n", SENDERS, receivers, (long long)bytes_all,
           median(seconds[METHOD_OURS], rounds), median(seconds[METHOD_COPY], rounds),
           median(seconds[METHOD_LEADER], rounds),
           (double)shared->crossed / (double)shared->minimum,
           median_ratio(seconds[METHOD_COPY], seconds[METHOD_OURS], rounds),
           median_ratio(seconds[METHOD_LEADER], seconds[METHOD_OURS], rounds));
    fflush(stdout);
}

int main(int argc, char **argv)
{
    static const int receivers[] = {1, 2, 4};
    static const int64_t rows[] = {16, 256, 1024, 4096};
    int rounds = argc > 1 ? (int)strtol(argv[1], NULL, 10) : 60;
    rounds = rounds < 3 ? 3 : rounds > ROUNDS_MAX ? ROUNDS_MAX : rounds;
    Shared *shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    for (size_t t = 0; t < sizeof receivers / sizeof *receivers; t++) {
        for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
            run_case(shared, receivers[t], rows[r], rounds);
        }
    }
    return 0;
}
