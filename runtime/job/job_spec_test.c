#include "job/job_file.h"
#include "job/job_layout.h"
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

/* Vision and sound into one decoder; the encoders share a pool. */
static const char three_text[] =
    "model:\n"
    "  vision: {image_size: 64, patch_size: 16, width: 128, layers: 4, heads: 4,\n"
    "           feature_layer: -2}\n"
    "  audio: {width: 96, layers: 4, heads: 4}\n"
    "  llm: {width: 128, layers: 6, heads: 4, mlp_width: 384, max_tokens: 128}\n"
    "data: {train: [a.tar]}\n"
    "modules:\n"
    "  - {name: llm, pool: l, tp: 2, cp: 2, pp: 3, virtual_stages: 2, sequence_parallel: true}\n"
    "  - {name: vision, pool: e, dp: 2}\n"
    "  - {name: audio, pool: e, pp: 4, recompute: SELECTIVE}\n"
    "pools: [{name: e, role: encoder}, {name: l, role: llm}]\n"
    "training: {steps: 300, global_batch: 32, frozen: [\"audio_tower.*\", \"x\"]}\n"
    "optimizer: {learning_rate: 0.001, sharding: ZERO1}\n";

/* The decoder alone. */
static const char llm_text[] = "model: {llm: {width: 128, layers: 3, heads: 4, mlp_width: 384}}\n"
                               "data: {train: [a.tar]}\n"
                               "modules: [{name: llm, pool: l, tp: 2, dp: 3}]\n"
                               "pools: [{name: l, role: llm}]\n"
                               "training: {steps: 300, global_batch: 32}\n"
                               "optimizer: {learning_rate: 0.001}\n";

static JobSpec *make_from(const char *text, const char *assignment)
{
    JobSpec *spec = NULL;
    if (job_file_parse("job.yaml", text, strlen(text), &spec) != STATUS_OK) {
        fail_msg("%s", status_message());
    }
    if (assignment && job_file_set(spec, assignment) != STATUS_OK) {
        fail_msg("%s", status_message());
    }
    assert_int_equal(job_spec_resolve(spec), STATUS_OK);
    return spec;
}

static JobSpec *make(const char *assignment)
{
    return make_from(good_text, assignment);
}

static void expect_good(const JobSpec *spec)
{
    JobProblem problem;
    if (job_spec_check(spec, &problem, 1) != 0) {
        fail_msg("%s: %s", problem.field, problem.message);
    }
}

static void expect_same_when_resolved_again(JobSpec *spec)
{
    uint8_t first[4096];
    uint8_t second[4096];
    size_t size = protobuf_c_message_pack(&spec->base, first);
    assert_int_equal(job_spec_resolve(spec), STATUS_OK);
    assert_int_equal(protobuf_c_message_pack(&spec->base, second), size);
    assert_memory_equal(first, second, size);
}

static void defaults_are_filled_and_stay(void **state)
{
    (void)state;
    JobSpec *spec = make(NULL);
    expect_good(spec);
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
    assert_null(spec->model->audio);
    assert_null(spec->model->audio_projector);
    assert_int_equal(spec->modules[0]->virtual_stages, 1);
    assert_int_equal(spec->modules[0]->recompute, VIADUCT__V1__MODULE_SPEC__RECOMPUTE__NONE);
    assert_int_equal(spec->optimizer->sharding, VIADUCT__V1__OPTIMIZER_SPEC__SHARDING__NONE);
    assert_string_equal(spec->row_cache->directory, "");
    assert_int_equal(spec->row_cache->size_bytes_max, 1 << 30);
    expect_same_when_resolved_again(spec);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

static void defaults_follow_the_modules(void **state)
{
    (void)state;
    JobSpec *spec = make_from(three_text, NULL);
    expect_good(spec);
    assert_int_equal(spec->model->audio->mels, 80);
    assert_int_equal(spec->model->audio->mlp_width, 384);
    assert_true(spec->model->audio->max_seconds == 30.0);
    assert_true(spec->model->audio->norm_epsilon == 1e-5);
    assert_int_equal(spec->model->audio_projector->width, 128);
    assert_int_equal(spec->model->projector->width, 128);
    assert_string_equal(spec->data->prompt, "<image><audio>");
    /* A shared pool is one group, whatever the dp of its modules. */
    assert_int_equal(spec->pools[0]->min_groups, 1);
    assert_int_equal(spec->pools[0]->desired_groups, 1);
    assert_int_equal(spec->pools[0]->max_groups, 1);
    assert_int_equal(job_spec_module_ranks(spec->modules[0]), 12);
    expect_same_when_resolved_again(spec);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);

    spec = make_from(llm_text, NULL);
    expect_good(spec);
    assert_null(spec->model->vision);
    assert_null(spec->model->projector);
    assert_string_equal(spec->data->prompt, "");
    assert_int_equal(spec->pools[0]->desired_groups, 3);
    expect_same_when_resolved_again(spec);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);

    /* Sound alone: the job with images, its encoder by another name. */
    char text[sizeof good_text + 64];
    snprintf(text, sizeof text, "%s", good_text);
    const char *vision = strstr(good_text, "  vision");
    const char *llm = strstr(good_text, "  llm");
    snprintf(text, sizeof text, "%.*s  audio: {width: 64, layers: 2, heads: 4}\n%s",
             (int)(vision - good_text), good_text, llm);
    char *name = strstr(text, "name: vision");
    memcpy(name, "name: audio ", strlen("name: audio "));
    spec = make_from(text, NULL);
    expect_good(spec);
    assert_string_equal(spec->data->prompt, "<audio>");
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

