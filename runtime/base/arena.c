#include "base/arena.h"

void arena_init(Arena *arena, void *block, int64_t size_bytes)
{
    CHECK(block != NULL && size_bytes >= 0);
    *arena = (Arena){.block = block, .capacity = size_bytes};
}

void arena_init_measure(Arena *arena)
{
    *arena = (Arena){.capacity = INT64_MAX};
}

void *arena_take(Arena *arena, int64_t size_bytes)
{
    CHECK(size_bytes >= 0 && size_bytes <= INT64_MAX / 2);
    int64_t start = (arena->used + ARENA_ALIGNMENT - 1) / ARENA_ALIGNMENT * ARENA_ALIGNMENT;
    CHECK(size_bytes <= arena->capacity - start);
    arena->used = start + size_bytes;
    if (arena->used > arena->peak) {
        arena->peak = arena->used;
    }
    return arena->block ? arena->block + start : NULL;
}

void arena_rewind(Arena *arena, int64_t used)
{
    CHECK(used >= 0 && used <= arena->used);
    arena->used = used;
}
