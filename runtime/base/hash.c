#include "base/hash.h"

#include <string.h>

uint64_t hash_bytes(uint64_t hash, const void *data, size_t size_bytes)
{
    const unsigned char *bytes = data;
    for (size_t i = 0; i < size_bytes; i++) {
        hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
    }
    return hash;
}

uint64_t hash_u64(uint64_t hash, uint64_t value)
{
    return hash_bytes(hash, &value, sizeof value);
}

uint64_t hash_text(const char *text)
{
    uint64_t hash = hash_bytes(HASH_SEED, text, strlen(text));
    /* the finalizer of MurmurHash3: FNV alone is weak in its upper bits on short names */
    hash = (hash ^ hash >> 33) * UINT64_C(0xff51afd7ed558ccd);
    hash = (hash ^ hash >> 33) * UINT64_C(0xc4ceb9fe1a85ec53);
    return hash ^ hash >> 33;
}
