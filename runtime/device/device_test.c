#include "base/clock.h"
#include "device/device.h"

#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

/* What every backend must do; the CPU is the one there is. */
static void test_memory_streams_events(void **state)
{
    (void)state;
    enum {
        SIZE = 100000
    };
    Device *device = NULL;
    Stream *streams[2] = {NULL, NULL};
    Event *event = NULL;
    unsigned char *memory = NULL;
    unsigned char *host = NULL;
    assert_int_equal(device_open("cpu", 0, &device), STATUS_OK);
    assert_int_equal(device_alloc(device, SIZE, (void **)&memory), STATUS_OK);
    assert_int_equal(device_alloc_host(device, SIZE, (void **)&host), STATUS_OK);
    assert_int_equal((uintptr_t)memory % 64, 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(stream_create(device, &streams[i]), STATUS_OK);
    }
    assert_int_equal(event_create(device, &event), STATUS_OK);
    for (int i = 0; i < SIZE; i++) {
        host[i] = (unsigned char)(i * 7);
    }
    assert_int_equal(stream_copy(streams[0], memory, host, SIZE), STATUS_OK);
    assert_int_equal(event_record(event, streams[0]), STATUS_OK);
    assert_int_equal(stream_wait_event(streams[1], event), STATUS_OK);
    assert_int_equal(stream_zero(streams[1], host, SIZE), STATUS_OK);
    assert_int_equal(stream_copy(streams[1], host, memory + 1, SIZE - 1), STATUS_OK);
    assert_int_equal(stream_copy(streams[1], host, memory, 0), STATUS_OK);
    assert_int_equal(stream_wait(streams[1], clock_deadline_in_ms(10000)), STATUS_OK);
    for (int i = 0; i < SIZE - 1; i++) {
        assert_int_equal(host[i], (unsigned char)((i + 1) * 7));
    }
    assert_int_equal(host[SIZE - 1], 0);
    event_destroy(device, event);
    stream_destroy(streams[0]);
    stream_destroy(streams[1]);
    stream_destroy(NULL);
    device_free(device, memory, SIZE);
    device_free_host(device, host, SIZE);
    device_free(device, NULL, 0);
    device_close(device);
}

static void test_refusals(void **state)
{
    (void)state;
    Device *device = NULL;
    assert_int_equal(device_open("abacus", 0, &device), STATUS_UNSUPPORTED);
    assert_non_null(strstr(status_message(), "abacus"));
    assert_int_equal(device_open("cpu", 1, &device), STATUS_NOT_FOUND);
    assert_int_equal(device_open("cpu", 0, &device), STATUS_OK);
    void *memory = NULL;
    assert_int_equal(device_alloc(device, INT64_MAX / 2, &memory), STATUS_NO_MEMORY);
    assert_null(memory);
    assert_int_equal(device_alloc(device, 0, &memory), STATUS_OK);
    device_free(device, memory, 0);
    device_close(device);
    device_close(NULL);
}

/* What is allocated is counted, and the most that was. */
static void test_counts(void **state)
{
    (void)state;
    Device *device = NULL;
    void *memory[2] = {NULL, NULL};
    assert_int_equal(device_open("cpu", 0, &device), STATUS_OK);
    assert_int_equal(device_alloc(device, 1000, &memory[0]), STATUS_OK);
    assert_int_equal(device_alloc(device, 500, &memory[1]), STATUS_OK);
    device_free(device, memory[0], 1000);
    assert_int_equal(device->allocated_bytes, 500);
    assert_int_equal(device->peak_bytes, 1500);
    device_reset_peak(device);
    assert_int_equal(device->peak_bytes, 500);
    device_free(device, memory[1], 500);
    assert_int_equal(device->allocated_bytes, 0);
    device_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory_streams_events),
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
