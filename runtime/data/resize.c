#include "data/resize.h"

#include "base/memory.h"

#include <math.h>
#include <string.h>

static void axis_done(ResizeAxis *axis)
{
    memory_free(axis->begin);
    memory_free(axis->count);
    memory_free(axis->first_weight);
    memory_free(axis->weights);
}

/* Weights for `length` source pixels to `size` results. Pixel i covers [i, i + 1); result o is
 * centred at (o + 0.5) * length / size. Shrinking by s, the triangle reaches s pixels to each side;
 * growing, one. */
static Status axis_init(ResizeAxis *axis, int32_t length, int32_t size)
{
    double scale = (double)length / size;
    double reach = scale > 1 ? scale : 1;
    size_t taps = (size_t)(2 * ceil(reach) + 1);
    taps = taps < (size_t)length ? taps : (size_t)length;
    TRY(MEMORY_NEW(&axis->begin, size));
    TRY(MEMORY_NEW(&axis->count, size));
    TRY(MEMORY_NEW(&axis->first_weight, size));
    TRY(MEMORY_NEW(&axis->weights, taps * (size_t)size));
    for (int32_t o = 0; o < size; o++) {
        double center = (o + 0.5) * scale;
        int64_t begin = (int64_t)fmax(center - reach + 0.5, 0);
        int64_t end = (int64_t)fmin(center + reach + 0.5, length);
        float *weights = axis->weights + taps * (size_t)o;
        CHECK(begin < end && (size_t)(end - begin) <= taps);
        double total = 0;
        for (int64_t i = begin; i < end; i++) {
            total += fmax(1 - fabs(((double)i + 0.5 - center) / reach), 0);
        }
        for (int64_t i = begin; i < end; i++) {
            double weight = fmax(1 - fabs(((double)i + 0.5 - center) / reach), 0);
            weights[i - begin] = (float)(weight / total);
        }
        axis->begin[o] = (int32_t)begin;
        axis->count[o] = (int32_t)(end - begin);
        axis->first_weight[o] = (int64_t)taps * o;
    }
    return STATUS_OK;
}

Status resize_init(Resize *resize, int32_t width, int32_t height, int32_t size)
{
    CHECK(width > 0 && height > 0 && size > 0);
    *resize = (Resize){.width = width, .height = height, .size = size};
    TRY(axis_init(&resize->across, width, size));
    TRY(axis_init(&resize->down, height, size));
    TRY(MEMORY_NEW(&resize->row, (size_t)size * 3));
    TRY(MEMORY_NEW(&resize->sums, (size_t)size * (size_t)size * 3));
    return STATUS_OK;
}

void resize_done(Resize *resize)
{
    axis_done(&resize->across);
    axis_done(&resize->down);
    memory_free(resize->row);
    memory_free(resize->sums);
    *resize = (Resize){0};
}

static void resize_across(Resize *resize, const uint8_t *source)
{
    const ResizeAxis *axis = &resize->across;
    for (int32_t o = 0; o < resize->size; o++) {
        const float *weights = axis->weights + axis->first_weight[o];
        const uint8_t *pixels = source + (ptrdiff_t)axis->begin[o] * 3;
        float red = 0;
        float green = 0;
        float blue = 0;
        for (int32_t i = 0; i < axis->count[o]; i++) {
            red += weights[i] * (float)pixels[0];
            green += weights[i] * (float)pixels[1];
            blue += weights[i] * (float)pixels[2];
            pixels += 3;
        }
        float *result = resize->row + (ptrdiff_t)o * 3;
        result[0] = red;
        result[1] = green;
        result[2] = blue;
    }
}

void resize_feed(Resize *resize, const uint8_t *row)
{
    const ResizeAxis *axis = &resize->down;
    int32_t y = resize->row_in++;
    CHECK(y < resize->height);
    while (resize->first_open < resize->size &&
           axis->begin[resize->first_open] + axis->count[resize->first_open] <= y) {
        resize->first_open++;
    }
    resize_across(resize, row);
    /* Windows move on monotonically, so those that hold row y are neighbours. */
    size_t stride = (size_t)resize->size * 3;
    for (int32_t o = resize->first_open; o < resize->size && axis->begin[o] <= y; o++) {
        float weight = axis->weights[axis->first_weight[o] + y - axis->begin[o]];
        float *sums = resize->sums + stride * (size_t)o;
        for (size_t i = 0; i < stride; i++) {
            sums[i] += weight * resize->row[i];
        }
    }
}

void resize_finish(const Resize *resize, uint8_t *pixels_out)
{
    CHECK(resize->row_in == resize->height);
    size_t count = (size_t)resize->size * (size_t)resize->size * 3;
    for (size_t i = 0; i < count; i++) {
        float value = resize->sums[i] + 0.5F;
        pixels_out[i] = (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
    }
}
