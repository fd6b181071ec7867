#include "data/audio.h"
#include "data/testing.h"
#include "tests/fuzz/fuzz.h"

#include <math.h>
#include <sndfile.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    MELS = 8,
    ROWS = 3
};

static Status probe(const uint8_t *bytes, size_t size_bytes, AudioInfo *info_out)
{
    int file = memfd_create("fuzz", MFD_CLOEXEC);
    CHECK(file >= 0 && write(file, bytes, size_bytes) == (ssize_t)size_bytes);
    Status status = audio_probe(file, 0, (int64_t)size_bytes, 10, info_out);
    close(file);
    return status;
}

/* Headers that are let in keep the limits; what is decoded is finite; every refusal has a message. */
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size_bytes)
{
    float frames[ROWS * AUDIO_FRAMES_A_ROW * MELS];
    AudioInfo info = {0};
    Status status = probe(bytes, size_bytes, &info);
    if (status == STATUS_OK) {
        CHECK(info.samples > 0 && info.samples / AUDIO_RATE <= 10);
        CHECK(audio_rows(info.samples) > 0);
    } else {
        CHECK(status_message()[0] != '\0');
    }
    status_clear();
    status = audio_decode(bytes, size_bytes, MELS, ROWS, frames);
    CHECK(status == STATUS_OK || status_message()[0] != '\0');
    for (int i = 0; status == STATUS_OK && i < ROWS * AUDIO_FRAMES_A_ROW * MELS; i++) {
        CHECK(isfinite(frames[i]));
    }
    return 0;
}

/* A FLAC file by libsndfile itself. */
static size_t make_flac(uint8_t *out)
{
    static short samples[3000];
    int file = memfd_create("seed", MFD_CLOEXEC);
    SF_INFO info = {
        .samplerate = 16000, .channels = 1, .format = SF_FORMAT_FLAC | SF_FORMAT_PCM_16};
    SNDFILE *sound = sf_open_fd(file, SFM_WRITE, &info, 0);
    CHECK(sound != NULL);
    for (int i = 0; i < 3000; i++) {
        samples[i] = (short)(i * 37 % 2003);
    }
    CHECK(sf_writef_short(sound, samples, 3000) == 3000);
    sf_close(sound);
    ssize_t size_bytes = pread(file, out, FUZZ_SEED_BYTES_MAX, 0);
    close(file);
    CHECK(size_bytes > 0);
    return (size_t)size_bytes;
}

static TestingFile file;

size_t fuzz_seed(int index, uint8_t *out)
{
    if (index >= 4) {
        return 0;
    }
    if (index == 3) {
        return make_flac(out);
    }
    if (index == 0) {
        testing_wav(&file, 8000, 1, 600);
    } else if (index == 1) {
        testing_wav(&file, 44100, 2, 1000);
    } else {
        testing_wav_begin(&file, 3, 32, 16000, 1, 500);
        for (int i = 0; i < 500; i++) {
            float value = (float)(i % 50) / 50;
            testing_append(&file, &value, sizeof value);
        }
    }
    memcpy(out, file.bytes, file.size_bytes);
    return file.size_bytes;
}
