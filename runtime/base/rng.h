/* Rng: counter-based random numbers. A value is a pure function of (seed, stream, index), so any
 * rank can make any element of a global array without making the others, and every layout starts
 * from the same weights.
 *
 * Generator: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
 *
 * Threading: pure functions.
 */
#ifndef BASE_RNG_H
#define BASE_RNG_H

#include <stdint.h>

typedef struct Rng {
    uint64_t seed;
    uint64_t stream; /* e.g. hash_text(parameter name): independent sequences of one seed */
} Rng;

/* 32 random bits for element `index`. */
uint32_t rng_bits(Rng rng, uint64_t index);

/* 64 random bits for element `index`. */
uint64_t rng_bits64(Rng rng, uint64_t index);

/* Uniform in [0, 1), 24 bits. */
float rng_uniform(Rng rng, uint64_t index);

/* Standard normal (Box-Muller). */
float rng_normal(Rng rng, uint64_t index);

/* Uniform in [0, bound), without bias worth speaking of: 64 random bits times bound. bound > 0. */
uint64_t rng_below(Rng rng, uint64_t index, uint64_t bound);

/* Element `index` of a random permutation of [0, count): a pure function, no array. 0 <= index <
 * count. A Feistel network over the next power of four, walked until it falls inside. */
int64_t rng_permute(Rng rng, int64_t index, int64_t count);

#endif
