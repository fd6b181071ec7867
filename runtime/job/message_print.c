/* The printing half of message.h: one walk over a message by its descriptors, and a writer that
 * knows JSON and YAML. */
#include "base/memory.h"
#include "job/message.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>
#include <time.h>

enum {
    DEPTH_MAX = 32 /* the contract's messages nest five deep */
};

typedef struct Writer {
    FILE *file;
    MessageFormat format;
    int depth;
    bool is_list[DEPTH_MAX];
    size_t count[DEPTH_MAX]; /* elements written at that depth */
    bool after_dash;         /* YAML: the next key goes on the line of its "- " */
    bool newline_due; /* YAML: a block was opened after its key; its first element ends the line */
} Writer;

void message_print_quoted(FILE *file, const char *text)
{
    fputc('"', file);
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        if (*c == '"' || *c == '\\') {
            fprintf(file, "\\%c", *c);
        } else if (*c == '\n') {
            fputs("\\n", file);
        } else if (*c == '\t') {
            fputs("\\t", file);
        } else if (*c < 0x20 || *c == 0x7f) {
            fprintf(file, "\\u%04x", *c);
        } else {
            fputc(*c, file);
        }
    }
    fputc('"', file);
}

static void indent(Writer *writer, int levels)
{
    fprintf(writer->file, "%*s", levels * 2, "");
}

/* Before an element of the current list or mapping. */
static void begin_element(Writer *writer)
{
    if (writer->depth == 0) {
        return;
    }
    size_t *count = &writer->count[writer->depth - 1];
    if (writer->newline_due) {
        fputc('\n', writer->file);
        writer->newline_due = false;
    }
    if (writer->format == MESSAGE_FORMAT_JSON) {
        fputs(*count > 0 ? ",\n" : "\n", writer->file);
        indent(writer, writer->depth);
    } else if (writer->after_dash) {
        writer->after_dash = false;
    } else {
        indent(writer, writer->depth - 1);
    }
    ++*count;
}

static void write_key(Writer *writer, const char *name, bool is_scalar)
{
    begin_element(writer);
    if (writer->format == MESSAGE_FORMAT_JSON) {
        message_print_quoted(writer->file, name);
        fputs(": ", writer->file);
    } else {
        fprintf(writer->file, "%s:%s", name, is_scalar ? " " : "");
    }
}

/* An element of a list; its value follows. */
static void write_item(Writer *writer, bool is_scalar)
{
    begin_element(writer);
    if (writer->format == MESSAGE_FORMAT_YAML) {
        fputs("- ", writer->file);
        writer->after_dash = !is_scalar;
    }
}

static void open_block(Writer *writer, bool is_list)
{
    CHECK(writer->depth < DEPTH_MAX);
    if (writer->format == MESSAGE_FORMAT_JSON) {
        fputc(is_list ? '[' : '{', writer->file);
    } else if (!writer->after_dash && writer->depth > 0) {
        writer->newline_due = true;
    }
    writer->is_list[writer->depth] = is_list;
    writer->count[writer->depth] = 0;
    writer->depth++;
}

static void close_block(Writer *writer)
{
    writer->depth--;
    bool is_empty = writer->count[writer->depth] == 0;
    bool is_list = writer->is_list[writer->depth];
    if (writer->format == MESSAGE_FORMAT_JSON) {
        if (!is_empty) {
            fputc('\n', writer->file);
            indent(writer, writer->depth);
        }
        fputc(is_list ? ']' : '}', writer->file);
    } else if (is_empty) {
        fprintf(writer->file, "%s%s\n", writer->newline_due ? " " : "", is_list ? "[]" : "{}");
        writer->after_dash = false;
        writer->newline_due = false;
    }
}

static void end_scalar(Writer *writer)
{
    if (writer->format == MESSAGE_FORMAT_YAML) {
        fputc('\n', writer->file);
    }
}

/* YAML needs no quotes for plain words that cannot be taken for something else. */
static bool is_plain(const char *text)
{
    static const char *const others[] = {"true", "false", "null", "yes", "no",
                                         "on",   "off",   "y",    "n"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        if (strcasecmp(text, others[i]) == 0) {
            return false;
        }
    }
    bool letter_first =
        (text[0] >= 'a' && text[0] <= 'z') || (text[0] >= 'A' && text[0] <= 'Z') || text[0] == '/';
    return letter_first && strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                        "0123456789_-./") == strlen(text);
}

