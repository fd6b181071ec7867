#include "tests/parity/parity_data.h"

#include "base/rng.h"
#include "data/testing.h"

#include <ftw.h>
#include <stdlib.h>
#include <unistd.h>

enum {
    SIDE_MAX = 16
};

/* No two images are alike. */
static void write_image(TestingFile *file, int sample, int image)
{
    static uint8_t rows[SIDE_MAX * (3 * SIDE_MAX + 1)];
    int width = 7 + (sample + image) % 5;
    int height = 8 + (3 * sample + image) % 4;
    Rng rng = {.seed = 5, .stream = (uint64_t)(100 * sample + image)};
    size_t at = 0;
    for (int y = 0; y < height; y++) {
        rows[at++] = 0;
        for (int x = 0; x < 3 * width; x++, at++) {
            rows[at] = (uint8_t)rng_bits(rng, (uint64_t)at);
        }
    }
    testing_png_begin(file, (uint32_t)width, (uint32_t)height, 8, 2);
    testing_png_end(file, rows, at);
}

/* 16-bit noise at 16 kHz, 2 to 7 rows of 20 ms; no two clips are alike. */
static void write_clip(TestingFile *file, int sample, int clip)
{
    int frames = 640 + 320 * ((3 * sample + 2 * clip) % 5) + 50;
    Rng rng = {.seed = 6, .stream = (uint64_t)(100 * sample + clip)};
    testing_wav_begin(file, 1, 16, 16000, 1, frames);
    for (int i = 0; i < frames; i++) {
        testing_append_little(file, (uint32_t)rng_bits(rng, (uint64_t)i) & 0x1fff, 2);
    }
}

static void write_sample(TestingTar *tar, int sample, int images, int clips)
{
    static TestingFile file;
    char name[64];
    char caption[64] = "";
    for (int i = 0; i < images; i++) {
        snprintf(name, sizeof name, "sample-%02d.%d.png", sample, i);
        write_image(&file, sample, i);
        testing_tar_add(tar, name, file.bytes, file.size_bytes);
    }
    for (int i = 0; i < clips; i++) {
        snprintf(name, sizeof name, "sample-%02d.%d.wav", sample, i);
        write_clip(&file, sample, i);
        testing_tar_add(tar, name, file.bytes, file.size_bytes);
    }
    snprintf(caption, sizeof caption, "%.*s %d", 2 + sample * 5 % 13, "a quick brown fox", sample);
    snprintf(name, sizeof name, "sample-%02d.txt", sample);
    testing_tar_text(tar, name, caption);
}

void parity_data_write(ParityData *data, const int *images, const int *clips, int num)
{
    TestingTar tar;
    snprintf(data->folder, sizeof data->folder, "/tmp/parity.XXXXXX");
    CHECK(mkdtemp(data->folder) != NULL);
    snprintf(data->shard, sizeof data->shard, "%.200s/samples.tar", data->folder);
    testing_tar_open(&tar, data->shard);
    for (int i = 0; i < num; i++) {
        write_sample(&tar, i, images[i], clips ? clips[i] : 0);
    }
    testing_tar_close(&tar);
}

void parity_data_spoil(const ParityData *data)
{
    static char bytes[64 * 1024];
    FILE *file = fopen(data->shard, "r+");
    CHECK(file);
    size_t size_bytes = fread(bytes, 1, sizeof bytes, file);
    const char *pixels = memmem(bytes, size_bytes, "IDAT", 4);
    CHECK(pixels);
    CHECK(fseek(file, (long)(pixels - bytes) + 4, SEEK_SET) == 0);
    CHECK(fwrite("spoiled.", 1, 8, file) == 8);
    CHECK(fclose(file) == 0);
}

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *walk)
{
    (void)info;
    (void)kind;
    (void)walk;
    return remove(path);
}

void parity_data_remove(ParityData *data)
{
    nftw(data->folder, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}
