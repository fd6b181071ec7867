/* Testing: pictures, sounds and tars for the tests of this folder, made without the code under test.
 * Threading: pure functions.
 */
#ifndef DATA_TESTING_H
#define DATA_TESTING_H

#include "base/status.h"

#include <archive.h>
#include <archive_entry.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <turbojpeg.h>
#include <zlib.h>

enum {
    TESTING_FILE_BYTES = 1 << 20
};

typedef struct TestingFile {
    uint8_t bytes[TESTING_FILE_BYTES];
    size_t size_bytes;
} TestingFile;

static inline void testing_append(TestingFile *file, const void *bytes, size_t size_bytes)
{
    CHECK(file->size_bytes + size_bytes <= sizeof file->bytes);
    memcpy(file->bytes + file->size_bytes, bytes, size_bytes);
    file->size_bytes += size_bytes;
}

static inline void testing_store_u32(uint8_t *to, uint32_t value)
{
    to[0] = (uint8_t)(value >> 24);
    to[1] = (uint8_t)(value >> 16);
    to[2] = (uint8_t)(value >> 8);
    to[3] = (uint8_t)value;
}

static inline void testing_png_chunk(TestingFile *file, const char *type, const void *data,
                                     size_t size_bytes)
{
    uint8_t number[4];
    testing_store_u32(number, (uint32_t)size_bytes);
    testing_append(file, number, 4);
    size_t begin = file->size_bytes;
    testing_append(file, type, 4);
    testing_append(file, data, size_bytes);
    uLong crc = crc32(0, file->bytes + begin, (uInt)(file->size_bytes - begin));
    testing_store_u32(number, (uint32_t)crc);
    testing_append(file, number, 4);
}

static inline void testing_png_begin(TestingFile *file, uint32_t width, uint32_t height,
                                     uint8_t bits, uint8_t color_type)
{
    file->size_bytes = 0;
    testing_append(file, "\x89PNG\r\n\x1a\n", 8);
    uint8_t header[13] = {0};
    testing_store_u32(header, width);
    testing_store_u32(header + 4, height);
    header[8] = bits;
    header[9] = color_type;
    testing_png_chunk(file, "IHDR", header, sizeof header);
}

/* `rows`: each with its leading filter byte (0). */
static inline void testing_png_end(TestingFile *file, const uint8_t *rows, size_t size_bytes)
{
    static uint8_t packed[TESTING_FILE_BYTES];
    uLongf packed_bytes = sizeof packed;
    CHECK(compress(packed, &packed_bytes, rows, size_bytes) == Z_OK);
    testing_png_chunk(file, "IDAT", packed, packed_bytes);
    testing_png_chunk(file, "IEND", "", 0);
}

/* A color wheel of RGB, u8 [height, width, 3]. */
static inline void testing_fill_rgb(uint8_t *rgb, int width, int height)
{
    for (int y = 0; y < height; y++) {
        for (int x = 0; x < width; x++) {
            uint8_t *pixel = rgb + 3 * ((size_t)y * (size_t)width + (size_t)x);
            pixel[0] = (uint8_t)(255 * x / width);
            pixel[1] = (uint8_t)(255 * y / height);
            pixel[2] = (uint8_t)((x / 3 + y / 5) % 2 * 200);
        }
    }
}

static inline void testing_png_rgb(TestingFile *file, int width, int height)
{
    static uint8_t rgb[TESTING_FILE_BYTES];
    static uint8_t rows[TESTING_FILE_BYTES];
    size_t stride = (size_t)width * 3;
    CHECK((stride + 1) * (size_t)height <= sizeof rows);
    testing_fill_rgb(rgb, width, height);
    for (int y = 0; y < height; y++) {
        rows[(size_t)y * (stride + 1)] = 0;
        memcpy(rows + (size_t)y * (stride + 1) + 1, rgb + (size_t)y * stride, stride);
    }
    testing_png_begin(file, (uint32_t)width, (uint32_t)height, 8, 2);
    testing_png_end(file, rows, (stride + 1) * (size_t)height);
}

