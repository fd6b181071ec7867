#include "base/memory.h"
#include "checkpoint/safetensors.h"

#include <stdio.h>
#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

/* A file of this header and `data_bytes` bytes of data, with `claim` added to the header's length.
 * */
static Status parse(const char *header, int64_t data_bytes, int64_t claim, Safetensors *out)
{
    static uint8_t bytes[4096];
    size_t length = strlen(header);
    uint64_t told = (uint64_t)((int64_t)length + claim);
    for (int i = 0; i < 8; i++) {
        bytes[i] = (uint8_t)(told >> (8 * i));
    }
    memcpy(bytes + 8, header, length + 1);
    return safetensors_parse(bytes, 8 + length, (int64_t)(8 + length) + data_bytes, out);
}

static void test_good(void **state)
{
    (void)state;
    Safetensors found;
    const char *header = "{\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[4,16]},"
                         "\"__metadata__\":{\"any\":\"thing\"},"
                         "\"a\":{\"shape\":[],\"data_offsets\":[0,4],\"dtype\":\"F32\"}}   ";
    assert_int_equal(parse(header, 16, 0, &found), STATUS_OK);
    assert_int_equal(found.num_tensors, 2);
    assert_string_equal(found.tensors[0].name, "a"); /* in the order of their data */
    const SafetensorsTensor *b = safetensors_find(&found, "b");
    assert_string_equal(b->dtype, "BF16");
    assert_int_equal(b->num_dims, 2);
    assert_int_equal(b->dims[1], 3);
    assert_int_equal(b->begin, 4);
    assert_null(safetensors_find(&found, "c"));
    safetensors_done(&found);
    assert_int_equal(parse("{}", 0, 0, &found), STATUS_OK);
    safetensors_done(&found);
}

static void test_bad(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        int64_t data_bytes;
        int64_t claim;
        const char *part;
    } cases[] = {
        {"{}", 0, 1, "claims"},
        {"{}", 0, INT64_MAX - 100, "claims"},
        {"{}", 100, 50, "truncated"},
        {"", 0, 0, "JSON"},
        {"[]", 0, 0, "object"},
        {"{\"a\":1}", 0, 0, "tensor a"},
        {"{\"a\":{\"dtype\":\"F32\"}}", 0, 0, "shape"},
        {"{\"a\":{\"dtype\":\"F33\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, 0, "F33"},
        {"{\"a\":{\"dtype\":\"a long text that is not a dtype\",\"shape\":[1]}}", 4, 0, "a long"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, 0, "shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1.5],\"data_offsets\":[0,4]}}", 4, 0, "shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
         0, "too large"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2305843009213693952,2],\"data_offsets\":[0,0]}}", 0,
         0, "do not make"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1, 0,
         "shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]}}", 8, 0, "do not make"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4, 0, "data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}", 4, 0,
         "data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 4, 0, "data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 8, 0, "truncated"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
         "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}",
         6, 0, "tensor b begins at byte 2"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
         "\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[5,6]}}",
         6, 0, "tensor b begins at byte 5"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
         "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
         1, 0, "JSON"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Safetensors found;
        Status status = parse(cases[i].header, cases[i].data_bytes, cases[i].claim, &found);
        if (status != STATUS_CORRUPT || !strstr(status_message(), cases[i].part)) {
            fail_msg("case %zu: got %s: \"%s\", expected \"%s\"", i, status_name(status),
                     status_message(), cases[i].part);
        }
        safetensors_done(&found);
    }
}

/* What is made is what is parsed, aligned for a reader that maps the file. */
static void test_round_trip(void **state)
{
    (void)state;
    for (int count = 0; count < 20; count++) {
        Safetensors made = {0};
        for (int i = 0; i < count; i++) {
            char name[64];
            int64_t dims[3] = {i % 4, 3, 5};
            snprintf(name, sizeof name, "layer.%d \"quoted\" \xc3\xa4", i * i);
            assert_int_equal(safetensors_add(&made, name, i % 4, dims), STATUS_OK);
        }
        char *bytes = NULL;
        size_t size_bytes = 0;
        assert_int_equal(safetensors_make_header(&made, &bytes, &size_bytes), STATUS_OK);
        assert_int_equal(size_bytes % 8, 0);
        Safetensors found;
        Status status = safetensors_parse((uint8_t *)bytes, size_bytes, made.file_bytes, &found);
        if (status != STATUS_OK) {
            fail_msg("%s", status_message());
        }
        assert_int_equal(found.num_tensors, count);
        assert_int_equal(found.data_begin, made.data_begin);
        for (int i = 0; i < count; i++) {
            const SafetensorsTensor *tensor = safetensors_find(&found, made.tensors[i].name);
            assert_non_null(tensor);
            assert_int_equal(tensor->begin, made.tensors[i].begin);
            assert_int_equal(tensor->end, made.tensors[i].end);
            assert_int_equal(tensor->num_dims, made.tensors[i].num_dims);
        }
        safetensors_done(&found);
        safetensors_done(&made);
        memory_free(bytes);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_good), cmocka_unit_test(test_bad),
                                       cmocka_unit_test(test_round_trip)};
    return cmocka_run_group_tests_name("safetensors", tests, NULL, NULL);
}
