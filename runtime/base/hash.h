/* Hash: 64-bit FNV-1a with a final mix, for names, caches and plan agreement between ranks. Not for
 * security. Threading: pure functions.
 */
#ifndef BASE_HASH_H
#define BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

#define HASH_SEED UINT64_C(0xcbf29ce484222325)

/* Goes on from `hash` (HASH_SEED to begin) over `size_bytes` bytes. */
uint64_t hash_bytes(uint64_t hash, const void *data, size_t size_bytes);

/* One 64-bit value more. */
uint64_t hash_u64(uint64_t hash, uint64_t value);

/* Hash of a text. */
uint64_t hash_text(const char *text);

#endif
