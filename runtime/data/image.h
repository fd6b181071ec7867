/* Image: PNG and JPEG files in memory, told apart by their first bytes and never by name, read into
 * a square of RGB pixels.
 *
 * Policy, one answer for every kind of file:
 *   transparency    over white, in the file's own (gamma-coded) values
 *   gray, palette   become RGB; 16 bits become 8 by rounding; a PNG that states its gamma is
 *                   converted to sRGB
 *   CMYK, YCCK      JPEG of four components is taken as Adobe writes it (inverted):
 *                   R = C * K / 255; profiles are ignored
 *   animated PNG    its first picture
 *   EXIF            orientation 1 to 8 is applied (JPEG APP1, PNG eXIf); a broken EXIF block counts
 *                   as none
 *   JPEG warnings   an error, except for stray bytes before a marker, which harm no pixel
 *   size            more than IMAGE_PIXELS_MAX pixels is STATUS_CORRUPT, from the header, before
 *                   memory is taken
 * Messages do not name the file: the caller knows it.
 * Threading: pure functions.
 */
#ifndef DATA_IMAGE_H
#define DATA_IMAGE_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

enum {
    IMAGE_PIXELS_MAX = 1 << 26, /* 8192 x 8192: 256 MiB while one picture is decoded */
    IMAGE_SIDE_MAX = 1 << 20,
    IMAGE_SQUARE_MAX = 1 << 13, /* largest side of the result */
};

typedef enum ImageKind {
    IMAGE_KIND_PNG,
    IMAGE_KIND_JPEG,
} ImageKind;

typedef struct ImageInfo {
    ImageKind kind;
    int32_t width; /* pixels, as stored: before the orientation is applied */
    int32_t height;
    int32_t channels;    /* JPEG: 1, 3 or 4; PNG: 4 with transparency, else 3 */
    int32_t orientation; /* EXIF, 1..8; 1 when not told, or told after the first pixels */
} ImageInfo;

/* Reads the header from the beginning of a file. STATUS_CORRUPT: not a picture, a broken header, or
 * too many pixels. STATUS_UNSUPPORTED: another known picture format. STATUS_EXHAUSTED: the header
 * goes on after these bytes. */
Status image_probe(const uint8_t *bytes, size_t size_bytes, ImageInfo *info_out) STATUS_CHECKED;

/* Decodes the whole file and resizes it, without keeping its aspect, with a triangle filter that
 * widens when it shrinks (no aliasing; the filter of PIL's BILINEAR). pixels_out u8 [size, size,
 * 3]. STATUS_CORRUPT, STATUS_UNSUPPORTED, STATUS_NO_MEMORY. */
Status image_read_square(const uint8_t *bytes, size_t size_bytes, int size,
                         uint8_t *pixels_out) STATUS_CHECKED;

#endif
