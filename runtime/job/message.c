#include "job/message.h"

#include "base/memory.h"

#include <string.h>

Status message_create(const ProtobufCMessageDescriptor *descriptor, ProtobufCMessage **message_out)
{
    void *memory = NULL;
    TRY(memory_alloc(1, descriptor->sizeof_message, &memory));
    descriptor->message_init(memory);
    *message_out = memory;
    return STATUS_OK;
}

Status message_copy(const ProtobufCMessage *message, ProtobufCMessage **copy_out)
{
    size_t size = protobuf_c_message_get_packed_size(message);
    uint8_t *bytes = NULL;
    TRY(MEMORY_NEW(&bytes, size + 1)); /* an empty message packs into no bytes */
    protobuf_c_message_pack(message, bytes);
    ProtobufCMessage *copy = protobuf_c_message_unpack(message->descriptor, NULL, size, bytes);
    memory_free(bytes);
    if (!copy) {
        return fail(STATUS_NO_MEMORY, "no memory for a copy of a %s of %zu bytes",
                    message->descriptor->short_name, size);
    }
    *copy_out = copy;
    return STATUS_OK;
}

Status message_set_text(char **field, const char *text)
{
    char *copy = (char *)protobuf_c_empty_string;
    if (text[0]) {
        TRY(memory_copy_text(text, &copy));
    }
    if (*field != protobuf_c_empty_string) {
        memory_free(*field);
    }
    *field = copy;
    return STATUS_OK;
}

void message_drop_texts(char **texts, size_t *num_texts)
{
    for (size_t i = 0; i < *num_texts; i++) {
        if (texts[i] != protobuf_c_empty_string) {
            memory_free(texts[i]);
        }
    }
    *num_texts = 0;
}

static size_t element_bytes(const ProtobufCFieldDescriptor *field)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_DOUBLE:
        return 8;
    case PROTOBUF_C_TYPE_BOOL:
        return sizeof(protobuf_c_boolean);
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE:
        return sizeof(void *);
    case PROTOBUF_C_TYPE_BYTES:
        return sizeof(ProtobufCBinaryData);
    default:
        return 4;
    }
}

Status message_append(ProtobufCMessage *message, const ProtobufCFieldDescriptor *field,
                      const void *element)
{
    CHECK(field->label == PROTOBUF_C_LABEL_REPEATED);
    char *base = (char *)message;
    size_t *count = (size_t *)(void *)(base + field->quantifier_offset);
    void **array = (void **)(void *)(base + field->offset);
    size_t bytes = element_bytes(field);
    /* The message keeps no capacity: arrays made here hold a power of two of elements, at least
     * 8. */
    bool is_full = *count == 0 || (*count >= 8 && (*count & (*count - 1)) == 0);
    if (is_full) {
        size_t capacity = *count;
        void *grown = *array;
        TRY(memory_grow(&grown, &capacity, *count + 1, bytes));
        *array = grown;
    }
    memcpy((char *)*array + *count * bytes, element, bytes);
    ++*count;
    return STATUS_OK;
}

bool message_field_is_map(const ProtobufCFieldDescriptor *field)
{
    if (field->label != PROTOBUF_C_LABEL_REPEATED || field->type != PROTOBUF_C_TYPE_MESSAGE) {
        return false;
    }
    const ProtobufCMessageDescriptor *entry = field->descriptor;
    size_t length = strlen(entry->short_name);
    return entry->n_fields == 2 && length > 5 &&
           strcmp(entry->short_name + length - 5, "Entry") == 0 &&
           strcmp(entry->fields[0].name, "key") == 0 && strcmp(entry->fields[1].name, "value") == 0;
}

int64_t message_duration_ms(const Google__Protobuf__Duration *duration)
{
    if (!duration) {
        return 0;
    }
    const int64_t seconds_max = INT64_MAX / 1000 - 1;
    if (duration->seconds > seconds_max) {
        return INT64_MAX;
    }
    if (duration->seconds < -seconds_max) {
        return INT64_MIN;
    }
    return duration->seconds * 1000 + duration->nanos / 1000000;
}

Status message_set_duration(Google__Protobuf__Duration **field, int64_t duration_ms)
{
    Google__Protobuf__Duration *duration = *field;
    if (!duration) {
        ProtobufCMessage *message = NULL;
        TRY(message_create(&google__protobuf__duration__descriptor, &message));
        duration = (Google__Protobuf__Duration *)message;
    }
    CHECK(duration);
    duration->seconds = duration_ms / 1000;
    duration->nanos = (int32_t)(duration_ms % 1000) * 1000000;
    *field = duration;
    return STATUS_OK;
}

Status message_set_timestamp(Google__Protobuf__Timestamp **field, int64_t wall_ms)
{
    if (wall_ms == 0) {
        return STATUS_OK;
    }
    Google__Protobuf__Timestamp *stamp = *field;
    if (!stamp) {
        ProtobufCMessage *message = NULL;
        TRY(message_create(&google__protobuf__timestamp__descriptor, &message));
        stamp = (Google__Protobuf__Timestamp *)message;
    }
    CHECK(stamp);
    stamp->seconds = wall_ms / 1000;
    stamp->nanos = (int32_t)(wall_ms % 1000) * 1000000;
    *field = stamp;
    return STATUS_OK;
}

const char *message_enum_name(const ProtobufCEnumDescriptor *descriptor, int value)
{
    const ProtobufCEnumValue *found = protobuf_c_enum_descriptor_get_value(descriptor, value);
    return found ? found->name : "UNKNOWN";
}
