#include "base/clock.h"
#include "base/memory.h"
#include "data/loader.h"
#include "data/testing.h"

#include <stdlib.h>
#include <unistd.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    NUM_SAMPLES = 24,
    SIZE = 16,
    IMAGE_BYTES = SIZE * SIZE * 3,
    BAD_SAMPLE = 23,
    MELS = 4,
    ROW_BYTES = 2 * MELS * 4,
};

static char shard[] = "/tmp/loader_test.XXXXXX";
static TestingFile png;
static TestingFile wav;
static Dataset *dataset;

/* Sample i has one picture of its own size; the last one is broken behind its header. */
static int make_dataset(void **state)
{
    (void)state;
    int file = mkstemp(shard);
    if (file < 0) {
        return -1;
    }
    close(file);
    TestingTar tar;
    testing_tar_open(&tar, shard);
    for (int i = 0; i < NUM_SAMPLES; i++) {
        char name[32];
        testing_png_rgb(&png, 20 + i, 30);
        if (i == BAD_SAMPLE) {
            png.bytes[png.size_bytes - 20] ^= 0xff;
        }
        snprintf(name, sizeof name, "s%02d.png", i);
        testing_tar_add(&tar, name, png.bytes, png.size_bytes);
        for (int clip = 0; clip < 2; clip++) { /* of (2 i + clip) % 5 + 1 rows */
            testing_wav(&wav, 16000, 1, 320 * ((2 * i + clip) % 5 + 1));
            snprintf(name, sizeof name, "s%02d.%d.wav", i, clip);
            testing_tar_add(&tar, name, wav.bytes, wav.size_bytes);
        }
        snprintf(name, sizeof name, "s%02d.txt", i);
        testing_tar_text(&tar, name, "x");
    }
    testing_tar_close(&tar);
    char *patterns[] = {shard};
    DatasetOptions options = {.patterns = patterns,
                              .num_patterns = 1,
                              .prompt = "<image><audio>",
                              .rows_per_image = 1,
                              .image_size = SIZE,
                              .mels = MELS,
                              .max_seconds = 1,
                              .max_tokens = 64};
    return dataset_open(&options, &dataset) == STATUS_OK ? 0 : -1;
}

static int remove_dataset(void **state)
{
    (void)state;
    dataset_close(dataset);
    return unlink(shard);
}

static int64_t soon(void)
{
    return clock_deadline_in_ms(20000);
}

/* Batches of changing sizes come out in the order asked for, with the pixels of a direct read. */
static void test_order(void **state)
{
    (void)state;
    enum {
        DEPTH = 3,
        BATCHES = 40,
        IMAGES_MAX = 5
    };
    Loader *loader = NULL;
    assert_int_equal(
        loader_create(dataset, SAMPLE_MEDIA_IMAGE, 3, DEPTH, IMAGES_MAX, IMAGES_MAX, &loader),
        STATUS_OK);
    int requested = 0;
    for (int taken = 0; taken < BATCHES; taken++) {
        while (requested < BATCHES && requested < taken + DEPTH) {
            LoaderItem items[IMAGES_MAX];
            int count = requested % (IMAGES_MAX + 1);
            for (int i = 0; i < count; i++) {
                items[i] =
                    (LoaderItem){.sample = (requested + i) * INT64_C(7) % BAD_SAMPLE, .rows = 1};
            }
            assert_int_equal(loader_request(loader, items, count), STATUS_OK);
            memset(items, 0xee, sizeof items); /* they were copied */
            requested++;
        }
        if (requested == taken + DEPTH) {
            assert_int_equal(loader_request(loader, NULL, 0), STATUS_EXHAUSTED);
        }
        const uint8_t *pixels = NULL;
        assert_int_equal(loader_take(loader, soon(), &pixels), STATUS_OK);
        for (int i = 0; i < taken % (IMAGES_MAX + 1); i++) {
            uint8_t expected[IMAGE_BYTES];
            int64_t sample = (taken + i) * INT64_C(7) % BAD_SAMPLE;
            assert_int_equal(dataset_read_image(dataset, sample, 0, expected), STATUS_OK);
            assert_memory_equal(pixels + (size_t)i * IMAGE_BYTES, expected, IMAGE_BYTES);
        }
        loader_release(loader);
    }
    loader_destroy(loader);
}

