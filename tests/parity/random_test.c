/* 500 random layouts against one process: axes, pools, placements, microbatches, windows,
 * recomputation, ZeRO-1 and frozen sets by chance; ragged images in every batch, more microbatches
 * than samples in some. Usage: parity_random_test [first case [number of cases [seed]]] */
#include "base/rng.h"
#include "tests/parity/parity_suite.h"

#include <stdio.h>
#include <stdlib.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    SEED = 77, /* of the data, the weights and, where none is given, the layouts */
    STEPS = 3,
    BATCH = 9,
    RANKS_MAX = 8 /* of one module */
};

/* Under a sanitizer fewer: it is some ten times slower. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum {
    NUM_CASES = 60
};
#else
enum {
    NUM_CASES = 500
};
#endif

static int first_case;
static int num_cases = NUM_CASES;
static uint64_t seed = SEED;

static const int images[] = {1, 0, 2, 7, 1, 0, 0, 2, 1, 5, 3, 1, 0};
static const int clips[] = {0, 1, 1, 0, 2, 1, 0, 0, 3, 1, 1, 0, 2};
enum {
    NUM_SAMPLES = sizeof images / sizeof *images
};

static const char *const frozen_sets[] = {
    NULL,
    "\"vision_tower.*\"",
    "\"vision_tower.*\", \"multi_modal_projector.*\"",
    "\"language_model.*\"",
    "\"*layers.1.*\", \"*norm*\"",
};
enum {
    NUM_SETS = sizeof frozen_sets / sizeof *frozen_sets
};

/* A stream of choices. */
typedef struct Dice {
    Rng rng;
    uint64_t at;
} Dice;

static int roll(Dice *dice, int sides)
{
    return (int)(rng_bits(dice->rng, dice->at++) % (uint64_t)sides);
}

static ParityModule random_module(Dice *dice, int layers)
{
    static const char *const recompute[] = {"NONE", "NONE", "SELECTIVE", "FULL"};
    ParityModule module;
    do {
        module = (ParityModule){.tp = 1 + roll(dice, 4) * (roll(dice, 2)),
                                .cp = 1 + roll(dice, 3) * (roll(dice, 2)),
                                .pp = 1 + roll(dice, 3) * (roll(dice, 2)),
                                .dp = 1 + roll(dice, 4) * (roll(dice, 2)),
                                .recompute = recompute[roll(dice, 4)]};
    } while (module.tp * module.cp * module.pp * module.dp > RANKS_MAX || module.pp > layers);
    module.is_sequence_parallel = module.tp > 1 && roll(dice, 2);
    module.chunks = module.pp > 1 ? 1 + roll(dice, layers / module.pp) : 1;
    return module;
}

static void test_random(void **state)
{
    (void)state;
    for (int set = 0; set < NUM_SETS; set++) {
        ParitySuite suite;
        ParityOptions options = {.steps = STEPS,
                                 .batch = BATCH,
                                 .seed = SEED,
                                 .frozen = frozen_sets[set],
                                 .has_audio = set == 1 || set == 4,
                                 .has_tied_head = set % 2 == 0};
        parity_suite_open(&suite, &options, images, options.has_audio ? clips : NULL, NUM_SAMPLES);
        for (int i = first_case; i < first_case + num_cases; i++) {
            char what[32];
            Dice dice = {.rng = {seed, (uint64_t)i}};
            if (i % NUM_SETS != set) {
                continue;
            }
            options.layout.vision = random_module(&dice, 3);
            options.layout.audio = random_module(&dice, 3);
            options.layout.llm = random_module(&dice, 5);
            options.layout.shares_pool = roll(&dice, 2);
            options.layout.is_colocated = roll(&dice, 2);
            options.microbatches = 1 + roll(&dice, 12);
            options.window = 1 + roll(&dice, 6);
            options.is_sharded = roll(&dice, 3) == 0;
            snprintf(what, sizeof what, "case %d", i);
            parity_suite_run(&suite, &options, what);
        }
        parity_suite_close(&suite);
    }
}

int main(int argc, char **argv)
{
    first_case = argc > 1 ? (int)strtol(argv[1], NULL, 10) : 0;
    num_cases = argc > 2 ? (int)strtol(argv[2], NULL, 10) : argc > 1 ? 1 : num_cases;
    seed = argc > 3 ? strtoull(argv[3], NULL, 10) : seed;
    printf("seed %llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
