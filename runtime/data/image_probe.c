#include "data/image.h"

#include <stdbool.h>
#include <string.h>
#include <zlib.h>

/* Formats: PNG 1.2 (W3C), JPEG (ITU T.81 annex B), Exif 2.3 (TIFF inside APP1 or eXIf). */

enum {
    PNG_SIGNATURE_BYTES = 8,
    PNG_CHUNK_BYTES = 12, /* length, type, crc around a chunk's data */
    PNG_HEADER_BYTES = PNG_SIGNATURE_BYTES + PNG_CHUNK_BYTES + 13,
    EXIF_ORIENTATION = 0x0112,
    EXIF_SHORT = 3,
    EXIF_ENTRY_BYTES = 12,
};

static const uint8_t png_signature[PNG_SIGNATURE_BYTES] = {0x89, 'P',  'N',  'G',
                                                           '\r', '\n', 0x1a, '\n'};

static uint32_t read_u32(const uint8_t *bytes, bool big_endian)
{
    uint32_t a = bytes[0];
    uint32_t b = bytes[1];
    uint32_t c = bytes[2];
    uint32_t d = bytes[3];
    return big_endian ? a << 24 | b << 16 | c << 8 | d : d << 24 | c << 16 | b << 8 | a;
}

static uint32_t read_u16(const uint8_t *bytes, bool big_endian)
{
    return big_endian ? (uint32_t)bytes[0] << 8 | bytes[1] : (uint32_t)bytes[1] << 8 | bytes[0];
}

/* The orientation that a TIFF block tells; 1 where it is broken or silent. */
static int32_t exif_orientation(const uint8_t *tiff, size_t size_bytes)
{
    if (size_bytes < 8 || (memcmp(tiff, "II*\0", 4) != 0 && memcmp(tiff, "MM\0*", 4) != 0)) {
        return 1;
    }
    bool big = tiff[0] == 'M';
    size_t at = read_u32(tiff + 4, big);
    if (at > size_bytes - 2) {
        return 1;
    }
    size_t entries = read_u16(tiff + at, big);
    at += 2;
    for (size_t i = 0; i < entries && at + EXIF_ENTRY_BYTES <= size_bytes; i++) {
        const uint8_t *entry = tiff + at;
        uint32_t value = read_u16(entry + 8, big);
        if (read_u16(entry, big) == EXIF_ORIENTATION && read_u16(entry + 2, big) == EXIF_SHORT &&
            read_u32(entry + 4, big) == 1) {
            return value >= 1 && value <= 8 ? (int32_t)value : 1;
        }
        at += EXIF_ENTRY_BYTES;
    }
    return 1;
}

static Status check_size(uint32_t width, uint32_t height)
{
    if (width == 0 || height == 0) {
        return fail(STATUS_CORRUPT, "the header says %u x %u pixels", width, height);
    }
    if (width > IMAGE_SIDE_MAX || height > IMAGE_SIDE_MAX ||
        (uint64_t)width * height > IMAGE_PIXELS_MAX) {
        return fail(STATUS_CORRUPT,
                    "the header claims %u x %u pixels; at most %d pixels and %d to a side are read",
                    width, height, IMAGE_PIXELS_MAX, IMAGE_SIDE_MAX);
    }
    return STATUS_OK;
}

/* eXIf and tRNS stand before the first IDAT in the files that matter; beyond the bytes given
 * nothing is known. */
static void probe_png_chunks(const uint8_t *bytes, size_t size_bytes, ImageInfo *info)
{
    size_t at = PNG_HEADER_BYTES;
    while (size_bytes - at >= PNG_CHUNK_BYTES) {
        size_t length = read_u32(bytes + at, true);
        const uint8_t *type = bytes + at + 4;
        if (memcmp(type, "IDAT", 4) == 0 || length > size_bytes - at - PNG_CHUNK_BYTES) {
            return;
        }
        if (memcmp(type, "eXIf", 4) == 0) {
            info->orientation = exif_orientation(type + 4, length);
        } else if (memcmp(type, "tRNS", 4) == 0) {
            info->channels = 4;
        }
        at += length + PNG_CHUNK_BYTES;
    }
}

static Status probe_png(const uint8_t *bytes, size_t size_bytes, ImageInfo *info_out)
{
    if (size_bytes < PNG_HEADER_BYTES) {
        return fail(STATUS_EXHAUSTED, "the PNG header ends after %zu bytes", size_bytes);
    }
    const uint8_t *header = bytes + PNG_SIGNATURE_BYTES;
    if (read_u32(header, true) != 13 || memcmp(header + 4, "IHDR", 4) != 0) {
        return fail(STATUS_CORRUPT, "the PNG file does not begin with its header");
    }
    uint32_t told = read_u32(header + 21, true);
    uint32_t crc = (uint32_t)crc32(0, header + 4, 17);
    if (told != crc) {
        return fail(STATUS_CORRUPT, "the PNG header's checksum is %08x, expected %08x", told, crc);
    }
    uint32_t width = read_u32(header + 8, true);
    uint32_t height = read_u32(header + 12, true);
    TRY(check_size(width, height));
    int color_type = header[17];
    ImageInfo info = {.kind = IMAGE_KIND_PNG,
                      .width = (int32_t)width,
                      .height = (int32_t)height,
                      .channels = color_type == 4 || color_type == 6 ? 4 : 3,
                      .orientation = 1};
    probe_png_chunks(bytes, size_bytes, &info);
    *info_out = info;
    return STATUS_OK;
}

