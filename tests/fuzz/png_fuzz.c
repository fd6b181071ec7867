#include "base/memory.h"
#include "data/image.h"
#include "data/testing.h"
#include "tests/fuzz/fuzz.h"

#include <string.h>

enum {
    SIZE = 24,
    PIXELS_MAX = 1 << 20 /* larger pictures only take time */
};

static void read_picture(const uint8_t *bytes, size_t size_bytes)
{
    static uint8_t pixels[SIZE * SIZE * 3];
    ImageInfo info = {0};
    Status status = image_probe(bytes, size_bytes, &info);
    if (status != STATUS_OK || (int64_t)info.width * info.height > PIXELS_MAX) {
        return;
    }
    if (image_read_square(bytes, size_bytes, SIZE, pixels) != STATUS_OK) {
        CHECK(status_message()[0] != '\0');
    }
}

/* Makes the chunks' checksums right, since almost no change would get past them. */
static void sign_chunks(uint8_t *bytes, size_t size_bytes)
{
    size_t at = 8;
    while (at <= size_bytes && size_bytes - at >= 12) {
        size_t length = (size_t)bytes[at] << 24 | (size_t)bytes[at + 1] << 16 |
                        (size_t)bytes[at + 2] << 8 | bytes[at + 3];
        if (length > size_bytes - at - 12) {
            return;
        }
        uLong crc = crc32(0, bytes + at + 4, (uInt)(length + 4));
        testing_store_u32(bytes + at + 8 + length, (uint32_t)crc);
        at += length + 12;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size_bytes)
{
    read_picture(bytes, size_bytes);
    uint8_t *copy = NULL;
    CHECK(memory_alloc(size_bytes + 1, 1, (void **)&copy) == STATUS_OK);
    memcpy(copy, bytes, size_bytes);
    sign_chunks(copy, size_bytes);
    read_picture(copy, size_bytes);
    memory_free(copy);
    return 0;
}

static TestingFile file;

size_t fuzz_seed(int index, uint8_t *out)
{
    static const uint8_t rows[200] = {0};
    switch (index) {
    case 0:
        testing_png_rgb(&file, 30, 20);
        break;
    case 1:
        testing_png_begin(&file, 4, 3, 4, 3);
        testing_png_chunk(&file, "PLTE", "\1\2\3\4\5\6\7\10\11", 9);
        testing_png_chunk(&file, "tRNS", "\200\0", 2);
        testing_png_end(&file, rows, 9);
        break;
    case 2:
        testing_png_begin(&file, 5, 2, 16, 6);
        testing_png_chunk(&file, "gAMA", "\0\0\xb1\x8f", 4);
        testing_png_chunk(&file, "eXIf", "MM\0*\0\0\0\10\0\1\1\22\0\3\0\0\0\1\0\6\0\0", 22);
        testing_png_end(&file, rows, 82);
        break;
    default:
        return 0;
    }
    memcpy(out, file.bytes, file.size_bytes);
    return file.size_bytes;
}
