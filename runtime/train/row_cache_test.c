/* Entries come back as they were written; what is torn, changed or another's does not. */
#include "base/memory.h"
#include "train/row_cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    ROWS = 3,
    WIDTH = 5,
    COUNT = ROWS * WIDTH,
    ENTRY_BYTES = 48 + COUNT * 4
};

static char folder[64];

static int remove_one(const char *path, const struct stat *about, int type, struct FTW *walk)
{
    (void)about;
    (void)type;
    (void)walk;
    return remove(path);
}

static int set_up(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/row_cache.XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    return nftw(folder, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

static RowCache *open_cache(int64_t size_bytes_max, uint64_t weights)
{
    RowCache *cache = NULL;
    char path[96];
    snprintf(path, sizeof path, "%s/deep/er", folder);
    assert_int_equal(row_cache_open(path, size_bytes_max, weights, &cache), STATUS_OK);
    return cache;
}

static void fill(float *values, float first)
{
    for (int i = 0; i < COUNT; i++) {
        values[i] = first + (float)i;
    }
}

static void entry_path(const RowKey *key, char *path, size_t size)
{
    snprintf(path, size, "%s/deep/er/%016llx%016llx.rows", folder,
             (unsigned long long)key->words[0], (unsigned long long)key->words[1]);
}

static void test_round_trip(void **state)
{
    (void)state;
    float values[COUNT];
    float found[COUNT];
    RowCache *cache = open_cache(1 << 20, 7);
    RowKey key = row_cache_key(cache, "picture", 7, ROWS, WIDTH);
    fill(values, 1);
    assert_false(row_cache_read(cache, &key, ROWS, WIDTH, found));
    row_cache_write(cache, &key, ROWS, WIDTH, values);
    row_cache_close(cache);
    cache = open_cache(1 << 20, 7); /* another process */
    assert_true(row_cache_read(cache, &key, ROWS, WIDTH, found));
    assert_memory_equal(found, values, sizeof values);
    RowKey other = row_cache_key(cache, "pictura", 7, ROWS, WIDTH);
    assert_false(row_cache_read(cache, &other, ROWS, WIDTH, found));
    assert_int_equal(row_cache_counts(cache).found, 1);
    assert_int_equal(row_cache_counts(cache).missing, 1);
    row_cache_close(cache);
    cache = open_cache(1 << 20, 8); /* other weights */
    other = row_cache_key(cache, "picture", 7, ROWS, WIDTH);
    assert_false(row_cache_read(cache, &other, ROWS, WIDTH, found));
    row_cache_close(cache);
}

/* A flipped bit anywhere, a missing or an added byte: removed and counted; then written anew. */
static void test_corrupt(void **state)
{
    (void)state;
    float values[COUNT];
    float found[COUNT];
    char path[192];
    RowCache *cache = open_cache(1 << 20, 7);
    RowKey key = row_cache_key(cache, "picture", 7, ROWS, WIDTH);
    entry_path(&key, path, sizeof path);
    fill(values, 2);
    for (int at = 0; at < ENTRY_BYTES + 2; at++) {
        row_cache_write(cache, &key, ROWS, WIDTH, values);
        int file = open(path, O_RDWR);
        assert_true(file >= 0);
        if (at < ENTRY_BYTES) {
            char byte = 0;
            assert_int_equal(pread(file, &byte, 1, at), 1);
            byte = (char)(byte ^ 4);
            assert_int_equal(pwrite(file, &byte, 1, at), 1);
        } else {
            assert_int_equal(ftruncate(file, ENTRY_BYTES + (at == ENTRY_BYTES ? -1 : 1)), 0);
        }
        close(file);
        assert_false(row_cache_read(cache, &key, ROWS, WIDTH, found));
        assert_int_equal(access(path, F_OK), -1);
    }
    assert_int_equal(row_cache_counts(cache).corrupt, ENTRY_BYTES + 2);
    row_cache_write(cache, &key, ROWS, WIDTH, values);
    assert_true(row_cache_read(cache, &key, ROWS, WIDTH, found));
    row_cache_close(cache);
}

/* The bound holds over processes; what fits stays readable. */
static void test_bound(void **state)
{
    (void)state;
    float values[COUNT];
    float found[COUNT];
    int num_found = 0;
    for (int run = 0; run < 2; run++) {
        RowCache *cache = open_cache(3 * ENTRY_BYTES + 1, 7);
        num_found = 0;
        for (int i = 0; i < 5; i++) {
            char input = (char)i;
            RowKey key = row_cache_key(cache, &input, 1, ROWS, WIDTH);
            fill(values, (float)i);
            if (row_cache_read(cache, &key, ROWS, WIDTH, found)) {
                assert_memory_equal(found, values, sizeof values);
                num_found++;
            } else {
                row_cache_write(cache, &key, ROWS, WIDTH, values);
            }
        }
        row_cache_close(cache);
    }
    assert_int_equal(num_found, 3);
}

/* Two caches of one process write the same entry at once, over and over: nothing torn is ever
 * found, and neither gives up writing. */
typedef struct Writer {
    RowCache *cache;
    int num_bad;
} Writer;

enum {
    WRITES = 400
};

static void *write_and_read(void *context)
{
    Writer *writer = context;
    float values[COUNT];
    float found[COUNT];
    fill(values, 3);
    for (int i = 0; i < WRITES; i++) {
        RowKey key = row_cache_key(writer->cache, "picture", 7, ROWS, WIDTH);
        row_cache_write(writer->cache, &key, ROWS, WIDTH, values);
        bool is_found = row_cache_read(writer->cache, &key, ROWS, WIDTH, found);
        writer->num_bad += !is_found;
        for (int v = 0; is_found && v < COUNT; v++) {
            writer->num_bad += found[v] != values[v];
        }
    }
    return NULL;
}

static void test_two_writers(void **state)
{
    (void)state;
    Writer writers[2] = {{open_cache(1 << 20, 7), 0}, {open_cache(1 << 20, 7), 0}};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, write_and_read, &writers[i]), 0);
    }
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_int_equal(writers[i].num_bad, 0);
        assert_int_equal(row_cache_counts(writers[i].cache).written, WRITES);
        row_cache_close(writers[i].cache);
    }
}