static Status read_frame_header(const uint8_t *segment, size_t size_bytes, ImageInfo *info_out)
{
    if (size_bytes < 6) {
        return fail(STATUS_CORRUPT, "the JPEG frame header has %zu bytes", size_bytes);
    }
    if (segment[0] != 8) {
        return fail(STATUS_UNSUPPORTED, "a JPEG of %u bits per sample; 8 are read", segment[0]);
    }
    uint32_t height = read_u16(segment + 1, true);
    uint32_t width = read_u16(segment + 3, true);
    TRY(check_size(width, height));
    int channels = segment[5];
    if (channels != 1 && channels != 3 && channels != 4) {
        return fail(STATUS_UNSUPPORTED, "a JPEG of %d components; 1, 3 and 4 are read", channels);
    }
    info_out->width = (int32_t)width;
    info_out->height = (int32_t)height;
    info_out->channels = channels;
    return STATUS_OK;
}

/* SOF0..SOF15 without DHT, JPG and DAC, which share their range. */
static bool is_frame_marker(int marker)
{
    return marker >= 0xc0 && marker <= 0xcf && marker != 0xc4 && marker != 0xc8 && marker != 0xcc;
}

static Status probe_segment(int marker, const uint8_t *segment, size_t size_bytes, ImageInfo *info)
{
    if (marker == 0xe1 && size_bytes > 6 && memcmp(segment, "Exif\0\0", 6) == 0) {
        info->orientation = exif_orientation(segment + 6, size_bytes - 6);
    }
    if (is_frame_marker(marker)) {
        if (marker > 0xc2 && marker != 0xc9 && marker != 0xca) {
            return fail(STATUS_UNSUPPORTED, "a lossless or hierarchical JPEG (SOF%d)",
                        marker - 0xc0);
        }
        TRY(read_frame_header(segment, size_bytes, info));
    }
    return STATUS_OK;
}

/* Walks the segments up to the frame header. */
static Status probe_jpeg(const uint8_t *bytes, size_t size_bytes, ImageInfo *info_out)
{
    ImageInfo info = {.kind = IMAGE_KIND_JPEG, .orientation = 1};
    size_t at = 2; /* after SOI */
    while (info.width == 0) {
        while (at + 1 < size_bytes && bytes[at] == 0xff && bytes[at + 1] == 0xff) {
            at++; /* fill bytes */
        }
        if (size_bytes - at < 4) {
            return fail(STATUS_EXHAUSTED, "the JPEG header ends after %zu bytes", size_bytes);
        }
        int marker = bytes[at + 1];
        size_t length = read_u16(bytes + at + 2, true);
        if (bytes[at] != 0xff || length < 2 || marker < 0xc0 || marker == 0xda || marker == 0xd9) {
            return fail(STATUS_CORRUPT, "no JPEG frame header before byte %zu (%02x %02x)", at,
                        bytes[at], bytes[at + 1]);
        }
        if (length > size_bytes - at - 2) {
            return fail(STATUS_EXHAUSTED, "the JPEG header ends after %zu bytes", size_bytes);
        }
        TRY(probe_segment(marker, bytes + at + 4, length - 2, &info));
        at += 2 + length;
    }
    *info_out = info;
    return STATUS_OK;
}

/* Names what the bytes are instead, since "a web page saved as .jpg" saves a search. */
static Status fail_unknown(const uint8_t *bytes, size_t size_bytes)
{
    if (size_bytes == 0) {
        return fail(STATUS_CORRUPT, "the picture is empty (0 bytes)");
    }
    if (size_bytes >= 4 && memcmp(bytes, "GIF8", 4) == 0) {
        return fail(STATUS_UNSUPPORTED, "a GIF picture; PNG and JPEG are read");
    }
    if (size_bytes >= 12 && memcmp(bytes, "RIFF", 4) == 0 && memcmp(bytes + 8, "WEBP", 4) == 0) {
        return fail(STATUS_UNSUPPORTED, "a WebP picture; PNG and JPEG are read");
    }
    char text[17] = "";
    for (size_t i = 0; i < size_bytes && i < sizeof text - 1; i++) {
        text[i] = '.';
        if (bytes[i] >= 0x20 && bytes[i] < 0x7f) {
            text[i] = (char)bytes[i];
        }
    }
    return fail(STATUS_CORRUPT, "neither PNG nor JPEG: it begins with \"%s\"", text);
}

Status image_probe(const uint8_t *bytes, size_t size_bytes, ImageInfo *info_out)
{
    if (size_bytes >= PNG_SIGNATURE_BYTES &&
        memcmp(bytes, png_signature, PNG_SIGNATURE_BYTES) == 0) {
        TRY(probe_png(bytes, size_bytes, info_out));
        return STATUS_OK;
    }
    if (size_bytes >= 3 && bytes[0] == 0xff && bytes[1] == 0xd8 && bytes[2] == 0xff) {
        TRY(probe_jpeg(bytes, size_bytes, info_out));
        return STATUS_OK;
    }
    return fail_unknown(bytes, size_bytes);
}
