/* Arena: carves one block of memory into pieces that die together.
 *
 * The block belongs to the caller and may be device memory: the arena keeps its books outside it.
 * An arena without a block (arena_init_measure) hands out no memory but counts, so that the
 * function that carves a structure also tells its size: Arena measure;
 * arena_init_measure(&measure);  acts_carve(&measure, dims, &acts); block of measure.used bytes;
 * arena_init(&arena, block, measure.used);  acts_carve(&arena, ...)
 *
 * Threading: one owner.
 */
#ifndef BASE_ARENA_H
#define BASE_ARENA_H

#include "base/status.h"

#include <stdbool.h>
#include <stdint.h>

enum {
    ARENA_ALIGNMENT = 64
}; /* bytes: a cache line, and the widest vector register */

typedef struct Arena {
    char *block;      /* borrowed; NULL while measuring */
    int64_t capacity; /* bytes; INT64_MAX while measuring */
    int64_t used;     /* bytes */
    int64_t peak;     /* largest `used` since init */
} Arena;

void arena_init(Arena *arena, void *block, int64_t size_bytes);
void arena_init_measure(Arena *arena);

/* `size_bytes` bytes aligned to ARENA_ALIGNMENT, not zeroed. Running out is our own bug (the size
 * was computed by the same carving), hence a CHECK. While measuring, the pointer must not be
 * dereferenced. */
void *arena_take(Arena *arena, int64_t size_bytes);

/* Gives back everything taken since `used` was read. */
void arena_rewind(Arena *arena, int64_t used);

static inline bool arena_is_measuring(const Arena *arena)
{
    return arena->block == NULL;
}

#endif
