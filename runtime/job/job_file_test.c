#include "base/memory.h"
#include "job/job_file.h"
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
    "  vision: {image_size: 64, patch_size: 16, width: 128, layers: 3, heads: 4, activation: "
    "GELU}\n"
    "  projector: {}\n"
    "  audio: {mels: 128, width: 64, max_seconds: 12.5}\n"
    "  audio_projector: {width: 48}\n"
    "  llm: {width: 128, layers: 3, heads: 4, kv_heads: 2, mlp_width: 384, tied_head: true}\n"
    "data:\n"
    "  train: [a.tar, 'b-*.tar']\n"
    "  prompt: \"<image> says \\u00e4\"\n"
    "modules:\n"
    "  - {name: vision, pool: encoders, dp: 2}\n"
    "  - name: llm\n"
    "    pool: llms\n"
    "    tp: 2\n"
    "    sequence_parallel: true\n"
    "    virtual_stages: 2\n"
    "    recompute: SELECTIVE\n"
    "pools:\n"
    "  - {name: encoders, role: encoder, selector: {zone: north, disk: fast}}\n"
    "  - {name: llms, role: llm}\n"
    "training: {steps: 300, global_batch: 32, seed: 18446744073709551615,\n"
    "           frozen: [vision_tower.*, \"*.bias\"]}\n"
    "optimizer: {kind: ADAMW, learning_rate: 1e-3, sharding: ZERO1}\n"
    "row_cache: {directory: /tmp/rows, size_bytes_max: 5000000000}\n"
    "timeouts: {start: 5m, transfer: 1h30m, step: 1.5s, drain: 250ms}\n"
    "priority: -3\n";

static Status parse(const char *text, JobSpec **spec_out)
{
    return job_file_parse("job.yaml", text, strlen(text), spec_out);
}

