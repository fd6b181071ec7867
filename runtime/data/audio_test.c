#include "base/memory.h"
#include "data/audio.h"
#include "data/testing.h"

#include <fcntl.h>
#include <math.h>
#include <sndfile.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    MELS = 80,
    ROWS_MAX = 100,
};

static TestingFile file;
static float frames[2][ROWS_MAX * AUDIO_FRAMES_A_ROW * 128];

static Status decode(int mels, int32_t rows, float *frames_out)
{
    return audio_decode(file.bytes, file.size_bytes, mels, rows, frames_out);
}

/* The file as part of a larger one, as in a shard. */
static Status probe(double max_seconds, AudioInfo *info_out)
{
    int shard = memfd_create("shard", MFD_CLOEXEC);
    assert_int_equal(pwrite(shard, file.bytes, file.size_bytes, 512), (ssize_t)file.size_bytes);
    assert_int_equal(pwrite(shard, "more", 4, 512 + (off_t)file.size_bytes), 4);
    Status status = audio_probe(shard, 512, (int64_t)file.size_bytes, max_seconds, info_out);
    close(shard);
    return status;
}

static void expect_info(int64_t samples, int rate, int channels)
{
    AudioInfo info = {0};
    if (probe(30, &info) != STATUS_OK) {
        fail_msg("%s", status_message());
    }
    assert_int_equal(info.samples, samples);
    assert_int_equal(info.rate, rate);
    assert_int_equal(info.channels, channels);
}

static void expect_refused(Status code, const char *part)
{
    AudioInfo info;
    status_clear();
    Status status = probe(30, &info);
    if (status != code || !strstr(status_message(), part)) {
        fail_msg("got %s: \"%s\", expected %s with \"%s\"", status_name(status), status_message(),
                 status_name(code), part);
    }
    assert_int_equal(decode(MELS, 1, frames[0]), code);
}

static double largest_difference(int64_t count)
{
    double largest = 0;
    for (int64_t i = 0; i < count; i++) {
        largest = fmax(largest, fabs((double)frames[0][i] - (double)frames[1][i]));
    }
    return largest;
}

/* 16-bit PCM of a sum of sines that all rates can carry, the same on all channels. */
static void make_sines(int rate, int channels, int count)
{
    testing_wav_begin(&file, 1, 16, rate, channels, count);
    for (int i = 0; i < count; i++) {
        double t = (double)i / rate;
        double value = 8000 * sin(2 * M_PI * 440 * t) + 4000 * sin(2 * M_PI * 1234.5 * t + 1) +
                       1000 * sin(2 * M_PI * 3000 * t + 2);
        for (int c = 0; c < channels; c++) {
            testing_append_little(&file, (uint32_t)(int)lrint(value), 2);
        }
    }
}

static void test_lengths(void **state)
{
    (void)state;
    assert_int_equal(audio_rows(0), 1);
    assert_int_equal(audio_rows(1), 1);
    assert_int_equal(audio_rows(320), 1);
    assert_int_equal(audio_rows(321), 2);
    assert_int_equal(audio_rows(480000), 1500);
    assert_int_equal(audio_frames(1500), 3000);
    make_sines(8000, 1, 4001);
    expect_info(8002, 8000, 1);
    make_sines(44100, 2, 44100);
    expect_info(16000, 44100, 2);
    make_sines(44100, 2, 44101);
    expect_info(16001, 44100, 2);
}

/* numpy's frames in float64 (tests/golden/audio_generate.py). The tolerance: on this scale 1e-5 is 1e-4 of a
 * band's power. A float32 transform is good to some 1e-7 of the loudest amplitude, and bands that are 8 decades
 * of power below it, which it would not reach, are raised to one floor. A window or a band that is shifted
 * by one gives 0.01 and more. */
static void test_golden(void **state)
{
    (void)state;
    enum {
        SAMPLES = 7000,
        ROWS = 25,
        FRAMES = ROWS * AUDIO_FRAMES_A_ROW
    };
    testing_wav_begin(&file, 1, 16, AUDIO_RATE, 1, SAMPLES);
    for (int64_t i = 0; i < SAMPLES; i++) {
        int value = (int)(i * i * 3 % 20011) - 10000;
        value = i < 6000 ? value >> (2 * (i / 1000)) : 0;
        testing_append_little(&file, (uint32_t)value, 2);
    }
    int golden = open("../../tests/golden/audio_frames.bin", O_RDONLY | O_CLOEXEC);
    assert_true(golden >= 0);
    static const int all_mels[] = {80, 128};
    off_t offset = 0;
    for (int i = 0; i < 2; i++) {
        int64_t count = (int64_t)FRAMES * all_mels[i];
        size_t size_bytes = (size_t)count * sizeof(float);
        assert_int_equal(pread(golden, frames[1], size_bytes, offset), (ssize_t)size_bytes);
        offset += (off_t)size_bytes;
        assert_int_equal(decode(all_mels[i], ROWS, frames[0]), STATUS_OK);
        double difference = largest_difference(count);
        printf("%d bands: largest difference %.2e\n", all_mels[i], difference);
        assert_true(difference < 1e-5);
    }
    close(golden);
}

