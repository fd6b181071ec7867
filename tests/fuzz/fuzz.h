/* Fuzz: what a fuzz target is. A target is one file: LLVMFuzzerTestOneInput, which must survive any
 * bytes, and seeds, which are good input. It links with replay.c into a test (mutated seeds, the
 * same on every run), or with libFuzzer (-DVIADUCT_LIBFUZZER=ON, clang).
 * Threading: one thread.
 */
#ifndef FUZZ_FUZZ_H
#define FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>

enum {
    FUZZ_SEED_BYTES_MAX = 1 << 17
};

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size_bytes);

/* Writes seed `index` to out[FUZZ_SEED_BYTES_MAX]; returns its size, 0 when there is no such seed.
 * */
size_t fuzz_seed(int index, uint8_t *out);

#endif
