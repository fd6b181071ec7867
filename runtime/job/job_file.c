#include "job/job_file.h"

#include "base/memory.h"
#include "job/field_value.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <yaml.h>

enum {
    FILE_BYTES_MAX = 1 << 20,
    DEPTH_MAX = 12, /* a JobSpec nests four deep */
    NODES_MAX = 100000,
    FIELDS_MAX = 64, /* of one message: one bit each */
    PATH_BYTES = 256
};

typedef enum FrameKind {
    FRAME_KIND_MESSAGE, /* a mapping of fields */
    FRAME_KIND_LIST,    /* a sequence: elements of `field` */
    FRAME_KIND_MAP,     /* a mapping: entries of the map<> `field` */
} FrameKind;

/* One open mapping or sequence. */
typedef struct Frame {
    FrameKind kind;
    ProtobufCMessage *message;             /* into which values go */
    const ProtobufCFieldDescriptor *field; /* MESSAGE: whose value comes next, NULL: a key comes */
    ProtobufCMessage *entry;               /* MAP: whose value comes next, NULL: a key comes */
    uint64_t seen;                         /* MESSAGE: fields given so far */
    size_t count;                          /* LIST: elements so far */
} Frame;

typedef struct Reader {
    const char *name;
    yaml_mark_t mark; /* of the event at hand */
    Frame frames[DEPTH_MAX];
    int depth;
    int nodes;
    bool done;
} Reader;

/* "modules[0].tp", from the frames that are open. */
static void write_path(const Reader *reader, char *path, size_t size)
{
    size_t used = 0;
    path[0] = '\0';
    for (int i = 0; i < reader->depth && used < size; i++) {
        const Frame *frame = &reader->frames[i];
        if (frame->kind == FRAME_KIND_MESSAGE && frame->field) {
            used += (size_t)snprintf(path + used, size - used, "%s%s", used ? "." : "",
                                     frame->field->name);
        } else if (frame->kind == FRAME_KIND_LIST) {
            used += (size_t)snprintf(path + used, size - used, "[%zu]", frame->count);
        }
    }
}

/* Puts file, line, column and field before the message at hand. */
static Status fail_here(const Reader *reader, Status status)
{
    char path[PATH_BYTES];
    write_path(reader, path, sizeof path);
    return fail(status, "%s:%zu:%zu: %s%s%s", reader->name, reader->mark.line + 1,
                reader->mark.column + 1, path, path[0] ? ": " : "", status_message());
}

static Status push(Reader *reader, FrameKind kind, ProtobufCMessage *message,
                   const ProtobufCFieldDescriptor *field)
{
    if (reader->depth == DEPTH_MAX) {
        return fail(STATUS_INVALID, "nested more than %d deep", DEPTH_MAX);
    }
    reader->frames[reader->depth++] = (Frame){.kind = kind, .message = message, .field = field};
    return STATUS_OK;
}

/* A value of the top frame has been read. */
static void value_done(Reader *reader)
{
    if (reader->depth == 0) {
        reader->done = true;
        return;
    }
    Frame *frame = &reader->frames[reader->depth - 1];
    if (frame->kind == FRAME_KIND_MESSAGE) {
        frame->field = NULL;
    } else if (frame->kind == FRAME_KIND_LIST) {
        frame->count++;
    } else {
        frame->entry = NULL;
    }
}

static Status read_key(Frame *frame, const char *key)
{
    const ProtobufCFieldDescriptor *field = NULL;
    const ProtobufCMessageDescriptor *descriptor = frame->message->descriptor;
    TRY(field_value_find(descriptor, key, &field));
    size_t index = (size_t)(field - descriptor->fields);
    CHECK(index < FIELDS_MAX);
    if (frame->seen & (UINT64_C(1) << index)) {
        return fail(STATUS_INVALID, "\"%s\" is given twice", key);
    }
    frame->seen |= UINT64_C(1) << index;
    frame->field = field;
    return STATUS_OK;
}