/* The same sound at other rates and on several channels makes the same frames, but for the first
 * ones, where the sines begin, and for faint bands, where rounding to 16 bits makes a noise of its
 * own. 1e-3 is 1 % of a band's power; a delay of one sample makes 5e-3 at the sharpest sine. */
static void test_rates(void **state)
{
    (void)state;
    static const int rates[] = {8000, 11025, 22050, 44100, 48000, 192000};
    enum {
        ROWS = 25
    };
    make_sines(AUDIO_RATE, 1, AUDIO_RATE * 6 / 10); /* longer than what is asked for */
    assert_int_equal(decode(MELS, ROWS, frames[1]), STATUS_OK);
    float loudest = 0;
    for (int band = 0; band < MELS; band++) {
        loudest = fmaxf(loudest, frames[1][10 * MELS + band]);
    }
    for (size_t r = 0; r < sizeof rates / sizeof *rates; r++) {
        int channels = rates[r] < 100000 ? (int)r % 3 + 1 : 1;
        make_sines(rates[r], channels, rates[r] * 6 / 10);
        expect_info(AUDIO_RATE * 6 / 10, rates[r], channels);
        assert_int_equal(decode(MELS, ROWS, frames[0]), STATUS_OK);
        double largest = 0;
        for (int i = 4 * MELS; i < 2 * ROWS * MELS; i++) {
            if (frames[1][i] > loudest - 1) { /* 4 decades of power */
                largest = fmax(largest, fabs((double)frames[0][i] - (double)frames[1][i]));
            }
        }
        printf("%d Hz, %d channels: largest difference %.2e\n", rates[r], channels, largest);
        assert_true(largest < 1e-3);
    }
}

/* A clip is cut, or goes on with silence, to the rows asked for: as if the file were so. */
static void test_cut_and_continued(void **state)
{
    (void)state;
    make_sines(AUDIO_RATE, 1, 320 * 7);
    assert_int_equal(decode(MELS, 7, frames[0]), STATUS_OK);
    make_sines(AUDIO_RATE, 1, 320 * 20);
    assert_int_equal(decode(MELS, 7, frames[1]), STATUS_OK);
    assert_memory_equal(frames[0], frames[1], sizeof(float[14 * MELS]));
    make_sines(AUDIO_RATE, 1, 320 * 5);
    assert_int_equal(decode(MELS, 9, frames[0]), STATUS_OK);
    testing_wav_begin(&file, 1, 16, AUDIO_RATE, 1, 320 * 9);
    size_t begin = file.size_bytes;
    make_sines(AUDIO_RATE, 1, 320 * 5);
    TestingFile *whole = NULL;
    assert_int_equal(MEMORY_NEW(&whole, 1), STATUS_OK);
    testing_wav_begin(whole, 1, 16, AUDIO_RATE, 1, 320 * 9);
    testing_append(whole, file.bytes + begin, file.size_bytes - begin);
    whole->size_bytes += (size_t)320 * 4 * 2; /* zeros */
    assert_int_equal(audio_decode(whole->bytes, whole->size_bytes, MELS, 9, frames[1]), STATUS_OK);
    assert_memory_equal(frames[0], frames[1], sizeof(float[18 * MELS]));
    memory_free(whole);
}

