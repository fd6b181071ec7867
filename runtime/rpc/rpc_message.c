#include "base/memory.h"
#include "rpc/rpc_internal.h"

#include <grpc/byte_buffer_reader.h>
#include <string.h>

/* Bytes on the wire grow when decoded: an empty sub-message takes two bytes there and up to some
 * hundred here. */
static const size_t DECODED_BYTES_MAX = (size_t)64 << 20;

/* Messages nest as deep as the schema says; no schema of ours comes near this. */
enum {
    DEPTH_MAX = 32
};

grpc_byte_buffer *rpc_message_encode(const ProtobufCMessage *message)
{
    grpc_slice slice = grpc_slice_malloc(protobuf_c_message_get_packed_size(message));
    protobuf_c_message_pack(message, GRPC_SLICE_START_PTR(slice));
    grpc_byte_buffer *bytes = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    return bytes;
}

/* Bytes that continue the character that `lead` begins, and the range of the first of them, by
 * table 3-7 of the Unicode standard: it excludes overlong forms, surrogates and what lies beyond
 * U+10FFFF. -1 when none begins so. */
static int utf8_continuation(uint8_t lead, uint8_t *low_out, uint8_t *high_out)
{
    *low_out = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    *high_out = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    if (lead >= 0x01 && lead <= 0x7F) {
        return 0;
    }
    if (lead >= 0xC2 && lead <= 0xDF) {
        return 1;
    }
    if (lead >= 0xE0 && lead <= 0xEF) {
        return 2;
    }
    return lead >= 0xF0 && lead <= 0xF4 ? 3 : -1;
}

size_t rpc_message_utf8_prefix(const uint8_t *text, size_t num_bytes)
{
    size_t done = 0;
    while (done < num_bytes) {
        uint8_t low;
        uint8_t high;
        int more = utf8_continuation(text[done], &low, &high);
        if (more < 0 || (size_t)more >= num_bytes - done) {
            return done;
        }
        for (int i = 1; i <= more; i++) {
            uint8_t byte = text[done + (size_t)i];
            if (byte < low || byte > high) {
                return done;
            }
            low = 0x80;
            high = 0xBF;
        }
        done += 1 + (size_t)more;
    }
    return done;
}

static bool read_varint(const uint8_t **at, const uint8_t *end, uint64_t *value_out)
{
    uint64_t value = 0;
    for (int shift = 0; shift < 64 && *at < end; shift += 7) {
        uint8_t byte = *(*at)++;
        value |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80) {
            *value_out = value;
            return true;
        }
    }
    return false;
}

/* Reads one field at *at: its descriptor (NULL: unknown) and, for the length-delimited wire type,
 * its bytes; *bytes_out is NULL for the others. False when the bytes break the format. */
static bool read_field(const ProtobufCMessageDescriptor *descriptor, const uint8_t **at,
                       const uint8_t *end, const ProtobufCFieldDescriptor **field_out,
                       const uint8_t **bytes_out, size_t *num_bytes_out)
{
    uint64_t tag;
    uint64_t value;
    *bytes_out = NULL;
    *num_bytes_out = 0;
    if (!read_varint(at, end, &tag) || tag > UINT32_MAX) {
        return false;
    }
    *field_out = protobuf_c_message_descriptor_get_field(descriptor, (unsigned)(tag >> 3));
    size_t left = (size_t)(end - *at);
    size_t skip = 0;
    switch (tag & 7) {
    case 0:
        return read_varint(at, end, &value);
    case 1:
        skip = 8;
        break;
    case 5:
        skip = 4;
        break;
    case 2:
        if (!read_varint(at, end, &value) || value > (uint64_t)(end - *at)) {
            return false;
        }
        left = (size_t)(end - *at);
        skip = (size_t)value;
        *bytes_out = *at;
        *num_bytes_out = skip;
        break;
    default:
        return false;
    }
    if (skip > left) {
        return false;
    }
    *at += skip;
    return true;
}

