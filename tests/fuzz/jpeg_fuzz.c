#include "data/image.h"
#include "data/testing.h"
#include "tests/fuzz/fuzz.h"

#include <string.h>

enum {
    SIZE = 24,
    PIXELS_MAX = 1 << 18 /* larger pictures only take time */
};

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size_bytes)
{
    static uint8_t pixels[SIZE * SIZE * 3];
    ImageInfo info = {0};
    Status status = image_probe(bytes, size_bytes, &info);
    if (status != STATUS_OK || (int64_t)info.width * info.height > PIXELS_MAX) {
        return 0;
    }
    if (image_read_square(bytes, size_bytes, SIZE, pixels) != STATUS_OK) {
        CHECK(status_message()[0] != '\0');
    }
    return 0;
}

static TestingFile file;

size_t fuzz_seed(int index, uint8_t *out)
{
    static const int formats[] = {TJPF_RGB, TJPF_GRAY, TJPF_CMYK};
    static uint8_t pixels[20 * 16 * 4];
    if (index >= 3) {
        return 0;
    }
    for (size_t i = 0; i < sizeof pixels; i++) {
        pixels[i] = (uint8_t)(i * 7 + i / 60);
    }
    testing_jpeg(&file, pixels, 20, 16, formats[index]);
    testing_jpeg_orient(&file, 6 + index);
    memcpy(out, file.bytes, file.size_bytes);
    return file.size_bytes;
}
