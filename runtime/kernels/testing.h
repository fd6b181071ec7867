/* What the kernels' tests share: seeded arrays, comparison with references in double precision, and
 * gradients by central differences of such a reference.
 *
 * Threading: one thread, apart from OpenMP inside the ops.
 */
#ifndef KERNELS_TESTING_H
#define KERNELS_TESTING_H

#include "base/memory.h"
#include "base/rng.h"
#include "kernels/kernels.h"

#include <math.h>
#include <omp.h>
#include <string.h>

/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    TEST_BLOCKS_MAX = 4096,
    TEST_SEED = 20240611,
    TEST_SAMPLES = 16, /* elements of a large gradient that are checked */
};

typedef struct Fixture {
    Device *device;
    Stream *stream;
    const Kernels *kernels;
    void *blocks[TEST_BLOCKS_MAX]; /* owned: freed by test_release */
    int num_blocks;
} Fixture;

static inline int test_setup(void **state)
{
    Fixture *f = NULL;
    assert_int_equal(MEMORY_NEW(&f, 1), STATUS_OK);
    assert_int_equal(device_open("cpu", 0, &f->device), STATUS_OK);
    assert_int_equal(stream_create(f->device, &f->stream), STATUS_OK);
    f->kernels = kernels_for(f->device);
    print_message("seed %d\n", TEST_SEED);
    *state = f;
    return 0;
}

/* After each test: back to one thread, and its arrays are freed. */
static inline int test_release(void **state)
{
    Fixture *f = *state;
    omp_set_num_threads(1);
    for (int i = 0; i < f->num_blocks; i++) {
        memory_free(f->blocks[i]);
    }
    f->num_blocks = 0;
    return 0;
}

static inline int test_teardown(void **state)
{
    Fixture *f = *state;
    stream_destroy(f->stream);
    device_close(f->device);
    memory_free(f);
    return 0;
}

#define TEST(function) cmocka_unit_test_teardown(function, test_release)

/* Zeroed memory of exactly that size, so that a sanitizer sees every step outside. */
static inline void *test_memory(Fixture *f, int64_t count, size_t element_bytes)
{
    assert_true(f->num_blocks < TEST_BLOCKS_MAX);
    void *memory = NULL;
    assert_int_equal(memory_alloc((size_t)count, element_bytes, &memory), STATUS_OK);
    f->blocks[f->num_blocks++] = memory;
    return memory;
}

/* Standard normal values; each `stream` is another array. */
static inline float *test_floats(Fixture *f, uint64_t stream, int64_t count)
{
    float *x = test_memory(f, count, sizeof *x);
    for (int64_t i = 0; i < count; i++) {
        x[i] = rng_normal((Rng){TEST_SEED, stream}, (uint64_t)i);
    }
    return x;
}

static inline float *test_copy(Fixture *f, const float *x, int64_t count)
{
    float *copy = test_memory(f, count, sizeof *copy);
    for (int64_t i = 0; i < count; i++) {
        copy[i] = x[i];
    }
    return copy;
}

static inline double *test_doubles(Fixture *f, const float *x, int64_t count)
{
    double *copy = test_memory(f, count, sizeof *copy);
    for (int64_t i = 0; i < count; i++) {
        copy[i] = (double)x[i];
    }
    return copy;
}

static inline int64_t test_below(uint64_t stream, int64_t index, int64_t bound)
{
    return (int64_t)rng_below((Rng){TEST_SEED, stream}, (uint64_t)index, (uint64_t)bound);
}

/* |got - want| <= tolerance max(1, |want|) */
static inline void assert_near(double got, double want, double tolerance, const char *what,
                               int64_t index)
{
    if (!(fabs(got - want) <= tolerance * fmax(1.0, fabs(want)))) {
        fail_msg("%s[%lld] is %.9g, expected %.9g", what, (long long)index, got, want);
    }
}

static inline void assert_all_near(const float *got, const double *want, int64_t count,
                                   double tolerance, const char *what)
{
    for (int64_t i = 0; i < count; i++) {
        assert_near((double)got[i], want[i], tolerance, what, i);
    }
}

static inline void assert_same_bits(const float *a, const float *b, int64_t count)
{
    if (count > 0) {
        assert_memory_equal(a, b, (size_t)count * sizeof *a);
    }
}

/* grad [count] must be `before` (NULL: 0) plus the derivative of loss(context) by x [count], which
 * loss reads. */
static inline void assert_gradient(double (*loss)(const void *context), const void *context,
                                   double *x, int64_t count, const float *grad, const float *before,
                                   double tolerance, const char *what)
{
    const double h = 1e-5;
    int64_t samples = count < TEST_SAMPLES ? count : TEST_SAMPLES;
    for (int64_t s = 0; s < samples; s++) {
        int64_t i = count <= TEST_SAMPLES ? s : test_below(999, s, count);
        double x_i = x[i];
        x[i] = x_i + h;
        double above = loss(context);
        x[i] = x_i - h;
        double below = loss(context);
        x[i] = x_i;
        double want = (above - below) / (2.0 * h) + (before ? (double)before[i] : 0.0);
        assert_near((double)grad[i], want, tolerance, what, i);
    }
}

#endif
