/* The conformance suite of comm: every test runs over every backend and several world sizes, ranks
 * as threads. */
#include "base/clock.h"
#include "base/memory.h"
#include "base/range.h"
#include "base/rng.h"
#include "comm/comm.h"
#include "comm/comm_host.h"
#include "comm/comm_local.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    SIZE_MAX_TESTED = 5,
    SEED = 20240611,
};

typedef enum Backend {
    BACKEND_LOCAL,
    BACKEND_SHARED, /* host, one shared memory */
    BACKEND_TCP,    /* host, TCP only */
    BACKEND_MIXED,  /* host, even ranks share memory, odd ranks are reached over TCP */
    BACKEND_COUNT,
} Backend;

static const char *const backend_names[BACKEND_COUNT] = {"local", "shared memory", "tcp", "mixed"};

typedef struct Rank Rank;
typedef bool Body(Rank *rank);

/* What the ranks of one test run share. */
typedef struct World {
    Backend backend;
    int size;
    int64_t timeout_ms;
    Body *body;
    Comm *local_comms[SIZE_MAX_TESTED];
    char addresses[SIZE_MAX_TESTED][80];
    pthread_barrier_t barrier;
} World;

struct Rank {
    World *world;
    int rank;
    int size;
    Comm *comm; /* the body may destroy it and set it to NULL */
    bool is_good;
};

/* cmocka's assertions belong to the main thread; ranks report and return. */
#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: rank %d of %d, %s: %s (%s)\n", __FILE__, __LINE__, rank->rank, \
                    rank->size, backend_names[rank->world->backend], #condition,                   \
                    status_message());                                                             \
            return false;                                                                          \
        }                                                                                          \
    } while (0)
#define REQUIRE_OK(call) REQUIRE((call) == STATUS_OK)

static bool open_host(Rank *rank, CommEndpoint **endpoint_out)
{
    World *world = rank->world;
    CommEndpoint *endpoint = NULL;
    REQUIRE_OK(comm_endpoint_open("127.0.0.1:0", &endpoint));
    *endpoint_out = endpoint;
    snprintf(world->addresses[rank->rank], sizeof world->addresses[0], "%s",
             comm_endpoint_address(endpoint));
    pthread_barrier_wait(&world->barrier);
    const char *addresses[SIZE_MAX_TESTED];
    for (int i = 0; i < world->size; i++) {
        addresses[i] = world->addresses[i];
    }
    CommHostWorld options = {
        .addresses = addresses,
        .size = world->size,
        .rank = rank->rank,
        .key = SEED,
        .timeout_ms = world->timeout_ms,
        .connect_timeout_ms = 20000,
        .tcp_only = world->backend == BACKEND_TCP ||
                    (world->backend == BACKEND_MIXED && rank->rank % 2 == 1),
    };
    REQUIRE_OK(comm_host_create(endpoint, &options, &rank->comm));
    return true;
}

static void *rank_run(void *argument)
{
    Rank *rank = argument;
    CommEndpoint *endpoint = NULL;
    bool is_open = true;
    if (rank->world->backend == BACKEND_LOCAL) {
        rank->comm = rank->world->local_comms[rank->rank];
    } else {
        is_open = open_host(rank, &endpoint);
    }
    pthread_barrier_wait(
        &rank->world->barrier); /* no test breaks a world while others still connect */
    rank->is_good = is_open && rank->world->body(rank);
    comm_destroy(rank->comm);
    comm_endpoint_close(endpoint);
    return NULL;
}

static void run_world(Backend backend, int size, int64_t timeout_ms, Body *body)
{
    World world = {.backend = backend, .size = size, .timeout_ms = timeout_ms, .body = body};
    Rank ranks[SIZE_MAX_TESTED];
    pthread_t threads[SIZE_MAX_TESTED];
    assert_int_equal(pthread_barrier_init(&world.barrier, NULL, (unsigned)size), 0);
    if (backend == BACKEND_LOCAL) {
        assert_int_equal(comm_local_create(size, timeout_ms, world.local_comms), STATUS_OK);
    }
    for (int i = 0; i < size; i++) {
        ranks[i] = (Rank){.world = &world, .rank = i, .size = size};
        assert_int_equal(pthread_create(&threads[i], NULL, rank_run, &ranks[i]), 0);
    }
    bool is_good = true;
    for (int i = 0; i < size; i++) {
        pthread_join(threads[i], NULL);
        is_good &= ranks[i].is_good;
    }
    pthread_barrier_destroy(&world.barrier);
    if (!is_good) {
        fail_msg("failed on %s with %d ranks, seed %d", backend_names[backend], size, SEED);
    }
}