static Status read_map_key(Frame *frame, const char *key)
{
    const char *base = (const char *)frame->message;
    size_t count = *(const size_t *)(const void *)(base + frame->field->quantifier_offset);
    char *const *entries = *(char *const *const *)(const void *)(base + frame->field->offset);
    const ProtobufCMessageDescriptor *descriptor = frame->field->descriptor;
    for (size_t i = 0; i < count; i++) {
        const char *other =
            *(char *const *)(const void *)(entries[i] + descriptor->fields[0].offset);
        if (strcmp(other, key) == 0) {
            return fail(STATUS_INVALID, "\"%.60s\" is given twice", key);
        }
    }
    ProtobufCMessage *entry = NULL;
    TRY(message_create(descriptor, &entry));
    Status status = field_value_set(entry, &descriptor->fields[0], key);
    if (status == STATUS_OK) {
        status = message_append(frame->message, frame->field, &entry);
    }
    if (status != STATUS_OK) {
        protobuf_c_message_free_unpacked(entry, NULL);
        return status;
    }
    frame->entry = entry;
    return STATUS_OK;
}

/* Opens the mapping of a message field, or of one more element of a repeated one. */
static Status open_message(Reader *reader, ProtobufCMessage *message,
                           const ProtobufCFieldDescriptor *field)
{
    ProtobufCMessage *inner = NULL;
    TRY(message_create(field->descriptor, &inner));
    if (field->label == PROTOBUF_C_LABEL_REPEATED) {
        Status status = message_append(message, field, &inner);
        if (status != STATUS_OK) {
            protobuf_c_message_free_unpacked(inner, NULL);
            return status;
        }
    } else {
        *(ProtobufCMessage **)(void *)((char *)message + field->offset) = inner;
    }
    return push(reader, FRAME_KIND_MESSAGE, inner, NULL);
}

static Status read_scalar(Reader *reader, const yaml_event_t *event)
{
    const char *text = (const char *)event->data.scalar.value;
    if (memchr(text, '\0', event->data.scalar.length)) {
        return fail(STATUS_INVALID, "a zero byte is not allowed in a text");
    }
    if (reader->depth == 0) {
        return fail(STATUS_INVALID, "expected a mapping of fields, got \"%.60s\"", text);
    }
    Frame *frame = &reader->frames[reader->depth - 1];
    if (frame->kind == FRAME_KIND_MESSAGE && !frame->field) {
        return read_key(frame, text);
    }
    if (frame->kind == FRAME_KIND_MAP && !frame->entry) {
        return read_map_key(frame, text);
    }
    const ProtobufCFieldDescriptor *field = frame->field;
    ProtobufCMessage *message = frame->message;
    if (frame->kind == FRAME_KIND_MAP) {
        message = frame->entry;
        field = &message->descriptor->fields[1];
    } else if (frame->kind == FRAME_KIND_MESSAGE && field->label == PROTOBUF_C_LABEL_REPEATED) {
        return fail(STATUS_INVALID, "expected a %s, got \"%.60s\"",
                    message_field_is_map(field) ? "mapping" : "list", text);
    }
    if (!field_value_is_scalar(field)) {
        return fail(STATUS_INVALID, "expected %s, got \"%.60s\"", field_value_expected(field),
                    text);
    }
    bool is_number = field->type != PROTOBUF_C_TYPE_STRING && field->type != PROTOBUF_C_TYPE_ENUM &&
                     field->type != PROTOBUF_C_TYPE_MESSAGE;
    if (is_number && event->data.scalar.style != YAML_PLAIN_SCALAR_STYLE) {
        return fail(STATUS_INVALID, "expected %s, got the quoted text \"%.60s\"",
                    field_value_expected(field), text);
    }
    TRY(field_value_set(message, field, text));
    value_done(reader);
    return STATUS_OK;
}

static Status open_mapping(Reader *reader, JobSpec *spec)
{
    if (reader->depth == 0) {
        return push(reader, FRAME_KIND_MESSAGE, &spec->base, NULL);
    }
    Frame *frame = &reader->frames[reader->depth - 1];
    const ProtobufCFieldDescriptor *field = frame->field;
    if ((frame->kind == FRAME_KIND_MESSAGE && !field) || frame->kind == FRAME_KIND_MAP) {
        return fail(STATUS_INVALID, "expected a %s, got a mapping",
                    frame->kind == FRAME_KIND_MAP && frame->entry ? "text" : "name");
    }
    if (frame->kind == FRAME_KIND_MESSAGE && message_field_is_map(field)) {
        return push(reader, FRAME_KIND_MAP, frame->message, field);
    }
    if (frame->kind == FRAME_KIND_MESSAGE && field->label == PROTOBUF_C_LABEL_REPEATED) {
        return fail(STATUS_INVALID, "expected a list, got a mapping");
    }
    if (field_value_is_scalar(field)) {
        return fail(STATUS_INVALID, "expected %s, got a mapping", field_value_expected(field));
    }
    return open_message(reader, frame->message, field);
}

