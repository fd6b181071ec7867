#include "base/memory.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* No object can be larger than PTRDIFF_MAX bytes. */
static bool is_too_large(size_t count, size_t element_bytes)
{
    return element_bytes > 0 && count > PTRDIFF_MAX / element_bytes;
}

Status memory_alloc(size_t count, size_t element_bytes, void **out)
{
    if (count == 0) {
        *out = NULL;
        return STATUS_OK;
    }
    void *pointer = is_too_large(count, element_bytes) ? NULL : calloc(count, element_bytes);
    if (!pointer) {
        return fail(STATUS_NO_MEMORY, "no memory for %zu elements of %zu bytes", count,
                    element_bytes);
    }
    *out = pointer;
    return STATUS_OK;
}

Status memory_grow(void **array, size_t *capacity, size_t count, size_t element_bytes)
{
    if (count <= *capacity) {
        return STATUS_OK;
    }
    size_t wanted = *capacity < 8 ? 8 : *capacity;
    while (wanted < count && wanted <= SIZE_MAX / 2) {
        wanted *= 2;
    }
    bool is_possible = wanted >= count && !is_too_large(wanted, element_bytes);
    void *grown = is_possible ? reallocarray(*array, wanted, element_bytes) : NULL;
    if (!grown) {
        return fail(STATUS_NO_MEMORY, "no memory for %zu elements of %zu bytes", count,
                    element_bytes);
    }
    *array = grown;
    *capacity = wanted;
    return STATUS_OK;
}

Status memory_copy_text(const char *text, char **out)
{
    char *copy = strdup(text);
    if (!copy) {
        return fail(STATUS_NO_MEMORY, "no memory for a text of %zu bytes", strlen(text));
    }
    *out = copy;
    return STATUS_OK;
}

Status memory_format(char **out, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    char *text = NULL;
    int length = vasprintf(&text, format, arguments);
    va_end(arguments);
    if (length < 0) {
        return fail(STATUS_NO_MEMORY, "no memory for a formatted text");
    }
    *out = text;
    return STATUS_OK;
}

void memory_free(void *pointer)
{
    free(pointer);
}
