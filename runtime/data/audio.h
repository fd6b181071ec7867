/* Audio: sound files in memory become log-mel frames, as Whisper's front end makes them.
 *
 * Frames: mono at 16 kHz; a (periodic) Hann window of 400 samples every 160 (10 ms), reflected at
 * the ends; power spectrum; `mels` triangular bands on the Slaney scale with Slaney's norm (librosa's
 * default); log10 of at least 1e-10, then max(x, largest of the clip - 8), then (x + 4) / 4
 * (Radford et al. 2022). A clip of S samples at 16 kHz has ceil(S / 160) frames. The encoder's
 * second convolution has stride 2: two frames a row. Other rates are resampled (resample.h), channels
 * averaged.
 *
 * Threading: pure functions; any thread.
 */
#ifndef DATA_AUDIO_H
#define DATA_AUDIO_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

enum {
    AUDIO_RATE = 16000, /* samples a second */
    AUDIO_HOP = 160,    /* samples a frame */
    AUDIO_FRAMES_A_ROW = 2,
    AUDIO_MELS_MAX = 256,
};

typedef struct AudioInfo {
    int64_t samples; /* at AUDIO_RATE, after resampling */
    int rate;        /* of the file */
    int channels;
} AudioInfo;

/* Rows of a clip of so many samples at AUDIO_RATE, at least 1; and the frames of so many rows. */
int32_t audio_rows(int64_t samples);
int64_t audio_frames(int32_t rows);

/* Of `size_bytes` bytes at `offset` of an open file; looks at the header only. STATUS_CORRUPT,
 * STATUS_UNSUPPORTED, STATUS_INVALID (no samples, more than `max_seconds`); the message says what
 * was found and expected. */
Status audio_probe(int file, int64_t offset, int64_t size_bytes, double max_seconds,
                   AudioInfo *info_out) STATUS_CHECKED;

/* frames_out f32 [audio_frames(rows), mels]. A clip that is longer is cut, one that is shorter goes
 * on with silence. */
Status audio_decode(const uint8_t *bytes, size_t size_bytes, int mels, int32_t rows,
                    float *frames_out) STATUS_CHECKED;

#endif
