/* What the schedule is told of a job: costs on its data, who runs backward, the window. */
#include "job/job_file.h"
#include "train/job_graph.h"

#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

static const char job[] =
    "model:\n"
    "  vision: {image_size: 8, patch_size: 4, width: 12, layers: 4, heads: 3}\n"
    "  llm: {width: 16, layers: 6, heads: 4, mlp_width: 26}\n"
    "data: {train: [x.tar]}\n"
    "modules:\n"
    "  - {name: vision, pool: e, dp: 2}\n"
    "  - {name: llm, pool: l, tp: 2, pp: 3, virtual_stages: 2}\n"
    "pools: [{name: e, role: encoder}, {name: l, role: llm}]\n"
    "training: {steps: 1, global_batch: 24, microbatches: 12}\n"
    "optimizer: {learning_rate: 0.1}\n";

static const SampleItem picture = {SAMPLE_MEDIA_IMAGE, 0, 4, 1};
static const StepSample samples[] = {{.num_tokens = 30, .num_items = 1, .items = &picture},
                                     {.num_tokens = 10}};

static JobSpec *read_job(const char *const *settings, int num)
{
    JobSpec *spec = NULL;
    JobProblem problem;
    assert_int_equal(job_file_parse("job", job, sizeof job - 1, &spec), STATUS_OK);
    for (int i = 0; i < num; i++) {
        assert_int_equal(job_file_set(spec, settings[i]), STATUS_OK);
    }
    assert_int_equal(job_spec_resolve(spec), STATUS_OK);
    if (job_spec_check(spec, &problem, 1) > 0) {
        fail_msg("%s: %s", problem.field, problem.message);
    }
    return spec;
}

static StepSource source_of(const JobSpec *spec)
{
    return (StepSource){.samples = samples,
                        .num_samples = 2,
                        .batch = spec->training->global_batch,
                        .microbatches = spec->training->microbatches,
                        .num_encoders = 1,
                        .encoders = {{SAMPLE_MEDIA_IMAGE, 2}},
                        .llm_dp = 1};
}

static void test_graph(void **state)
{
    (void)state;
    JobSpec *spec = read_job(NULL, 0);
    Place place = place_make(spec, 0);
    StepSource source = source_of(spec);
    ScheduleGraph graph;
    const int all[] = {0, 0};
    assert_int_equal(job_graph_make(spec, &place, &source, all, &graph), STATUS_OK);
    assert_int_equal(graph.num_modules, 2);
    assert_int_equal(graph.modules[0].feeds, 1);
    assert_int_equal(graph.modules[1].feeds, -1);
    assert_int_equal(graph.modules[1].chunks, 2);
    assert_int_equal(graph.modules[1].grid.first_rank, 2);
    assert_true(graph.modules[0].is_trained && graph.modules[1].is_trained);
    assert_true(graph.modules[0].backward_cost == 2 * graph.modules[0].forward_cost);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

/* A sixth of the layers on half of the width costs a twelfth, whatever the unit. */
static void test_costs(void **state)
{
    (void)state;
    static const char *const whole[] = {"modules.llm.pp=1", "modules.llm.tp=1",
                                        "modules.llm.virtual_stages=1"};
    const int all[] = {0, 0};
    double costs[2];
    for (int i = 0; i < 2; i++) {
        JobSpec *spec = read_job(whole, i == 0 ? 0 : 3);
        Place place = place_make(spec, 0);
        StepSource source = source_of(spec);
        ScheduleGraph graph;
        assert_int_equal(job_graph_make(spec, &place, &source, all, &graph), STATUS_OK);
        costs[i] = graph.modules[1].forward_cost - 1;
        viaduct__v1__job_spec__free_unpacked(spec, NULL);
    }
    assert_true(costs[0] > 0);
    assert_float_equal((float)(costs[1] / costs[0]), 12.0f, 1e-4);
}

static void test_frozen(void **state)
{
    (void)state;
    JobSpec *spec = read_job(NULL, 0);
    Place place = place_make(spec, 0);
    StepSource source = source_of(spec);
    ScheduleGraph graph;
    /* The encoder is trained, the decoder not: it still runs backward, for the rows' gradients. */
    const int encoder_only[] = {0, 6};
    assert_int_equal(job_graph_make(spec, &place, &source, encoder_only, &graph), STATUS_OK);
    assert_false(graph.modules[1].is_trained);
    assert_int_equal(graph.modules[1].backward_begin, 0);
    assert_true(graph.modules[1].backward_cost == graph.modules[1].forward_cost);
    /* The last half of the decoder alone. */
    const int half[] = {1, 3};
    assert_int_equal(job_graph_make(spec, &place, &source, half, &graph), STATUS_OK);
    assert_false(graph.modules[0].is_trained);
    assert_int_equal(graph.modules[0].backward_begin, 1);
    assert_int_equal(graph.modules[1].backward_begin, 3);
    const int nothing[] = {1, 6};
    assert_int_equal(job_graph_make(spec, &place, &source, nothing, &graph), STATUS_INVALID);
    assert_non_null(strstr(status_message(), "training.frozen"));
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

static void check_window(const char *const *settings, int num, int expected)
{
    JobSpec *spec = read_job(settings, num);
    Place place = place_make(spec, 0);
    assert_int_equal(job_graph_window(spec, &place), expected);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

/* encoder_window ahead of what keeps the decoder's pipeline full. */
static void test_window(void **state)
{
    (void)state;
    static const char *const plain[] = {"modules.llm.virtual_stages=1", "modules.llm.pp=1"};
    static const char *const few[] = {"training.microbatches=3"};
    static const char *const many[] = {"training.encoder_window=50"};
    check_window(NULL, 0, 2 + 4);
    check_window(plain, 1, 2 + 2);
    check_window(plain, 2, 2);
    check_window(few, 1, 3);
    check_window(many, 1, 10); /* as many as a boundary keeps apart */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_graph),
        cmocka_unit_test(test_costs),
        cmocka_unit_test(test_frozen),
        cmocka_unit_test(test_window),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