static Status open_sequence(Reader *reader)
{
    Frame *frame = reader->depth ? &reader->frames[reader->depth - 1] : NULL;
    if (!frame) {
        return fail(STATUS_INVALID, "expected a mapping of fields, got a list");
    }
    bool takes_list = frame->kind == FRAME_KIND_MESSAGE && frame->field &&
                      frame->field->label == PROTOBUF_C_LABEL_REPEATED &&
                      !message_field_is_map(frame->field);
    if (!takes_list) {
        const char *expected = frame->kind == FRAME_KIND_MESSAGE && !frame->field ? "a name"
                               : frame->kind == FRAME_KIND_MAP                    ? "a text"
                               : message_field_is_map(frame->field)
                                   ? "a mapping"
                                   : field_value_expected(frame->field);
        return fail(STATUS_INVALID, "expected %s, got a list", expected);
    }
    return push(reader, FRAME_KIND_LIST, frame->message, frame->field);
}

static Status read_event(Reader *reader, const yaml_event_t *event, JobSpec *spec)
{
    if (++reader->nodes > NODES_MAX) {
        return fail(STATUS_INVALID, "more than %d values", NODES_MAX);
    }
    switch (event->type) {
    case YAML_SCALAR_EVENT:
        return read_scalar(reader, event);
    case YAML_MAPPING_START_EVENT:
        return open_mapping(reader, spec);
    case YAML_SEQUENCE_START_EVENT:
        return open_sequence(reader);
    case YAML_MAPPING_END_EVENT:
    case YAML_SEQUENCE_END_EVENT:
        reader->depth--;
        value_done(reader);
        return STATUS_OK;
    case YAML_ALIAS_EVENT:
        return fail(STATUS_INVALID, "aliases (*name) are not supported; write the value out");
    case YAML_DOCUMENT_START_EVENT:
        if (reader->done) {
            return fail(STATUS_INVALID, "expected one document, got a second one");
        }
        return STATUS_OK;
    default:
        return STATUS_OK;
    }
}

static Status read_all(Reader *reader, yaml_parser_t *parser, JobSpec *spec)
{
    yaml_event_type_t type = YAML_NO_EVENT;
    while (type != YAML_STREAM_END_EVENT) {
        yaml_event_t event;
        if (!yaml_parser_parse(parser, &event)) {
            if (parser->error == YAML_MEMORY_ERROR) {
                return fail(STATUS_NO_MEMORY, "%s: no memory to read it", reader->name);
            }
            bool is_reader = parser->error == YAML_READER_ERROR;
            return fail(STATUS_INVALID, "%s:%zu:%zu: not YAML: %s%s%s", reader->name,
                        is_reader ? parser->mark.line + 1 : parser->problem_mark.line + 1,
                        is_reader ? parser->mark.column + 1 : parser->problem_mark.column + 1,
                        parser->problem ? parser->problem : "syntax error",
                        parser->context ? " " : "", parser->context ? parser->context : "");
        }
        type = event.type;
        reader->mark = event.start_mark;
        Status status = read_event(reader, &event, spec);
        yaml_event_delete(&event);
        if (status != STATUS_OK) {
            return fail_here(reader, status);
        }
    }
    if (!reader->done) {
        return fail(STATUS_INVALID, "%s: empty, expected the fields of a job", reader->name);
    }
    return STATUS_OK;
}

Status job_file_parse(const char *name, const char *text, size_t size_bytes, JobSpec **spec_out)
{
    if (size_bytes > FILE_BYTES_MAX) {
        return fail(STATUS_INVALID, "%s: %zu bytes, expected at most %d", name, size_bytes,
                    FILE_BYTES_MAX);
    }
    ProtobufCMessage *message = NULL;
    TRY(message_create(&viaduct__v1__job_spec__descriptor, &message));
    JobSpec *spec = (JobSpec *)message;
    yaml_parser_t parser;
    if (!yaml_parser_initialize(&parser)) {
        viaduct__v1__job_spec__free_unpacked(spec, NULL);
        return fail(STATUS_NO_MEMORY, "%s: no memory to read it", name);
    }
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, size_bytes);
    Reader reader = {.name = name};
    Status status = read_all(&reader, &parser, spec);
    yaml_parser_delete(&parser);
    if (status != STATUS_OK) {
        viaduct__v1__job_spec__free_unpacked(spec, NULL);
        return status;
    }
    *spec_out = spec;
    return STATUS_OK;
}