static void layouts_are_allowed(void **state)
{
    (void)state;
    static const char *const assignments[] = {
        "modules.vision.cp=3",
        "modules.llm.pp=3",
        "modules.vision.pp=3",
        "modules.llm.tp=5",
        "modules.llm.dp=4096",
        "modules.vision.recompute=FULL",
        "row_cache.directory=/tmp/rows",
        "data.prompt=<audio> <image>",
        "modules.llm.sequence_parallel=true",
    };
    for (size_t i = 0; i < sizeof assignments / sizeof *assignments; i++) {
        JobSpec *spec = make(assignments[i]);
        expect_good(spec);
        viaduct__v1__job_spec__free_unpacked(spec, NULL);
    }
    /* Every encoder on the decoder's workers, or one of them. */
    JobSpec *spec = make_from(three_text, "modules.vision.pool=l");
    assert_int_equal(job_spec_resolve(spec), STATUS_OK);
    expect_good(spec);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

static void expect_problem_in(const JobSpec *spec, const char *change, const char *field,
                              const char *message)
{
    JobProblem problems[32];
    int count = job_spec_check(spec, problems, 32);
    for (int i = 0; i < count && i < 32; i++) {
        if (strcmp(problems[i].field, field) == 0 && strstr(problems[i].message, message)) {
            return;
        }
    }
    fail_msg("%s: no problem \"%s: ... %s\" among %d", change, field, message, count);
}

/* An assignment, the field that has a problem then, and a part of the problem's text. */
static void expect_problem(const char *text, const char *const parts[3])
{
    JobSpec *spec = make_from(text, parts[0]);
    expect_problem_in(spec, parts[0], parts[1], parts[2]);
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
        {"modules.0.name=sound", "modules[0].name", "expected \"vision\", \"audio\" or \"llm\""},
        {"modules.0.name=audio", "model.vision", "modules has no \"vision\""},
        {"modules.0.name=audio", "model.audio.width", "is 0, expected 1 to"},
        {"model.audio.width=64", "model.audio", "modules has no \"audio\""},
        {"model.audio_projector.width=64", "model.audio_projector", "modules has no \"audio\""},
        {"modules.1.name=vision", "modules", "has no module \"llm\""},
        {"modules.vision.pool=nowhere", "modules[0].pool", "which pools does not have"},
        {"modules.1.name=vision", "modules[1].name", "is \"vision\" a second time"},
        {"modules.llm.pool=e", "modules[1].pool", "expected a pool of role \"llm\""},
        {"modules.llm.pp=4", "modules[1].pp", "4 parts, expected at most the 3 layers"},
        {"modules.vision.pp=4", "modules[0].pp", "4 parts, expected at most the 3 layers"},
        {"modules.llm.virtual_stages=2", "modules[1].virtual_stages", "expected 1 where pp is 1"},
        {"modules.llm.virtual_stages=17", "modules[1].virtual_stages", "expected 1 to 16"},
        {"modules.llm.cp=-1", "modules[1].cp", "expected 1 to 4096"},
        {"modules.vision.dp=4097", "modules[0].dp", "expected 1 to 4096"},
        {"modules.llm.tp=-1", "modules[1].tp", "expected 1 to"},
        {"pools.e.role=gpu", "pools[0].role", "expected \"encoder\" or \"llm\""},
        {"pools.e.role=llm", "modules[0].pool",
         "expected a pool of role \"encoder\", or that of the module \"llm\""},
        {"pools.l.role=encoder", "modules[1].pool", "expected a pool of role \"llm\""},
        {"pools.e.desired_groups=5", "pools[0].desired_groups", "expected the dp 2"},
        {"pools.e.min_groups=3", "pools[0].min_groups", "expected 1 <= min"},
        {"training.steps=0", "training.steps", "is 0, expected 1"},
        {"training.global_batch=-4", "training.global_batch", "is -4"},
        {"optimizer.learning_rate=0", "optimizer.learning_rate", "is 0"},
        {"optimizer.min_learning_rate=1", "optimizer.min_learning_rate", "at most learning_rate"},
        {"optimizer.beta1=1", "optimizer.beta1", "less than 1"},
        {"row_cache.size_bytes_max=-1", "row_cache.size_bytes_max", "is -1, expected 1 to"},
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
        expect_problem(good_text, cases[i]);
    }
}

