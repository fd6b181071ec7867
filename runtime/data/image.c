#include "data/image.h"

#include "base/memory.h"
#include "data/resize.h"

#include <png.h>
#include <stdbool.h>
#include <string.h>
#include <turbojpeg.h>

/* A decoded file: u8 [height, width, channels]; 3: RGB, 4: RGBA of a PNG or inverted CMYK of a
 * JPEG. */
typedef struct Pixels {
    uint8_t *data;
    ImageInfo info;
    int channels;
} Pixels;

/* libpng's simplified interface: it reports errors as values, where the full one leaves through
 * longjmp. */
static Status decode_png(const uint8_t *bytes, size_t size_bytes, Pixels *pixels)
{
    png_image image = {.version = PNG_IMAGE_VERSION};
    if (!png_image_begin_read_from_memory(&image, bytes, size_bytes)) {
        return fail(STATUS_CORRUPT, "PNG: %s", image.message);
    }
    pixels->channels = image.format & PNG_FORMAT_FLAG_ALPHA ? 4 : 3;
    image.format = pixels->channels == 4 ? PNG_FORMAT_RGBA : PNG_FORMAT_RGB;
    image.flags |= PNG_IMAGE_FLAG_16BIT_sRGB; /* otherwise 16 bits are taken for linear light */
    Status status = STATUS_OK;
    if (image.width != (uint32_t)pixels->info.width ||
        image.height != (uint32_t)pixels->info.height) {
        status = fail(STATUS_CORRUPT, "PNG: two headers that differ");
    } else {
        status = memory_alloc((size_t)image.width * image.height, (size_t)pixels->channels,
                              (void **)&pixels->data);
    }
    if (status != STATUS_OK) {
        png_image_free(&image);
        return status_trace(status, __FILE__, __LINE__);
    }
    if (!png_image_finish_read(&image, NULL, pixels->data, 0, NULL)) {
        return fail(STATUS_CORRUPT, "PNG: %s", image.message);
    }
    return STATUS_OK;
}

/* libjpeg goes on after a warning with gray pixels where data is missing, so a warning is an error
 * here, but for stray bytes between segments. */
static Status check_jpeg(tjhandle handle, int result)
{
    if (result == 0) {
        return STATUS_OK;
    }
    const char *message = tjGetErrorStr2(handle);
    if (tjGetErrorCode(handle) == TJERR_WARNING && strstr(message, "extraneous bytes")) {
        return STATUS_OK;
    }
    return fail(STATUS_CORRUPT, "JPEG: %s", message);
}

static Status decode_jpeg_with(tjhandle handle, const uint8_t *bytes, size_t size_bytes,
                               Pixels *pixels)
{
    int width = 0;
    int height = 0;
    int sampling = 0;
    int color_space = 0;
    TRY(check_jpeg(handle, tjDecompressHeader3(handle, bytes, size_bytes, &width, &height,
                                               &sampling, &color_space)));
    if (width != pixels->info.width || height != pixels->info.height) {
        return fail(STATUS_CORRUPT, "JPEG: two frame headers that differ");
    }
    bool has_black = color_space == TJCS_CMYK || color_space == TJCS_YCCK;
    pixels->channels = has_black ? 4 : 3;
    TRY(memory_alloc((size_t)width * (size_t)height, (size_t)pixels->channels,
                     (void **)&pixels->data));
    int format = has_black ? TJPF_CMYK : TJPF_RGB;
    TRY(check_jpeg(handle, tjDecompress2(handle, bytes, size_bytes, pixels->data, width, 0, height,
                                         format, TJFLAG_ACCURATEDCT | TJFLAG_LIMITSCANS)));
    return STATUS_OK;
}

static Status decode_jpeg(const uint8_t *bytes, size_t size_bytes, Pixels *pixels)
{
    tjhandle handle = tjInitDecompress();
    if (!handle) {
        return fail(STATUS_NO_MEMORY, "no memory for a JPEG decoder");
    }
    Status status = decode_jpeg_with(handle, bytes, size_bytes, pixels);
    tjDestroy(handle);
    TRY(status);
    return STATUS_OK;
}

