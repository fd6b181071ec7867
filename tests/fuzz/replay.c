/* Runs a fuzz target over its seeds and mutations of them, the same on every run; or over files
 * that a fuzzer found. Usage: NAME_fuzz [seconds]        mutations until so many seconds passed
 * (default 3), at most MUTATIONS_MAX
 *        NAME_fuzz file ...         these files
 */
#include "base/clock.h"
#include "base/memory.h"
#include "base/rng.h"
#include "tests/fuzz/fuzz.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SEED = 2024,
    MUTATIONS_MAX = 20000,
    CHANGES_MAX = 8 /* of one mutation */
};

typedef struct Input {
    uint8_t bytes[FUZZ_SEED_BYTES_MAX];
    size_t size_bytes;
} Input;

static uint64_t draw(uint64_t *counter, uint64_t bound)
{
    return rng_below((Rng){.seed = SEED}, (*counter)++, bound);
}

/* Values at which lengths and sizes turn over. */
static const uint32_t edges[] = {0,          1,          0x7f,       0x80,
                                 0xff,       0x7fff,     0xffff,     0x7fffffff,
                                 0x80000000, 0xffffffff, 0x00010000, 0x30303030};

static void change(Input *input, uint64_t *counter)
{
    size_t at = draw(counter, input->size_bytes);
    size_t left = input->size_bytes - at;
    size_t length = 1 + draw(counter, left < 64 ? left : 64);
    size_t from = draw(counter, input->size_bytes - length + 1);
    uint32_t edge = edges[draw(counter, sizeof edges / sizeof *edges)];
    switch (draw(counter, 6)) {
    case 0:
        input->bytes[at] ^= (uint8_t)(1U << draw(counter, 8));
        break;
    case 1:
        input->bytes[at] = (uint8_t)draw(counter, 256);
        break;
    case 2: /* a number of 1 to 4 bytes, in either order */
        for (size_t i = 0; i < 4 && i < left; i++) {
            input->bytes[at + i] = (uint8_t)(edge >> 8 * (at % 2 ? i : 3 - i));
        }
        break;
    case 3: /* a piece from elsewhere */
        memmove(input->bytes + at, input->bytes + from, length);
        break;
    case 4: /* a piece left out */
        memmove(input->bytes + at, input->bytes + at + length, left - length);
        input->size_bytes -= length;
        break;
    default: /* the end left out, now and then */
        if (draw(counter, 8) == 0) {
            input->size_bytes = at;
        }
        break;
    }
}

/* In memory of exactly its size, so that a read beyond is seen. */
static void run(const Input *input)
{
    uint8_t *exact = NULL;
    CHECK(memory_alloc(input->size_bytes + (input->size_bytes == 0), 1, (void **)&exact) ==
          STATUS_OK);
    memcpy(exact, input->bytes, input->size_bytes);
    LLVMFuzzerTestOneInput(exact, input->size_bytes);
    memory_free(exact);
}

static int run_mutations(double seconds)
{
    static Input seed;
    static Input mutated;
    int64_t deadline_ns = clock_now_ns() + (int64_t)(seconds * 1e9);
    int num_seeds = 0;
    seed.size_bytes = fuzz_seed(0, seed.bytes);
    while (seed.size_bytes > 0) {
        run(&seed);
        seed.size_bytes = fuzz_seed(++num_seeds, seed.bytes);
    }
    CHECK(num_seeds > 0);
    uint64_t counter = 0;
    int mutations = 0;
    for (; mutations < MUTATIONS_MAX && !clock_is_past(deadline_ns); mutations++) {
        mutated.size_bytes = fuzz_seed(mutations % num_seeds, mutated.bytes);
        uint64_t changes = 1 + draw(&counter, CHANGES_MAX);
        for (uint64_t i = 0; i < changes && mutated.size_bytes > 0; i++) {
            change(&mutated, &counter);
        }
        run(&mutated);
    }
    printf("seed %d: %d seeds and %d mutations survived\n", SEED, num_seeds, mutations);
    return 0;
}

static int run_file(const char *path)
{
    static Input input;
    FILE *file = fopen(path, "re");
    if (!file) {
        fprintf(stderr, "cannot open %s\n", path);
        return 1;
    }
    input.size_bytes = fread(input.bytes, 1, sizeof input.bytes, file);
    fclose(file);
    run(&input);
    printf("%s: survived\n", path);
    return 0;
}

int main(int argc, char **argv)
{
    double seconds = argc == 2 ? strtod(argv[1], NULL) : 3; /* 0: a file's name */
    if (argc < 2 || seconds > 0) {
        return run_mutations(seconds);
    }
    int result = 0;
    for (int i = 1; i < argc; i++) {
        result |= run_file(argv[i]);
    }
    return result;
}
