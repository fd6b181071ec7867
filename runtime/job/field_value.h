/* FieldValue: text to a protobuf field and the lookup of fields by name, for job files and --set.
 *
 * Errors say what was expected and what was found, without a place: the caller knows file, line and
 * path.
 * Threading: pure functions.
 */
#ifndef JOB_FIELD_VALUE_H
#define JOB_FIELD_VALUE_H

#include "job/message.h"

/* Whether one scalar text gives the field's (or its elements') value: all but messages; durations
 * count as scalars. */
bool field_value_is_scalar(const ProtobufCFieldDescriptor *field);

/* Sets the field, or appends to a repeated one. STATUS_INVALID, STATUS_NO_MEMORY. */
Status field_value_set(ProtobufCMessage *message, const ProtobufCFieldDescriptor *field,
                       const char *text) STATUS_CHECKED;

/* The field of that name. STATUS_INVALID: "unknown field "stpes" of TrainingSpec; did you mean
 * "steps"?" */
Status field_value_find(const ProtobufCMessageDescriptor *descriptor, const char *name,
                        const ProtobufCFieldDescriptor **field_out) STATUS_CHECKED;

/* "a whole number", "a duration such as 30s", ... */
const char *field_value_expected(const ProtobufCFieldDescriptor *field);

#endif
