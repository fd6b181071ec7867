#include "data/member_name.h"

#include <stdbool.h>
#include <string.h>
#include <strings.h>

typedef struct Extension {
    const char *text;
    MemberKind kind; /* NONE: a known format that is not read */
} Extension;

static const Extension extensions[] = {
    {"txt", MEMBER_KIND_CAPTION}, {"json", MEMBER_KIND_JSON},  {"png", MEMBER_KIND_IMAGE},
    {"jpg", MEMBER_KIND_IMAGE},   {"jpeg", MEMBER_KIND_IMAGE}, {"webp", MEMBER_KIND_NONE},
    {"gif", MEMBER_KIND_NONE},    {"bmp", MEMBER_KIND_NONE},   {"tif", MEMBER_KIND_NONE},
    {"tiff", MEMBER_KIND_NONE},   {"avif", MEMBER_KIND_NONE},  {"heic", MEMBER_KIND_NONE},
};

static const Extension *find_extension(const char *text)
{
    for (size_t i = 0; i < sizeof extensions / sizeof *extensions; i++) {
        if (strcasecmp(extensions[i].text, text) == 0) {
            return &extensions[i];
        }
    }
    return NULL;
}

/* "12" of "12.png": 1 to 4 digits; -1 otherwise. */
static int32_t parse_number(const char *suffix, const char *dot)
{
    if (dot == suffix || dot - suffix > 4) {
        return -1;
    }
    int32_t number = 0;
    for (const char *at = suffix; at < dot; at++) {
        if (*at < '0' || *at > '9') {
            return -1;
        }
        number = number * 10 + (*at - '0');
    }
    return number;
}

Status member_name_parse(const char *name, MemberName *parsed_out)
{
    *parsed_out = (MemberName){.kind = MEMBER_KIND_NONE, .number = -1};
    const char *slash = strrchr(name, '/');
    const char *base = slash ? slash + 1 : name;
    const char *dot = strchr(base, '.');
    if (!dot || dot == base || dot[1] == '\0') {
        return STATUS_OK;
    }
    parsed_out->kind = MEMBER_KIND_OTHER;
    parsed_out->key_bytes = (size_t)(dot - name);
    parsed_out->suffix = dot + 1;
    const char *last = strrchr(dot, '.'); /* the dot before the extension */
    const Extension *extension = find_extension(last + 1);
    if (!extension) {
        return STATUS_OK;
    }
    if (extension->kind == MEMBER_KIND_NONE) {
        return fail(STATUS_UNSUPPORTED, "pictures of type .%s are not read; PNG and JPEG are",
                    extension->text);
    }
    if (last != dot) {
        bool is_image = extension->kind == MEMBER_KIND_IMAGE;
        parsed_out->number = is_image ? parse_number(dot + 1, last) : -1;
        if (parsed_out->number < 0) {
            return fail(STATUS_INVALID,
                        "the key ends at the first dot, so \".%s\" is the extension; rename the "
                        "member without a dot in its base name (several pictures of a sample are "
                        ".0.png, .1.png, ...)",
                        dot + 1);
        }
    }
    parsed_out->kind = extension->kind;
    return STATUS_OK;
}
