/* Layouts against one process: losses, every gradient and all weights over three SGD steps. SGD,
 * since AdamW would hide a wrong scale. First every encoder layout against every decoder layout
 * with tp and dp; then the pairs that published systems test, and those that they refuse. */
#include "tests/parity/parity_suite.h"

#include <stdio.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    STEPS = 3,
    BATCH = 7,
    SEED = 21
};

static const int images[] = {1, 0, 2, 7, 1, 0, 1, 2, 1, 0, 3};
static const int clips[] = {0, 1, 1, 0, 2, 1, 0, 0, 3, 1, 1};
enum {
    NUM_SAMPLES = sizeof images / sizeof *images
};

static void test_all_pairs(void **state)
{
    (void)state;
    static const int encoders[][2] = {{1, 1}, {2, 1}, {4, 1}, {1, 2}, {1, 3}, {1, 5}, {2, 2}};
    static const int llms[][2] = {{1, 1}, {2, 1}, {4, 1}, {1, 2}, {1, 3}, {2, 2}};
    ParitySuite suite;
    ParityOptions options = {.steps = STEPS, .batch = BATCH, .warmup = 2, .seed = SEED};
    parity_suite_open(&suite, &options, images, NULL, NUM_SAMPLES);
    for (size_t e = 0; e < sizeof encoders / sizeof *encoders; e++) {
        for (size_t l = 0; l < sizeof llms / sizeof *llms; l++) {
            options.layout = PARITY_PLAIN(encoders[e][0], encoders[e][1], llms[l][0], llms[l][1]);
            options.microbatches = 1 + suite.num_cases % 4;
            options.window = 1 + suite.num_cases % 3;
            parity_suite_run(&suite, &options, "pair");
        }
    }
    parity_suite_close(&suite);
}

typedef struct Case {
    const char *what;
    ParityLayout layout;
    int microbatches; /* 0: 4 */
} Case;

static void run_cases(const Case *cases, size_t num, const ParityOptions *base)
{
    ParitySuite suite;
    parity_suite_open(&suite, base, images, base->has_audio ? clips : NULL, NUM_SAMPLES);
    for (size_t i = 0; i < num; i++) {
        ParityOptions options = *base;
        options.layout = cases[i].layout;
        options.microbatches = cases[i].microbatches ? cases[i].microbatches : 4;
        options.window = 1 + (int)(i % 3);
        parity_suite_run(&suite, &options, cases[i].what);
    }
    parity_suite_close(&suite);
}

#define ONE              .tp = 1
#define RUN(cases, base) run_cases((cases), sizeof(cases) / sizeof *(cases), (base))

static const ParityOptions plain = {.steps = STEPS, .batch = BATCH, .warmup = 2, .seed = SEED};

static void test_disaggregated(void **state)
{
    (void)state;
    static const Case cases[] = {
        {"TP2 -> TP2", {.vision = {.tp = 2}, .llm = {.tp = 2}}, 0},
        {"TP2 -> TP2PP2", {.vision = {.tp = 2}, .llm = {.tp = 2, .pp = 2}}, 0},
        {"TP2PP2 -> TP2PP2", {.vision = {.tp = 2, .pp = 2}, .llm = {.tp = 2, .pp = 2}}, 0},
        {"TP4 -> TP4", {.vision = {.tp = 4}, .llm = {.tp = 4}}, 0},
        {"TP2DP2 -> TP4", {.vision = {.tp = 2, .dp = 2}, .llm = {.tp = 4}}, 0},
        {"TP4 -> TP2DP2", {.vision = {.tp = 4}, .llm = {.tp = 2, .dp = 2}}, 0},
        {"TP2DP2 -> DP4", {.vision = {.tp = 2, .dp = 2}, .llm = {.dp = 4}}, 0},
        {"TP4 -> DP4", {.vision = {.tp = 4}, .llm = {.dp = 4}}, 0},
        {"1 -> 1", {.vision = {ONE}, .llm = {ONE}}, 0},
        {"1 -> PP3", {.vision = {ONE}, .llm = {.pp = 3}}, 0},
        {"TP2 -> TP2PP3", {.vision = {.tp = 2}, .llm = {.tp = 2, .pp = 3}}, 0},
        {"DP4 -> TP2PP2", {.vision = {.dp = 4}, .llm = {.tp = 2, .pp = 2}}, 0},
        {"TP2PP2 -> DP4", {.vision = {.tp = 2, .pp = 2}, .llm = {.dp = 4}}, 0},
        {"DP2 -> TP2PP3", {.vision = {.dp = 2}, .llm = {.tp = 2, .pp = 3}}, 0},
        {"DP4 -> CP2PP2", {.vision = {.dp = 4}, .llm = {.cp = 2, .pp = 2}}, 0},
        {"16 microbatches", {.vision = {.dp = 2}, .llm = {.tp = 2, .pp = 2}}, 16},
        {"one microbatch", {.vision = {.tp = 2}, .llm = {.pp = 2}}, 1},
    };
    RUN(cases, &plain);
}

