#include "base/rng.h"
#include "comm/ring.h"

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
    CAPACITY = 256,
    NUM_BYTES = 200000,
    SEED = 11,
};

typedef struct Place {
    _Alignas(64) char memory[RING_HEADER_BYTES + CAPACITY];
} Place;

static unsigned char byte_at(int64_t i)
{
    return (unsigned char)(i * 131 / 7);
}

/* Writes and reads of random lengths against a count of what must be in the ring. */
static void test_model(void **state)
{
    (void)state;
    printf("seed %d\n", SEED);
    Place place = {0};
    Ring producer;
    Ring consumer;
    ring_attach(&producer, &place, CAPACITY);
    ring_attach(&consumer, &place, CAPACITY);
    Rng rng = {.seed = SEED};
    int64_t written = 0;
    int64_t consumed = 0;
    for (uint64_t draw = 0; consumed < NUM_BYTES; draw += 2) {
        unsigned char data[CAPACITY + 50];
        int64_t wanted = (int64_t)rng_below(rng, draw, sizeof data);
        for (int64_t i = 0; i < wanted; i++) {
            data[i] = byte_at(written + i);
        }
        int64_t room = CAPACITY - (written - consumed);
        int64_t done = ring_write(&producer, data, wanted);
        assert_int_equal(done, wanted < room ? wanted : room);
        written += done;
        const char *from = NULL;
        int64_t readable = ring_peek(&consumer, &from);
        assert_true(readable > 0 || written == consumed);
        int64_t take = (int64_t)rng_below(rng, draw + 1, (uint64_t)readable + 1);
        for (int64_t i = 0; i < take; i++) {
            assert_int_equal((unsigned char)from[i], byte_at(consumed + i));
        }
        ring_consume(&consumer, take);
        consumed += take;
    }
    assert_false(producer.is_broken || consumer.is_broken);
}

/* Positions that cannot be, as a damaged or hostile peer would leave them, make the ring broken and
 * give access to nothing. */
static void test_broken_positions(void **state)
{
    (void)state;
    const uint64_t wrong[] = {CAPACITY + 1, UINT64_MAX, UINT64_MAX / 2};
    for (int i = 0; i < 3; i++) {
        Place place = {0};
        Ring ring;
        const char *from = NULL;
        char *to = NULL;
        ring_attach(&ring, &place, CAPACITY);
        atomic_store(&ring.shared->written, wrong[i]);
        assert_int_equal(ring_peek(&ring, &from), 0);
        assert_true(ring.is_broken);
        ring_attach(&ring, &place, CAPACITY);
        atomic_store(&ring.shared->consumed, wrong[i] / 3 + 1);
        assert_int_equal(ring_space(&ring, &to), 0);
        assert_true(ring.is_broken);
        assert_int_equal(ring_write(&ring, "x", 1), 0);
    }
}

/* A full producer is woken once there is a quarter of room, not for every byte. */
static void test_starved_producer(void **state)
{
    (void)state;
    Place place = {0};
    Ring producer;
    Ring consumer;
    char data[CAPACITY] = {0};
    ring_attach(&producer, &place, CAPACITY);
    ring_attach(&consumer, &place, CAPACITY);
    assert_int_equal(ring_write(&producer, data, CAPACITY), CAPACITY);
    assert_false(ring_consume(&consumer, 1)); /* nobody was refused yet */
    assert_int_equal(ring_write(&producer, data, 2), 1);
    assert_false(ring_consume(&consumer, 20));
    assert_true(ring_consume(&consumer, 100));
    assert_false(ring_consume(&consumer, 1));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model),
        cmocka_unit_test(test_broken_positions),
        cmocka_unit_test(test_starved_producer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
