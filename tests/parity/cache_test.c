/* Frozen encoders whose rows are cached: the same losses as without, whether rows are computed,
 * read, or found corrupt and computed again. */
#include "tests/parity/parity_data.h"
#include "tests/parity/parity_job.h"

#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    SEED = 8,
    STEPS = 4,
    OTHER_HEADS = 4
};

static const int images[] = {2, 0, 3, 1, 0, 1};

/* heads: of the vision encoder; 0: the template's. */
static void run_job(const ParityOptions *options, int heads, ParityRun *run)
{
    static ParityRank ranks[PARITY_RANKS_MAX];
    JobSpec *spec = parity_spec(options);
    spec->model->vision->heads = heads > 0 ? heads : spec->model->vision->heads;
    *run = (ParityRun){.spec = spec, .is_whole = true};
    parity_run(run, ranks);
    parity_expect_good(run, ranks, options->row_cache ? "cached" : "not cached");
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
}

/* A product of fewer rows may be cut into other tiles, and so be rounded otherwise. */
static bool is_near(double a, double b)
{
    return fabs(a - b) <= 1e-5 * fabs(b);
}

static void check_same(const ParityRun *a, const ParityRun *b)
{
    assert_int_equal(a->num_steps, STEPS);
    assert_int_equal(b->num_steps, STEPS);
    for (int i = 0; i < STEPS; i++) {
        assert_true(is_near(a->steps[i].loss, b->steps[i].loss));
        assert_true(is_near(a->steps[i].grad_norm, b->steps[i].grad_norm));
    }
}

/* Number of entries; with `flips`, a byte of each second one is changed. */
static int visit_entries(const char *folder, bool flips)
{
    DIR *entries = opendir(folder);
    assert_non_null(entries);
    struct dirent *entry;
    int num = 0;
    while ((entry = readdir(entries)) != NULL) {
        if (!strstr(entry->d_name, ".rows")) {
            continue;
        }
        if (flips && num % 2 == 0) {
            char byte = 0;
            int file = openat(dirfd(entries), entry->d_name, O_RDWR);
            assert_true(file >= 0);
            assert_int_equal(pread(file, &byte, 1, 100), 1);
            byte = (char)~byte;
            assert_int_equal(pwrite(file, &byte, 1, 100), 1);
            close(file);
        }
        num++;
    }
    closedir(entries);
    return num;
}

static void check_layout(ParityLayout layout)
{
    ParityData data;
    char folder[PARITY_PATH_BYTES + 16];
    parity_data_write(&data, images, NULL, sizeof images / sizeof *images);
    snprintf(folder, sizeof folder, "%s/rows", data.folder);
    ParityOptions options = {.shard = data.shard,
                             .layout = layout,
                             .frozen = "\"vision_tower.*\", \"multi_modal_projector.*\"",
                             .steps = STEPS,
                             .batch = 5,
                             .microbatches = 2,
                             .seed = SEED};
    ParityRun plain;
    ParityRun cached;
    run_job(&options, 0, &plain);
    options.row_cache = folder;
    run_job(&options, 0, &cached); /* writes */
    check_same(&plain, &cached);
    int entries = visit_entries(folder, true);
    assert_int_equal(entries, 7);  /* one for each image */
    run_job(&options, 0, &cached); /* reads, and computes what is corrupt */
    check_same(&plain, &cached);
    assert_int_equal(visit_entries(folder, false), entries);
    run_job(&options, 0, &cached); /* reads all */
    check_same(&plain, &cached);
    /* Another number of heads has the same weights, and is another model. */
    options.row_cache = NULL;
    run_job(&options, OTHER_HEADS, &plain);
    options.row_cache = folder;
    run_job(&options, OTHER_HEADS, &cached);
    check_same(&plain, &cached);
    assert_int_equal(visit_entries(folder, false), 2 * entries);
    parity_data_remove(&data);
}

static void test_cache(void **state)
{
    (void)state;
    check_layout(PARITY_PLAIN(1, 1, 1, 1));
    check_layout(PARITY_PLAIN(2, 2, 2, 1));
    check_layout((ParityLayout){.vision = {.dp = 2}, .llm = {.pp = 2}, .is_colocated = true});
}

/* A cache that could never be used is refused. */
static void test_refused(void **state)
{
    (void)state;
    static ParityRank ranks[PARITY_RANKS_MAX];
    ParityData data;
    parity_data_write(&data, images, NULL, sizeof images / sizeof *images);
    const ParityOptions options = {.shard = data.shard,
                                   .layout = PARITY_PLAIN(1, 1, 1, 1),
                                   .row_cache = data.folder,
                                   .steps = STEPS,
                                   .batch = 5,
                                   .seed = SEED};
    JobSpec *spec = parity_spec(&options);
    ParityRun run = {.spec = spec};
    parity_run(&run, ranks);
    int told = 0;
    for (int i = 0; i < parity_ranks(&run); i++) {
        assert_int_not_equal(ranks[i].status, STATUS_OK);
        told += strstr(ranks[i].message, "row_cache.directory") != NULL;
    }
    assert_true(told > 0);
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
    parity_data_remove(&data);
}

int main(void)
{
    printf("seed %d\n", SEED);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cache),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
