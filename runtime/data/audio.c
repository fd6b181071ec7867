#include "data/audio.h"

#include "base/file.h"
#include "base/memory.h"
#include "data/resample.h"

#include <kiss_fftr.h>
#include <math.h>
#include <sndfile.h>
#include <stdbool.h>
#include <string.h>

enum {
    CHANNELS_MAX = 8,
    RATE_MIN = 1000,
    RATE_MAX = 192000,
    CHUNKS_MAX = 1000,   /* of a WAV file before its sound */
    BLOCK_FRAMES = 4096, /* read at once */
    FFT_SAMPLES = 400,   /* 25 ms */
    HALF_SAMPLES = FFT_SAMPLES / 2,
    BINS = HALF_SAMPLES + 1,
    WAV_HEADER_BYTES = 12,
    WAV_CHUNK_BYTES = 8,
};

/* Larger values of a float file are broken ones: with these the power spectrum is still finite. */
static const float sample_max = 1e12F;

_Static_assert(AUDIO_FRAMES_A_ROW *AUDIO_HOP > HALF_SAMPLES, "the shortest clip can be reflected");

/* A file in memory, or a part of an open one. */
typedef struct Source {
    const uint8_t *bytes; /* NULL: of the file */
    int file;
    int64_t offset;
    int64_t size_bytes;
    int64_t position; /* of libsndfile's reading */
} Source;

int32_t audio_rows(int64_t samples)
{
    int64_t frames = (samples + AUDIO_HOP - 1) / AUDIO_HOP;
    int64_t rows = (frames + AUDIO_FRAMES_A_ROW - 1) / AUDIO_FRAMES_A_ROW;
    CHECK(rows <= INT32_MAX);
    return rows > 0 ? (int32_t)rows : 1;
}

int64_t audio_frames(int32_t rows)
{
    return (int64_t)rows * AUDIO_FRAMES_A_ROW;
}

static Status source_read(const Source *source, int64_t position, void *out, int64_t count)
{
    if (count < 0 || position > source->size_bytes - count) {
        return fail(STATUS_CORRUPT, "truncated: it ends at byte %lld",
                    (long long)source->size_bytes);
    }
    if (source->bytes) {
        memcpy(out, source->bytes + position, (size_t)count);
    } else {
        TRY(file_read(source->file, source->offset + position, out, (size_t)count));
    }
    return STATUS_OK;
}

static sf_count_t source_length(void *user)
{
    return ((const Source *)user)->size_bytes;
}

static sf_count_t source_seek(sf_count_t offset, int whence, void *user)
{
    Source *source = user;
    int64_t base = whence == SEEK_SET   ? 0
                   : whence == SEEK_CUR ? source->position
                                        : source->size_bytes;
    int64_t target = 0;
    if (__builtin_add_overflow(base, offset, &target) || target < 0) {
        return -1;
    }
    source->position = target;
    return target;
}

static sf_count_t source_take(void *out, sf_count_t count, void *user)
{
    Source *source = user;
    int64_t left = source->size_bytes - source->position;
    int64_t taken = count < left ? count : left;
    if (taken <= 0 || source_read(source, source->position, out, taken) != STATUS_OK) {
        return 0;
    }
    source->position += taken;
    return taken;
}

static sf_count_t source_tell(void *user)
{
    return ((const Source *)user)->position;
}

