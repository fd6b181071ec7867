#include "job/job_file.h"
#include "job/job_layout.h"

#include <stdio.h>
#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

/* A job of these modules and pools; the rest does not matter to a layout. */
static JobSpec *make(const char *modules, const char *pools)
{
    char text[1024];
    snprintf(text, sizeof text, "modules: [%s]\npools: [%s]\n", modules, pools);
    JobSpec *spec = NULL;
    if (job_file_parse("job.yaml", text, strlen(text), &spec) != STATUS_OK) {
        fail_msg("%s", status_message());
    }
    assert_int_equal(job_spec_resolve(spec), STATUS_OK);
    return spec;
}

static void check_module(const JobLayout *layout, int index, const char *name, int pool,
                         int first_rank, int num_ranks)
{
    assert_in_range(index, 0, layout->num_modules - 1);
    const JobLayoutModule *module = &layout->modules[index];
    assert_string_equal(module->spec->name, name);
    assert_int_equal(job_layout_find(layout, name), index);
    assert_int_equal(module->pool, pool);
    assert_int_equal(module->first_rank, first_rank);
    assert_int_equal(module->num_ranks, num_ranks);
}

static void check_pool(const JobLayout *layout, int index, const char *name, int first_rank,
                       int num_ranks, int num_modules)
{
    assert_in_range(index, 0, layout->num_pools - 1);
    const JobLayoutPool *pool = &layout->pools[index];
    assert_string_equal(pool->spec->name, name);
    assert_int_equal(pool->first_rank, first_rank);
    assert_int_equal(pool->num_ranks, num_ranks);
    assert_int_equal(pool->num_modules, num_modules);
}

static void pools_follow_the_order_of_modules(void **state)
{
    (void)state;
    /* Neither list is in the order of ranks. */
    JobSpec *spec = make("{name: llm, pool: l, tp: 2, pp: 3}, {name: audio, pool: a, cp: 2}, "
                         "{name: vision, pool: v, dp: 3}",
                         "{name: l, role: llm}, {name: v, role: encoder}, "
                         "{name: a, role: encoder}");
    JobLayout layout = job_layout_make(spec);
    assert_int_equal(layout.num_modules, 3);
    assert_int_equal(job_layout_num_encoders(&layout), 2);
    assert_int_equal(layout.num_pools, 3);
    assert_int_equal(layout.num_ranks, 11);
    check_module(&layout, 0, "vision", 0, 0, 3);
    check_module(&layout, 1, "audio", 1, 3, 2);
    check_module(&layout, 2, "llm", 2, 5, 6);
    check_pool(&layout, 0, "v", 0, 3, 1);
    check_pool(&layout, 1, "a", 3, 2, 1);
    check_pool(&layout, 2, "l", 5, 6, 1);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

static void modules_of_one_pool_begin_at_its_first_rank(void **state)
{
    (void)state;
    JobSpec *spec = make("{name: vision, pool: all, tp: 2, dp: 4}, {name: llm, pool: all, tp: 4, "
                         "dp: 2}",
                         "{name: all, role: llm}");
    JobLayout layout = job_layout_make(spec);
    assert_int_equal(layout.num_ranks, 8);
    assert_int_equal(layout.num_pools, 1);
    check_module(&layout, 0, "vision", 0, 0, 8);
    check_module(&layout, 1, "llm", 0, 0, 8);
    check_pool(&layout, 0, "all", 0, 8, 2);
    assert_int_equal(job_layout_find(&layout, "audio"), -1);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

static void a_pool_is_as_large_as_its_largest_module(void **state)
{
    (void)state;
    /* The smaller module comes first, then last. */
    JobSpec *spec = make("{name: vision, pool: e, pp: 2}, {name: audio, pool: e, tp: 3}, "
                         "{name: llm, pool: l}",
                         "{name: e, role: encoder}, {name: l, role: llm}");
    JobLayout layout = job_layout_make(spec);
    check_module(&layout, 0, "vision", 0, 0, 2);
    check_module(&layout, 1, "audio", 0, 0, 3);
    check_module(&layout, 2, "llm", 1, 3, 1);
    check_pool(&layout, 0, "e", 0, 3, 2);
    assert_int_equal(layout.num_ranks, 4);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);

    /* Vision shares the decoder's pool, audio between them has its own. */
    spec = make("{name: vision, pool: l, tp: 4}, {name: audio, pool: a}, {name: llm, pool: l}",
                "{name: a, role: encoder}, {name: l, role: llm}");
    layout = job_layout_make(spec);
    check_module(&layout, 0, "vision", 0, 0, 4);
    check_module(&layout, 1, "audio", 1, 4, 1);
    check_module(&layout, 2, "llm", 0, 0, 1);
    check_pool(&layout, 0, "l", 0, 4, 2);
    check_pool(&layout, 1, "a", 4, 1, 1);
    assert_int_equal(layout.num_ranks, 5);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

static void a_decoder_may_stand_alone(void **state)
{
    (void)state;
    JobSpec *spec = make("{name: llm, pool: l, cp: 2, dp: 2}", "{name: l, role: llm}");
    JobLayout layout = job_layout_make(spec);
    assert_int_equal(job_layout_num_encoders(&layout), 0);
    check_module(&layout, 0, "llm", 0, 0, 4);
    assert_int_equal(layout.num_ranks, 4);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pools_follow_the_order_of_modules),
        cmocka_unit_test(modules_of_one_pool_begin_at_its_first_rank),
        cmocka_unit_test(a_pool_is_as_large_as_its_largest_module),
        cmocka_unit_test(a_decoder_may_stand_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