static void write_text(Writer *writer, const char *text)
{
    if (writer->format == MESSAGE_FORMAT_YAML && is_plain(text)) {
        fputs(text, writer->file);
    } else {
        message_print_quoted(writer->file, text);
    }
}

static void write_number(Writer *writer, double value)
{
    char text[40];
    if (!isfinite(value)) {
        write_text(writer, isnan(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity");
        return;
    }
    snprintf(text, sizeof text, "%.15g", value);
    if (strtod(text, NULL) != value) {
        snprintf(text, sizeof text, "%.17g", value);
    }
    fputs(text, writer->file);
}

static void write_bytes(Writer *writer, const ProtobufCBinaryData *bytes)
{
    fputc('"', writer->file);
    for (size_t i = 0; i < bytes->len; i++) {
        fprintf(writer->file, "%02x", bytes->data[i]);
    }
    fputc('"', writer->file);
}

static void write_timestamp(Writer *writer, const Google__Protobuf__Timestamp *stamp)
{
    time_t seconds = (time_t)stamp->seconds;
    struct tm parts;
    gmtime_r(&seconds, &parts);
    char text[64];
    size_t used = strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &parts);
    snprintf(text + used, sizeof text - used, ".%03dZ", stamp->nanos / 1000000);
    message_print_quoted(writer->file, text);
}

static void write_duration(Writer *writer, const Google__Protobuf__Duration *duration)
{
    char text[64];
    if (duration->nanos == 0) {
        snprintf(text, sizeof text, "%" PRId64 "s", duration->seconds);
    } else {
        snprintf(text, sizeof text, "%" PRId64 ".%03ds", duration->seconds,
                 duration->nanos / 1000000);
    }
    message_print_quoted(writer->file, text);
}

static bool is_time(const ProtobufCMessageDescriptor *descriptor)
{
    return descriptor == &google__protobuf__timestamp__descriptor ||
           descriptor == &google__protobuf__duration__descriptor;
}

static bool field_is_scalar(const ProtobufCFieldDescriptor *field)
{
    return field->type != PROTOBUF_C_TYPE_MESSAGE || is_time(field->descriptor);
}

static void write_scalar(Writer *writer, const ProtobufCFieldDescriptor *field, const void *value)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
        fprintf(writer->file, "%" PRId64, *(const int64_t *)value);
        break;
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
        fprintf(writer->file, "%" PRIu64, *(const uint64_t *)value);
        break;
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32:
        fprintf(writer->file, "%" PRIu32, *(const uint32_t *)value);
        break;
    case PROTOBUF_C_TYPE_FLOAT:
        write_number(writer, (double)*(const float *)value);
        break;
    case PROTOBUF_C_TYPE_DOUBLE:
        write_number(writer, *(const double *)value);
        break;
    case PROTOBUF_C_TYPE_BOOL:
        fputs(*(const protobuf_c_boolean *)value ? "true" : "false", writer->file);
        break;
    case PROTOBUF_C_TYPE_ENUM:
        write_text(writer, message_enum_name(field->descriptor, *(const int *)value));
        break;
    case PROTOBUF_C_TYPE_STRING:
        write_text(writer, *(char *const *)value);
        break;
    case PROTOBUF_C_TYPE_BYTES:
        write_bytes(writer, value);
        break;
    case PROTOBUF_C_TYPE_MESSAGE:
        if (field->descriptor == &google__protobuf__duration__descriptor) {
            write_duration(writer, *(Google__Protobuf__Duration *const *)value);
        } else {
            write_timestamp(writer, *(Google__Protobuf__Timestamp *const *)value);
        }
        break;
    default:
        fprintf(writer->file, "%" PRId32, *(const int32_t *)value);
        break;
    }
    end_scalar(writer);
}

static size_t element_stride(const ProtobufCFieldDescriptor *field)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE:
        return sizeof(void *);
    case PROTOBUF_C_TYPE_BYTES:
        return sizeof(ProtobufCBinaryData);
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_DOUBLE:
        return 8;
    default:
        return 4; /* bool too: protobuf_c_boolean is an int */
    }
}
_Static_assert(sizeof(protobuf_c_boolean) == 4, "element_stride counts on it");