static void test_convergence_layouts(void **state)
{
    (void)state;
    static const Case cases[] = {
        {"4/1/1;4/1/1", {.llm = {.tp = 4}, .vision = {.tp = 4}}, 0},
        {"2/1/2;2/1/2", {.llm = {.tp = 2, .dp = 2}, .vision = {.tp = 2, .dp = 2}}, 0},
        {"2/2/1;4/1/1", {.llm = {.tp = 2, .pp = 2}, .vision = {.tp = 4}}, 0},
        {"1/1/4;1/1/4", {.llm = {.dp = 4}, .vision = {.dp = 4}}, 0},
        {"1/4/1;4/1/1", {.llm = {.pp = 4}, .vision = {.tp = 4}}, 0},
        {"1/4/1;1/1/4", {.llm = {.pp = 4}, .vision = {.dp = 4}}, 0},
        {"1/2/2;2/1/2", {.llm = {.pp = 2, .dp = 2}, .vision = {.tp = 2, .dp = 2}}, 0},
        {"4/1/1;1/1/4", {.llm = {.tp = 4}, .vision = {.dp = 4}}, 0},
        {"2/2/1;2/1/2", {.llm = {.tp = 2, .pp = 2}, .vision = {.tp = 2, .dp = 2}}, 0},
        {"2/1/2;1/1/4", {.llm = {.tp = 2, .dp = 2}, .vision = {.dp = 4}}, 0},
    };
    Case doubled[sizeof cases / sizeof *cases];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        doubled[i] = cases[i];
        doubled[i].layout.is_colocated = true;
        doubled[i].layout.llm.dp = 2 * (cases[i].layout.llm.dp ? cases[i].layout.llm.dp : 1);
        doubled[i].layout.vision.dp =
            2 * (cases[i].layout.vision.dp ? cases[i].layout.vision.dp : 1);
    }
    RUN(cases, &plain);
    RUN(doubled, &plain);
}

static void test_colocated(void **state)
{
    (void)state;
    static const Case cases[] = {
        {"one rank", {.vision = {ONE}, .llm = {ONE}, .is_colocated = true}, 0},
        {"TP2DP4 -> TP4DP2",
         {.vision = {.tp = 2, .dp = 4}, .llm = {.tp = 4, .dp = 2}, .is_colocated = true},
         1},
        {"TP2DP4 -> TP4DP2",
         {.vision = {.tp = 2, .dp = 4}, .llm = {.tp = 4, .dp = 2}, .is_colocated = true},
         4},
        {"TP4DP2 -> TP2DP4",
         {.vision = {.tp = 4, .dp = 2}, .llm = {.tp = 2, .dp = 4}, .is_colocated = true},
         1},
        {"TP4DP2 -> TP2DP4",
         {.vision = {.tp = 4, .dp = 2}, .llm = {.tp = 2, .dp = 4}, .is_colocated = true},
         4},
        {"llm TP2PP2DP2",
         {.vision = {.dp = 8}, .llm = {.tp = 2, .pp = 2, .dp = 2}, .is_colocated = true},
         4},
        {"llm PP2DP4",
         {.vision = {.tp = 2, .dp = 4}, .llm = {.pp = 2, .dp = 4}, .is_colocated = true},
         4},
        {"one microbatch PP2", {.vision = {.dp = 2}, .llm = {.pp = 2}, .is_colocated = true}, 1},
        {"encoder across stages", {.vision = {.tp = 4}, .llm = {.pp = 4}, .is_colocated = true}, 5},
        {"cp", {.vision = {.dp = 4}, .llm = {.tp = 2, .cp = 2}, .is_colocated = true}, 4},
        {"cp, pp and encoder cp",
         {.vision = {.cp = 2, .dp = 4}, .llm = {.cp = 2, .pp = 2, .dp = 2}, .is_colocated = true},
         3},
        {"interleaved",
         {.vision = {.dp = 2}, .llm = {.pp = 2, .chunks = 2}, .is_colocated = true},
         6},
        {"smaller encoder",
         {.vision = {.dp = 3}, .llm = {.tp = 2, .pp = 2, .dp = 2}, .is_colocated = true},
         4},
        {"pipelined encoder",
         {.vision = {.pp = 2, .dp = 2}, .llm = {.tp = 4}, .is_colocated = true},
         4},
    };
    RUN(cases, &plain);
}