static void run_everywhere(int size_min, int64_t timeout_ms, Body *body)
{
    for (int backend = 0; backend < BACKEND_COUNT; backend++) {
        for (int size = size_min; size <= SIZE_MAX_TESTED; size++) {
            run_world((Backend)backend, size, timeout_ms, body);
        }
    }
}

/* Element `i` of rank `r`'s array `array`: magnitudes over six decades, so that another order of
 * adding gives another sum. */
static double element(uint64_t array, int r, int64_t i)
{
    Rng rng = {.seed = SEED, .stream = array * 64 + (uint64_t)r};
    double scale[] = {1e-3, 1e-2, 1e-1, 1, 10, 100, 1000};
    uint64_t bits = rng_bits64(rng, (uint64_t)i);
    return ((double)(bits >> 12) / (double)(1ULL << 51) - 1) * scale[bits % 7];
}

/* The definition: contributions in rank order, in the array's own type. */
static double expected_f64(uint64_t array, int size, int64_t i, CommReduce reduce)
{
    double sum = element(array, 0, i);
    for (int r = 1; r < size; r++) {
        double x = element(array, r, i);
        sum = reduce == COMM_REDUCE_SUM ? sum + x : x > sum ? x : sum;
    }
    return sum;
}

static float expected_f32(uint64_t array, int size, int64_t i, CommReduce reduce)
{
    volatile float sum = (float)element(array, 0, i);
    for (int r = 1; r < size; r++) {
        float x = (float)element(array, r, i);
        sum = reduce == COMM_REDUCE_SUM ? sum + x : x > sum ? x : sum;
    }
    return sum;
}

static bool same_f32(float a, float b)
{
    uint32_t bits[2];
    memcpy(&bits[0], &a, sizeof a);
    memcpy(&bits[1], &b, sizeof b);
    return bits[0] == bits[1];
}

static bool same_f64(double a, double b)
{
    uint64_t bits[2];
    memcpy(&bits[0], &a, sizeof a);
    memcpy(&bits[1], &b, sizeof b);
    return bits[0] == bits[1];
}

static bool reduce_once(Rank *rank, int64_t count, DType dtype, CommReduce reduce, uint64_t array)
{
    void *data = NULL;
    REQUIRE_OK(memory_alloc((size_t)count + 1, 8, &data));
    float *f32 = data;
    double *f64 = data;
    for (int64_t i = 0; i < count; i++) {
        double x = element(array, rank->rank, i);
        if (dtype == DTYPE_F32) {
            f32[i] = (float)x;
        } else {
            f64[i] = x;
        }
    }
    REQUIRE_OK(comm_all_reduce(rank->comm, data, count, dtype, reduce, NULL));
    for (int64_t i = 0; i < count; i++) {
        if (dtype == DTYPE_F32) {
            REQUIRE(same_f32(f32[i], expected_f32(array, rank->size, i, reduce)));
        } else {
            REQUIRE(same_f64(f64[i], expected_f64(array, rank->size, i, reduce)));
        }
    }
    memory_free(data);
    return true;
}

/* Counts below the number of ranks, odd, around the limit of the one-exchange path, and larger than
 * all rings together. */
static bool all_reduce_body(Rank *rank)
{
    const int64_t counts[] = {0, 1, 2, 3, 7, 63, 1000, 1024, 1025, 4096, 4097, 30011, 400003};
    uint64_t array = 0;
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        REQUIRE(reduce_once(rank, counts[i], DTYPE_F32, COMM_REDUCE_SUM, array++));
        if (counts[i] < 100000) {
            REQUIRE(reduce_once(rank, counts[i], DTYPE_F64, COMM_REDUCE_SUM, array++));
            REQUIRE(reduce_once(rank, counts[i], DTYPE_F32, COMM_REDUCE_MAX, array++));
            REQUIRE(reduce_once(rank, counts[i], DTYPE_F64, COMM_REDUCE_MAX, array++));
        }
    }
    for (int i = 0; i < 200; i++) {
        REQUIRE(reduce_once(rank, 3, DTYPE_F64, COMM_REDUCE_SUM, array++));
        REQUIRE_OK(comm_barrier(rank->comm, NULL));
    }
    return true;
}

