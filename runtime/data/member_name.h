/* MemberName: what the name of a tar member says by WebDataset's rules: the key up to the first dot
 * after the last slash, then what it holds.
 * Threading: pure functions.
 */
#ifndef DATA_MEMBER_NAME_H
#define DATA_MEMBER_NAME_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

enum {
    MEMBER_SUFFIX_BYTES = 12, /* "9999.jpeg" and a zero */
    MEMBER_ITEMS_MAX = 10000, /* images, or clips, of one sample */
};

typedef enum MemberKind {
    MEMBER_KIND_NONE,  /* belongs to no sample: no key or no extension */
    MEMBER_KIND_OTHER, /* of a sample, not used */
    MEMBER_KIND_CAPTION,
    MEMBER_KIND_JSON,
    MEMBER_KIND_IMAGE,
    MEMBER_KIND_AUDIO,
} MemberKind;

typedef struct MemberName {
    MemberKind kind;
    size_t key_bytes;   /* the key is the beginning of the name */
    const char *suffix; /* after the key's dot; borrowed from the name */
    int32_t number;     /* of an image ".3.png" or a clip; -1 for ".png" */
} MemberName;

/* STATUS_INVALID, STATUS_UNSUPPORTED: a name that would lose data in silence: a second dot in the
 * base name, a picture or a sound of another format. */
Status member_name_parse(const char *name, MemberName *parsed_out) STATUS_CHECKED;

#endif
