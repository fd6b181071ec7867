/* Layout: which boxes of one global array each rank holds, and what copies mean.
 *
 * A box is a range per dim. A rank may hold several boxes; its local buffer is their elements one box after another, each row-major.
 * Nothing here asks for divisibility.
 * Threading: plain data, pure functions. A layout owns its boxes: layout_done.
 */
#ifndef RESHARD_LAYOUT_H
#define RESHARD_LAYOUT_H

#include "base/range.h"
#include "base/status.h"

#include <stdint.h>

enum { LAYOUT_DIMS_MAX = 4 };

typedef struct Box {
    Range ranges[LAYOUT_DIMS_MAX]; /* dims past num_dims are [0, 1) */
} Box;

typedef enum LayoutCopies {
    LAYOUT_COPIES_REPLICATE, /* elements held by several ranks are equal: any copy will do; as a destination, each holder gets one */
    LAYOUT_COPIES_PARTIAL,   /* the value is the sum over all holders */
} LayoutCopies;

typedef struct LayoutPiece {
    int rank;
    Box box;
    int64_t offset; /* elements: where the box begins in the rank's local buffer */
} LayoutPiece;

typedef struct Layout {
    int num_dims;
    int64_t dims[LAYOUT_DIMS_MAX]; /* of the global array */
    LayoutCopies copies;
    int num_pieces;
    LayoutPiece *pieces; /* in the order added */
    size_t capacity;
} Layout;

void layout_init(Layout *layout, int num_dims, const int64_t *dims, LayoutCopies copies);
void layout_done(Layout *layout);

/* Adds a box to a rank; its offset follows what the rank has already. Empty boxes are left out. CHECKs that it lies inside the array. */
Status layout_add(Layout *layout, int rank, Box box) STATUS_CHECKED;

/* Rows [rows.begin, rows.end) of dim 0, all of the other dims. */
Status layout_add_rows(Layout *layout, int rank, Range rows) STATUS_CHECKED;

/* Elements that a rank holds. */
int64_t layout_rank_count(const Layout *layout, int rank);

int64_t box_count(const Box *box, int num_dims);

#endif
