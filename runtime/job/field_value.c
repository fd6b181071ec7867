#include "job/field_value.h"

#include "base/config.h"
#include "base/memory.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

enum {
    TEXT_BYTES_MAX = 64 << 10,
    SHOWN_MAX = 60 /* characters of a wrong value that an error repeats */
};

bool field_value_is_scalar(const ProtobufCFieldDescriptor *field)
{
    return field->type != PROTOBUF_C_TYPE_MESSAGE ||
           field->descriptor == &google__protobuf__duration__descriptor;
}

const char *field_value_expected(const ProtobufCFieldDescriptor *field)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_BOOL:
        return "true or false";
    case PROTOBUF_C_TYPE_FLOAT:
    case PROTOBUF_C_TYPE_DOUBLE:
        return "a number";
    case PROTOBUF_C_TYPE_STRING:
        return "a text";
    case PROTOBUF_C_TYPE_ENUM:
        return "a name";
    case PROTOBUF_C_TYPE_BYTES:
        return "bytes";
    case PROTOBUF_C_TYPE_MESSAGE:
        if (field->descriptor == &google__protobuf__duration__descriptor) {
            return "a duration such as 30s, 5m or 1h30m";
        }
        return "a mapping of fields";
    default:
        return "a whole number";
    }
}

static Status fail_value(const ProtobufCFieldDescriptor *field, const char *text)
{
    return fail(STATUS_INVALID, "expected %s, got \"%.*s\"", field_value_expected(field), SHOWN_MAX,
                text);
}

static Status parse_signed(const ProtobufCFieldDescriptor *field, const char *text, int64_t low,
                           int64_t high, int64_t *value_out)
{
    char *end = NULL;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end || text[0] == ' ') {
        return fail_value(field, text);
    }
    if (errno || value < low || value > high) {
        return fail(STATUS_INVALID,
                    "expected a whole number from %" PRId64 " to %" PRId64 ", got \"%.*s\"", low,
                    high, SHOWN_MAX, text);
    }
    *value_out = value;
    return STATUS_OK;
}

static Status parse_unsigned(const ProtobufCFieldDescriptor *field, const char *text, uint64_t high,
                             uint64_t *value_out)
{
    char *end = NULL;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (end == text || *end || text[0] == ' ') {
        return fail_value(field, text);
    }
    if (errno || text[0] == '-' || value > high) {
        return fail(STATUS_INVALID, "expected a whole number from 0 to %" PRIu64 ", got \"%.*s\"",
                    high, SHOWN_MAX, text);
    }
    *value_out = value;
    return STATUS_OK;
}

static Status parse_double(const ProtobufCFieldDescriptor *field, const char *text,
                           double *value_out)
{
    char *end = NULL;
    errno = 0;
    double value = strtod(text, &end);
    if (end == text || *end || text[0] == ' ') {
        return fail_value(field, text);
    }
    if (!isfinite(value) || (errno == ERANGE && value != 0.0)) {
        return fail(STATUS_INVALID, "expected a finite number, got \"%.*s\"", SHOWN_MAX, text);
    }
    *value_out = value;
    return STATUS_OK;
}

static Status parse_bool(const ProtobufCFieldDescriptor *field, const char *text,
                         protobuf_c_boolean *value_out)
{
    if (strcmp(text, "true") == 0) {
        *value_out = true;
    } else if (strcmp(text, "false") == 0) {
        *value_out = false;
    } else {
        return fail_value(field, text);
    }
    return STATUS_OK;
}

static Status parse_enum(const ProtobufCFieldDescriptor *field, const char *text, int *value_out)
{
    const ProtobufCEnumDescriptor *descriptor = field->descriptor;
    const ProtobufCEnumValue *found =
        protobuf_c_enum_descriptor_get_value_by_name(descriptor, text);
    if (found) {
        *value_out = found->value;
        return STATUS_OK;
    }
    char names[256];
    size_t used = 0;
    names[0] = '\0';
    for (unsigned i = 0; i < descriptor->n_values && used < sizeof names; i++) {
        if (descriptor->values[i].value != 0) { /* zero stands for "not given" */
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "",
                                     descriptor->values[i].name);
        }
    }
    return fail(STATUS_INVALID, "expected one of %s, got \"%.*s\"", names, SHOWN_MAX, text);
}