static int count_files(void)
{
    char path[96];
    int num = 0;
    snprintf(path, sizeof path, "%s/deep/er", folder);
    DIR *entries = opendir(path);
    assert_non_null(entries);
    for (const struct dirent *entry; (entry = readdir(entries)) != NULL;) {
        num += entry->d_name[0] != '.';
    }
    closedir(entries);
    return num;
}

/* A disk that takes no more, here a bound on the size of files: what was written stays, nothing
 * half-written is left, nothing more is tried. */
static void test_full_disk(void **state)
{
    (void)state;
    float values[COUNT];
    float found[COUNT];
    struct rlimit before;
    RowCache *cache = open_cache(1 << 20, 7);
    RowKey first = row_cache_key(cache, "first", 5, ROWS, WIDTH);
    RowKey second = row_cache_key(cache, "second", 6, ROWS, WIDTH);
    fill(values, 4);
    row_cache_write(cache, &first, ROWS, WIDTH, values);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    assert_true(signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
    const struct rlimit full = {.rlim_cur = ENTRY_BYTES - 1, .rlim_max = before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &full), 0);
    row_cache_write(cache, &second, ROWS, WIDTH, values);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    row_cache_write(cache, &second, ROWS, WIDTH, values);
    assert_int_equal(count_files(), 1);
    assert_true(row_cache_read(cache, &first, ROWS, WIDTH, found));
    assert_memory_equal(found, values, sizeof values);
    assert_false(row_cache_read(cache, &second, ROWS, WIDTH, found));
    assert_int_equal(row_cache_counts(cache).written, 1);
    row_cache_close(cache);
}

static void test_no_folder(void **state)
{
    (void)state;
    RowCache *cache = NULL;
    char path[96];
    snprintf(path, sizeof path, "%s/file", folder);
    int file = open(path, O_CREAT | O_WRONLY, 0600);
    assert_true(file >= 0);
    close(file);
    assert_int_not_equal(row_cache_open(path, 100, 1, &cache), STATUS_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_round_trip, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_corrupt, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_bound, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_two_writers, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_full_disk, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_no_folder, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