/* x / 255, rounded, for x in [0, 255 * 255]. */
static uint8_t divide_by_255(uint32_t x)
{
    return (uint8_t)((x + 127) / 255);
}

/* One row of four channels to RGB [width, 3]. */
static void flatten_row(const Pixels *pixels, const uint8_t *row, uint8_t *rgb)
{
    bool is_png = pixels->info.kind == IMAGE_KIND_PNG;
    for (int32_t x = 0; x < pixels->info.width; x++) {
        const uint8_t *pixel = row + 4 * (size_t)x;
        uint32_t last = pixel[3]; /* alpha, or inverted black */
        uint32_t white = is_png ? 255 * (255 - last) : 0;
        for (int c = 0; c < 3; c++) {
            rgb[3 * (size_t)x + (size_t)c] = divide_by_255(pixel[c] * last + white);
        }
    }
}

static void feed_rows(const Pixels *pixels, uint8_t *rgb, Resize *resize)
{
    size_t stride = (size_t)pixels->info.width * (size_t)pixels->channels;
    for (int32_t y = 0; y < pixels->info.height; y++) {
        const uint8_t *row = pixels->data + stride * (size_t)y;
        if (pixels->channels == 4) {
            flatten_row(pixels, row, rgb);
            row = rgb;
        }
        resize_feed(resize, row);
    }
}

/* On a square, so it may follow the resize: the filter is the same in both directions. Orientations
 * (Exif 2.3, tag 0x112): where row 0 and column 0 of the stored picture belong. 5 to 8 exchange
 * rows and columns. */
static void orient_square(const uint8_t *stored, int size, int32_t orientation, uint8_t *pixels_out)
{
    bool exchange = orientation >= 5;
    bool flip_x = orientation == 2 || orientation == 3 || orientation == 6 || orientation == 7;
    bool flip_y = orientation == 3 || orientation == 4 || orientation == 7 || orientation == 8;
    for (int y = 0; y < size; y++) {
        for (int x = 0; x < size; x++) {
            int to_x = exchange ? y : x;
            int to_y = exchange ? x : y;
            to_x = flip_x ? size - 1 - to_x : to_x;
            to_y = flip_y ? size - 1 - to_y : to_y;
            memcpy(pixels_out + 3 * ((size_t)to_y * (size_t)size + (size_t)to_x),
                   stored + 3 * ((size_t)y * (size_t)size + (size_t)x), 3);
        }
    }
}

static Status pixels_to_square(const Pixels *pixels, int size, uint8_t *pixels_out)
{
    uint8_t *rgb = NULL;    /* [width, 3] */
    uint8_t *square = NULL; /* [size, size, 3] */
    Resize resize = {0};
    Status status = MEMORY_NEW(&rgb, (size_t)pixels->info.width * 3);
    if (status == STATUS_OK) {
        status = MEMORY_NEW(&square, (size_t)size * (size_t)size * 3);
    }
    if (status == STATUS_OK) {
        status = resize_init(&resize, pixels->info.width, pixels->info.height, size);
    }
    if (status == STATUS_OK) {
        feed_rows(pixels, rgb, &resize);
        resize_finish(&resize, square);
        orient_square(square, size, pixels->info.orientation, pixels_out);
    }
    resize_done(&resize);
    memory_free(square);
    memory_free(rgb);
    TRY(status);
    return STATUS_OK;
}

Status image_read_square(const uint8_t *bytes, size_t size_bytes, int size, uint8_t *pixels_out)
{
    CHECK(size > 0 && size <= IMAGE_SQUARE_MAX);
    Pixels pixels = {0};
    Status status = image_probe(bytes, size_bytes, &pixels.info);
    if (status == STATUS_EXHAUSTED) {
        return fail(STATUS_CORRUPT, "truncated: %s", status_message());
    }
    TRY(status);
    if (pixels.info.kind == IMAGE_KIND_PNG) {
        status = decode_png(bytes, size_bytes, &pixels);
    } else {
        status = decode_jpeg(bytes, size_bytes, &pixels);
    }
    if (status == STATUS_OK) {
        status = pixels_to_square(&pixels, size, pixels_out);
    }
    memory_free(pixels.data);
    TRY(status);
    return STATUS_OK;
}
