#include "coordinator/store.h"

#include <stdio.h>
#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

typedef struct Seen {
    char text[256];
    int count;
} Seen;

static void note(void *context, const StoreRecord *record)
{
    Seen *seen = context;
    size_t used = strlen(seen->text);
    snprintf(seen->text + used, sizeof seen->text - used, "%s/%s/%s/%d ", record->job->uid,
             record->job->name, record->request_id, (int)record->request_hash);
    seen->count++;
}

static void put(Store *store, const char *uid, const char *name, const char *request, int hash)
{
    Viaduct__V1__Job job = VIADUCT__V1__JOB__INIT;
    job.uid = (char *)(uintptr_t)uid;
    job.name = (char *)(uintptr_t)name;
    StoreRecord record = {&job, request, (uint64_t)hash};
    assert_int_equal(store_put(store, &record), STATUS_OK);
}

static void what_is_put_is_there_until_it_is_removed(void **state)
{
    (void)state;
    Store *store = NULL;
    assert_int_equal(store_open_memory(&store), STATUS_OK);
    put(store, "u1", "jobs/a", "r1", 1);
    put(store, "u2", "jobs/b", "r2", 2);
    put(store, "u3", "jobs/c", "", 3);
    put(store, "u1", "jobs/a2", "r1", 1); /* replaces, keeps its place */
    Seen seen = {0};
    assert_int_equal(store_each(store, note, &seen), STATUS_OK);
    assert_string_equal(seen.text, "u1/jobs/a2/r1/1 u2/jobs/b/r2/2 u3/jobs/c//3 ");
    assert_int_equal(store_remove(store, "u2"), STATUS_OK);
    assert_int_equal(store_remove(store, "u2"), STATUS_OK);
    seen = (Seen){0};
    assert_int_equal(store_each(store, note, &seen), STATUS_OK);
    assert_string_equal(seen.text, "u1/jobs/a2/r1/1 u3/jobs/c//3 ");
    store_close(store);
    store_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_put_is_there_until_it_is_removed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
