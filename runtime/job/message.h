/* Message: what protobuf-c leaves to its users: building messages field by field, copying them, and
 * writing them as JSON or YAML, all by their descriptors, so that a new field of the contract needs
 * no code here.
 *
 * Everything made here is freed by protobuf_c_message_free_unpacked(message, NULL).
 * Threading: pure functions.
 */
#ifndef JOB_MESSAGE_H
#define JOB_MESSAGE_H

#include "base/status.h"
#include "google/protobuf/duration.pb-c.h"
#include "google/protobuf/timestamp.pb-c.h"

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* An empty message. */
Status message_create(const ProtobufCMessageDescriptor *descriptor,
                      ProtobufCMessage **message_out) STATUS_CHECKED;

/* A deep copy. */
Status message_copy(const ProtobufCMessage *message, ProtobufCMessage **copy_out) STATUS_CHECKED;

/* Replaces a string field by a copy of `text`. */
Status message_set_text(char **field, const char *text) STATUS_CHECKED;
/* Frees the texts of a repeated field and makes it empty. */
void message_drop_texts(char **texts, size_t *num_texts);

/* Appends to a repeated field. `element` points to the value: int32_t, char *, ProtobufCMessage *,
 * ...; strings and messages are taken. */
Status message_append(ProtobufCMessage *message, const ProtobufCFieldDescriptor *field,
                      const void *element) STATUS_CHECKED;

/* A map<> field arrives as a repeated message with the two fields key and value. */
bool message_field_is_map(const ProtobufCFieldDescriptor *field);

/* Milliseconds of a duration, 0 for NULL, saturating. */
int64_t message_duration_ms(const Google__Protobuf__Duration *duration);
Status message_set_duration(Google__Protobuf__Duration **field, int64_t duration_ms) STATUS_CHECKED;
/* wall_ms: milliseconds since 1970; 0 leaves the field unset. */
Status message_set_timestamp(Google__Protobuf__Timestamp **field, int64_t wall_ms) STATUS_CHECKED;

/* "RUNNING"; "UNKNOWN" for a value that this build does not know. */
const char *message_enum_name(const ProtobufCEnumDescriptor *descriptor, int value);

typedef enum MessageFormat {
    MESSAGE_FORMAT_JSON,
    MESSAGE_FORMAT_YAML,
} MessageFormat;

/* Writes a message with the field names of the contract: enums by name, durations as "30s", times
 * as RFC 3339, map<> as a mapping, bytes in hex. Fields that hold their default are left out. Ends
 * with a new line. */
void message_print(FILE *file, const ProtobufCMessage *message, MessageFormat format);

/* The same for several messages, as a list. */
void message_print_list(FILE *file, const ProtobufCMessage *const *messages, size_t count,
                        MessageFormat format);

/* A JSON string, quotes included. */
void message_print_quoted(FILE *file, const char *text);

#endif
