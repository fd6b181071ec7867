#include "data/member_name.h"

#include <stdbool.h>
#include <string.h>
#include <strings.h>

typedef struct Extension {
    const char *text;
    MemberKind kind;
    bool is_read;
} Extension;

static const Extension extensions[] = {
    {"txt", MEMBER_KIND_CAPTION, true}, {"json", MEMBER_KIND_JSON, true},
    {"png", MEMBER_KIND_IMAGE, true},   {"jpg", MEMBER_KIND_IMAGE, true},
    {"jpeg", MEMBER_KIND_IMAGE, true},  {"webp", MEMBER_KIND_IMAGE, false},
    {"gif", MEMBER_KIND_IMAGE, false},  {"bmp", MEMBER_KIND_IMAGE, false},
    {"tif", MEMBER_KIND_IMAGE, false},  {"tiff", MEMBER_KIND_IMAGE, false},
    {"avif", MEMBER_KIND_IMAGE, false}, {"heic", MEMBER_KIND_IMAGE, false},
    {"wav", MEMBER_KIND_AUDIO, true},   {"flac", MEMBER_KIND_AUDIO, true},
    {"mp3", MEMBER_KIND_AUDIO, false},  {"ogg", MEMBER_KIND_AUDIO, false},
    {"oga", MEMBER_KIND_AUDIO, false},  {"opus", MEMBER_KIND_AUDIO, false},
    {"m4a", MEMBER_KIND_AUDIO, false},  {"aac", MEMBER_KIND_AUDIO, false},
    {"aiff", MEMBER_KIND_AUDIO, false},
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
    if (!extension->is_read) {
        bool is_image = extension->kind == MEMBER_KIND_IMAGE;
        return fail(STATUS_UNSUPPORTED, "%s of type .%s are not read; %s are",
                    is_image ? "pictures" : "sounds", extension->text,
                    is_image ? "PNG and JPEG" : "WAV and FLAC");
    }
    if (last != dot) {
        bool is_item = extension->kind == MEMBER_KIND_IMAGE || extension->kind == MEMBER_KIND_AUDIO;
        parsed_out->number = is_item ? parse_number(dot + 1, last) : -1;
        if (parsed_out->number < 0) {
            return fail(STATUS_INVALID,
                        "the key ends at the first dot, so \".%s\" is the extension; rename the "
                        "member without a dot in its base name (several pictures or clips of a "
                        "sample are .0.png, .1.png, ... or .0.wav, ...)",
                        dot + 1);
        }
    }
    parsed_out->kind = extension->kind;
    return STATUS_OK;
}
