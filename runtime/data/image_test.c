#include "data/image.h"
#include "data/testing.h"

#include <math.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    SIZE_MAX_TEST = 256
};

static TestingFile file;
static uint8_t result[SIZE_MAX_TEST * SIZE_MAX_TEST * 3];

static void read_square(int size)
{
    Status status = image_read_square(file.bytes, file.size_bytes, size, result);
    if (status != STATUS_OK) {
        fail_msg("%s", status_message());
    }
}

static void expect_error(Status code, const char *part)
{
    status_clear();
    Status status = image_read_square(file.bytes, file.size_bytes, 8, result);
    if (status != code || !strstr(status_message(), part)) {
        fail_msg("got %s: \"%s\", expected %s with \"%s\"", status_name(status), status_message(),
                 status_name(code), part);
    }
}

static void expect_pixel(int index, int red, int green, int blue, int tolerance)
{
    const uint8_t *pixel = result + 3 * (size_t)index;
    if (abs(pixel[0] - red) > tolerance || abs(pixel[1] - green) > tolerance ||
        abs(pixel[2] - blue) > tolerance) {
        fail_msg("pixel %d is %d %d %d, expected %d %d %d", index, pixel[0], pixel[1], pixel[2],
                 red, green, blue);
    }
}

/* The filter's definition in float64 over the whole plane at once. */
static double reference(const uint8_t *rgb, int width, int height, int size, int out_x, int out_y,
                        int channel)
{
    double reach_x = fmax((double)width / size, 1);
    double reach_y = fmax((double)height / size, 1);
    double center_x = (out_x + 0.5) * width / size;
    double center_y = (out_y + 0.5) * height / size;
    double sum = 0;
    double total = 0;
    for (int y = 0; y < height; y++) {
        for (int x = 0; x < width; x++) {
            double weight_x = fmax(0, 1 - fabs(x + 0.5 - center_x) / reach_x);
            double weight_y = fmax(0, 1 - fabs(y + 0.5 - center_y) / reach_y);
            sum += weight_x * weight_y * rgb[3 * (y * width + x) + channel];
            total += weight_x * weight_y;
        }
    }
    return sum / total;
}

static void test_resize(void **state)
{
    (void)state;
    static const int cases[][3] = {{72, 72, 64}, {128, 128, 64}, {100, 37, 16}, {5, 9, 16},
                                   {1, 1, 8},    {400, 1, 8},    {3, 600, 8},   {64, 64, 64}};
    static uint8_t rgb[128 * 128 * 3];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int width = cases[i][0];
        int height = cases[i][1];
        int size = cases[i][2];
        testing_fill_rgb(rgb, width, height);
        testing_png_rgb(&file, width, height);
        read_square(size);
        for (int at = 0; at < size * size; at += 7) {
            for (int c = 0; c < 3; c++) {
                double expected = reference(rgb, width, height, size, at % size, at / size, c);
                if (fabs(result[3 * at + c] - expected) > 0.51) {
                    fail_msg("%d x %d to %d: pixel %d channel %d is %d, expected %.3f", width,
                             height, size, at, c, result[3 * at + c], expected);
                }
            }
        }
    }
}

static void test_png_kinds(void **state)
{
    (void)state;
    /* Palette with transparency: opaque red, half green, clear. */
    testing_png_begin(&file, 2, 2, 8, 3);
    testing_png_chunk(&file, "PLTE", "\xff\0\0\0\xff\0\0\0\xff", 9);
    testing_png_chunk(&file, "tRNS", "\xff\x80\0", 3);
    testing_png_end(&file, (const uint8_t *)"\0\0\1\0\2\0", 6);
    read_square(2);
    expect_pixel(0, 255, 0, 0, 0);
    expect_pixel(1, 127, 255, 127, 0);
    expect_pixel(2, 255, 255, 255, 0);
    ImageInfo info;
    assert_int_equal(image_probe(file.bytes, file.size_bytes, &info), STATUS_OK);
    assert_int_equal(info.channels, 4);
    /* Gray of 16 bits: values are kept, not taken for linear light. */
    testing_png_begin(&file, 2, 2, 16, 0);
    testing_png_end(&file, (const uint8_t *)"\0\x80\x80\x40\x40\0\xff\xff\0\0", 10);
    read_square(2);
    expect_pixel(0, 128, 128, 128, 0);
    expect_pixel(1, 64, 64, 64, 0);
    expect_pixel(2, 255, 255, 255, 0);
    expect_pixel(3, 0, 0, 0, 0);
    /* RGBA of 16 bits. */
    testing_png_begin(&file, 1, 1, 16, 6);
    testing_png_end(&file, (const uint8_t *)"\0\x10\x10\x20\x20\x30\x30\x80\x80", 9);
    read_square(1);
    expect_pixel(0, 135, 143, 151, 1); /* 255 - 128/255 * (255 - 16), ... */
    /* Gray of 1 bit; RGBA of 8. */
    testing_png_begin(&file, 2, 1, 1, 0);
    testing_png_end(&file, (const uint8_t *)"\0\x40", 2);
    read_square(2);
    expect_pixel(0, 0, 0, 0, 0);
    expect_pixel(1, 255, 255, 255, 0);
    testing_png_begin(&file, 1, 1, 8, 6);
    testing_png_end(&file, (const uint8_t *)"\0\x10\x20\x30\x00", 5);
    read_square(1);
    expect_pixel(0, 255, 255, 255, 0);
}