static void problems_of_several_encoders(void **state)
{
    (void)state;
    static const char *const cases[][3] = {
        {"model.audio.mels=257", "model.audio.mels", "expected 1 to 256"},
        {"model.audio.heads=5", "model.audio.width", "multiple of heads 5"},
        {"model.audio.width=95", "model.audio.width", "expected an even number"},
        {"model.audio.width=-2", "model.audio.mlp_width", "is 0"},
        {"model.audio.layers=3", "modules[2].pp", "4 parts, expected at most the 3 layers"},
        {"model.audio.max_seconds=-1", "model.audio.max_seconds", "is -1"},
        {"model.audio.max_seconds=1e9", "model.audio.max_seconds", "less than 3600"},
        {"model.audio.norm_epsilon=2", "model.audio.norm_epsilon", "is 2"},
        {"model.audio_projector.width=-1", "model.audio_projector.width", "is -1"},
        {"model.llm.layers=5", "modules[0].pp", "6 parts, expected at most the 5 layers"},
        /* Of four layers feature_layer -2 runs three. */
        {"modules.vision.pp=4", "modules[1].pp", "4 parts, expected at most the 3 layers"},
        {"modules.0.name=speech", "modules", "has no module \"llm\""},
        {"pools.e.max_groups=2", "pools[0].min_groups", "expected 1 each"},
        {"pools.e.desired_groups=2", "pools[0].min_groups", "expected 1 each"},
        {"pools.e.min_groups=2", "pools[0].min_groups", "expected 1 each"},
        {"pools.e.role=llm", "modules[2].pool", "or that of the module \"llm\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        expect_problem(three_text, cases[i]);
    }
}

static void what_no_assignment_can_set_is_checked(void **state)
{
    (void)state;
    JobSpec *spec = make_from(three_text, NULL);
    spec->training->frozen[1][0] = '\0';
    expect_problem_in(spec, "empty pattern", "training.frozen[1]", "is empty, expected a pattern");
    spec->modules[0]->tp = 64;
    spec->modules[0]->cp = 64;
    spec->modules[0]->dp = 64;
    expect_problem_in(spec, "many ranks", "modules[0]", "786432 ranks, expected at most 65536");
    spec->modules[0]->recompute = (Viaduct__V1__ModuleSpec__Recompute)9;
    expect_problem_in(spec, "no enum value", "modules[0].recompute",
                      "is 9, which is no value of Recompute");
    spec->optimizer->sharding = (Viaduct__V1__OptimizerSpec__Sharding)9;
    expect_problem_in(spec, "no enum value", "optimizer.sharding",
                      "is 9, which is no value of Sharding");
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

/* Whatever a changed byte makes of a job: what passes the checks has a layout. */
static void what_is_good_has_a_layout(void **state)
{
    (void)state;
    char text[sizeof three_text];
    uint32_t random = 4321;
    print_message("seed %u\n", random);
    int good = 0;
    int bad = 0;
    for (int i = 0; i < 4000; i++) {
        memcpy(text, three_text, sizeof text);
        random = random * 1664525U + 1013904223U;
        text[(random >> 8) % (sizeof text - 1)] = (char)(' ' + (random >> 24) % 95);
        JobSpec *spec = NULL;
        if (job_file_parse("job.yaml", text, sizeof text - 1, &spec) != STATUS_OK) {
            continue;
        }
        assert_int_equal(job_spec_resolve(spec), STATUS_OK);
        if (job_spec_check(spec, NULL, 0) == 0) {
            JobLayout layout = job_layout_make(spec);
            assert_int_equal(layout.num_modules, 3);
            assert_in_range(layout.num_ranks, 4, 3 * 65536);
            good++;
        } else {
            bad++;
        }
        viaduct__v1__job_spec__free_unpacked(spec, NULL);
    }
    print_message("%d good, %d bad\n", good, bad);
    assert_true(good > 100 && bad > 100);
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
        cmocka_unit_test(defaults_follow_the_modules),
        cmocka_unit_test(layouts_are_allowed),
        cmocka_unit_test(each_problem_names_its_field),
        cmocka_unit_test(problems_of_several_encoders),
        cmocka_unit_test(what_no_assignment_can_set_is_checked),
        cmocka_unit_test(what_is_good_has_a_layout),
        cmocka_unit_test(an_empty_spec_has_many_problems_and_is_not_dereferenced),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