static void test_all_reduce(void **state)
{
    (void)state;
    run_everywhere(1, 60000, all_reduce_body);
}

/* Parts in units of 4 bytes, some empty, behind an offset. */
static void make_begins(int size, int64_t scale, uint64_t salt, int64_t *begins)
{
    Rng rng = {.seed = SEED, .stream = 1000 + salt};
    begins[0] = (int64_t)rng_below(rng, 100, 3) * 4;
    for (int r = 0; r < size; r++) {
        bool is_empty = rng_below(rng, (uint64_t)r, 4) == 0;
        int64_t count = is_empty ? 0 : (int64_t)rng_below(rng, 10 + (uint64_t)r, (uint64_t)scale);
        begins[r + 1] = begins[r] + 4 * count;
    }
}

static bool parts_once(Rank *rank, int64_t scale, uint64_t salt)
{
    int64_t begins[SIZE_MAX_TESTED + 1];
    make_begins(rank->size, scale, salt, begins);
    int64_t count = begins[rank->size] / 4;
    float *data = NULL;
    REQUIRE_OK(MEMORY_NEW(&data, count + 1));
    int64_t first = begins[rank->rank] / 4;
    int64_t last = begins[rank->rank + 1] / 4;
    for (int64_t i = first; i < last; i++) {
        data[i] = (float)element(salt, 0, i);
    }
    REQUIRE_OK(comm_all_gather(rank->comm, data, begins, NULL));
    for (int64_t i = 0; i < count; i++) {
        REQUIRE(data[i] == (i < begins[0] / 4 ? 0 : (float)element(salt, 0, i)));
    }
    for (int64_t i = 0; i < count; i++) {
        data[i] = (float)element(salt, rank->rank, i);
    }
    REQUIRE_OK(comm_reduce_scatter(rank->comm, data, begins, NULL));
    for (int64_t i = first; i < last; i++) {
        REQUIRE(data[i] == expected_f32(salt, rank->size, i, COMM_REDUCE_SUM));
    }
    memory_free(data);
    return true;
}

static bool parts_body(Rank *rank)
{
    const int64_t scales[] = {2, 5, 40, 1000, 20000, 20000};
    for (uint64_t i = 0; i < sizeof scales / sizeof scales[0]; i++) {
        REQUIRE(parts_once(rank, scales[i], i));
    }
    return true;
}

static void test_gather_and_scatter(void **state)
{
    (void)state;
    run_everywhere(1, 60000, parts_body);
}

static bool broadcast_body(Rank *rank)
{
    const int64_t sizes[] = {0, 1, 63, 64, 65, 4097, 700001};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int root = 0; root < rank->size; root++) {
            unsigned char *data = NULL;
            REQUIRE_OK(MEMORY_NEW(&data, sizes[i] + 1));
            for (int64_t k = 0; rank->rank == root && k < sizes[i]; k++) {
                data[k] = (unsigned char)(k * 7 + root + 1);
            }
            REQUIRE_OK(comm_broadcast(rank->comm, data, sizes[i], root, NULL));
            for (int64_t k = 0; k < sizes[i]; k++) {
                REQUIRE(data[k] == (unsigned char)(k * 7 + root + 1));
            }
            REQUIRE(data[sizes[i]] == 0);
            memory_free(data);
        }
    }
    return true;
}

static void test_broadcast(void **state)
{
    (void)state;
    run_everywhere(1, 60000, broadcast_body);
}

/* The sum of world ranks over a comm tells who its members are. */
static bool check_members(Rank *rank, Comm *comm, double expected_sum)
{
    double sum = rank->rank;
    REQUIRE_OK(comm_all_reduce(comm, &sum, 1, DTYPE_F64, COMM_REDUCE_SUM, NULL));
    REQUIRE(sum == expected_sum);
    return true;
}

