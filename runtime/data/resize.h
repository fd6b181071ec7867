/* Resize: a picture to a square, through a triangle filter that widens when it shrinks, so that
 * nothing aliases.
 *
 * Rows are fed one at a time, so memory is that of the result and of one row, whatever the aspect
 * of the source.
 * Threading: one owner.
 */
#ifndef DATA_RESIZE_H
#define DATA_RESIZE_H

#include "base/status.h"

#include <stdint.h>

/* Weights of one axis: result o is the sum of weights[first_weight[o] + i] * source[begin[o] + i],
 * i < count[o]. */
typedef struct ResizeAxis {
    int32_t *begin;
    int32_t *count;
    int64_t *first_weight;
    float *weights;
} ResizeAxis;

typedef struct Resize {
    int32_t width; /* of the source */
    int32_t height;
    int32_t size; /* of the result */
    ResizeAxis across;
    ResizeAxis down;
    float *row;         /* [size, 3]: one source row, resized across */
    float *sums;        /* [size, size, 3] */
    int32_t row_in;     /* source rows fed so far */
    int32_t first_open; /* results before it have all their rows */
} Resize;

/* resize_done in every case. */
Status resize_init(Resize *resize, int32_t width, int32_t height, int32_t size) STATUS_CHECKED;
void resize_done(Resize *resize);

/* The next source row: u8 [width, 3]. */
void resize_feed(Resize *resize, const uint8_t *row);

/* After the last row: u8 [size, size, 3]. */
void resize_finish(const Resize *resize, uint8_t *pixels_out);

#endif