/* Clips of uneven sizes stand one after another; some are cut and some are continued. */
static void test_clips(void **state)
{
    (void)state;
    enum {
        BATCHES = 30,
        CLIPS_MAX = 4,
        ROWS_MAX = 24
    };
    Loader *loader = NULL;
    assert_int_equal(loader_create(dataset, SAMPLE_MEDIA_AUDIO, 3, 2, CLIPS_MAX, ROWS_MAX, &loader),
                     STATUS_OK);
    assert_int_equal(loader_item_bytes(loader, 3), 3 * ROW_BYTES);
    for (int batch = 0; batch < BATCHES; batch++) {
        LoaderItem items[CLIPS_MAX];
        int count = batch % (CLIPS_MAX + 1);
        for (int i = 0; i < count; i++) {
            items[i] = (LoaderItem){.sample = (batch * 5 + i) % NUM_SAMPLES, .index = i % 2};
            items[i].rows = 1 + (batch + i) % 6;
        }
        assert_int_equal(loader_request(loader, items, count), STATUS_OK);
        const uint8_t *data = NULL;
        assert_int_equal(loader_take(loader, soon(), &data), STATUS_OK);
        for (int i = 0; i < count; i++) {
            float expected[6 * ROW_BYTES / 4];
            assert_int_equal(dataset_read_audio(dataset, items[i].sample, items[i].index,
                                                items[i].rows, expected),
                             STATUS_OK);
            assert_memory_equal(data, expected, (size_t)items[i].rows * ROW_BYTES);
            data += (size_t)items[i].rows * ROW_BYTES;
        }
        loader_release(loader);
    }
    loader_destroy(loader);
}

static void test_error(void **state)
{
    (void)state;
    Loader *loader = NULL;
    assert_int_equal(loader_create(dataset, SAMPLE_MEDIA_IMAGE, 2, 2, 4, 4, &loader), STATUS_OK);
    LoaderItem items[] = {{.sample = 0}, {.sample = BAD_SAMPLE}, {.sample = 2}};
    assert_int_equal(loader_request(loader, items, 3), STATUS_OK);
    assert_int_equal(loader_request(loader, items, 1), STATUS_OK);
    const uint8_t *pixels = NULL;
    assert_int_equal(loader_take(loader, soon(), &pixels), STATUS_CORRUPT);
    assert_non_null(strstr(status_message(), "sample s23, member s23.png"));
    assert_int_equal(loader_take(loader, soon(), &pixels), STATUS_OK); /* the next is whole */
    loader_release(loader);
    assert_int_equal(loader_request(loader, items, 1), STATUS_OK);
    loader_destroy(loader); /* with a batch under way */
}

/* A deadline that has passed already. Should the threads win the race all the same, the batch is
 * asked for again. */
static void test_deadline(void **state)
{
    (void)state;
    enum {
        TRIES = 200
    };
    Loader *loader = NULL;
    assert_int_equal(
        loader_create(dataset, SAMPLE_MEDIA_IMAGE, 1, 1, NUM_SAMPLES, NUM_SAMPLES, &loader),
        STATUS_OK);
    LoaderItem items[NUM_SAMPLES] = {0};
    const uint8_t *pixels = NULL;
    Status status = STATUS_OK;
    for (int i = 0; i < TRIES && status == STATUS_OK; i++) {
        assert_int_equal(loader_request(loader, items, NUM_SAMPLES), STATUS_OK);
        status = loader_take(loader, clock_now_ns(), &pixels);
        if (status == STATUS_OK) {
            loader_release(loader);
        }
    }
    assert_int_equal(status, STATUS_TIMEOUT);
    assert_int_equal(loader_take(loader, soon(), &pixels), STATUS_OK); /* the same batch */
    loader_release(loader);
    loader_destroy(loader);
    loader_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_order), cmocka_unit_test(test_clips),
                                       cmocka_unit_test(test_error),
                                       cmocka_unit_test(test_deadline)};
    return cmocka_run_group_tests_name("loader", tests, make_dataset, remove_dataset);
}
