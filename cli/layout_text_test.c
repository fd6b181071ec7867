#include "base/memory.h"
#include "cli/layout_text.h"
#include "job/job_file.h"

#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

static const char shared_text[] = "modules:\n"
                                  "  - {name: llm, pool: all, tp: 2, pp: 2}\n"
                                  "  - {name: vision, pool: all, dp: 3}\n"
                                  "  - {name: audio, pool: ears}\n"
                                  "pools: [{name: ears, role: encoder}, {name: all, role: llm}]\n";

static JobSpec *make(const char *text)
{
    JobSpec *spec = NULL;
    assert_int_equal(job_file_parse("job.yaml", text, strlen(text), &spec), STATUS_OK);
    assert_int_equal(job_spec_resolve(spec), STATUS_OK);
    return spec;
}

static void every_module_has_its_line(void **state)
{
    (void)state;
    JobSpec *spec = make(shared_text);
    char *text = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    layout_text_print(file, spec);
    fclose(file);
    assert_string_equal(text,
                        "  vision tp 1, cp 1, pp 1, dp 3 on pool \"all\" (shared), ranks 0 to 2\n"
                        "  audio  tp 1, cp 1, pp 1, dp 1 on pool \"ears\", rank 4\n"
                        "  llm    tp 2, cp 1, pp 2, dp 1 on pool \"all\" (shared), ranks 0 to 3\n");
    memory_free(text);
    assert_string_equal(layout_text_inputs(spec), "images and clips");
    assert_true(layout_text_has_encoder_pool(spec));
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

static void a_cell_is_cut_where_it_is_full(void **state)
{
    (void)state;
    JobSpec *spec = make(shared_text);
    char text[80];
    layout_text_describe(spec, text, sizeof text);
    assert_string_equal(text, "llm 2/1/2/1 all, vision 1/1/1/3 all, audio 1/1/1/1 ears");
    layout_text_describe(spec, text, 20);
    assert_string_equal(text, "llm 2/1/2/1 all, vi");
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

static void a_decoder_alone_has_no_inputs(void **state)
{
    (void)state;
    JobSpec *spec = make("modules: [{name: llm, pool: l}]\npools: [{name: l, role: llm}]\n");
    assert_string_equal(layout_text_inputs(spec), "");
    assert_false(layout_text_has_encoder_pool(spec));
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_module_has_its_line),
        cmocka_unit_test(a_cell_is_cut_where_it_is_full),
        cmocka_unit_test(a_decoder_alone_has_no_inputs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