/* `format`: TJPF_RGB, TJPF_CMYK (`pixels` inverted as Adobe writes them) or TJPF_GRAY. */
static inline void testing_jpeg(TestingFile *file, const uint8_t *pixels, int width, int height,
                                int format)
{
    tjhandle handle = tjInitCompress();
    unsigned char *bytes = NULL;
    unsigned long size_bytes = 0;
    int sampling = format == TJPF_GRAY ? TJSAMP_GRAY : TJSAMP_444;
    CHECK(tjCompress2(handle, pixels, width, 0, height, format, &bytes, &size_bytes, sampling, 95,
                      0) == 0);
    file->size_bytes = 0;
    testing_append(file, bytes, size_bytes);
    tjFree(bytes);
    tjDestroy(handle);
}

/* Puts an EXIF block with this orientation after a JPEG's first marker. */
static inline void testing_jpeg_orient(TestingFile *file, int orientation)
{
    uint8_t block[] = {0xff, 0xe1, 0, 34, 'E', 'x', 'i', 'f', 0, 0,
                       'M',  'M',  0, 42, 0,   0,   0,   8,   0, 1,
                       1,    0x12, 0, 3,  0,   0,   0,   1,   0, (uint8_t)orientation,
                       0,    0,    0, 0,  0,   0};
    CHECK(file->size_bytes + sizeof block <= sizeof file->bytes);
    memmove(file->bytes + 2 + sizeof block, file->bytes + 2, file->size_bytes - 2);
    memcpy(file->bytes + 2, block, sizeof block);
    file->size_bytes += sizeof block;
}

static inline void testing_append_little(TestingFile *file, uint32_t value, int size_bytes)
{
    uint8_t bytes[4] = {(uint8_t)value, (uint8_t)(value >> 8), (uint8_t)(value >> 16),
                        (uint8_t)(value >> 24)};
    testing_append(file, bytes, (size_t)size_bytes);
}

/* The header of a WAV file: `coding` 1 PCM, 3 floats, 7 u-law. */
static inline void testing_wav_begin(TestingFile *file, int coding, int bits, int rate,
                                     int channels, int frames)
{
    int frame_bytes = channels * bits / 8;
    int data_bytes = frames * frame_bytes;
    file->size_bytes = 0;
    testing_append(file, "RIFF", 4);
    testing_append_little(file, (uint32_t)(36 + data_bytes), 4);
    testing_append(file, "WAVEfmt ", 8);
    testing_append_little(file, 16, 4);
    testing_append_little(file, (uint32_t)coding, 2);
    testing_append_little(file, (uint32_t)channels, 2);
    testing_append_little(file, (uint32_t)rate, 4);
    testing_append_little(file, (uint32_t)(rate * frame_bytes), 4);
    testing_append_little(file, (uint32_t)frame_bytes, 2);
    testing_append_little(file, (uint32_t)bits, 2);
    testing_append(file, "data", 4);
    testing_append_little(file, (uint32_t)data_bytes, 4);
}

/* 16-bit PCM: a noise that depends on the place and the channel only. */
static inline void testing_wav(TestingFile *file, int rate, int channels, int frames)
{
    testing_wav_begin(file, 1, 16, rate, channels, frames);
    for (int i = 0; i < frames; i++) {
        for (int c = 0; c < channels; c++) {
            testing_append_little(file, (uint32_t)((i * 7919 + c * 31) % 20011 - 10000), 2);
        }
    }
}

typedef struct TestingTar {
    struct archive *archive;
} TestingTar;

static inline void testing_tar_open(TestingTar *tar, const char *path)
{
    tar->archive = archive_write_new();
    CHECK(archive_write_set_format_pax_restricted(tar->archive) == ARCHIVE_OK);
    CHECK(archive_write_open_filename(tar->archive, path) == ARCHIVE_OK);
}

static inline void testing_tar_add(TestingTar *tar, const char *name, const void *bytes,
                                   size_t size_bytes)
{
    struct archive_entry *entry = archive_entry_new();
    archive_entry_set_pathname(entry, name);
    archive_entry_set_filetype(entry, AE_IFREG);
    archive_entry_set_perm(entry, 0644);
    archive_entry_set_size(entry, (int64_t)size_bytes);
    CHECK(archive_write_header(tar->archive, entry) == ARCHIVE_OK);
    CHECK(archive_write_data(tar->archive, bytes, size_bytes) == (la_ssize_t)size_bytes);
    archive_entry_free(entry);
}

static inline void testing_tar_text(TestingTar *tar, const char *name, const char *text)
{
    testing_tar_add(tar, name, text, strlen(text));
}

static inline void testing_tar_close(TestingTar *tar)
{
    CHECK(archive_write_close(tar->archive) == ARCHIVE_OK);
    archive_write_free(tar->archive);
}

#endif