/* protobuf-c copies strings as they are: their encoding, and NUL bytes that would cut them short,
 * are seen here, on the wire, before it runs. */
static Status check_strings(const uint8_t *bytes, size_t num_bytes,
                            const ProtobufCMessageDescriptor *descriptor)
{
    struct {
        const ProtobufCMessageDescriptor *descriptor;
        const uint8_t *end;
    } stack[DEPTH_MAX] = {{descriptor, bytes + num_bytes}};
    int depth = 1;
    const uint8_t *at = bytes;
    while (depth > 0) {
        if (at == stack[depth - 1].end) {
            depth--;
            continue;
        }
        const ProtobufCMessageDescriptor *message = stack[depth - 1].descriptor;
        const ProtobufCFieldDescriptor *field;
        const uint8_t *content;
        size_t length;
        if (!read_field(message, &at, stack[depth - 1].end, &field, &content, &length)) {
            return fail(STATUS_CORRUPT, "the bytes are not a %s", descriptor->name);
        }
        if (field == NULL || content == NULL) {
            continue;
        }
        if (field->type == PROTOBUF_C_TYPE_STRING &&
            rpc_message_utf8_prefix(content, length) != length) {
            return fail(STATUS_CORRUPT, "%s.%s: the text is not UTF-8, or holds a NUL",
                        message->name, field->name);
        }
        if (field->type == PROTOBUF_C_TYPE_MESSAGE) {
            CHECK(depth < DEPTH_MAX);
            stack[depth].descriptor = field->descriptor;
            stack[depth].end = at;
            depth++;
            at = content;
        }
    }
    return STATUS_OK;
}

/* Memory for protobuf-c, until the budget of one message is spent. */
static void *budget_alloc(void *budget, size_t size)
{
    size_t *left = budget;
    void *memory = NULL;
    if (size > *left || memory_alloc(size, 1, &memory) != STATUS_OK) {
        return NULL;
    }
    *left -= size;
    return memory;
}

static void budget_free(void *budget, void *memory)
{
    (void)budget;
    memory_free(memory);
}

static Status decode_bytes(const uint8_t *bytes, size_t num_bytes,
                           const ProtobufCMessageDescriptor *descriptor,
                           ProtobufCMessage **message_out)
{
    TRY(check_strings(bytes, num_bytes, descriptor));
    size_t budget = DECODED_BYTES_MAX;
    ProtobufCAllocator allocator = {budget_alloc, budget_free, &budget};
    ProtobufCMessage *message = protobuf_c_message_unpack(descriptor, &allocator, num_bytes, bytes);
    if (message == NULL) {
        return fail(STATUS_CORRUPT, "the bytes are not a %s, or one too large when decoded",
                    descriptor->name);
    }
    *message_out = message;
    return STATUS_OK;
}

Status rpc_message_decode(grpc_byte_buffer *bytes, const ProtobufCMessageDescriptor *descriptor,
                          ProtobufCMessage **message_out)
{
    grpc_byte_buffer_reader reader;
    if (!grpc_byte_buffer_reader_init(&reader, bytes)) {
        return fail(STATUS_CORRUPT, "the bytes of a %s cannot be read", descriptor->name);
    }
    grpc_slice slice = grpc_byte_buffer_reader_readall(&reader);
    grpc_byte_buffer_reader_destroy(&reader);
    Status status = decode_bytes(GRPC_SLICE_START_PTR(slice), GRPC_SLICE_LENGTH(slice), descriptor,
                                 message_out);
    grpc_slice_unref(slice);
    return status == STATUS_OK ? STATUS_OK : status_trace(status, __FILE__, __LINE__);
}

void rpc_message_free(ProtobufCMessage *message)
{
    if (message != NULL) {
        ProtobufCAllocator allocator = {budget_alloc, budget_free, NULL};
        protobuf_c_message_free_unpacked(message, &allocator);
    }
}
