/* Decoding bytes from outside, directly: random damage, text that is not UTF-8 deep inside,
 * messages that grow. */
#include "base/memory.h"
#include "base/rng.h"
#include "rpc/rpc_internal.h"
#include "viaduct/v1/viaduct.pb-c.h"

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
    SEED = 20240607,
    NUM_DAMAGES = 20000
};

/* The status of decoding `bytes` as a `descriptor`; the message in message_out if OK and wanted. */
static Status decode(const ProtobufCMessageDescriptor *descriptor, const uint8_t *bytes,
                     size_t num_bytes, ProtobufCMessage **message_out)
{
    grpc_slice slice = grpc_slice_from_copied_buffer((const char *)bytes, num_bytes);
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    ProtobufCMessage *message = NULL;
    Status status = rpc_message_decode(buffer, descriptor, &message);
    grpc_byte_buffer_destroy(buffer);
    if (message_out != NULL) {
        *message_out = message;
    } else {
        rpc_message_free(message);
    }
    return status;
}

/* An event about a job with labels: text two and three levels deep. Returns its length in bytes. */
static size_t encode_event(char *deep_text, uint8_t *bytes, size_t capacity)
{
    Viaduct__V1__Job__LabelsEntry label = VIADUCT__V1__JOB__LABELS_ENTRY__INIT;
    label.key = (char *)"team";
    label.value = deep_text;
    Viaduct__V1__Job__LabelsEntry *labels[] = {&label};
    Google__Protobuf__Timestamp time = GOOGLE__PROTOBUF__TIMESTAMP__INIT;
    time.seconds = 1700000000;
    Viaduct__V1__Job job = VIADUCT__V1__JOB__INIT;
    job.name = (char *)"jobs/train";
    job.labels = labels;
    job.n_labels = 1;
    job.create_time = &time;
    job.generation = -1;
    Viaduct__V1__WatchJobsResponse event = VIADUCT__V1__WATCH_JOBS_RESPONSE__INIT;
    event.type = VIADUCT__V1__WATCH_JOBS_RESPONSE__TYPE__MODIFIED;
    event.revision = INT64_MAX;
    event.job = &job;
    size_t num_bytes = viaduct__v1__watch_jobs_response__get_packed_size(&event);
    assert_true(num_bytes <= capacity);
    return viaduct__v1__watch_jobs_response__pack(&event, bytes);
}

static const ProtobufCMessageDescriptor *const EVENT =
    &viaduct__v1__watch_jobs_response__descriptor;

static void test_round_trip(void **state)
{
    (void)state;
    uint8_t bytes[512];
    uint8_t again[512];
    size_t num_bytes = encode_event((char *)"grün", bytes, sizeof bytes);
    ProtobufCMessage *message = NULL;
    assert_int_equal(decode(EVENT, bytes, num_bytes, &message), STATUS_OK);
    assert_int_equal(protobuf_c_message_get_packed_size(message), num_bytes);
    protobuf_c_message_pack(message, again);
    assert_memory_equal(bytes, again, num_bytes);
    rpc_message_free(message);
}

static void test_deep_text(void **state)
{
    (void)state;
    uint8_t bytes[512];
    size_t num_bytes = encode_event((char *)"gr\xC3n", bytes, sizeof bytes);
    assert_int_equal(decode(EVENT, bytes, num_bytes, NULL), STATUS_CORRUPT);
    assert_non_null(strstr(status_message(), "LabelsEntry.value"));
    num_bytes = encode_event((char *)"gruen", bytes, sizeof bytes);
    uint8_t *text = memmem(bytes, num_bytes, "gruen", 5);
    text[2] = '\0';
    assert_int_equal(decode(EVENT, bytes, num_bytes, NULL), STATUS_CORRUPT);
    /* Fields that the schema does not know are nobody's text. */
    static const uint8_t UNKNOWN[] = {0xFA, 0x01, 0x02, 0xFF, 0x00};
    assert_int_equal(decode(EVENT, UNKNOWN, sizeof UNKNOWN, NULL), STATUS_OK);
}

/* Each prefix, and random damage: no crash, and never more accepted than protobuf-c's own decoder
 * accepts. */
static void test_damage(void **state)
{
    (void)state;
    printf("seed %d\n", SEED);
    uint8_t bytes[512];
    uint8_t damaged[512];
    size_t num_bytes = encode_event((char *)"grün", bytes, sizeof bytes);
    Rng rng = {.seed = SEED};
    uint64_t index = 0;
    int num_accepted = 0;
    for (int i = 0; i < NUM_DAMAGES; i++) {
        memcpy(damaged, bytes, num_bytes);
        size_t length = (size_t)i < num_bytes ? (size_t)i : num_bytes;
        for (uint64_t j = rng_below(rng, index++, 4); (size_t)i >= num_bytes && j > 0; j--) {
            size_t place = (size_t)rng_below(rng, index++, num_bytes);
            damaged[place] = (uint8_t)rng_bits(rng, index++);
        }
        ProtobufCMessage *reference = protobuf_c_message_unpack(EVENT, NULL, length, damaged);
        Status status = decode(EVENT, damaged, length, NULL);
        assert_true(status == STATUS_OK || status == STATUS_CORRUPT);
        assert_true(status == STATUS_CORRUPT || reference != NULL);
        num_accepted += status == STATUS_OK;
        if (reference != NULL) {
            protobuf_c_message_free_unpacked(reference, NULL);
        }
    }
    /* About a quarter was not damaged at all. */
    assert_true(num_accepted > NUM_DAMAGES / 5 && num_accepted < NUM_DAMAGES);
}

/* Two bytes on the wire make a whole empty job: 4 MiB would make several hundred. */
static void test_growth(void **state)
{
    (void)state;
    enum {
        NUM_BYTES = 4 << 20
    };
    uint8_t *bytes = NULL;
    assert_int_equal(MEMORY_NEW(&bytes, NUM_BYTES), STATUS_OK);
    for (int i = 0; i < NUM_BYTES; i += 2) {
        bytes[i] = 0x0A;
        bytes[i + 1] = 0x00;
    }
    const ProtobufCMessageDescriptor *list = &viaduct__v1__list_jobs_response__descriptor;
    assert_int_equal(decode(list, bytes, 1000, NULL), STATUS_OK);
    assert_int_equal(decode(list, bytes, NUM_BYTES, NULL), STATUS_CORRUPT);
    memory_free(bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_deep_text),
        cmocka_unit_test(test_damage),
        cmocka_unit_test(test_growth),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
