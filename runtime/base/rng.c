#include "base/rng.h"

#include "base/status.h"

#include <math.h>

typedef struct Block {
    uint32_t word[4];
} Block;

static Block philox(Rng rng, uint64_t index)
{
    Block b = {{(uint32_t)index, (uint32_t)(index >> 32), (uint32_t)rng.stream,
                (uint32_t)(rng.stream >> 32)}};
    uint32_t key0 = (uint32_t)rng.seed;
    uint32_t key1 = (uint32_t)(rng.seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = (uint64_t)0xD2511F53u * b.word[0];
        uint64_t product1 = (uint64_t)0xCD9E8D57u * b.word[2];
        b = (Block){{(uint32_t)(product1 >> 32) ^ b.word[1] ^ key0, (uint32_t)product1,
                     (uint32_t)(product0 >> 32) ^ b.word[3] ^ key1, (uint32_t)product0}};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return b;
}

uint32_t rng_bits(Rng rng, uint64_t index)
{
    return philox(rng, index).word[0];
}

uint64_t rng_bits64(Rng rng, uint64_t index)
{
    Block b = philox(rng, index);
    return (uint64_t)b.word[0] << 32 | b.word[1];
}

float rng_uniform(Rng rng, uint64_t index)
{
    return (float)(rng_bits(rng, index) >> 8) * 0x1p-24f;
}

float rng_normal(Rng rng, uint64_t index)
{
    Block b = philox(rng, index);
    /* (0, 1], so that the logarithm is finite */
    double radius = sqrt(-2.0 * log(((double)b.word[0] + 1.0) * 0x1p-32));
    double angle = 6.283185307179586 * ((double)b.word[1] * 0x1p-32);
    return (float)(radius * cos(angle));
}

uint64_t rng_below(Rng rng, uint64_t index, uint64_t bound)
{
    CHECK(bound > 0);
    return (uint64_t)(((unsigned __int128)rng_bits64(rng, index) * bound) >> 64);
}

int64_t rng_permute(Rng rng, int64_t index, int64_t count)
{
    CHECK(index >= 0 && index < count);
    int half_bits = 1;
    while (half_bits < 31 && (INT64_C(1) << (2 * half_bits)) < count) {
        half_bits++;
    }
    uint64_t mask = (UINT64_C(1) << half_bits) - 1;
    uint64_t value = (uint64_t)index;
    do {
        uint64_t left = value >> half_bits;
        uint64_t right = value & mask;
        for (uint64_t round = 0; round < 6; round++) {
            uint64_t mixed = left ^ (rng_bits64(rng, right << 3 | round) & mask);
            left = right;
            right = mixed;
        }
        value = left << half_bits | right;
    } while (value >= (uint64_t)count);
    return (int64_t)value;
}
