/* Memory: the heap of the host, with failure as a Status. Owned by the caller, freed with
 * memory_free. Large tensors do not come from here but from device/.
 *
 * Threading: any thread.
 */
#ifndef BASE_MEMORY_H
#define BASE_MEMORY_H

#include "base/status.h"

#include <stddef.h>

/* Zeroed memory for `count` elements; *out is NULL when count is 0. STATUS_NO_MEMORY. */
Status memory_alloc(size_t count, size_t element_bytes, void **out) STATUS_CHECKED;

/* Like memory_alloc, with the pointer's own type: TRY(MEMORY_NEW(&samples, num_samples)). */
#define MEMORY_NEW(pointer_out, count) \
    memory_alloc((size_t)(count), sizeof **(pointer_out), (void **)(pointer_out))

/* Grows *array to hold at least `count` elements (doubling), keeping its content. New elements are
 * not zeroed. */
Status memory_grow(void **array, size_t *capacity, size_t count,
                   size_t element_bytes) STATUS_CHECKED;

/* A copy of `text`. STATUS_NO_MEMORY. */
Status memory_copy_text(const char *text, char **out) STATUS_CHECKED;

/* A new string made as printf does. STATUS_NO_MEMORY. */
Status memory_format(char **out, const char *format, ...)
    __attribute__((format(printf, 2, 3))) STATUS_CHECKED;

void memory_free(void *pointer); /* NULL is fine */

#endif