/* Even and odd ranks part, listed backwards; then each group parts again into its first rank and
 * the rest. */
static bool split_body(Rank *rank)
{
    int mine[SIZE_MAX_TESTED] = {0};
    int num_mine = 0;
    double sum = 0;
    for (int r = rank->size - 1; r >= 0; r--) {
        if (r % 2 == rank->rank % 2) {
            mine[num_mine++] = r;
            sum += r;
        }
    }
    Comm *half = NULL;
    REQUIRE_OK(comm_split(rank->comm, mine, num_mine, "half", &half));
    REQUIRE(half->size == num_mine && mine[half->rank] == rank->rank);
    REQUIRE(strcmp(half->label, "half") == 0 && half->timeout_ms == rank->comm->timeout_ms);
    REQUIRE(check_members(rank, half, sum));
    int rest[SIZE_MAX_TESTED] = {0};
    int num_rest = 0;
    for (int r = half->rank == 0 ? 0 : 1; r < (half->rank == 0 ? 1 : half->size); r++) {
        rest[num_rest++] = r;
    }
    Comm *quarter = NULL;
    REQUIRE_OK(comm_split(half, rest, num_rest, "quarter", &quarter));
    double quarter_sum = 0;
    for (int i = 0; i < num_rest; i++) {
        quarter_sum += mine[rest[i]];
    }
    REQUIRE(check_members(rank, quarter, quarter_sum));
    REQUIRE(check_members(rank, half, sum));
    REQUIRE(check_members(rank, rank->comm, rank->size * (rank->size - 1) / 2.0));
    /* One of two overlapping groups: ranks {0, 1}, then {1, 2}, ...; sequence numbers of the world
     * must stay in step. */
    for (int r = 0; r + 1 < rank->size; r++) {
        Comm *pair = NULL;
        int ranks[] = {r, r + 1};
        if (rank->rank == r || rank->rank == r + 1) {
            REQUIRE_OK(comm_split(rank->comm, ranks, 2, "pair", &pair));
            REQUIRE(check_members(rank, pair, 2 * r + 1));
            comm_destroy(pair);
        }
    }
    REQUIRE(check_members(rank, rank->comm, rank->size * (rank->size - 1) / 2.0));
    comm_destroy(quarter);
    comm_destroy(half);
    return true;
}

static void test_split(void **state)
{
    (void)state;
    run_everywhere(1, 60000, split_body);
}

/* Every rank starts many requests with every other, far more bytes than the rings hold, before
 * anybody waits; waits go backwards. */
static bool many_requests_body(Rank *rank)
{
    enum {
        NUM_REQUESTS = COMM_REQUESTS_MAX,
        BYTES = 90001,
    };
    CommTransfer transfers[NUM_REQUESTS][2 * SIZE_MAX_TESTED];
    CommRequest requests[NUM_REQUESTS];
    unsigned char *data = NULL;
    size_t block = (size_t)BYTES * SIZE_MAX_TESTED * 2;
    REQUIRE_OK(MEMORY_NEW(&data, NUM_REQUESTS * block));
    for (int q = 0; q < NUM_REQUESTS; q++) {
        for (int peer = 0; peer < rank->size; peer++) {
            unsigned char *out = data + (size_t)q * block + (size_t)2 * peer * BYTES;
            memset(out, q * 5 + rank->rank * 31 + peer, BYTES);
            uint64_t tag = (uint64_t)q;
            transfers[q][(size_t)2 * peer] = (CommTransfer){peer, true, out, BYTES, tag};
            transfers[q][(size_t)2 * peer + 1] =
                (CommTransfer){peer, false, &out[BYTES], BYTES, tag};
        }
        REQUIRE_OK(comm_start(rank->comm, transfers[q], 2 * rank->size, NULL, &requests[q]));
    }
    CommRequest extra;
    REQUIRE(comm_start(rank->comm, transfers[0], 0, NULL, &extra) == STATUS_EXHAUSTED);
    for (int q = NUM_REQUESTS - 1; q >= 0; q--) {
        REQUIRE_OK(comm_wait(rank->comm, &requests[q], NULL));
        for (int peer = 0; peer < rank->size; peer++) {
            const unsigned char *in = data + (size_t)q * block + ((size_t)2 * peer + 1) * BYTES;
            unsigned char expected = (unsigned char)(q * 5 + peer * 31 + rank->rank);
            REQUIRE(in[0] == expected && memcmp(in, in + 1, BYTES - 1) == 0);
        }
    }
    int64_t expected_bytes = (int64_t)NUM_REQUESTS * BYTES * (rank->size - 1);
    REQUIRE(rank->comm->bytes_sent == expected_bytes);
    REQUIRE(rank->comm->bytes_received == expected_bytes);
    REQUIRE_OK(comm_start(rank->comm, transfers[0], 0, NULL, &extra));
    REQUIRE_OK(comm_wait(rank->comm, &extra, NULL));
    memory_free(data);
    return true;
}

