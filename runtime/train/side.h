/* Side: what both sides of the boundary need to do their part of a pass: the rank's module and the
 * means to run it.
 * Threading: plain data, borrowed by encoder_side and llm_side.
 */
#ifndef TRAIN_SIDE_H
#define TRAIN_SIDE_H

#include "train/boundary.h"
#include "train/feed.h"
#include "train/module.h"

typedef struct SideContext {
    Device *device;
    Stream *stream;
    const Kernels *kernels;
    const Place *place;
    Boundary *boundary;
    Module *module;
    int window;        /* microbatches in flight */
    int64_t width;     /* D */
    StepBounds bounds; /* of all passes */
    int rows_per_image;
    int image_size;
} SideContext;

#endif
