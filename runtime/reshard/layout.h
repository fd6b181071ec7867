/* Layout: which boxes of one global array each rank holds, and what copies mean.
 *
 * A box is a range per dim. A rank may hold several boxes, which must not overlap each other
 * (plan_make refuses that); its local buffer is their elements one box after another, each row-
 * major. Nothing here asks for divisibility.
 * Threading: plain data, pure functions. A layout owns its boxes: layout_done.
 */
#ifndef RESHARD_LAYOUT_H
#define RESHARD_LAYOUT_H

#include "base/range.h"
#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    LAYOUT_DIMS_MAX = 4,
    LAYOUT_RANKS_MAX = 1 << 20, /* keeps arrays by rank small */
};

typedef struct Box {
    Range ranges[LAYOUT_DIMS_MAX]; /* dims past num_dims are [0, 1) */
} Box;

typedef enum LayoutCopies {
    /* Elements held by several ranks are equal: any copy will do; as a destination, each holder
     * gets one. */
    LAYOUT_COPIES_REPLICATE,
    /* The value is the sum over all holders. Sources only. */
    LAYOUT_COPIES_PARTIAL,
} LayoutCopies;

typedef struct LayoutPiece {
    int rank;
    Box box;
    int64_t offset; /* elements: where the box begins in the rank's local buffer */
} LayoutPiece;

typedef struct Layout {
    int num_dims;
    int64_t dims[LAYOUT_DIMS_MAX]; /* of the global array; past num_dims 1 */
    LayoutCopies copies;
    uint64_t digest; /* of all above and all pieces in order: equal layouts have equal digests */
    int num_pieces;
    LayoutPiece *pieces; /* in the order added */
    size_t capacity;
    int num_ranks;        /* 1 + the highest rank that holds something */
    int64_t *rank_counts; /* [num_ranks], elements */
    size_t rank_capacity;
} Layout;

void layout_init(Layout *layout, int num_dims, const int64_t *dims, LayoutCopies copies);
/* As done and init, but keeps the memory: a layout made again and again stops allocating. */
void layout_reset(Layout *layout, int num_dims, const int64_t *dims, LayoutCopies copies);
void layout_done(Layout *layout);

/* Adds a box to a rank; its offset follows what the rank has already. Empty boxes are left out.
 * CHECKs that it lies inside the array. */
Status layout_add(Layout *layout, int rank, Box box) STATUS_CHECKED;

/* Rows [rows.begin, rows.end) of dim 0, all of the other dims. */
Status layout_add_rows(Layout *layout, int rank, Range rows) STATUS_CHECKED;

/* Elements that a rank holds. */
int64_t layout_rank_count(const Layout *layout, int rank);

int64_t box_count(const Box *box, int num_dims);

/* The common part; empty in at least one dim when there is none. */
Box box_intersect(const Box *a, const Box *b);

/* Elements from the beginning of `outer`, stored row-major, to the first of `inner`, which lies
 * inside it. */
int64_t box_offset(const Box *outer, const Box *inner);

/* Whether `inner` is one run of memory in `outer`. */
bool box_is_contiguous(const Box *outer, const Box *inner);

enum {
    BOX_TEXT_BYTES = 192
};

/* "[0:4, 8:16]" into text[BOX_TEXT_BYTES]; returns text. */
char *box_print(const Box *box, int num_dims, char *text);

#endif