static void test_many_requests(void **state)
{
    (void)state;
    for (int backend = 0; backend < BACKEND_COUNT; backend++) {
        run_world((Backend)backend, 2, 60000, many_requests_body);
        run_world((Backend)backend, 3, 60000, many_requests_body);
    }
}

typedef struct Message {
    int from;
    int to;
    int64_t size_bytes;
} Message;

enum {
    NUM_MESSAGES = 240,
    MESSAGE_BYTES_MAX = 60000,
};

static Message random_message(int round, int index, int size)
{
    Rng rng = {.seed = SEED, .stream = 5000 + (uint64_t)round};
    uint64_t at = (uint64_t)index * 4;
    uint64_t kind = rng_below(rng, at, 4);
    uint64_t bound = kind == 0 ? 1 : kind == 1 ? 200 : kind == 2 ? 5000 : MESSAGE_BYTES_MAX;
    return (Message){.from = (int)rng_below(rng, at + 1, (uint64_t)size),
                     .to = (int)rng_below(rng, at + 2, (uint64_t)size),
                     .size_bytes = (int64_t)rng_below(rng, at + 3, bound)};
}

/* One rank's share of a random pattern, cut into requests of random lengths, of which up to eight
 * are under way. */
static bool random_round(Rank *rank, Comm *comm, int round)
{
    CommTransfer transfers[2 * NUM_MESSAGES];
    CommRequest requests[2 * NUM_MESSAGES];
    unsigned char *data = NULL;
    REQUIRE_OK(MEMORY_NEW(&data, (int64_t)2 * NUM_MESSAGES * MESSAGE_BYTES_MAX));
    int num_transfers = 0;
    for (int i = 0; i < NUM_MESSAGES; i++) {
        Message message = random_message(round, i, rank->size);
        for (int side = 0; side < 2; side++) {
            bool is_send = side == 0;
            if ((is_send ? message.from : message.to) != rank->rank) {
                continue;
            }
            unsigned char *place = data + (int64_t)num_transfers * MESSAGE_BYTES_MAX;
            memset(place, is_send ? i + 1 : 0, (size_t)message.size_bytes);
            transfers[num_transfers++] =
                (CommTransfer){is_send ? message.to : message.from, is_send, place,
                               message.size_bytes, (uint64_t)i};
        }
    }
    Rng rng = {.seed = SEED, .stream = 6000 + (uint64_t)(round * 8 + rank->rank)};
    int started = 0;
    int waited = 0;
    for (int at = 0, draw = 0; at < num_transfers; draw++) {
        int length = (int)rng_below(rng, (uint64_t)draw, 9);
        length = length < num_transfers - at ? length : num_transfers - at;
        if (started - waited == 8) {
            REQUIRE_OK(comm_wait(comm, &requests[waited++], NULL));
        }
        REQUIRE_OK(comm_start(comm, transfers + at, length, NULL, &requests[started++]));
        at += length;
    }
    for (; waited < started; waited++) {
        REQUIRE_OK(comm_wait(comm, &requests[waited], NULL));
    }
    for (int i = 0; i < num_transfers; i++) {
        const unsigned char *place = transfers[i].data;
        for (int64_t k = 0; k < transfers[i].size_bytes; k++) {
            REQUIRE(place[k] == (unsigned char)(transfers[i].tag + 1));
        }
    }
    memory_free(data);
    return true;
}