/* "1h30m", "45s", "1.5s", "250ms": numbers with units, largest unit first is usual but not asked
 * for. */
static Status parse_duration_ms(const ProtobufCFieldDescriptor *field, const char *text,
                                int64_t *duration_ms_out)
{
    static const struct {
        const char *unit;
        double ms;
    } units[] = {{"ms", 1}, {"s", 1e3}, {"m", 60e3}, {"h", 3600e3}, {"d", 86400e3}};
    const double max_ms = 3650.0 * 86400e3; /* ten years: more is a mistake */
    double total_ms = 0;
    const char *at = text;
    while (*at || at == text) {
        char *end = NULL;
        if (*at < '0' || *at > '9') {
            return fail_value(field, text);
        }
        double value = strtod(at, &end);
        double unit_ms = 0;
        for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
            size_t length = strlen(units[i].unit);
            int after = strncmp(end, units[i].unit, length) == 0 ? end[length] : 'x';
            if (unit_ms == 0 && (after == '\0' || (after >= '0' && after <= '9'))) {
                unit_ms = units[i].ms;
                at = end + length;
            }
        }
        total_ms += value * unit_ms;
        if (unit_ms == 0 || !(total_ms <= max_ms)) {
            return fail_value(field, text);
        }
    }
    *duration_ms_out = (int64_t)(total_ms + 0.5);
    return STATUS_OK;
}

static bool is_utf8(const char *text)
{
    const unsigned char *c = (const unsigned char *)text;
    while (*c) {
        int more = *c < 0x80                  ? 0
                   : *c >= 0xc2 && *c <= 0xdf ? 1
                   : *c >= 0xe0 && *c <= 0xef ? 2
                   : *c >= 0xf0 && *c <= 0xf4 ? 3
                                              : -1;
        if (more < 0) {
            return false;
        }
        c++;
        for (; more > 0; more--, c++) {
            if ((*c & 0xc0) != 0x80) {
                return false;
            }
        }
    }
    return true;
}

/* The largest of the scalar values, as memory to copy into a field or append. */
typedef union Value {
    int32_t int32;
    int64_t int64;
    uint32_t uint32;
    uint64_t uint64;
    float float32;
    double float64;
    protobuf_c_boolean boolean;
    int enumerator;
    void *pointer;
} Value;

static Status parse_pointer(const ProtobufCFieldDescriptor *field, const char *text,
                            Value *value_out)
{
    if (field->type == PROTOBUF_C_TYPE_STRING) {
        if (!is_utf8(text)) {
            return fail(STATUS_INVALID, "expected UTF-8 text");
        }
        char *copy = NULL;
        TRY(memory_copy_text(text, &copy));
        value_out->pointer = copy;
        return STATUS_OK;
    }
    int64_t duration_ms = 0;
    Google__Protobuf__Duration *duration = NULL;
    TRY(parse_duration_ms(field, text, &duration_ms));
    TRY(message_set_duration(&duration, duration_ms));
    value_out->pointer = duration;
    return STATUS_OK;
}

