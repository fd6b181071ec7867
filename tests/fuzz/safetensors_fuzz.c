#include "checkpoint/safetensors.h"
#include "tests/fuzz/fuzz.h"

#include <stdio.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size_bytes)
{
    Safetensors found;
    Status status = safetensors_parse(bytes, size_bytes, (int64_t)size_bytes, &found);
    int64_t at = 0;
    for (int i = 0; status == STATUS_OK && i < found.num_tensors; i++) {
        /* What was accepted must be safe to read. */
        const SafetensorsTensor *tensor = &found.tensors[i];
        CHECK(tensor->begin == at && tensor->end >= at);
        at = tensor->end;
        CHECK(found.data_begin + at <= (int64_t)size_bytes);
        CHECK(safetensors_find(&found, tensor->name) == tensor);
    }
    safetensors_done(&found);
    return 0;
}

static const char *const headers[] = {
    "{\"__metadata__\":{\"format\":\"pt\"},\"a.weight\":{\"dtype\":\"F32\",\"shape\":[2,3],"
    "\"data_offsets\":[0,24]},\"b\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[24,32]}}",
    "{\"x\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]},"
    "\"empty\":{\"dtype\":\"U8\",\"shape\":[0,7],\"data_offsets\":[8,8]},"
    "\"y\":{\"dtype\":\"U8\",\"shape\":[24],\"data_offsets\":[8,32]}}   "};

size_t fuzz_seed(int index, uint8_t *out)
{
    enum {
        DATA_BYTES = 32
    };
    if (index >= (int)(sizeof headers / sizeof *headers)) {
        return 0;
    }
    size_t length = strlen(headers[index]);
    memset(out, 0, 8 + length + DATA_BYTES);
    out[0] = (uint8_t)length;
    memcpy(out + 8, headers[index], length);
    return 8 + length + DATA_BYTES;
}
