#include "job/job_file.h"
#include "job/job_spec.h"
#include "job/message.h"

#include <stdio.h>
#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

static const char good_text[] =
    "model:\n"
    "  vision: {image_size: 64, patch_size: 16, width: 128, layers: 3, heads: 4}\n"
    "  llm: {width: 128, layers: 3, heads: 4, kv_heads: 2, mlp_width: 384, max_tokens: 128}\n"
    "data: {train: [a.tar]}\n"
    "modules: [{name: vision, pool: e, dp: 2}, {name: llm, pool: l, tp: 2}]\n"
    "pools: [{name: e, role: encoder}, {name: l, role: llm}]\n"
    "training: {steps: 300, global_batch: 32}\n"
    "optimizer: {learning_rate: 0.001}\n";

static JobSpec *make(const char *assignment)
{
    JobSpec *spec = NULL;
    assert_int_equal(job_file_parse("job.yaml", good_text, strlen(good_text), &spec), STATUS_OK);
    if (assignment && job_file_set(spec, assignment) != STATUS_OK) {
        fail_msg("%s", status_message());
    }
    assert_int_equal(job_spec_resolve(spec), STATUS_OK);
    return spec;
}

static void defaults_are_filled_and_stay(void **state)
{
    (void)state;
    JobSpec *spec = make(NULL);
    JobProblem problem;
    if (job_spec_check(spec, &problem, 1) != 0) {
        fail_msg("%s: %s", problem.field, problem.message);
    }
    assert_int_equal(spec->model->vision->mlp_width, 512);
    assert_int_equal(spec->model->vision->feature_layer, -1);
    assert_int_equal(spec->model->vision->activation, VIADUCT__V1__ACTIVATION__QUICK_GELU);
    assert_int_equal(spec->model->llm->vocabulary, 259);
    assert_int_equal(spec->model->llm->head_width, 32);
    assert_int_equal(spec->model->projector->width, 128);
    assert_string_equal(spec->data->prompt, "<image>");
    assert_int_equal(spec->pools[0]->min_groups, 2);
    assert_int_equal(spec->modules[0]->tp, 1);
    assert_int_equal(message_duration_ms(spec->timeouts->start), 600000);
    assert_true(spec->optimizer->beta2 == 0.95);
    assert_int_equal(job_spec_module_ranks(job_spec_module(spec, "vision")), 2);
    assert_int_equal(job_spec_module_ranks(job_spec_module(spec, "llm")), 2);
    assert_null(job_spec_module(spec, "audio"));
    uint8_t first[4096];
    uint8_t second[4096];
    size_t size = protobuf_c_message_pack(&spec->base, first);
    assert_int_equal(job_spec_resolve(spec), STATUS_OK);
    assert_int_equal(protobuf_c_message_pack(&spec->base, second), size);
    assert_memory_equal(first, second, size);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

static void each_problem_names_its_field(void **state)
{
    (void)state;
    static const char *const cases[][3] = {
        {"model.vision.patch_size=15", "model.vision.image_size", "multiple of patch_size 15"},
        {"model.vision.heads=3", "model.vision.width", "multiple of heads 3"},
        {"model.vision.image_size=-64", "model.vision.image_size", "expected 1 to"},
        {"model.vision.layers=-2147483648", "model.vision.layers", "expected 1 to"},
        {"model.vision.feature_layer=9", "model.vision.feature_layer", "expected -3 to 3"},
        {"model.llm.head_width=33", "model.llm.head_width", "even number"},
        {"model.llm.kv_heads=3", "model.llm.heads", "multiple of kv_heads 3"},
        {"model.llm.vocabulary=100", "model.llm.vocabulary", "expected 259"},
        {"model.llm.max_tokens=16", "model.llm.max_tokens", "16 rows of one image"},
        {"model.llm.norm_epsilon=-1", "model.llm.norm_epsilon", "is -1"},
        {"modules.0.name=audio", "modules[0].name", "expected \"vision\" or \"llm\""},
        {"modules.1.name=vision", "modules", "has no module \"llm\""},
        {"modules.vision.pool=nowhere", "modules[0].pool", "which pools does not have"},
        {"modules.llm.pool=e", "modules[1].pool", "not supported yet: colocation"},
        {"modules.vision.cp=2", "modules[0].cp", "not supported yet"},
        {"modules.llm.pp=2", "modules[1].pp", "not supported yet"},
        {"modules.llm.tp=-1", "modules[1].tp", "expected 1 to"},
        {"pools.e.role=gpu", "pools[0].role", "expected \"encoder\" or \"llm\""},
        {"pools.e.role=llm", "modules[0].pool", "expected a pool of role \"encoder\""},
        {"pools.e.desired_groups=5", "pools[0].desired_groups", "expected the dp 2"},
        {"pools.e.min_groups=3", "pools[0].min_groups", "expected 1 <= min"},
        {"training.steps=0", "training.steps", "is 0, expected 1"},
        {"training.global_batch=-4", "training.global_batch", "is -4"},
        {"optimizer.learning_rate=0", "optimizer.learning_rate", "is 0"},
        {"optimizer.min_learning_rate=1", "optimizer.min_learning_rate", "at most learning_rate"},
        {"optimizer.beta1=1", "optimizer.beta1", "less than 1"},
        {"checkpoint.keep=-1", "checkpoint.keep", "is -1"},
        {"timeouts.transfer=5s", "timeouts.transfer", "more than the lease"},
        {"timeouts.step=20s", "timeouts.step", "more than timeouts.transfer"},
        {"timeouts.drain=60s", "timeouts.drain", "from timeouts.step"},
        {"transport=TRANSPORT_NCCL", "transport", "not supported yet"},
        {"training.deterministic_reduction=true", "training.deterministic_reduction",
         "not supported yet"},
        {"max_reconfigurations_on_failure=1", "max_reconfigurations_on_failure",
         "not supported yet"},
        {"ttl_after_finished=1h", "ttl_after_finished", "not supported yet"},
        {"active_deadline=1h", "active_deadline", "not supported yet"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        JobSpec *spec = make(cases[i][0]);
        JobProblem problems[16];
        int count = job_spec_check(spec, problems, 16);
        bool found = false;
        for (int j = 0; j < count && j < 16; j++) {
            found = found || (strcmp(problems[j].field, cases[i][1]) == 0 &&
                              strstr(problems[j].message, cases[i][2]));
        }
        if (!found) {
            fail_msg("%s: no problem \"%s: ... %s\" among %d", cases[i][0], cases[i][1],
                     cases[i][2], count);
        }
        viaduct__v1__job_spec__free_unpacked(spec, NULL);
    }
}

static void axes_need_not_divide_heads(void **state)
{
    (void)state;
    JobSpec *spec = make("modules.llm.tp=5");
    assert_int_equal(job_spec_check(spec, NULL, 0), 0);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

static void an_empty_spec_has_many_problems_and_is_not_dereferenced(void **state)
{
    (void)state;
    ProtobufCMessage *message = NULL;
    assert_int_equal(message_create(&viaduct__v1__job_spec__descriptor, &message), STATUS_OK);
    JobSpec *spec = (JobSpec *)message;
    assert_int_equal(job_spec_resolve(spec), STATUS_OK);
    JobProblem problems[2];
    assert_true(job_spec_check(spec, problems, 2) > 10);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_are_filled_and_stay),
        cmocka_unit_test(each_problem_names_its_field),
        cmocka_unit_test(axes_need_not_divide_heads),
        cmocka_unit_test(an_empty_spec_has_many_problems_and_is_not_dereferenced),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
