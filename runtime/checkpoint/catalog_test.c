/* Declarations of ranks put together: one order whatever the order of what comes in, and no belief in what
 * peers say. */
#include "base/memory.h"
#include "checkpoint/catalog.h"

#include <stdio.h>
#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

static CatalogTensor make_tensor(const char *module, const char *name, int rank)
{
    CatalogTensor tensor = {.dims = {2, 3}, .num_dims = 2, .has_state = 1, .rank = rank};
    snprintf(tensor.module, sizeof tensor.module, "%s", module);
    snprintf(tensor.name, sizeof tensor.name, "%s", name);
    return tensor;
}

static Status build(const CatalogTensor *tensors, int num, Catalog *catalog)
{
    CatalogTensor *copy = NULL;
    assert_int_equal(MEMORY_NEW(&copy, num), STATUS_OK);
    if (num > 0) {
        memcpy(copy, tensors, (size_t)num * sizeof *copy);
    }
    return catalog_build(copy, num, catalog);
}

static void test_order(void **state)
{
    (void)state;
    static const char *const expected[] = {"a",
                                           "a.01",
                                           "a.1",
                                           "a.2",
                                           "a.2.b",
                                           "a.10",
                                           "a.10.b.3.c",
                                           "a.10.b.20.c",
                                           "a.99999999999999999999999",
                                           "a.100000000000000000000000",
                                           "a.b",
                                           "b"};
    enum {
        COUNT = sizeof expected / sizeof *expected
    };
    /* "01" and "1" are the same number: then bytes decide */
    CatalogTensor tensors[COUNT];
    for (int start = 0; start < COUNT; start++) {
        for (int i = 0; i < COUNT; i++) {
            tensors[i] = make_tensor("llm", expected[(start + 5 * i) % COUNT], i);
        }
        Catalog catalog;
        assert_int_equal(build(tensors, COUNT, &catalog), STATUS_OK);
        assert_int_equal(catalog.num_tensors, COUNT);
        for (int i = 0; i < COUNT; i++) {
            assert_string_equal(catalog.tensors[i].name, expected[i]);
            assert_ptr_equal(catalog_find(&catalog, "llm", expected[i]), &catalog.tensors[i]);
        }
        assert_null(catalog_find(&catalog, "llm", "c"));
        assert_null(catalog_find(&catalog, "vision", "a"));
        catalog_done(&catalog);
    }
}

static void test_modules(void **state)
{
    (void)state;
    CatalogTensor tensors[] = {make_tensor("vision", "x", 4), make_tensor("llm", "x", 3),
                               make_tensor("llm", "y", 2),    make_tensor("vision", "x", 1),
                               make_tensor("llm", "x", 5),    make_tensor("audio", "w", 0)};
    tensors[5].has_state = 0;
    tensors[2].has_state = 0;
    Catalog catalog;
    assert_int_equal(build(tensors, 6, &catalog), STATUS_OK);
    assert_int_equal(catalog.num_tensors, 4);
    assert_int_equal(catalog.num_modules, 3);
    static const struct {
        const char *name;
        int num_tensors;
        int creator;
        int num_states;
    } expected[] = {{"audio", 1, 0, 0}, {"llm", 2, 2, 6}, {"vision", 1, 1, 6}};
    for (int m = 0; m < 3; m++) {
        const CatalogModule *module = &catalog.modules[m];
        assert_string_equal(module->name, expected[m].name);
        assert_int_equal(module->num_tensors, expected[m].num_tensors);
        assert_int_equal(module->creator, expected[m].creator);
        assert_int_equal(module->num_values, 6 * expected[m].num_tensors);
        assert_int_equal(module->num_states, expected[m].num_states);
        assert_int_equal(module->has_states, expected[m].num_states > 0);
        assert_ptr_equal(catalog_find_module(&catalog, expected[m].name), module);
    }
    assert_int_equal(catalog_find(&catalog, "llm", "x")->rank, 3);
    assert_null(catalog_find_module(&catalog, "text"));
    catalog_done(&catalog);
    assert_int_equal(build(NULL, 0, &catalog), STATUS_OK);
    assert_int_equal(catalog.num_modules, 0);
    assert_null(catalog_find(&catalog, "llm", "x"));
    catalog_done(&catalog);
}