static bool random_body(Rank *rank)
{
    int all[SIZE_MAX_TESTED] = {0, 1, 2, 3, 4};
    Comm *other = NULL;
    REQUIRE_OK(comm_split(rank->comm, all, rank->size, "other", &other));
    for (int round = 0; round < 3; round++) {
        REQUIRE(random_round(rank, round % 2 ? other : rank->comm, round));
        REQUIRE(check_members(rank, other, rank->size * (rank->size - 1) / 2.0));
    }
    comm_destroy(other);
    return true;
}

static void test_random_transfers(void **state)
{
    (void)state;
    run_everywhere(1, 60000, random_body);
}

/* Rank 0 waits in a barrier of one comm for what rank 1 does only after a transfer of another comm,
 * larger than its ring, is through. */
static bool progress_body(Rank *rank)
{
    enum {
        BYTES = 5 << 20
    };
    int all[SIZE_MAX_TESTED] = {0, 1};
    Comm *other = NULL;
    REQUIRE_OK(comm_split(rank->comm, all, 2, "other", &other));
    unsigned char *data = NULL;
    REQUIRE_OK(MEMORY_NEW(&data, BYTES));
    CommTransfer transfer = {1 - rank->rank, rank->rank == 0, data, BYTES, 9};
    CommRequest request;
    REQUIRE_OK(comm_start(other, &transfer, 1, NULL, &request));
    if (rank->rank == 0) {
        REQUIRE_OK(comm_barrier(rank->comm, NULL));
        REQUIRE_OK(comm_wait(other, &request, NULL));
    } else {
        REQUIRE_OK(comm_wait(other, &request, NULL));
        REQUIRE_OK(comm_barrier(rank->comm, NULL));
    }
    memory_free(data);
    comm_destroy(other);
    return true;
}

static void test_progress_across_comms(void **state)
{
    (void)state;
    for (int backend = 0; backend < BACKEND_COUNT; backend++) {
        run_world((Backend)backend, 2, 20000, progress_body);
    }
}

/* One rank calls with another count: every rank hears of it, and soon. */
static bool count_mismatch_body(Rank *rank)
{
    double data[8] = {0};
    int64_t begin_ns = clock_now_ns();
    Status status = comm_all_reduce(rank->comm, data, rank->rank == 1 ? 4 : 3, DTYPE_F64,
                                    COMM_REDUCE_SUM, NULL);
    REQUIRE(status == STATUS_CORRUPT);
    REQUIRE(strstr(status_message(), "count 3") && strstr(status_message(), "count 4"));
    REQUIRE(clock_now_ns() - begin_ns < 10 * CLOCK_NS_PER_S);
    REQUIRE(comm_barrier(rank->comm, NULL) == STATUS_CORRUPT);
    return true;
}

/* The last rank broadcasts from another root: two ranks wait for each other's data, without a
 * header for a hang. */
static bool root_mismatch_body(Rank *rank)
{
    double data[8] = {0};
    int root = rank->rank == rank->size - 1 ? 0 : 1;
    REQUIRE(comm_broadcast(rank->comm, data, sizeof data, root, NULL) == STATUS_CORRUPT);
    REQUIRE(strstr(status_message(), "from rank 0") && strstr(status_message(), "from rank 1"));
    return true;
}

static bool operation_mismatch_body(Rank *rank)
{
    float data[64] = {0};
    Status status = rank->rank == 0
                        ? comm_broadcast(rank->comm, data, sizeof data, 0, NULL)
                        : comm_all_reduce(rank->comm, data, 64, DTYPE_F32, COMM_REDUCE_MAX, NULL);
    REQUIRE(status == STATUS_CORRUPT);
    REQUIRE(strstr(status_message(), "broadcast") && strstr(status_message(), "all_reduce"));
    return true;
}

static bool begins_mismatch_body(Rank *rank)
{
    float data[16] = {0};
    int64_t begins[SIZE_MAX_TESTED + 1] = {0};
    for (int r = 1; r <= rank->size; r++) {
        begins[r] = 40 - (rank->rank == 0 && r == 1 ? 4 : 0);
    }
    begins[rank->size] = 60;
    REQUIRE(comm_all_gather(rank->comm, data, begins, NULL) == STATUS_CORRUPT);
    return true;
}