/* Codings of the same samples, and FLAC as libsndfile writes it. */
static void test_codings(void **state)
{
    (void)state;
    enum {
        COUNT = 3200
    };
    static const int formats[] = {
        SF_FORMAT_WAV | SF_FORMAT_PCM_24,   SF_FORMAT_WAV | SF_FORMAT_PCM_32,
        SF_FORMAT_WAV | SF_FORMAT_FLOAT,    SF_FORMAT_WAV | SF_FORMAT_DOUBLE,
        SF_FORMAT_WAVEX | SF_FORMAT_PCM_16, SF_FORMAT_FLAC | SF_FORMAT_PCM_16};
    short samples[COUNT];
    make_sines(AUDIO_RATE, 1, COUNT);
    memcpy(samples, file.bytes + 44, sizeof samples);
    assert_int_equal(decode(MELS, 10, frames[1]), STATUS_OK);
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        int made = memfd_create("made", MFD_CLOEXEC);
        SF_INFO info = {.samplerate = AUDIO_RATE, .channels = 1, .format = formats[i]};
        SNDFILE *sound = sf_open_fd(made, SFM_WRITE, &info, 0);
        assert_non_null(sound);
        assert_int_equal(sf_writef_short(sound, samples, COUNT), COUNT);
        sf_close(sound);
        file.size_bytes = (size_t)pread(made, file.bytes, sizeof file.bytes, 0);
        close(made);
        expect_info(COUNT, AUDIO_RATE, 1);
        assert_int_equal(decode(MELS, 10, frames[0]), STATUS_OK);
        bool is_float =
            i == 2 || i == 3; /* libsndfile writes shorts as they are: 32768 times louder */
        double shift = is_float ? (log10(32768.0) * 2) / 4 : 0;
        for (int j = 0; j < 20 * MELS; j++) {
            assert_true(fabs((double)frames[0][j] - (double)frames[1][j] - shift) < 1e-4);
        }
    }
}

static void test_broken(void **state)
{
    (void)state;
    file.size_bytes = 0;
    expect_refused(STATUS_CORRUPT, "empty");
    testing_append(&file, "<!DOCTYPE html><html>", 21);
    expect_refused(STATUS_CORRUPT, "neither WAV nor FLAC: it begins with \"<!DOCTYPE ht\"");
    make_sines(8000, 1, 100);
    size_t whole = file.size_bytes;
    for (file.size_bytes = 1; file.size_bytes < whole; file.size_bytes++) {
        AudioInfo info;
        assert_int_equal(probe(30, &info), STATUS_CORRUPT);
        assert_int_equal(decode(MELS, 2, frames[0]), STATUS_CORRUPT);
    }
    expect_info(200, 8000, 1);
    file.size_bytes--;
    expect_refused(STATUS_CORRUPT, "truncated: a chunk of 200 bytes begins at byte 44");
    make_sines(8000, 1, 0);
    expect_refused(STATUS_INVALID, "no samples");
    testing_wav(&file, 8000, 9, 10);
    expect_refused(STATUS_UNSUPPORTED, "9 channels");
    testing_wav(&file, 999, 1, 10);
    expect_refused(STATUS_UNSUPPORTED, "999 samples a second");
    testing_wav(&file, 192001, 1, 10);
    expect_refused(STATUS_UNSUPPORTED, "192001 samples a second");
    testing_wav_begin(&file, 2, 4, 8000, 1, 4096); /* Microsoft's ADPCM without its header */
    testing_append(&file, frames, 4096);
    AudioInfo info;
    assert_int_not_equal(probe(30, &info), STATUS_OK);
    static const float bad_samples[] = {NAN, INFINITY, 1e30F};
    for (int i = 0; i < 3; i++) {
        testing_wav_begin(&file, 3, 32, AUDIO_RATE, 1, 2);
        testing_append(&file, &bad_samples[i], 4);
        testing_append(&file, &bad_samples[i], 4);
        expect_info(2, AUDIO_RATE, 1);
        assert_int_equal(decode(MELS, 1, frames[0]), STATUS_CORRUPT);
        assert_non_null(strstr(status_message(), "sample 0 is"));
    }
    make_sines(8000, 1, 8001);
    assert_int_equal(probe(1, &info), STATUS_INVALID);
    assert_non_null(strstr(status_message(), "1.000 seconds; model.audio.max_seconds is 1"));
    assert_int_equal(probe(1.001, &info), STATUS_OK);
}

/* A length of 2^32 - 1 in the header: a file written into a pipe. */
static void test_piped(void **state)
{
    (void)state;
    make_sines(AUDIO_RATE, 1, 3200);
    assert_int_equal(decode(MELS, 10, frames[1]), STATUS_OK);
    memset(file.bytes + 40, 0xff, 4);
    memset(file.bytes + 4, 0xff, 4);
    expect_info(3200, AUDIO_RATE, 1);
    assert_int_equal(decode(MELS, 10, frames[0]), STATUS_OK);
    assert_memory_equal(frames[0], frames[1], sizeof(float[20 * MELS]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lengths), cmocka_unit_test(test_golden),
        cmocka_unit_test(test_rates),   cmocka_unit_test(test_cut_and_continued),
        cmocka_unit_test(test_codings), cmocka_unit_test(test_broken),
        cmocka_unit_test(test_piped)};
    return cmocka_run_group_tests_name("audio", tests, NULL, NULL);
}