/* What published systems refuse. */
static void test_uneven(void **state)
{
    (void)state;
    static const Case cases[] = {
        {"DP3 -> DP2", {.vision = {.dp = 3}, .llm = {.dp = 2}}, 0},
        {"DP2 -> DP3", {.vision = {.dp = 2}, .llm = {.dp = 3}}, 0},
        {"DP5 -> DP4", {.vision = {.dp = 5}, .llm = {.dp = 4}}, 0},
        {"encoder CP2", {.vision = {.cp = 2}, .llm = {ONE}}, 0},
        {"encoder CP3TP2", {.vision = {.cp = 3, .tp = 2}, .llm = {.dp = 2}}, 0},
        {"encoder PP3", {.vision = {.pp = 3}, .llm = {.tp = 2}}, 0},
        {"encoder PP2CP2DP2", {.vision = {.pp = 2, .cp = 2, .dp = 2}, .llm = {.cp = 2}}, 0},
        {"interleaved 2 x 2", {.vision = {ONE}, .llm = {.pp = 2, .chunks = 2}}, 0},
        {"interleaved with a remainder", {.vision = {.dp = 2}, .llm = {.pp = 2, .chunks = 2}}, 5},
        {"CP2", {.vision = {ONE}, .llm = {.cp = 2}}, 0},
        {"CP3", {.vision = {.dp = 2}, .llm = {.cp = 3}}, 0},
        {"CP4", {.vision = {ONE}, .llm = {.cp = 4}}, 2},
        {"TP2CP2", {.vision = {.tp = 2}, .llm = {.tp = 2, .cp = 2}}, 0},
        {"CP2PP2", {.vision = {ONE}, .llm = {.cp = 2, .pp = 2}}, 0},
        {"TP2PP2", {.vision = {ONE}, .llm = {.tp = 2, .pp = 2}}, 0},
        {"sequence 2", {.vision = {ONE}, .llm = {.tp = 2, .is_sequence_parallel = true}}, 0},
        {"sequence 8", {.vision = {ONE}, .llm = {.tp = 8, .is_sequence_parallel = true}}, 2},
        {"sequence 2 x 2",
         {.vision = {ONE}, .llm = {.tp = 2, .cp = 2, .is_sequence_parallel = true}},
         0},
        {"sequence 3 both",
         {.vision = {.tp = 3, .is_sequence_parallel = true},
          .llm = {.tp = 3, .is_sequence_parallel = true}},
         0},
        {"all axes",
         {.vision = {.tp = 2, .cp = 2, .pp = 2, .is_sequence_parallel = true},
          .llm = {.tp = 2, .cp = 2, .pp = 2, .dp = 2, .is_sequence_parallel = true}},
         0},
    };
    RUN(cases, &plain);
}

static void test_recompute(void **state)
{
    (void)state;
    static const Case cases[] = {
        {"selective", {.vision = {.recompute = "SELECTIVE"}, .llm = {.recompute = "SELECTIVE"}}, 0},
        {"full", {.vision = {.recompute = "FULL"}, .llm = {.recompute = "FULL"}}, 0},
        {"full, all axes",
         {.vision = {.tp = 2, .cp = 2, .recompute = "FULL"},
          .llm = {.tp = 2, .cp = 2, .pp = 2, .is_sequence_parallel = true, .recompute = "FULL"}},
         0},
        {"selective, interleaved",
         {.vision = {.pp = 2, .recompute = "SELECTIVE"},
          .llm = {.pp = 2, .chunks = 2, .recompute = "SELECTIVE"},
          .is_colocated = true},
         0},
    };
    RUN(cases, &plain);
}

static void test_sharded_optimizer(void **state)
{
    (void)state;
    static const Case cases[] = {
        {"DP4 -> DP3", {.vision = {.dp = 4}, .llm = {.dp = 3}}, 0},
        {"DP2CP2 -> TP2DP2CP2",
         {.vision = {.dp = 2, .cp = 2}, .llm = {.tp = 2, .dp = 2, .cp = 2}},
         0},
        {"colocated PP2DP3",
         {.vision = {.dp = 6}, .llm = {.pp = 2, .dp = 3}, .is_colocated = true},
         0},
    };
    ParityOptions sharded = plain;
    sharded.is_sharded = true;
    RUN(cases, &sharded);
}