static void every_kind_of_field_is_read(void **state)
{
    (void)state;
    JobSpec *spec = NULL;
    if (parse(good_text, &spec) != STATUS_OK) {
        fail_msg("%s", status_message());
    }
    assert_int_equal(spec->model->vision->image_size, 64);
    assert_int_equal(spec->model->vision->activation, VIADUCT__V1__ACTIVATION__GELU);
    assert_non_null(spec->model->projector);
    assert_true(spec->model->llm->tied_head);
    assert_int_equal(spec->data->n_train, 2);
    assert_string_equal(spec->data->train[1], "b-*.tar");
    assert_string_equal(spec->data->prompt, "<image> says \xc3\xa4");
    assert_int_equal(spec->n_modules, 2);
    assert_int_equal(spec->modules[1]->tp, 2);
    assert_string_equal(spec->modules[0]->pool, "encoders");
    assert_int_equal(spec->pools[0]->n_selector, 2);
    assert_string_equal(spec->pools[0]->selector[1]->key, "disk");
    assert_string_equal(spec->pools[0]->selector[1]->value, "fast");
    assert_true(spec->training->seed == UINT64_MAX);
    assert_true(spec->optimizer->learning_rate == 1e-3);
    assert_int_equal(spec->model->audio->mels, 128);
    assert_true(spec->model->audio->max_seconds == 12.5);
    assert_int_equal(spec->model->audio_projector->width, 48);
    assert_true(spec->modules[1]->sequence_parallel);
    assert_int_equal(spec->modules[1]->virtual_stages, 2);
    assert_int_equal(spec->modules[1]->recompute, VIADUCT__V1__MODULE_SPEC__RECOMPUTE__SELECTIVE);
    assert_int_equal(spec->training->n_frozen, 2);
    assert_string_equal(spec->training->frozen[0], "vision_tower.*");
    assert_string_equal(spec->training->frozen[1], "*.bias");
    assert_int_equal(spec->optimizer->sharding, VIADUCT__V1__OPTIMIZER_SPEC__SHARDING__ZERO1);
    assert_string_equal(spec->row_cache->directory, "/tmp/rows");
    assert_true(spec->row_cache->size_bytes_max == INT64_C(5000000000));
    assert_int_equal(message_duration_ms(spec->timeouts->start), 300000);
    assert_int_equal(message_duration_ms(spec->timeouts->transfer), 5400000);
    assert_int_equal(message_duration_ms(spec->timeouts->step), 1500);
    assert_int_equal(message_duration_ms(spec->timeouts->drain), 250);
    assert_int_equal(spec->priority, -3);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

static void what_is_printed_reads_back_the_same(void **state)
{
    (void)state;
    JobSpec *spec = NULL;
    JobSpec *again = NULL;
    assert_int_equal(parse(good_text, &spec), STATUS_OK);
    for (int format = MESSAGE_FORMAT_JSON; format <= MESSAGE_FORMAT_YAML; format++) {
        char *text = NULL;
        size_t size = 0;
        FILE *file = open_memstream(&text, &size);
        message_print(file, &spec->base, (MessageFormat)format);
        fclose(file);
        /* JSON is YAML too. */
        if (parse(text, &again) != STATUS_OK) {
            fail_msg("%s\n%s", status_message(), text);
        }
        uint8_t bytes[2][4096];
        size_t first = protobuf_c_message_pack(&spec->base, bytes[0]);
        size_t second = protobuf_c_message_pack(&again->base, bytes[1]);
        assert_int_equal(first, second);
        assert_memory_equal(bytes[0], bytes[1], first);
        viaduct__v1__job_spec__free_unpacked(again, NULL);
        memory_free(text);
    }
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

static void bad_files_are_explained(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        const char *message;
    } cases[] = {
        {"training:\n  steps: many\n",
         "job.yaml:2:10: training.steps: expected a whole number, got \"many\""},
        {"training: {steps: 1.5}", "expected a whole number, got \"1.5\""},
        {"training: {steps: '10'}", "got the quoted text \"10\""},
        {"training: {stpes: 1}", "did you mean \"steps\"?"},
        {"trainin: {}", "job.yaml:1:1: unknown field \"trainin\" of JobSpec; did you mean"},
        {"wholly_unknown: 1", "unknown field \"wholly_unknown\" of JobSpec"},
        {"training: {steps: 1, steps: 2}", "\"steps\" is given twice"},
        {"training: 5", "training: expected a mapping of fields, got \"5\""},
        {"training: [1]", "training: expected a mapping of fields, got a list"},
        {"priority: {a: 1}", "expected a whole number, got a mapping"},
        {"priority: 3000000000", "expected a whole number from -2147483648 to 2147483647"},
        {"training: {seed: -1}", "from 0 to 18446744073709551615"},
        {"training: {deterministic_reduction: yes}", "expected true or false, got \"yes\""},
        {"optimizer: {kind: ADAM}", "expected one of ADAMW, SGD, got \"ADAM\""},
        {"optimizer: {sharding: ZERO3}", "expected one of NONE, ZERO1, got \"ZERO3\""},
        {"modules: [{recompute: SOME}]", "expected one of NONE, SELECTIVE, FULL, got \"SOME\""},
        {"modules: [{sequence_parallel: 1}]", "expected true or false, got \"1\""},
        {"training: {frozen: vision_tower.*}", "training.frozen: expected a list"},
        {"training: {frozen: [*x]}", "aliases (*name) are not supported"},
        {"row_cache: {size_bytes_max: 1GiB}", "expected a whole number"},
        {"optimizer: {learning_rate: fast}", "optimizer.learning_rate: expected a number"},
        {"optimizer: {learning_rate: nan}", "expected a finite number"},
        {"optimizer: {learning_rate: 1e999}", "expected a finite number"},
        {"timeouts: {start: 30}", "expected a duration such as 30s, 5m or 1h30m, got \"30\""},
        {"timeouts: {start: -1s}", "expected a duration"},
        {"timeouts: {start: 99999999d}", "expected a duration"},
        {"data: {train: a.tar}", "data.train: expected a list, got \"a.tar\""},
        {"data: {train: {a: b}}", "data.train: expected a list, got a mapping"},
        {"data: {train: [[a]]}", "data.train[0]: expected a text, got a list"},
        {"modules: [vision]", "modules[0]: expected a mapping of fields, got \"vision\""},
        {"modules:\n- {name: a}\n- {name: b, tp: x}\n", "job.yaml:3:17: modules[1].tp: expected"},
        {"modules: {name: vision}", "modules: expected a list, got a mapping"},
        {"pools: [{selector: [a]}]", "pools[0].selector: expected a mapping, got a list"},
        {"pools: [{selector: {a: [1]}}]", "expected a text, got a list"},
        {"pools: [{selector: {a: b, a: c}}]", "\"a\" is given twice"},
        {"- a\n- b\n", "expected a mapping of fields, got a list"},
        {"just text", "expected a mapping of fields, got \"just text\""},
        {"", "empty, expected the fields of a job"},
        {"# only a comment\n", "empty, expected the fields of a job"},
        {"a: [", "job.yaml:1"},
        {"training: {steps: 1", "not YAML"},
        {"training:\n\tsteps: 1\n", "not YAML"},
        {"training: &x {steps: 1}\noptimizer: *x\n", "aliases (*name) are not supported"},
        {"priority: 1\n---\npriority: 2\n", "expected one document"},
        {"data: {prompt: \"a\\0b\"}", "a zero byte is not allowed"},
        {"[[[[[[[[[[[[[[[[[[[[", "expected"},
        {"? {a: 1}\n: 2\n", "expected a name, got a mapping"},
        {"? [a]\n: 2\n", "expected a name, got a list"},
        {"\xff\xfe\x00", "job.yaml"},
        {"data: {prompt: \"\xc3\"}", "not YAML"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        JobSpec *spec = NULL;
        Status status = parse(cases[i].text, &spec);
        if (status != STATUS_INVALID || !strstr(status_message(), cases[i].message)) {
            fail_msg("case %zu: %s: \"%s\" does not say \"%s\"", i, status_name(status),
                     status_message(), cases[i].message);
        }
    }
}

static void sizes_are_bounded(void **state)
{
    (void)state;
    JobSpec *spec = NULL;
    static char large[2 << 20];
    memset(large, ' ', sizeof large);
    assert_int_equal(job_file_parse("job.yaml", large, sizeof large, &spec), STATUS_INVALID);
    /* Half a million list elements. */
    size_t used = (size_t)snprintf(large, sizeof large, "data: {train: [");
    while (used < 1000000) {
        large[used++] = 'a';
        large[used++] = ',';
    }
    assert_int_equal(job_file_parse("job.yaml", large, used, &spec), STATUS_INVALID);
    assert_non_null(strstr(status_message(), "more than 100000 values"));
}

/* Every truncation and every changed byte of a good file must be refused or read, never crash. */
static void damaged_files_do_not_crash(void **state)
{
    (void)state;
    char text[sizeof good_text];
    uint32_t random = 12345;
    print_message("seed %u\n", random);
    for (size_t i = 0; i < 2 * sizeof good_text; i++) {
        memcpy(text, good_text, sizeof text);
        size_t size = sizeof text - 1;
        if (i < sizeof good_text - 1) {
            size = i;
        } else {
            random = random * 1664525U + 1013904223U;
            text[(random >> 8) % size] = (char)(random >> 24);
        }
        JobSpec *spec = NULL;
        if (job_file_parse("job.yaml", text, size, &spec) == STATUS_OK) {
            JobProblem problems[4];
            assert_int_equal(job_spec_resolve(spec), STATUS_OK);
            (void)job_spec_check(spec, problems, 4);
            viaduct__v1__job_spec__free_unpacked(spec, NULL);
        }
    }
}

static void single_values_can_be_set(void **state)
{
    (void)state;
    JobSpec *spec = NULL;
    assert_int_equal(parse(good_text, &spec), STATUS_OK);
    assert_int_equal(job_file_set(spec, "training.steps=7"), STATUS_OK);
    assert_int_equal(spec->training->steps, 7);
    assert_int_equal(job_file_set(spec, "modules.vision.dp=3"), STATUS_OK);
    assert_int_equal(job_file_set(spec, "modules.1.tp=4"), STATUS_OK);
    assert_int_equal(spec->modules[0]->dp, 3);
    assert_int_equal(spec->modules[1]->tp, 4);
    assert_int_equal(job_file_set(spec, "checkpoint.directory=/tmp/a=b"), STATUS_OK);
    assert_string_equal(spec->checkpoint->directory, "/tmp/a=b");
    assert_int_equal(job_file_set(spec, "timeouts.start=2m"), STATUS_OK);
    assert_int_equal(message_duration_ms(spec->timeouts->start), 120000);
    static const char *const bad[][2] = {
        {"training.steps=x", "training.steps: expected a whole number"},
        {"training.stpes=1", "did you mean \"steps\"?"},
        {"training=1", "is not a single value"},
        {"data.train=a", "is not a single value"},
        {"modules.audio.dp=1", "no element \"audio\""},
        {"modules.0=1", "expected a path"},
        {"training.steps.more=1", "has no field \"more\""},
        {"=1", "expected FIELD=VALUE"},
        {"training.steps", "expected FIELD=VALUE"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(job_file_set(spec, bad[i][0]), STATUS_INVALID);
        if (!strstr(status_message(), bad[i][1])) {
            fail_msg("\"%s\" does not say \"%s\"", status_message(), bad[i][1]);
        }
    }
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

static void missing_file_is_not_found(void **state)
{
    (void)state;
    JobSpec *spec = NULL;
    assert_int_equal(job_file_read("/nonexistent/job.yaml", &spec), STATUS_NOT_FOUND);
    assert_non_null(strstr(status_message(), "/nonexistent/job.yaml"));
    assert_int_equal(job_file_read("/", &spec), STATUS_IO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_kind_of_field_is_read),
        cmocka_unit_test(what_is_printed_reads_back_the_same),
        cmocka_unit_test(bad_files_are_explained),
        cmocka_unit_test(sizes_are_bounded),
        cmocka_unit_test(damaged_files_do_not_crash),
        cmocka_unit_test(single_values_can_be_set),
        cmocka_unit_test(missing_file_is_not_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