static bool label_mismatch_body(Rank *rank)
{
    int all[SIZE_MAX_TESTED] = {0, 1, 2, 3, 4};
    Comm *split = NULL;
    Status status =
        comm_split(rank->comm, all, rank->size, rank->rank == 0 ? "tp" : "boundary", &split);
    REQUIRE(status == STATUS_CORRUPT && split == NULL);
    return true;
}

static bool transfer_mismatch(Rank *rank, uint64_t tag_extra, int64_t size_extra)
{
    char data[16] = {0};
    if (rank->rank > 1) {
        REQUIRE(comm_barrier(rank->comm, NULL) == STATUS_CORRUPT);
        return true;
    }
    bool is_send = rank->rank == 0;
    CommTransfer transfers[] = {
        {1 - rank->rank, is_send, data, 8, 77},
        {1 - rank->rank, is_send, data, 8 + (is_send ? size_extra : 0),
         is_send ? 78 + tag_extra : 78},
        {1 - rank->rank, !is_send, data + 8, 1, 79},
    };
    REQUIRE(comm_exchange(rank->comm, transfers, is_send ? 3 : 2, NULL) == STATUS_CORRUPT);
    REQUIRE(strstr(status_message(), "tag 78"));
    return true;
}

static bool tag_mismatch_body(Rank *rank)
{
    return transfer_mismatch(rank, 5, 0);
}

static bool size_mismatch_body(Rank *rank)
{
    return transfer_mismatch(rank, 0, 1);
}

static bool own_mismatch_body(Rank *rank)
{
    char data[16] = {0};
    CommTransfer transfers[] = {
        {rank->rank, true, data, 8, 1},
        {rank->rank, false, data + 8, 8, 2},
    };
    REQUIRE(comm_exchange(rank->comm, transfers, 2, NULL) == STATUS_CORRUPT);
    return true;
}

static void test_mismatch(void **state)
{
    (void)state;
    run_everywhere(2, 30000, count_mismatch_body);
    run_everywhere(2, 30000, root_mismatch_body);
    run_everywhere(2, 30000, operation_mismatch_body);
    run_everywhere(2, 30000, begins_mismatch_body);
    run_everywhere(2, 30000, label_mismatch_body);
    run_everywhere(2, 30000, tag_mismatch_body);
    run_everywhere(2, 30000, size_mismatch_body);
    run_everywhere(1, 30000, own_mismatch_body);
}

/* The last rank stays away; the others name it. */
static bool timeout_body(Rank *rank)
{
    int absent = rank->size - 1;
    if (rank->rank != absent) {
        char name[32];
        snprintf(name, sizeof name, "rank %d", absent);
        float data[4] = {0};
        int64_t begin_ns = clock_now_ns();
        Status status = comm_all_reduce(rank->comm, data, 4, DTYPE_F32, COMM_REDUCE_SUM, NULL);
        REQUIRE(status == STATUS_TIMEOUT);
        REQUIRE(strstr(status_message(), "no word from") && strstr(status_message(), name));
        REQUIRE(!strstr(status_message(), "no word from rank 0"));
        int64_t waited_ns = clock_now_ns() - begin_ns;
        REQUIRE(waited_ns < 10 * CLOCK_NS_PER_S);
        REQUIRE(rank->comm->wait_ns > waited_ns / 2);
    }
    pthread_barrier_wait(&rank->world->barrier);
    if (rank->rank == absent) {
        char byte = 0; /* waits for what nobody sends until it hears of the others' failure */
        CommTransfer transfer = {0, false, &byte, 1, 0};
        REQUIRE(comm_exchange(rank->comm, &transfer, 1, NULL) == STATUS_TIMEOUT);
        REQUIRE(strstr(status_message(), "in all_reduce on 'world'"));
    }
    return true;
}

static bool transfer_timeout_body(Rank *rank)
{
    char data[4] = {0};
    if (rank->rank == 0) {
        CommTransfer transfer = {1, false, data, 4, 3};
        REQUIRE(comm_exchange(rank->comm, &transfer, 1, NULL) == STATUS_TIMEOUT);
        REQUIRE(strstr(status_message(), "no word from rank 1"));
    }
    pthread_barrier_wait(&rank->world->barrier);
    return true;
}

