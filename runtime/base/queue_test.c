#include "base/clock.h"
#include "base/queue.h"

#include <pthread.h>
#include <stdatomic.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    PRODUCERS = 3,
    CONSUMERS = 2,
    PER_PRODUCER = 5000,
    CAPACITY = 4,
    TIMEOUT_MS = 30000
};

typedef struct Shared {
    Queue *queue;
    _Atomic int64_t sum;
    _Atomic int64_t count;
    _Atomic int failures;
} Shared;

static void *produce(void *argument)
{
    Shared *shared = argument;
    for (int64_t i = 1; i <= PER_PRODUCER; i++) {
        if (queue_push(shared->queue, &i, clock_deadline_in_ms(TIMEOUT_MS)) != STATUS_OK) {
            shared->failures++;
        }
    }
    return NULL;
}

static void *consume(void *argument)
{
    Shared *shared = argument;
    int64_t value = 0;
    while (queue_pop(shared->queue, &value, clock_deadline_in_ms(TIMEOUT_MS)) == STATUS_OK) {
        shared->sum += value;
        shared->count++;
    }
    return NULL;
}

/* Every element arrives once, through a queue far smaller than what goes through it; closing drains. */
static void test_threads(void **state)
{
    (void)state;
    Shared shared = {0};
    pthread_t threads[PRODUCERS + CONSUMERS];
    assert_int_equal(queue_create(CAPACITY, sizeof(int64_t), &shared.queue), STATUS_OK);
    for (int i = 0; i < PRODUCERS + CONSUMERS; i++) {
        assert_int_equal(
            pthread_create(&threads[i], NULL, i < PRODUCERS ? produce : consume, &shared), 0);
    }
    for (int i = 0; i < PRODUCERS; i++) {
        pthread_join(threads[i], NULL);
    }
    queue_close(shared.queue);
    for (int i = PRODUCERS; i < PRODUCERS + CONSUMERS; i++) {
        pthread_join(threads[i], NULL);
    }
    assert_int_equal(shared.failures, 0);
    assert_int_equal(shared.count, PRODUCERS * PER_PRODUCER);
    assert_int_equal(shared.sum, PRODUCERS * (int64_t)PER_PRODUCER * (PER_PRODUCER + 1) / 2);
    queue_destroy(shared.queue);
}

static void test_order_and_deadlines(void **state)
{
    (void)state;
    Queue *queue = NULL;
    int value = 0;
    assert_int_equal(queue_create(2, sizeof value, &queue), STATUS_OK);
    int64_t begin_ns = clock_now_ns();
    assert_int_equal(queue_pop(queue, &value, clock_deadline_in_ms(20)), STATUS_TIMEOUT);
    assert_true(clock_now_ns() - begin_ns >= 20 * CLOCK_NS_PER_MS);
    for (int i = 1; i <= 2; i++) {
        assert_int_equal(queue_push(queue, &i, clock_now_ns()), STATUS_OK);
    }
    assert_int_equal(queue_push(queue, &value, clock_deadline_in_ms(5)), STATUS_TIMEOUT);
    queue_close(queue);
    queue_close(queue);
    assert_int_equal(queue_push(queue, &value, clock_deadline_in_ms(5)), STATUS_ABORTED);
    for (int i = 1; i <= 2; i++) {
        assert_int_equal(queue_pop(queue, &value, clock_now_ns()), STATUS_OK);
        assert_int_equal(value, i);
    }
    assert_int_equal(queue_pop(queue, &value, clock_deadline_in_ms(5)), STATUS_ABORTED);
    queue_destroy(queue);
    queue_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_order_and_deadlines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