/* Number of elements that a field holds: 0 or 1 unless repeated. Defaults count as absent. */
static size_t field_count(const ProtobufCMessage *message, const ProtobufCFieldDescriptor *field)
{
    const char *base = (const char *)message;
    const void *value = base + field->offset;
    if (field->label == PROTOBUF_C_LABEL_REPEATED) {
        return *(const size_t *)(const void *)(base + field->quantifier_offset);
    }
    switch (field->type) {
    case PROTOBUF_C_TYPE_STRING: {
        const char *text = *(char *const *)value;
        return text && text[0];
    }
    case PROTOBUF_C_TYPE_MESSAGE:
        return *(void *const *)value != NULL;
    case PROTOBUF_C_TYPE_BYTES:
        return ((const ProtobufCBinaryData *)value)->len > 0;
    default:
        break;
    }
    static const char zeros[8];
    return memcmp(value, zeros, element_stride(field)) != 0;
}

/* Where the walk stands in one message. */
typedef struct Place {
    const ProtobufCMessage *message;
    size_t element;
    unsigned field;
    bool list_open;
} Place;

static const void *element_at(const Place *place, const ProtobufCFieldDescriptor *field)
{
    const char *value = (const char *)place->message + field->offset;
    if (field->label != PROTOBUF_C_LABEL_REPEATED) {
        return value;
    }
    const char *array = *(char *const *)(const void *)value;
    return array + place->element * element_stride(field);
}

/* Writes the map entries of a field; map values of the contract are scalars. */
static void write_map(Writer *writer, const Place *place, const ProtobufCFieldDescriptor *field,
                      size_t count)
{
    const ProtobufCMessageDescriptor *entry = field->descriptor;
    write_key(writer, field->name, false);
    open_block(writer, false);
    for (size_t i = 0; i < count; i++) {
        Place at = {.message = place->message, .element = i, .field = place->field};
        const char *pair = *(char *const *)element_at(&at, field);
        const char *key = *(char *const *)(const void *)(pair + entry->fields[0].offset);
        write_key(writer, key, true);
        write_scalar(writer, &entry->fields[1], pair + entry->fields[1].offset);
    }
    close_block(writer);
}

/* One field of a message, or one element of a repeated one. Returns the message to go down into, or
 * NULL. */
static const ProtobufCMessage *write_next(Writer *writer, Place *place)
{
    const ProtobufCFieldDescriptor *field = &place->message->descriptor->fields[place->field];
    size_t count = field_count(place->message, field);
    bool is_list = field->label == PROTOBUF_C_LABEL_REPEATED;
    bool is_scalar = field_is_scalar(field);
    if (place->element == count) {
        if (place->list_open) {
            close_block(writer);
        }
        place->field++;
        place->element = 0;
        place->list_open = false;
        return NULL;
    }
    if (message_field_is_map(field)) {
        write_map(writer, place, field, count);
        place->element = count;
        return NULL;
    }
    if (is_list) {
        if (!place->list_open) {
            write_key(writer, field->name, false);
            open_block(writer, true);
            place->list_open = true;
        }
        write_item(writer, is_scalar);
    } else {
        write_key(writer, field->name, is_scalar);
    }
    const void *value = element_at(place, field);
    place->element++;
    if (is_scalar) {
        write_scalar(writer, field, value);
        return NULL;
    }
    return *(ProtobufCMessage *const *)value;
}

static void write_message(Writer *writer, const ProtobufCMessage *message)
{
    Place places[DEPTH_MAX];
    int depth = 0;
    places[depth++] = (Place){.message = message};
    open_block(writer, false);
    while (depth > 0) {
        Place *place = &places[depth - 1];
        if (place->field == place->message->descriptor->n_fields) {
            close_block(writer);
            depth--;
            continue;
        }
        const ProtobufCMessage *inner = write_next(writer, place);
        if (inner) {
            CHECK(depth < DEPTH_MAX);
            places[depth++] = (Place){.message = inner};
            open_block(writer, false);
        }
    }
}

void message_print(FILE *file, const ProtobufCMessage *message, MessageFormat format)
{
    Writer writer = {.file = file, .format = format};
    write_message(&writer, message);
    if (format == MESSAGE_FORMAT_JSON) {
        fputc('\n', file);
    }
}

void message_print_list(FILE *file, const ProtobufCMessage *const *messages, size_t count,
                        MessageFormat format)
{
    Writer writer = {.file = file, .format = format};
    open_block(&writer, true);
    for (size_t i = 0; i < count; i++) {
        write_item(&writer, false);
        write_message(&writer, messages[i]);
    }
    close_block(&writer);
    if (format == MESSAGE_FORMAT_JSON) {
        fputc('\n', file);
    }
}