static void test_jpeg_kinds(void **state)
{
    (void)state;
    uint8_t pixels[16 * 16 * 4];
    static const uint8_t rgb[3] = {200, 50, 100};
    static const uint8_t cmyk[4] = {255, 128, 64, 128};
    for (size_t i = 0; i < 256; i++) {
        memcpy(pixels + i * 3, rgb, sizeof rgb);
    }
    testing_jpeg(&file, pixels, 16, 16, TJPF_RGB);
    read_square(4);
    expect_pixel(5, 200, 50, 100, 2);
    memset(pixels, 77, sizeof pixels);
    testing_jpeg(&file, pixels, 16, 16, TJPF_GRAY);
    read_square(4);
    expect_pixel(5, 77, 77, 77, 1);
    for (size_t i = 0; i < 256; i++) {
        memcpy(pixels + i * 4, cmyk, sizeof cmyk);
    }
    testing_jpeg(&file, pixels, 16, 16, TJPF_CMYK);
    read_square(4);
    expect_pixel(5, 128, 64, 32, 3);
}

/* Pixel (0, 0) of the stored picture must come out where Exif says "row 0 is ..., column 0 is ...".
 * */
static void test_orientation(void **state)
{
    (void)state;
    enum {
        SIDE = 64
    };
    /* Quarters of the stored picture: red, green / blue, white. */
    static uint8_t pixels[SIDE * SIDE * 3];
    static const uint8_t colors[4][3] = {{250, 0, 0}, {0, 250, 0}, {0, 0, 250}, {250, 250, 250}};
    for (int i = 0; i < SIDE * SIDE; i++) {
        int quarter = (i / SIDE >= SIDE / 2) * 2 + (i % SIDE >= SIDE / 2);
        memcpy(pixels + (size_t)i * 3, colors[quarter], 3);
    }
    /* For each orientation the quarters as seen: top left, top right, bottom left, bottom right. */
    static const int seen[9][4] = {{0},          {0, 1, 2, 3}, {1, 0, 3, 2},
                                   {3, 2, 1, 0}, {2, 3, 0, 1}, {0, 2, 1, 3},
                                   {2, 0, 3, 1}, {3, 1, 2, 0}, {1, 3, 0, 2}};
    for (int orientation = 1; orientation <= 8; orientation++) {
        testing_jpeg(&file, pixels, SIDE, SIDE, TJPF_RGB);
        testing_jpeg_orient(&file, orientation);
        ImageInfo info;
        assert_int_equal(image_probe(file.bytes, file.size_bytes, &info), STATUS_OK);
        assert_int_equal(info.orientation, orientation);
        read_square(4);
        static const int places[4] = {0, 3, 12, 15};
        for (int i = 0; i < 4; i++) {
            const uint8_t *color = colors[seen[orientation][i]];
            expect_pixel(places[i], color[0], color[1], color[2], 12);
        }
    }
    /* PNG's eXIf; an impossible value counts as none. */
    static const uint8_t tiff[] = {'I', 'I', 42, 0, 8, 0, 0, 0, 1, 0, 0x12,
                                   1,   3,   0,  1, 0, 0, 0, 6, 0, 0, 0};
    testing_png_begin(&file, 2, 2, 8, 0);
    testing_png_chunk(&file, "eXIf", tiff, sizeof tiff);
    testing_png_end(&file, (const uint8_t *)"\0\x0a\x14\0\x1e\x28", 6);
    read_square(2);
    expect_pixel(0, 30, 30, 30, 0); /* 10 20 / 30 40 turned right: 30 10 / 40 20 */
    expect_pixel(1, 10, 10, 10, 0);
    testing_jpeg(&file, pixels, SIDE, SIDE, TJPF_RGB);
    testing_jpeg_orient(&file, 77);
    read_square(4);
    expect_pixel(0, 250, 0, 0, 12);
}

