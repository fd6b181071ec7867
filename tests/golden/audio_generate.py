#!/usr/bin/env python3
"""Makes audio_frames.bin: log-mel frames of a clip that runtime/data/audio_test.c makes too, by numpy in float64.

Needs numpy only. Run it in this folder: ./audio_generate.py
The file: f32, little endian: [ROWS * 2, 80], then [ROWS * 2, 128]: the clip below continued with silence to ROWS rows.

Written from the definitions: Radford et al. 2022 (Whisper) for the frames, Slaney's Auditory Toolbox (1998) for the scale. By whole matrices
and a discrete Fourier transform as a product, on purpose unlike the C code. With --check it also compares with the feature extractor of the
package transformers, where that is installed.
"""
import sys

import numpy

RATE, HOP, WINDOW = 16000, 160, 400
SAMPLES, ROWS = 7000, 25


def clip():
    """A chirp that turns over, fading in steps of 12 dB, then silence: 16-bit integers."""
    i = numpy.arange(SAMPLES, dtype=numpy.int64)
    values = ((i * i * 3) % 20011 - 10000) >> (2 * (i // 1000))
    values[6000:] = 0
    return values.astype(numpy.float64) / 32768


def mel_of(hertz):
    return hertz * 3 / 200 if hertz < 1000 else 15 + 27 * numpy.log(hertz / 1000) / numpy.log(6.4)


def hertz_of(mel):
    return mel * 200 / 3 if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27)


def bands(mels):
    """[mels, bins]"""
    edges = [hertz_of(mel) for mel in numpy.linspace(0, mel_of(RATE / 2), mels + 2)]
    bins = numpy.arange(WINDOW // 2 + 1) * RATE / WINDOW
    rows = [numpy.interp(bins, edges[m : m + 3], [0, 2 / (edges[m + 2] - edges[m]), 0]) for m in range(mels)]
    return numpy.array(rows)


def frames(samples, rows, mels):
    count = rows * 2
    whole = numpy.zeros(count * HOP)
    whole[: len(samples)] = samples
    whole = numpy.pad(whole, WINDOW // 2, mode="reflect")
    places = numpy.arange(count)[:, None] * HOP + numpy.arange(WINDOW)[None]
    n = numpy.arange(WINDOW)
    window = numpy.sin(numpy.pi * n / WINDOW) ** 2  # Hann, periodic
    transform = numpy.exp(-2j * numpy.pi * numpy.outer(n, numpy.arange(WINDOW // 2 + 1)) / WINDOW)
    power = numpy.abs((whole[places] * window) @ transform) ** 2
    log = numpy.log10(numpy.maximum(power @ bands(mels).T, 1e-10))
    return (numpy.maximum(log, log.max() - 8) + 4) / 4


def check(results):
    from transformers import WhisperFeatureExtractor

    for mels, expected in results.items():
        extractor = WhisperFeatureExtractor(feature_size=mels, chunk_length=1)
        extractor.n_samples = ROWS * 2 * HOP
        got = extractor(clip(), sampling_rate=RATE, max_length=ROWS * 2 * HOP, return_tensors="np").input_features[0].T
        print(f"{mels} mels: {got.shape}, largest difference {numpy.abs(got - expected).max():.2e}")


def main():
    results = {mels: frames(clip(), ROWS, mels) for mels in (80, 128)}
    with open("audio_frames.bin", "wb") as file:
        for result in results.values():
            file.write(result.astype("<f4").tobytes())
    if "--check" in sys.argv:
        check(results)


if __name__ == "__main__":
    main()