static void test_tied_head(void **state)
{
    (void)state;
    static const Case cases[] = {
        {"PP3", {.vision = {ONE}, .llm = {.pp = 3}}, 0},
        {"TP2PP2DP2", {.vision = {.dp = 2}, .llm = {.tp = 2, .pp = 2, .dp = 2}}, 0},
        {"interleaved", {.vision = {ONE}, .llm = {.pp = 2, .chunks = 2, .cp = 2}}, 0},
        {"CP2", {.vision = {ONE}, .llm = {.cp = 2}}, 0},
    };
    ParityOptions tied = plain;
    tied.has_tied_head = true;
    RUN(cases, &tied);
    tied.is_sharded = true;
    RUN(cases, &tied);
}

static void test_frozen(void **state)
{
    (void)state;
    static const Case cases[] = {
        {"1 -> 1", {.vision = {ONE}, .llm = {ONE}}, 0},
        {"TP2PP2 -> TP2PP2", {.vision = {.tp = 2, .pp = 2}, .llm = {.tp = 2, .pp = 2}}, 0},
        {"DP2CP2 -> CP2, interleaved",
         {.vision = {.dp = 2, .cp = 2}, .llm = {.cp = 2, .pp = 2, .chunks = 2}},
         6},
        {"colocated",
         {.vision = {.dp = 4},
          .llm = {.tp = 2, .pp = 2, .is_sequence_parallel = true},
          .is_colocated = true},
         0},
    };
    static const char *const patterns[] = {
        "\"vision_tower.*\"",
        "\"vision_tower.*\", \"multi_modal_projector.*\"",
        "\"language_model.*\"",
        "\"language_model.*\", \"vision_tower.*\"",
        "\"*layers.0.*\", \"*norm*\", \"*embed*\"",
        "\"*layers.4.*\", \"*bias\", \"*lm_head*\"",
    };
    for (size_t p = 0; p < sizeof patterns / sizeof *patterns; p++) {
        ParityOptions frozen = plain;
        frozen.frozen = patterns[p];
        RUN(cases, &frozen);
        frozen.is_sharded = true;
        RUN(cases, &frozen);
    }
}

/* Images and clips: two encoders, each with a layout and a place of its own. */
static void test_two_encoders(void **state)
{
    (void)state;
    static const Case cases[] = {
        {"1, 1 -> 1", {.vision = {ONE}, .audio = {ONE}, .llm = {ONE}}, 0},
        {"image PP2, audio TP2 -> PP4",
         {.vision = {.pp = 2}, .audio = {.tp = 2}, .llm = {.pp = 4}},
         0},
        {"two encoders on one rank",
         {.vision = {ONE}, .audio = {ONE}, .llm = {.tp = 2}, .shares_pool = true},
         0},
        {"shared encoder pool",
         {.vision = {.dp = 4},
          .audio = {.tp = 2, .dp = 2},
          .llm = {.tp = 2, .dp = 2},
          .shares_pool = true},
         0},
        {"DP3, DP2 -> CP2PP2",
         {.vision = {.dp = 3}, .audio = {.dp = 2}, .llm = {.cp = 2, .pp = 2}},
         0},
        {"audio CP2 with sequence parallelism",
         {.vision = {.tp = 2},
          .audio = {.tp = 2, .cp = 2, .is_sequence_parallel = true},
          .llm = {.tp = 2, .is_sequence_parallel = true}},
         0},
        {"audio PP3",
         {.vision = {.dp = 2}, .audio = {.pp = 3, .recompute = "FULL"}, .llm = {.dp = 2}},
         0},
        {"all colocated",
         {.vision = {.dp = 4},
          .audio = {.tp = 2, .dp = 2},
          .llm = {.tp = 2, .pp = 2},
          .is_colocated = true},
         0},
        {"all colocated, interleaved",
         {.vision = {.cp = 2},
          .audio = {.pp = 2},
          .llm = {.pp = 2, .chunks = 2},
          .is_colocated = true},
         6},
    };
    ParityOptions both = plain;
    both.has_audio = true;
    RUN(cases, &both);
    both.frozen = "\"audio_tower.*\"";
    RUN(cases, &both);
    both.frozen = "\"vision_tower.*\", \"multi_modal_projector.*\", \"*layers.1.*\"";
    both.is_sharded = true;
    RUN(cases, &both);
}

int main(void)
{
    printf("seed %d\n", SEED);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_pairs),
        cmocka_unit_test(test_disaggregated),
        cmocka_unit_test(test_convergence_layouts),
        cmocka_unit_test(test_colocated),
        cmocka_unit_test(test_uneven),
        cmocka_unit_test(test_recompute),
        cmocka_unit_test(test_sharded_optimizer),
        cmocka_unit_test(test_tied_head),
        cmocka_unit_test(test_frozen),
        cmocka_unit_test(test_two_encoders),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
