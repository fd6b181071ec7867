/* Ranks of a pipeline as threads: activations go round through all parts, gradients back, while
 * both flows are under way at once and microbatches overtake each other between flows. */
#include "comm/comm_local.h"
#include "train/stage_link.h"

#include <pthread.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    STAGES = 3,
    CHUNKS = 2,
    SLOTS = 2,
    COUNT = 1000,
    MICROBATCHES = 4,
    PARTS = STAGES * CHUNKS,
    TIMEOUT_MS = 20000,
    MANY_SLOTS = COMM_REQUESTS_MAX + 36,
    MANY_SENDS = 2 * MANY_SLOTS + 7
};

#define MUST(call) CHECK((call) == STATUS_OK)

typedef struct StageRank {
    Comm *world;
    int wrong;
    bool sends_wrong_tag;
    Status status;
} StageRank;

static void fill(float *data, int part, int microbatch)
{
    for (int i = 0; i < COUNT; i++) {
        data[i] = (float)(part * 10000 + microbatch * 1000 + i);
    }
}

static int count_wrong(const float *data, int part, int microbatch)
{
    float expected[COUNT];
    fill(expected, part, microbatch);
    int wrong = 0;
    for (int i = 0; i < COUNT; i++) {
        wrong += data[i] != expected[i];
    }
    return wrong;
}

/* All forwards of a chunk, then all backwards: parts in order, each microbatch through its own
 * buffer. */
static Status pass(StageRank *rank, StageLink *link, StageFlow flow, Stream *stream)
{
    static _Thread_local float buffers[CHUNKS][SLOTS][COUNT];
    static _Thread_local float received[COUNT];
    bool is_next = flow == STAGE_FLOW_ACTIVATIONS;
    for (int i = 0; i < CHUNKS; i++) {
        int chunk = is_next ? i : CHUNKS - 1 - i;
        int part = chunk * STAGES + rank->world->rank;
        bool has_source = is_next ? part > 0 : part < PARTS - 1;
        bool has_target = is_next ? part < PARTS - 1 : part > 0;
        for (int m = 0; m < MICROBATCHES; m++) {
            uint64_t tag = (uint64_t)m + (rank->sends_wrong_tag && m == 2);
            StageMessage message = {flow, chunk, m % SLOTS, received, COUNT, tag};
            if (has_source) {
                TRY(stage_link_recv(link, &message, stream));
                rank->wrong += count_wrong(received, is_next ? part - 1 : part + 1, m);
            }
            if (has_target) {
                message.data = buffers[chunk][m % SLOTS];
                TRY(stage_link_finish(link, flow, chunk, m % SLOTS, stream));
                fill(message.data, part, m);
                TRY(stage_link_send(link, &message, stream));
            }
        }
    }
    return stage_link_drain(link, stream);
}

static void *rank_main(void *context)
{
    StageRank *rank = context;
    Device *device = NULL;
    Stream *stream = NULL;
    StageLink *link = NULL;
    MUST(device_open("cpu", 0, &device));
    MUST(stream_create(device, &stream));
    /* A neighbour may be at its end with an error already. */
    rank->status = stage_link_create(rank->world, "llm", CHUNKS, SLOTS, &link);
    if (rank->status == STATUS_OK) {
        rank->status = pass(rank, link, STAGE_FLOW_ACTIVATIONS, stream);
    }
    if (rank->status == STATUS_OK) {
        rank->status = pass(rank, link, STAGE_FLOW_GRADS, stream);
    }
    stage_link_destroy(link);
    stream_destroy(stream);
    device_close(device);
    comm_destroy(rank->world);
    return NULL;
}

static void run_ranks(StageRank *ranks, int wrong_rank)
{
    Comm *comms[STAGES];
    pthread_t threads[STAGES];
    assert_int_equal(comm_local_create(STAGES, TIMEOUT_MS, comms), STATUS_OK);
    for (int i = 0; i < STAGES; i++) {
        ranks[i] = (StageRank){.world = comms[i], .sends_wrong_tag = i == wrong_rank};
        assert_int_equal(pthread_create(&threads[i], NULL, rank_main, &ranks[i]), 0);
    }
    for (int i = 0; i < STAGES; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
}

static void test_round(void **state)
{
    (void)state;
    StageRank ranks[STAGES];
    run_ranks(ranks, -1);
    for (int i = 0; i < STAGES; i++) {
        assert_int_equal(ranks[i].status, STATUS_OK);
        assert_int_equal(ranks[i].wrong, 0);
    }
}

/* A rank that means another microbatch is found out, and nobody hangs. */
static void test_mispair(void **state)
{
    (void)state;
    StageRank ranks[STAGES];
    run_ranks(ranks, 1);
    int corrupt = 0;
    for (int i = 0; i < STAGES; i++) {
        assert_int_not_equal(ranks[i].status, STATUS_OK);
        corrupt += ranks[i].status == STATUS_CORRUPT;
    }
    assert_true(corrupt > 0);
}

/* The first of two stages runs far ahead: more sends are under way than a comm takes requests. */
static void *many_main(void *context)
{
    static float buffers[MANY_SLOTS];
    StageRank *rank = context;
    Device *device = NULL;
    Stream *stream = NULL;
    StageLink *link = NULL;
    MUST(device_open("cpu", 0, &device));
    MUST(stream_create(device, &stream));
    MUST(stage_link_create(rank->world, "llm", 1, MANY_SLOTS, &link));
    for (int m = 0; m < MANY_SENDS && rank->status == STATUS_OK; m++) {
        int slot = m % MANY_SLOTS;
        float received = 0;
        StageMessage message = {STAGE_FLOW_ACTIVATIONS, 0, slot, &received, 1, (uint64_t)m};
        if (rank->world->rank == 0) {
            MUST(stage_link_finish(link, STAGE_FLOW_ACTIVATIONS, 0, slot, stream));
            buffers[slot] = (float)m;
            message.data = &buffers[slot];
            rank->status = stage_link_send(link, &message, stream);
        } else {
            rank->status = stage_link_recv(link, &message, stream);
            rank->wrong += received != (float)m;
        }
    }
    if (rank->status == STATUS_OK) {
        rank->status = stage_link_drain(link, stream);
    }
    stage_link_destroy(link);
    stream_destroy(stream);
    device_close(device);
    comm_destroy(rank->world);
    return NULL;
}

static void test_many_sends(void **state)
{
    (void)state;
    Comm *comms[2];
    StageRank ranks[2];
    pthread_t threads[2];
    assert_int_equal(comm_local_create(2, TIMEOUT_MS, comms), STATUS_OK);
    for (int i = 0; i < 2; i++) {
        ranks[i] = (StageRank){.world = comms[i]};
        assert_int_equal(pthread_create(&threads[i], NULL, many_main, &ranks[i]), 0);
    }
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_int_equal(ranks[i].status, STATUS_OK);
        assert_int_equal(ranks[i].wrong, 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round),
        cmocka_unit_test(test_mispair),
        cmocka_unit_test(test_many_sends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