static Status parse_value(const ProtobufCFieldDescriptor *field, const char *text, Value *value_out,
                          size_t *bytes_out)
{
    int64_t number = 0;
    uint64_t natural = 0;
    double real = 0;
    switch (field->type) {
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SINT32:
    case PROTOBUF_C_TYPE_SFIXED32:
        TRY(parse_signed(field, text, INT32_MIN, INT32_MAX, &number));
        value_out->int32 = (int32_t)number;
        *bytes_out = sizeof value_out->int32;
        return STATUS_OK;
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
        *bytes_out = sizeof value_out->int64;
        return parse_signed(field, text, INT64_MIN, INT64_MAX, &value_out->int64);
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32:
        TRY(parse_unsigned(field, text, UINT32_MAX, &natural));
        value_out->uint32 = (uint32_t)natural;
        *bytes_out = sizeof value_out->uint32;
        return STATUS_OK;
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
        *bytes_out = sizeof value_out->uint64;
        return parse_unsigned(field, text, UINT64_MAX, &value_out->uint64);
    case PROTOBUF_C_TYPE_FLOAT:
        TRY(parse_double(field, text, &real));
        value_out->float32 = (float)real;
        *bytes_out = sizeof value_out->float32;
        return STATUS_OK;
    case PROTOBUF_C_TYPE_DOUBLE:
        *bytes_out = sizeof value_out->float64;
        return parse_double(field, text, &value_out->float64);
    case PROTOBUF_C_TYPE_BOOL:
        *bytes_out = sizeof value_out->boolean;
        return parse_bool(field, text, &value_out->boolean);
    case PROTOBUF_C_TYPE_ENUM:
        *bytes_out = sizeof value_out->enumerator;
        return parse_enum(field, text, &value_out->enumerator);
    default:
        *bytes_out = sizeof value_out->pointer;
        return parse_pointer(field, text, value_out);
    }
}

static void free_value(const ProtobufCFieldDescriptor *field, void *pointer)
{
    if (field->type == PROTOBUF_C_TYPE_STRING) {
        if (pointer != protobuf_c_empty_string) {
            memory_free(pointer);
        }
    } else if (field->type == PROTOBUF_C_TYPE_MESSAGE && pointer) {
        protobuf_c_message_free_unpacked(pointer, NULL);
    }
}

Status field_value_set(ProtobufCMessage *message, const ProtobufCFieldDescriptor *field,
                       const char *text)
{
    CHECK(field_value_is_scalar(field));
    if (field->type == PROTOBUF_C_TYPE_BYTES) {
        return fail(STATUS_INVALID, "bytes cannot be given as text");
    }
    if (strnlen(text, TEXT_BYTES_MAX) == TEXT_BYTES_MAX) {
        return fail(STATUS_INVALID, "expected at most %d bytes", TEXT_BYTES_MAX - 1);
    }
    Value value = {0};
    size_t bytes = 0;
    TRY(parse_value(field, text, &value, &bytes));
    if (field->label == PROTOBUF_C_LABEL_REPEATED) {
        Status status = message_append(message, field, &value);
        if (status != STATUS_OK) {
            free_value(field, value.pointer);
        }
        return status;
    }
    void *member = (char *)message + field->offset;
    if (field->type == PROTOBUF_C_TYPE_STRING || field->type == PROTOBUF_C_TYPE_MESSAGE) {
        free_value(field, *(void **)member);
    }
    memcpy(member, &value, bytes);
    return STATUS_OK;
}

Status field_value_find(const ProtobufCMessageDescriptor *descriptor, const char *name,
                        const ProtobufCFieldDescriptor **field_out)
{
    const ProtobufCFieldDescriptor *found =
        protobuf_c_message_descriptor_get_field_by_name(descriptor, name);
    if (found) {
        *field_out = found;
        return STATUS_OK;
    }
    const char *nearest = NULL;
    int nearest_distance = 4; /* farther names are no help */
    for (unsigned i = 0; i < descriptor->n_fields; i++) {
        int distance = config_edit_distance(name, descriptor->fields[i].name);
        if (distance < nearest_distance) {
            nearest_distance = distance;
            nearest = descriptor->fields[i].name;
        }
    }
    if (nearest) {
        return fail(STATUS_INVALID, "unknown field \"%.*s\" of %s; did you mean \"%s\"?", SHOWN_MAX,
                    name, descriptor->short_name, nearest);
    }
    return fail(STATUS_INVALID, "unknown field \"%.*s\" of %s", SHOWN_MAX, name,
                descriptor->short_name);
}