static Status read_text(FILE *file, const char *path, char **text_out, size_t *size_out)
{
    char *text = NULL;
    TRY(MEMORY_NEW(&text, FILE_BYTES_MAX + 1));
    size_t size = fread(text, 1, FILE_BYTES_MAX + 1, file);
    if (ferror(file)) {
        memory_free(text);
        return fail(STATUS_IO, "%s: cannot read it: %s", path, strerror(errno));
    }
    *text_out = text;
    *size_out = size;
    return STATUS_OK;
}

Status job_file_read(const char *path, JobSpec **spec_out)
{
    FILE *file = fopen(path, "re");
    if (!file) {
        return fail(errno == ENOENT ? STATUS_NOT_FOUND : STATUS_IO, "%s: cannot open it: %s", path,
                    strerror(errno));
    }
    char *text = NULL;
    size_t size = 0;
    Status status = read_text(file, path, &text, &size);
    fclose(file);
    if (status != STATUS_OK) {
        return status_trace(status, __FILE__, __LINE__);
    }
    status = job_file_parse(path, text, size, spec_out);
    memory_free(text);
    return status;
}

/* The element of a repeated message field that `key` names: its number, or the text of its field
 * "name". */
static Status find_element(ProtobufCMessage *message, const ProtobufCFieldDescriptor *field,
                           const char *key, ProtobufCMessage **element_out)
{
    const char *base = (const char *)message;
    size_t count = *(const size_t *)(const void *)(base + field->quantifier_offset);
    ProtobufCMessage **elements =
        *(ProtobufCMessage * *const *)(const void *)(base + field->offset);
    const ProtobufCFieldDescriptor *name =
        protobuf_c_message_descriptor_get_field_by_name(field->descriptor, "name");
    for (size_t i = 0; i < count; i++) {
        char number[24];
        snprintf(number, sizeof number, "%zu", i);
        const char *own =
            name ? *(char *const *)(const void *)((const char *)elements[i] + name->offset)
                 : number;
        if (strcmp(key, number) == 0 || strcmp(key, own) == 0) {
            *element_out = elements[i];
            return STATUS_OK;
        }
    }
    return fail(STATUS_INVALID, "there is no element \"%s\" in %s, which has %zu", key, field->name,
                count);
}

static Status set_path(ProtobufCMessage *message, char *path, const char *value)
{
    char *rest = NULL;
    char *key = strtok_r(path, ".", &rest);
    while (key) {
        const ProtobufCFieldDescriptor *field = NULL;
        TRY(field_value_find(message->descriptor, key, &field));
        char *next = strtok_r(NULL, ".", &rest);
        if (!next) {
            if (field->label == PROTOBUF_C_LABEL_REPEATED || !field_value_is_scalar(field)) {
                return fail(STATUS_INVALID, "%s is not a single value: name a field of it", key);
            }
            return field_value_set(message, field, value);
        }
        if (field_value_is_scalar(field) || message_field_is_map(field)) {
            return fail(STATUS_INVALID, "%s has no field \"%s\"", key, next);
        }
        ProtobufCMessage **inner = (ProtobufCMessage **)(void *)((char *)message + field->offset);
        if (field->label == PROTOBUF_C_LABEL_REPEATED) {
            TRY(find_element(message, field, next, &message));
            next = strtok_r(NULL, ".", &rest);
        } else {
            if (!*inner) {
                TRY(message_create(field->descriptor, inner));
            }
            message = *inner;
        }
        key = next;
    }
    return fail(STATUS_INVALID, "expected a path of field names");
}

Status job_file_set(JobSpec *spec, const char *assignment)
{
    const char *equals = strchr(assignment, '=');
    char path[PATH_BYTES];
    if (!equals || equals == assignment || (size_t)(equals - assignment) >= sizeof path) {
        return fail(STATUS_INVALID, "\"%.100s\": expected FIELD=VALUE such as training.steps=100",
                    assignment);
    }
    memcpy(path, assignment, (size_t)(equals - assignment));
    path[equals - assignment] = '\0';
    Status status = set_path(&spec->base, path, equals + 1);
    if (status != STATUS_OK) {
        return fail(status, "%.*s: %s", (int)(equals - assignment), assignment, status_message());
    }
    return STATUS_OK;
}