static void test_bad_png(void **state)
{
    (void)state;
    testing_png_rgb(&file, 30, 20);
    size_t whole = file.size_bytes;
    file.size_bytes = whole / 2;
    expect_error(STATUS_CORRUPT, "PNG");
    file.size_bytes = 20;
    expect_error(STATUS_CORRUPT, "truncated");
    file.size_bytes = whole;
    file.bytes[whole - 12 - 6] ^= 0x55; /* in the checksum of IDAT or just before */
    expect_error(STATUS_CORRUPT, "PNG");
    testing_png_rgb(&file, 30, 20);
    file.bytes[16] ^= 1; /* the width: its checksum is then wrong */
    expect_error(STATUS_CORRUPT, "checksum");
    testing_png_begin(&file, 0, 5, 8, 2);
    testing_png_end(&file, (const uint8_t *)"", 0);
    expect_error(STATUS_CORRUPT, "0 x 5");
    testing_png_begin(&file, 30000, 30000, 8, 2);
    testing_png_end(&file, (const uint8_t *)"", 0);
    expect_error(STATUS_CORRUPT, "30000 x 30000");
    /* A good header with no pixels behind it. */
    testing_png_begin(&file, 100, 100, 8, 2);
    testing_png_end(&file, (const uint8_t *)"\0\0\0\0", 4);
    expect_error(STATUS_CORRUPT, "PNG");
}

static void test_bad_jpeg(void **state)
{
    (void)state;
    static uint8_t pixels[64 * 64 * 3];
    testing_fill_rgb(pixels, 64, 64);
    testing_jpeg(&file, pixels, 64, 64, TJPF_RGB);
    size_t whole = file.size_bytes;
    file.size_bytes = whole / 2;
    expect_error(STATUS_CORRUPT, "JPEG");
    file.size_bytes = 30;
    expect_error(STATUS_CORRUPT, "truncated");
    /* The frame header: FF C0, length, 8, height, width. */
    file.size_bytes = whole;
    uint8_t *frame = memmem(file.bytes, whole, "\xff\xc0\0\x11\x08", 5);
    assert_non_null(frame);
    static const uint8_t sizes[2][4] = {{0x75, 0x30, 0x75, 0x30}, {0, 16, 0, 0}};
    memcpy(frame + 5, sizes[0], 4);
    expect_error(STATUS_CORRUPT, "30000 x 30000");
    memcpy(frame + 5, sizes[1], 4);
    expect_error(STATUS_CORRUPT, "0 x 16");
}

static void test_not_pictures(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        Status code;
        const char *part;
    } cases[] = {{"", STATUS_CORRUPT, "empty"},
                 {"<!DOCTYPE html><html>", STATUS_CORRUPT, "<!DOCTYPE html>"},
                 {"GIF89a......", STATUS_UNSUPPORTED, "GIF"},
                 {"RIFF1234WEBPVP8 ", STATUS_UNSUPPORTED, "WebP"},
                 {"\x89PN", STATUS_CORRUPT, "neither"},
                 {"\xff\xd8\xff\xda\x01\x01\x01", STATUS_CORRUPT, "frame header"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        file.size_bytes = 0;
        testing_append(&file, cases[i].bytes, strlen(cases[i].bytes));
        expect_error(cases[i].code, cases[i].part);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_resize),      cmocka_unit_test(test_png_kinds),
        cmocka_unit_test(test_jpeg_kinds),  cmocka_unit_test(test_orientation),
        cmocka_unit_test(test_bad_png),     cmocka_unit_test(test_bad_jpeg),
        cmocka_unit_test(test_not_pictures)};
    return cmocka_run_group_tests_name("image", tests, NULL, NULL);
}