static uint32_t load_u32(const uint8_t *bytes)
{
    return bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

/* libsndfile takes what is left of a WAV file that was cut; here that is an error. A length of 2^32 - 1
 * comes from programs that write into pipes and means: up to the end. */
static Status check_wav_length(const Source *source)
{
    int64_t at = WAV_HEADER_BYTES;
    for (int i = 0; i < CHUNKS_MAX; i++) {
        uint8_t chunk[WAV_CHUNK_BYTES] = {0};
        TRY(source_read(source, at, chunk, sizeof chunk));
        at += WAV_CHUNK_BYTES;
        int64_t length = load_u32(chunk + 4);
        bool is_sound = memcmp(chunk, "data", 4) == 0;
        if (is_sound && (length == UINT32_MAX || length <= source->size_bytes - at)) {
            return STATUS_OK;
        }
        if (length > source->size_bytes - at) {
            return fail(STATUS_CORRUPT,
                        "truncated: a chunk of %lld bytes begins at byte %lld, and the file ends "
                        "at %lld",
                        (long long)length, (long long)at, (long long)source->size_bytes);
        }
        at += length + length % 2; /* chunks begin at even places */
    }
    return fail(STATUS_CORRUPT, "WAV: no sound among its first %d chunks", CHUNKS_MAX);
}

/* By the first bytes, since libsndfile would read many more formats. */
static Status check_beginning(const Source *source)
{
    uint8_t head[WAV_HEADER_BYTES] = {0};
    int64_t count = source->size_bytes < WAV_HEADER_BYTES ? source->size_bytes : WAV_HEADER_BYTES;
    if (count == 0) {
        return fail(STATUS_CORRUPT, "empty (0 bytes)");
    }
    TRY(source_read(source, 0, head, count));
    if (memcmp(head, "fLaC", 4) == 0) {
        return STATUS_OK;
    }
    if (memcmp(head, "RIFF", 4) == 0 && memcmp(head + 8, "WAVE", 4) == 0) {
        TRY(check_wav_length(source));
        return STATUS_OK;
    }
    char text[WAV_HEADER_BYTES + 1] = {0};
    for (int i = 0; i < count; i++) {
        bool is_text = head[i] >= ' ' && head[i] <= '~';
        text[i] = (char)(is_text ? head[i] : '.');
    }
    return fail(STATUS_CORRUPT, "neither WAV nor FLAC: it begins with \"%s\"", text);
}

static bool is_known_coding(int format)
{
    switch (format & SF_FORMAT_SUBMASK) {
    case SF_FORMAT_PCM_S8:
    case SF_FORMAT_PCM_U8:
    case SF_FORMAT_PCM_16:
    case SF_FORMAT_PCM_24:
    case SF_FORMAT_PCM_32:
    case SF_FORMAT_FLOAT:
    case SF_FORMAT_DOUBLE:
    case SF_FORMAT_ULAW:
    case SF_FORMAT_ALAW:
        return true;
    default:
        return false;
    }
}

static Status check_info(const SF_INFO *info)
{
    if (!is_known_coding(info->format)) {
        return fail(STATUS_UNSUPPORTED,
                    "a coding that is not read (libsndfile's 0x%x); PCM, floats, u-law and A-law "
                    "are",
                    (unsigned)info->format);
    }
    if (info->channels < 1 || info->channels > CHANNELS_MAX) {
        return fail(STATUS_UNSUPPORTED, "%d channels; 1 to %d are read", info->channels,
                    CHANNELS_MAX);
    }
    if (info->samplerate < RATE_MIN || info->samplerate > RATE_MAX) {
        return fail(STATUS_UNSUPPORTED, "%d samples a second; %d to %d are read", info->samplerate,
                    RATE_MIN, RATE_MAX);
    }
    if (info->frames <= 0) {
        return fail(STATUS_INVALID, "no samples");
    }
    if (info->frames > (INT64_C(1) << 40)) { /* FLAC written into a pipe does not tell its length */
        return fail(STATUS_UNSUPPORTED, "its header does not tell how long it is");
    }
    return STATUS_OK;
}

/* Owned: sf_close. */
static Status open_sound(Source *source, SNDFILE **sound_out, SF_INFO *info_out)
{
    SF_VIRTUAL_IO calls = {.get_filelen = source_length,
                           .seek = source_seek,
                           .read = source_take,
                           .tell = source_tell};
    TRY(check_beginning(source));
    *info_out = (SF_INFO){0};
    SNDFILE *sound = sf_open_virtual(&calls, SFM_READ, info_out, source);
    if (!sound) {
        return fail(STATUS_CORRUPT, "a broken header: %s", sf_strerror(NULL));
    }
    Status status = check_info(info_out);
    if (status != STATUS_OK) {
        sf_close(sound);
        return status_trace(status, __FILE__, __LINE__);
    }
    *sound_out = sound;
    return STATUS_OK;
}

Status audio_probe(int file, int64_t offset, int64_t size_bytes, double max_seconds,
                   AudioInfo *info_out)
{
    Source source = {.file = file, .offset = offset, .size_bytes = size_bytes};
    SNDFILE *sound = NULL;
    SF_INFO info = {0};
    TRY(open_sound(&source, &sound, &info));
    sf_close(sound);
    CHECK(info.samplerate >= RATE_MIN); /* check_info */
    double seconds = (double)info.frames / info.samplerate;
    if (seconds > max_seconds) {
        return fail(STATUS_INVALID,
                    "%.3f seconds; model.audio.max_seconds is %g and nothing is cut off", seconds,
                    max_seconds);
    }
    *info_out =
        (AudioInfo){.samples = (info.frames * AUDIO_RATE + info.samplerate - 1) / info.samplerate,
                    .rate = info.samplerate,
                    .channels = info.channels};
    return STATUS_OK;
}

/* The first `count` frames, as the mean of their channels: mono_out [count]. */
static Status read_mono(SNDFILE *sound, int channels, int64_t count, float *mono_out)
{
    float block[BLOCK_FRAMES] = {0};
    int64_t block_frames = BLOCK_FRAMES / channels;
    for (int64_t at = 0; at < count;) {
        int64_t wanted = count - at < block_frames ? count - at : block_frames;
        int64_t got = sf_readf_float(sound, block, wanted);
        if (got != wanted) {
            return fail(STATUS_CORRUPT, "truncated or damaged after %lld of %lld samples%s%s",
                        (long long)(at + got), (long long)count, sf_error(sound) ? ": " : "",
                        sf_error(sound) ? sf_strerror(sound) : "");
        }
        for (int64_t i = 0; i < got; i++) {
            float sum = 0;
            for (int c = 0; c < channels; c++) {
                sum += block[i * channels + c];
            }
            if (!(fabsf(sum) <= sample_max)) {
                return fail(STATUS_CORRUPT, "sample %lld is %g", (long long)(at + i), (double)sum);
            }
            mono_out[at + i] = sum / (float)channels;
        }
        at += got;
    }
    return STATUS_OK;
}

/* samples_out [num_out] at AUDIO_RATE, zeroed before: the clip's beginning. */
static Status read_samples(SNDFILE *sound, const SF_INFO *info, int64_t num_out, float *samples_out)
{
    int rate = info->samplerate;
    if (rate == AUDIO_RATE) {
        int64_t count = info->frames < num_out ? info->frames : num_out;
        TRY(read_mono(sound, info->channels, count, samples_out));
        return STATUS_OK;
    }
    int64_t wanted = num_out * rate / AUDIO_RATE + resample_reach(rate, AUDIO_RATE);
    int64_t count = info->frames < wanted ? info->frames : wanted;
    float *mono = NULL;
    TRY(MEMORY_NEW(&mono, count));
    Status status = read_mono(sound, info->channels, count, mono);
    if (status == STATUS_OK) {
        status = resample(mono, count, rate, AUDIO_RATE, num_out, samples_out);
    }
    memory_free(mono);
    TRY(status);
    return STATUS_OK;
}

typedef struct FrontEnd {
    kiss_fftr_cfg fft;
    int mels;
    float *weights;             /* [mels, BINS] */
    int begins[AUDIO_MELS_MAX]; /* bins of each band that are not zero */
    int ends[AUDIO_MELS_MAX];
    float window[FFT_SAMPLES];
} FrontEnd;

/* Slaney's scale: linear up to 1000 Hz (200 / 3 Hz a mel), then 27 mels for each factor of 6.4. */
static double mel_to_hertz(double mel)
{
    double linear = mel * 200.0 / 3.0;
    return linear < 1000 ? linear : 1000 * exp((mel - 15) * log(6.4) / 27);
}

static double hertz_to_mel(double hertz)
{
    return hertz < 1000 ? hertz * 3.0 / 200.0 : 15 + 27 * log(hertz / 1000) / log(6.4);
}

/* Triangles between neighbours of mels + 2 points that are even on the scale, of area 1 (in Hz). */
static void set_bands(FrontEnd *front)
{
    double step = hertz_to_mel(AUDIO_RATE / 2.0) / (front->mels + 1);
    for (int band = 0; band < front->mels; band++) {
        double low = mel_to_hertz(step * band);
        double middle = mel_to_hertz(step * (band + 1));
        double high = mel_to_hertz(step * (band + 2));
        front->begins[band] = BINS;
        front->ends[band] = 0;
        for (int bin = 0; bin < BINS; bin++) {
            double hertz = (double)bin * AUDIO_RATE / FFT_SAMPLES;
            double rising = (hertz - low) / (middle - low);
            double falling = (high - hertz) / (high - middle);
            double weight = fmin(rising, falling);
            if (weight > 0) {
                front->weights[band * BINS + bin] = (float)(weight * 2 / (high - low));
                front->begins[band] = bin < front->begins[band] ? bin : front->begins[band];
                front->ends[band] = bin + 1;
            }
        }
    }
}

static void front_end_done(FrontEnd *front)
{
    kiss_fftr_free(front->fft);
    memory_free(front->weights);
}

static Status front_end_init(int mels, FrontEnd *front)
{
    memset(front, 0, sizeof *front);
    front->mels = mels;
    TRY(MEMORY_NEW(&front->weights, mels * BINS));
    front->fft = kiss_fftr_alloc(FFT_SAMPLES, 0, NULL, NULL);
    if (!front->fft) {
        front_end_done(front);
        return fail(STATUS_NO_MEMORY, "no memory for a Fourier transform of %d points",
                    FFT_SAMPLES);
    }
    set_bands(front);
    for (int i = 0; i < FFT_SAMPLES; i++) {
        front->window[i] = (float)(0.5 - 0.5 * cos(2 * M_PI * i / FFT_SAMPLES));
    }
    return STATUS_OK;
}

/* log10 of the bands' power: samples [FFT_SAMPLES] -> bands_out [mels]. */
static void measure_frame(const FrontEnd *front, const float *samples, float *bands_out)
{
    float windowed[FFT_SAMPLES];
    kiss_fft_cpx spectrum[BINS];
    float power[BINS];
    for (int i = 0; i < FFT_SAMPLES; i++) {
        windowed[i] = samples[i] * front->window[i];
    }
    kiss_fftr(front->fft, windowed, spectrum);
    for (int bin = 0; bin < BINS; bin++) {
        power[bin] = spectrum[bin].r * spectrum[bin].r + spectrum[bin].i * spectrum[bin].i;
    }
    for (int band = 0; band < front->mels; band++) {
        const float *weights = front->weights + (size_t)band * BINS;
        double sum = 0;
        for (int bin = front->begins[band]; bin < front->ends[band]; bin++) {
            sum += (double)weights[bin] * (double)power[bin];
        }
        bands_out[band] = (float)log10(fmax(sum, 1e-10));
    }
}

/* Nothing further than 8 decades below the loudest of the clip; then about -1 to 1. */
static void scale_bands(float *bands, int64_t count)
{
    float loudest = bands[0];
    for (int64_t i = 1; i < count; i++) {
        loudest = fmaxf(loudest, bands[i]);
    }
    for (int64_t i = 0; i < count; i++) {
        bands[i] = (fmaxf(bands[i], loudest - 8) + 4) / 4;
    }
}

/* padded [HALF_SAMPLES + count + HALF_SAMPLES]: mirrors the samples about the first and the last one, so that
 * the first window is centered on the first sample. */
static void reflect_ends(float *padded, int64_t count)
{
    float *samples = padded + HALF_SAMPLES;
    for (int64_t i = 1; i <= HALF_SAMPLES; i++) {
        samples[-i] = samples[i];
        samples[count - 1 + i] = samples[count - 1 - i];
    }
}

/* frames_out [frames, mels] of padded [HALF_SAMPLES + frames * AUDIO_HOP + HALF_SAMPLES]. */
static Status make_frames(const float *padded, int64_t frames, int mels, float *frames_out)
{
    FrontEnd front;
    TRY(front_end_init(mels, &front));
    for (int64_t frame = 0; frame < frames; frame++) {
        measure_frame(&front, padded + frame * AUDIO_HOP, frames_out + frame * mels);
    }
    scale_bands(frames_out, frames * mels);
    front_end_done(&front);
    return STATUS_OK;
}

Status audio_decode(const uint8_t *bytes, size_t size_bytes, int mels, int32_t rows,
                    float *frames_out)
{
    CHECK(mels > 0 && mels <= AUDIO_MELS_MAX && rows > 0);
    int64_t frames = audio_frames(rows);
    int64_t count = frames * AUDIO_HOP;
    Source source = {.bytes = bytes, .file = -1, .size_bytes = (int64_t)size_bytes};
    SNDFILE *sound = NULL;
    SF_INFO info = {0};
    float *padded = NULL;
    TRY(open_sound(&source, &sound, &info));
    Status status = MEMORY_NEW(&padded, HALF_SAMPLES + count + HALF_SAMPLES);
    if (status == STATUS_OK) {
        status = read_samples(sound, &info, count, padded + HALF_SAMPLES);
    }
    if (status == STATUS_OK) {
        reflect_ends(padded, count);
        status = make_frames(padded, frames, mels, frames_out);
    }
    memory_free(padded);
    sf_close(sound);
    TRY(status);
    return STATUS_OK;
}