static void expect_refused(const CatalogTensor *tensors, int num, Status code, const char *part)
{
    Catalog catalog;
    assert_int_equal(build(tensors, num, &catalog), code);
    if (!strstr(status_message(), part)) {
        fail_msg("\"%s\", expected \"%s\"", status_message(), part);
    }
    catalog_done(&catalog);
}

static void test_differ(void **state)
{
    (void)state;
    CatalogTensor tensors[2] = {make_tensor("llm", "x", 3), make_tensor("llm", "x", 7)};
    tensors[1].dims[1] = 4;
    expect_refused(tensors, 2, STATUS_INTERNAL, "ranks 3 and 7 have declared different tensors");
    tensors[1] = make_tensor("llm", "x", 7);
    tensors[1].num_dims = 1;
    expect_refused(tensors, 2, STATUS_INTERNAL, "module llm: x");
    tensors[1] = make_tensor("llm", "x", 7);
    tensors[1].has_state = 0;
    expect_refused(tensors, 2, STATUS_INTERNAL, "module llm: x");
}

static void test_hostile(void **state)
{
    (void)state;
    CatalogTensor tensor = make_tensor("llm", "x", 9);
    memset(tensor.name, 'x', sizeof tensor.name);
    expect_refused(&tensor, 1, STATUS_CORRUPT, "rank 9 declares a tensor without a name");
    tensor = make_tensor("llm", "", 9);
    expect_refused(&tensor, 1, STATUS_CORRUPT, "without a name");
    tensor = make_tensor("llm", "x", 9);
    memset(tensor.module, 'x', sizeof tensor.module);
    expect_refused(&tensor, 1, STATUS_CORRUPT, "without a name");
    static const char *const modules[] = {"", "../llm", "a/b", "a b"};
    for (size_t i = 0; i < sizeof modules / sizeof *modules; i++) {
        tensor = make_tensor(modules[i], "x", 9);
        expect_refused(&tensor, 1, STATUS_CORRUPT, "without a name");
    }
    static const int num_dims[] = {0, -1, TENSOR_DIMS_MAX + 1, INT32_MAX};
    for (size_t i = 0; i < sizeof num_dims / sizeof *num_dims; i++) {
        tensor = make_tensor("llm", "x", 9);
        tensor.num_dims = num_dims[i];
        expect_refused(&tensor, 1, STATUS_CORRUPT, "tensor x in a shape that cannot be");
    }
    static const int64_t dims[][2] = {{-1, 1}, {INT64_MAX / 2, 1}, {INT64_C(1) << 31, 1 << 30}};
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        tensor = make_tensor("llm", "x", 9);
        memcpy(tensor.dims, dims[i], sizeof dims[i]);
        expect_refused(&tensor, 1, STATUS_CORRUPT, "cannot be");
    }
    CatalogTensor many[CHECKPOINT_PARTS_MAX + 1];
    for (int i = 0; i <= CHECKPOINT_PARTS_MAX; i++) {
        char module[] = {(char)('a' + i), '\0'};
        many[i] = make_tensor(module, "x", i);
    }
    expect_refused(many, CHECKPOINT_PARTS_MAX + 1, STATUS_INVALID, "more than");
    many[1] = make_tensor("a", "y", 0);
    many[0].dims[0] = many[1].dims[0] = INT64_C(1) << 57; /* each can be, both together cannot */
    expect_refused(many, 2, STATUS_CORRUPT, "more elements than files can have");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_modules),
        cmocka_unit_test(test_differ),
        cmocka_unit_test(test_hostile),
    };
    return cmocka_run_group_tests_name("catalog", tests, NULL, NULL);
}
