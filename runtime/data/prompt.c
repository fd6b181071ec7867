#include "data/prompt.h"

#include "data/dataset.h"

#include <string.h>

#define PROMPT_MARK "<image>"

enum {
    MARK_BYTES = sizeof PROMPT_MARK - 1
};

static int64_t count_marks(const char *prompt)
{
    int64_t marks = 0;
    const char *at = strstr(prompt, PROMPT_MARK);
    while (at) {
        marks++;
        at = strstr(at + MARK_BYTES, PROMPT_MARK);
    }
    return marks;
}

Status prompt_count_tokens(const char *prompt, int64_t num_images, int64_t rows_per_image,
                           int64_t *count_out)
{
    int64_t marks = count_marks(prompt);
    if ((marks == 0 && num_images > 0) || (marks > 1 && marks != num_images)) {
        return fail(STATUS_INVALID,
                    "the prompt has %lld %s marks for %lld images; it needs one for all of them, "
                    "or one each",
                    (long long)marks, PROMPT_MARK, (long long)num_images);
    }
    int64_t text_bytes = (int64_t)strlen(prompt) - marks * MARK_BYTES;
    *count_out = text_bytes + num_images * rows_per_image;
    return STATUS_OK;
}

int32_t *prompt_write_tokens(const char *prompt, int64_t num_images, int64_t rows_per_image,
                             int32_t *ids_out)
{
    int64_t marks = count_marks(prompt);
    int64_t rows_per_mark = marks <= 1 ? num_images * rows_per_image : rows_per_image;
    const char *at = prompt;
    while (*at) {
        if (strncmp(at, PROMPT_MARK, MARK_BYTES) != 0) {
            *ids_out++ = (uint8_t)*at++;
            continue;
        }
        for (int64_t i = 0; i < rows_per_mark; i++) {
            *ids_out++ = TOKEN_IMAGE;
        }
        at += MARK_BYTES;
    }
    return ids_out;
}