static void test_timeout(void **state)
{
    (void)state;
    run_everywhere(2, 120, timeout_body);
    run_everywhere(2, 120, transfer_timeout_body);
}

static void *abort_run(void *argument)
{
    comm_abort(argument, "the user pressed Ctrl-C");
    comm_abort(argument, "twice");
    return NULL;
}

/* All wait for what never comes, the last one on a split; another thread of rank 0 ends it. */
static bool abort_body(Rank *rank)
{
    int self[] = {rank->rank};
    Comm *alone = NULL;
    REQUIRE_OK(comm_split(rank->comm, self, 1, "alone", &alone));
    pthread_barrier_wait(&rank->world->barrier);
    pthread_t thread;
    if (rank->rank == 0) {
        REQUIRE(pthread_create(&thread, NULL, abort_run, rank->comm) == 0);
    }
    char data[4];
    CommTransfer transfer = {0, false, data, 4, 3};
    int64_t begin_ns = clock_now_ns();
    Status status = rank->rank == rank->size - 1 ? comm_exchange(alone, &transfer, 1, NULL)
                                                 : comm_barrier(rank->comm, NULL);
    if (rank->rank == 0) {
        pthread_join(thread, NULL);
    }
    REQUIRE(status == STATUS_ABORTED);
    REQUIRE(strstr(status_message(), "Ctrl-C"));
    REQUIRE(clock_now_ns() - begin_ns < 10 * CLOCK_NS_PER_S);
    comm_destroy(alone);
    return true;
}

static void test_abort(void **state)
{
    (void)state;
    run_everywhere(1, 60000, abort_body);
}

/* Rank 0 sends, takes part in a sum and leaves in good order: nothing of it is lost; only then is
 * it missed. */
static bool leave_body(Rank *rank)
{
    enum {
        BYTES = 200000
    };
    unsigned char *data = NULL;
    REQUIRE_OK(MEMORY_NEW(&data, BYTES));
    double sum = 1;
    if (rank->rank == 0) {
        memset(data, 42, BYTES);
        CommTransfer transfer = {1, true, data, BYTES, 1};
        REQUIRE_OK(comm_exchange(rank->comm, &transfer, 1, NULL));
        REQUIRE_OK(comm_all_reduce(rank->comm, &sum, 1, DTYPE_F64, COMM_REDUCE_SUM, NULL));
        comm_destroy(rank->comm);
        rank->comm = NULL;
        memset(data, 0, BYTES);
    } else {
        REQUIRE_OK(comm_all_reduce(rank->comm, &sum, 1, DTYPE_F64, COMM_REDUCE_SUM, NULL));
        REQUIRE(sum == rank->size);
    }
    pthread_barrier_wait(&rank->world->barrier);
    if (rank->rank == 1) {
        CommTransfer transfer = {0, false, data, BYTES, 1};
        REQUIRE_OK(comm_exchange(rank->comm, &transfer, 1, NULL));
        REQUIRE(data[0] == 42 && memcmp(data, data + 1, BYTES - 1) == 0);
    }
    pthread_barrier_wait(&rank->world->barrier);
    if (rank->rank != 0) {
        int64_t begin_ns = clock_now_ns();
        REQUIRE(comm_barrier(rank->comm, NULL) == STATUS_PEER_LOST);
        REQUIRE(strstr(status_message(), "rank 0") && strstr(status_message(), "barrier"));
        REQUIRE(clock_now_ns() - begin_ns < 10 * CLOCK_NS_PER_S);
    }
    memory_free(data);
    return true;
}

static void test_leave(void **state)
{
    (void)state;
    run_everywhere(2, 60000, leave_body);
}

int main(void)
{
    printf("seed %d\n", SEED);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_reduce),
        cmocka_unit_test(test_gather_and_scatter),
        cmocka_unit_test(test_broadcast),
        cmocka_unit_test(test_split),
        cmocka_unit_test(test_many_requests),
        cmocka_unit_test(test_random_transfers),
        cmocka_unit_test(test_progress_across_comms),
        cmocka_unit_test(test_mismatch),
        cmocka_unit_test(test_timeout),
        cmocka_unit_test(test_abort),
        cmocka_unit_test(test_leave),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
