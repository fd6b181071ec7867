#include "base/memory.h"
#include "data/dataset.h"
#include "data/testing.h"
#include "tests/fuzz/fuzz.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    MAX_TOKENS = 256,
    MELS = 3
};

static void read_item(const Dataset *dataset, int64_t sample, const SampleItem *item,
                      const char *path)
{
    uint8_t pixels[4 * 4 * 3];
    float frames[2 * MELS];
    Status status = item->media == SAMPLE_MEDIA_IMAGE
                        ? dataset_read_image(dataset, sample, item->index, pixels)
                        : dataset_read_audio(dataset, sample, item->index, 1, frames);
    CHECK(status == STATUS_OK || strstr(status_message(), path) != NULL);
}

/* The whole way: tar, index, texts, JSON, image headers, then every sample that was let in. */
static void read_all(const char *path)
{
    char *patterns[] = {(char *)path};
    DatasetOptions options = {.patterns = patterns,
                              .num_patterns = 1,
                              .prompt = "see <image>, hear <audio>",
                              .rows_per_image = 3,
                              .image_size = 4,
                              .mels = MELS,
                              .max_seconds = 1,
                              .max_tokens = MAX_TOKENS};
    Dataset *dataset = NULL;
    if (dataset_open(&options, &dataset) != STATUS_OK) {
        CHECK(strstr(status_message(), path) != NULL); /* it names the shard */
        return;
    }
    for (int64_t i = 0; i < dataset_count(dataset); i++) {
        int32_t ids[MAX_TOKENS];
        int32_t labels[MAX_TOKENS];
        int32_t count = 0;
        CHECK(dataset_read_tokens(dataset, i, ids, labels) == STATUS_OK);
        CHECK(dataset_read_prompt(dataset, i, ids, &count) == STATUS_OK);
        CHECK(count < dataset_sample(dataset, i)->num_tokens);
        const SampleInfo *info = dataset_sample(dataset, i);
        for (int item = 0; item < info->num_items && item < 4; item++) {
            read_item(dataset, i, &info->items[item], path);
        }
    }
    dataset_close(dataset);
}

static void read_tar(const uint8_t *bytes, size_t size_bytes)
{
    int file = memfd_create("fuzz", MFD_CLOEXEC);
    CHECK(file >= 0);
    CHECK(write(file, bytes, size_bytes) == (ssize_t)size_bytes);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    read_all(path);
    close(file);
}

/* Makes the checksum of every block right that looks like a header, since almost no change would
 * get past it. */
static void sign_headers(uint8_t *bytes, size_t size_bytes)
{
    for (size_t at = 0; at + 512 <= size_bytes; at += 512) {
        uint8_t *header = bytes + at;
        if (memcmp(header + 257, "ustar", 5) != 0) {
            continue;
        }
        unsigned sum = 0;
        memset(header + 148, ' ', 8);
        for (int i = 0; i < 512; i++) {
            sum += header[i];
        }
        char text[8];
        snprintf(text, sizeof text, "%06o", sum & 0777777);
        memcpy(header + 148, text, 7);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size_bytes)
{
    read_tar(bytes, size_bytes);
    uint8_t *copy = NULL;
    CHECK(memory_alloc(size_bytes + 1, 1, (void **)&copy) == STATUS_OK);
    memcpy(copy, bytes, size_bytes);
    sign_headers(copy, size_bytes);
    read_tar(copy, size_bytes);
    memory_free(copy);
    return 0;
}

static TestingFile png;
static TestingFile wav;

size_t fuzz_seed(int index, uint8_t *out)
{
    static const int formats[] = {ARCHIVE_FORMAT_TAR_USTAR, ARCHIVE_FORMAT_TAR_PAX_INTERCHANGE,
                                  ARCHIVE_FORMAT_TAR_GNUTAR};
    if (index >= 3) {
        return 0;
    }
    size_t used = 0;
    char name[300];
    memset(name, 'n', sizeof name);
    memcpy(name + (index == 0 ? 60 : 250), ".txt", 5);
    testing_png_rgb(&png, 5, 4);
    testing_wav(&wav, 8000, 1, 50);
    TestingTar tar = {.archive = archive_write_new()};
    CHECK(archive_write_set_format(tar.archive, formats[index]) == ARCHIVE_OK);
    CHECK(archive_write_open_memory(tar.archive, out, FUZZ_SEED_BYTES_MAX, &used) == ARCHIVE_OK);
    testing_tar_add(&tar, "a/k.png", png.bytes, png.size_bytes);
    testing_tar_add(&tar, "a/k.wav", wav.bytes, wav.size_bytes);
    testing_tar_text(&tar, "a/k.txt", "a caption");
    testing_tar_text(&tar, name, "another");
    testing_tar_text(&tar, "j.json", "{\"prompt\": \"<image>: \", \"caption\": \"\\u00e4\"}");
    testing_tar_add(&tar, "j.0.jpg", png.bytes, png.size_bytes);
    testing_tar_add(&tar, "j.1.png", png.bytes, png.size_bytes);
    testing_tar_close(&tar);
    return used;
}
