/* What `viaduct verify` does: good layouts are equal, each seeded fault is different, a job that
 * cannot run says why. */
#include "tests/parity/faulty.h"
#include "tests/parity/parity_data.h"
#include "tests/parity/parity_job.h"
#include "train/verify.h"

#include <stdio.h>
#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    SEED = 12,
    NO_FAULT = -1
};

static const int images[] = {2, 0, 7, 1, 0, 1, 3, 0, 1};

typedef struct Spoiler {
    const JobSpec *spec;
    const ModuleOps *faulty;
} Spoiler;

static void spoil(void *context, Trainer *trainer)
{
    const Spoiler *spoiler = context;
    const Place *place = trainer_place(trainer);
    faulty_begin(spoiler->spec->model, place_decoder(place)->coords.at[GRID_AXIS_CP]);
    for (int i = 0; spoiler->faulty && i < place->num_modules; i++) {
        Module *module = trainer_module(trainer, i);
        if (module && strcmp(module->ops->name, spoiler->faulty->name) == 0) {
            module->ops = spoiler->faulty;
        }
    }
}

typedef struct Case {
    const char *what;
    ParityLayout layout;
    int fault;      /* FaultyKind */
    bool is_cached; /* the encoder is frozen and its rows are cached */
} Case;

static void run_case(const Case *given, const ParityData *data)
{
    char rows[PARITY_PATH_BYTES + 16];
    snprintf(rows, sizeof rows, "%s/rows", data->folder);
    const char *frozen = "\"vision_tower.*\", \"multi_modal_projector.*\"";
    const ParityOptions options = {.shard = data->shard,
                                   .frozen = given->is_cached ? frozen : NULL,
                                   .row_cache = given->is_cached ? rows : NULL,
                                   .layout = given->layout,
                                   .steps = 50,
                                   .batch = 6,
                                   .microbatches = FAULTY_MICROBATCHES,
                                   .seed = SEED,
                                   .is_adamw = true};
    JobSpec *spec = parity_spec(&options);
    Spoiler spoiler = {.spec = spec,
                       .faulty =
                           given->fault == NO_FAULT ? NULL : faulty_ops((FaultyKind)given->fault)};
    const VerifyOptions verify = {.spec = spec,
                                  .modules = parity_modules,
                                  .num_modules = parity_num_modules,
                                  .steps = 3,
                                  .context = &spoiler,
                                  .spoil = spoil};
    VerifyResult result;
    if (verify_run(&verify, &result) != STATUS_OK) {
        fail_msg("%s: %s", given->what, status_message());
    }
    double worst =
        result.worst_grad > result.worst_weight ? result.worst_grad : result.worst_weight;
    printf("%s: losses %.3g, gradients %.3g, weights %.3g times what is allowed\n", given->what,
           result.worst_loss, result.worst_grad, result.worst_weight);
    assert_int_equal(result.is_equal, given->fault == NO_FAULT);
    assert_true(given->fault == NO_FAULT ? worst <= 1 : worst > 30);
    assert_true(result.num_tensors > 20);
    verify_result_done(&result);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

static void test_cases(void **state)
{
    (void)state;
    const ParityLayout replicas = PARITY_PLAIN(1, 2, 1, 2);
    const ParityLayout context = {.vision = {.dp = 2}, .llm = {.cp = 2}};
    const ParityLayout one = {.vision = {.tp = 2}, .llm = {.tp = 2}, .is_colocated = true};
    const ParityLayout pipeline = {.vision = {.cp = 2},
                                   .llm = {.tp = 2, .pp = 2, .is_sequence_parallel = true}};
    const Case cases[] = {
        {"replicas", replicas, NO_FAULT, false},
        {"context parallel", context, NO_FAULT, false},
        {"colocated", one, NO_FAULT, false},
        {"pipeline", pipeline, NO_FAULT, false},
        {"cached rows", replicas, NO_FAULT, true},
        {"doubled encoder gradient", replicas, FAULTY_VISION_DOUBLED, false},
        {"swapped images", replicas, FAULTY_VISION_SWAPPED, false},
        {"images of the microbatch before", replicas, FAULTY_VISION_LATE, false},
        {"dropped row", replicas, FAULTY_VISION_DROPPED, false},
        {"dropped row, rows cached", replicas, FAULTY_VISION_DROPPED, true},
        {"gradient divided by dp", replicas, FAULTY_LLM_HALVED, false},
        {"gradient of one cp rank", context, FAULTY_LLM_ONE_COPY, false},
        {"mean over unequal microbatches", one, FAULTY_LLM_UNEQUAL, false},
        {"an update skipped by one module", replicas, FAULTY_LLM_SKIPPED, false},
    };
    ParityData data;
    parity_data_write(&data, images, NULL, sizeof images / sizeof *images);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        run_case(&cases[i], &data);
    }
    parity_data_remove(&data);
}

static void test_bad_data(void **state)
{
    (void)state;
    static const int few[] = {1, 0};
    ParityData data;
    parity_data_write(&data, few, NULL, 2);
    parity_data_spoil(&data);
    const ParityOptions options = {.shard = data.shard, .steps = 3, .batch = 2, .seed = SEED};
    JobSpec *spec = parity_spec(&options);
    const VerifyOptions verify = {
        .spec = spec, .modules = parity_modules, .num_modules = parity_num_modules, .steps = 2};
    VerifyResult result;
    assert_int_not_equal(verify_run(&verify, &result), STATUS_OK);
    if (!strstr(status_message(), "in one process") || !strstr(status_message(), "sample-00")) {
        fail_msg("%s", status_message());
    }
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
    parity_data_remove(&data);
}

static void test_too_many_ranks(void **state)
{
    (void)state;
    const ParityOptions options = {.shard = "none",
                                   .layout = {.vision = {.dp = VERIFY_RANKS_MAX}},
                                   .steps = 1,
                                   .batch = 2,
                                   .seed = SEED};
    JobSpec *spec = parity_spec(&options);
    const VerifyOptions verify = {
        .spec = spec, .modules = parity_modules, .num_modules = parity_num_modules, .steps = 1};
    VerifyResult result;
    assert_int_equal(verify_run(&verify, &result), STATUS_INVALID);
    assert_non_null(strstr(status_message(), "the layout has 513 ranks"));
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

int main(void)
{
    printf("seed %d\n", SEED);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cases),
        cmocka_unit_test(test_bad_data),
        cmocka_unit_test(test_too_many_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
