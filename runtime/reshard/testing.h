/* Testing: random layouts, and where each element lies by plain enumeration: what the tests of
 * this folder compare with.
 * Threading: plain data.
 */
#ifndef RESHARD_TESTING_H
#define RESHARD_TESTING_H

#include "base/rng.h"
#include "reshard/layout.h"

#include <string.h>

enum {
    TESTING_RANKS_MAX = 8,
    TESTING_ELEMENTS_MAX = 2048,
};

typedef struct TestingRng {
    Rng rng;
    uint64_t index;
} TestingRng;

/* Uniform in [low, high]. */
static inline int testing_pick(TestingRng *random, int low, int high)
{
    return low + (int)rng_below(random->rng, random->index++, (uint64_t)high - (uint64_t)low + 1);
}

/* What one side of a test holds: local[rank][element] is the place in the rank's local buffer, or
 * -1. */
typedef struct TestingMap {
    int num_elements;
    int32_t local[TESTING_RANKS_MAX][TESTING_ELEMENTS_MAX];
    bool is_in_group[TESTING_RANKS_MAX];
} TestingMap;

/* Global indices of a box's elements, row-major; returns how many. */
static inline int testing_enumerate(const Layout *layout, const Box *box, int32_t *elements_out)
{
    int num = 0;
    const Range *r = box->ranges;
    int64_t total = layout->dims[0] * layout->dims[1] * layout->dims[2] * layout->dims[3];
    for (int64_t e = 0; e < total; e++) {
        int64_t at[LAYOUT_DIMS_MAX];
        int64_t rest = e;
        bool is_inside = true;
        for (int d = LAYOUT_DIMS_MAX - 1; d >= 0; d--) {
            at[d] = rest % layout->dims[d];
            rest /= layout->dims[d];
            is_inside = is_inside && r[d].begin <= at[d] && at[d] < r[d].end;
        }
        if (is_inside) {
            elements_out[num++] = (int32_t)e;
        }
    }
    return num;
}

static inline void testing_map(const Layout *layout, TestingMap *map)
{
    memset(map->local, 0xff, sizeof map->local);
    memset(map->is_in_group, 0, sizeof map->is_in_group);
    int32_t used[TESTING_RANKS_MAX] = {0};
    int32_t elements[TESTING_ELEMENTS_MAX];
    for (int i = 0; i < layout->num_pieces; i++) {
        int rank = layout->pieces[i].rank;
        int num = testing_enumerate(layout, &layout->pieces[i].box, elements);
        map->is_in_group[rank] = true;
        for (int k = 0; k < num; k++) {
            map->local[rank][elements[k]] = used[rank]++;
        }
    }
    map->num_elements =
        (int)(layout->dims[0] * layout->dims[1] * layout->dims[2] * layout->dims[3]);
}

/* Random cuts of [0, length) into at most `parts_max` parts, some empty; returns how many. */
static inline int testing_cut(TestingRng *random, int64_t length, int parts_max, Range *parts_out)
{
    int num = testing_pick(random, 1, parts_max);
    int64_t begin = 0;
    for (int i = 0; i < num; i++) {
        int64_t end = i + 1 == num ? length : testing_pick(random, (int)begin, (int)length);
        parts_out[i] = (Range){begin, end};
        begin = end;
    }
    return num;
}

/* Blocks of a random grid over the array, each given to a random set out of `ranks` (a mask), or
 * with `by_rank` another grid for each rank with holes in it. Blocks are added in a random
 * rotation, so that local order is not global order. */
static inline void testing_add_grid(TestingRng *random, Layout *layout, unsigned ranks,
                                    int parts_max)
{
    Range parts[LAYOUT_DIMS_MAX][8];
    int num[LAYOUT_DIMS_MAX];
    int num_blocks = 1;
    for (int d = 0; d < LAYOUT_DIMS_MAX; d++) {
        num[d] =
            testing_cut(random, layout->dims[d], d < layout->num_dims ? parts_max : 1, parts[d]);
        num_blocks *= num[d];
    }
    int how = testing_pick(random, 0, 3); /* 0: on all; 1: on one; else on any set */
    int rotation = testing_pick(random, 0, num_blocks - 1);
    for (int b = 0; b < num_blocks; b++) {
        int rest = (b + rotation) % num_blocks;
        Box box;
        for (int d = 0; d < LAYOUT_DIMS_MAX; d++) {
            box.ranges[d] = parts[d][rest % num[d]];
            rest /= num[d];
        }
        unsigned holders = how == 0 ? ranks : 0;
        while (holders == 0) {
            holders = how == 1 ? ranks & 1U << testing_pick(random, 0, TESTING_RANKS_MAX - 1)
                               : ranks & (unsigned)testing_pick(random, 0, 255);
        }
        for (int rank = 0; rank < TESTING_RANKS_MAX; rank++) {
            if (holders & 1U << rank) {
                CHECK(layout_add(layout, rank, box) == STATUS_OK);
            }
        }
    }
}

/* A random array of `num_dims` dims, small enough for TESTING_ELEMENTS_MAX; empty now and then. */
static inline void testing_dims(TestingRng *random, int num_dims, int64_t *dims_out)
{
    static const int largest[LAYOUT_DIMS_MAX] = {60, 14, 7, 5};
    for (int d = 0; d < num_dims; d++) {
        dims_out[d] = testing_pick(random, 1, largest[num_dims - 1]);
    }
    if (testing_pick(random, 0, 49) == 0) {
        dims_out[0] = 0;
    }
}

/* Rows as at a boundary: items of ragged row counts in a random order, each on one replica: all
 * of its ranks hold the rows whole, or with `is_sharded` each a part of the columns. `ranks` is
 * cut into replicas of `width` ranks; the last may be smaller. */
static inline void testing_add_items(TestingRng *random, Layout *layout, unsigned ranks, int width,
                                     bool is_sharded, uint64_t item_seed)
{
    int members[TESTING_RANKS_MAX];
    int num_members = 0;
    for (int rank = 0; rank < TESTING_RANKS_MAX; rank++) {
        if (ranks & 1U << rank) {
            members[num_members++] = rank;
        }
    }
    int num_replicas = (num_members + width - 1) / width;
    TestingRng items = {.rng = {.seed = item_seed}};
    int64_t begin = 0;
    while (begin < layout->dims[0]) {
        int64_t end = begin + testing_pick(&items, 1, 9);
        end = end < layout->dims[0] ? end : layout->dims[0];
        int replica = testing_pick(random, 0, num_replicas - 1);
        int first = replica * width;
        int num = num_members - first < width ? num_members - first : width;
        for (int i = 0; i < num; i++) {
            Box box = {.ranges = {{begin, end}}};
            for (int d = 1; d < layout->num_dims; d++) {
                box.ranges[d] = (Range){0, layout->dims[d]};
            }
            if (is_sharded && layout->num_dims > 1) {
                box.ranges[1] = range_part(layout->dims[1], num, i);
            }
            CHECK(layout_add(layout, members[first + i], box) == STATUS_OK);
        }
        begin = end;
    }
}

/* A random side over the ranks of a mask that is not empty. The whole array is held or, rarely,
 * not quite. */
static inline void testing_layout(TestingRng *random, Layout *layout, unsigned ranks,
                                  uint64_t item_seed)
{
    int how = testing_pick(random, 0, 9);
    if (how < 4) {
        testing_add_items(random, layout, ranks, testing_pick(random, 1, 3), how == 0, item_seed);
    } else if (how < 9) {
        testing_add_grid(random, layout, ranks, 4);
    } else {
        for (int rank = 0; rank < TESTING_RANKS_MAX; rank++) {
            if (ranks & 1U << rank) {
                testing_add_grid(random, layout, 1U << rank, 3);
            }
        }
    }
    if (testing_pick(random, 0, 19) == 0 && layout->num_pieces > 1) {
        Layout whole = *layout;
        int dropped = testing_pick(random, 0, whole.num_pieces - 1);
        Layout rest;
        layout_init(&rest, whole.num_dims, whole.dims, whole.copies);
        for (int i = 0; i < whole.num_pieces; i++) {
            if (i != dropped) {
                CHECK(layout_add(&rest, whole.pieces[i].rank, whole.pieces[i].box) == STATUS_OK);
            }
        }
        layout_done(layout);
        *layout = rest;
    }
}

/* A random pair over `num_ranks` >= 2 ranks: groups apart, the same, or partly the same. */
static inline void testing_pair(TestingRng *random, int num_ranks, Layout *source,
                                Layout *destination)
{
    int all = (1 << num_ranks) - 1;
    int num_dims = testing_pick(random, 1, LAYOUT_DIMS_MAX);
    int64_t dims[LAYOUT_DIMS_MAX];
    testing_dims(random, num_dims, dims);
    LayoutCopies copies =
        testing_pick(random, 0, 2) == 0 ? LAYOUT_COPIES_PARTIAL : LAYOUT_COPIES_REPLICATE;
    layout_reset(source, num_dims, dims, copies);
    layout_reset(destination, num_dims, dims, LAYOUT_COPIES_REPLICATE);
    unsigned a = (unsigned)testing_pick(random, 1, all - 1);
    unsigned b = (unsigned)testing_pick(random, 1, all - 1);
    int how = testing_pick(random, 0, 3);
    if (how < 2) {
        b = ~a & (unsigned)all;
    } else if (how == 2) {
        b = a;
    }
    uint64_t item_seed = (uint64_t)testing_pick(random, 0, 1000000);
    testing_layout(random, source, a, item_seed);
    testing_layout(random, destination, b, item_seed);
}

/* Small whole numbers, so that float sums of 8 ranks are exact. */
static inline float testing_value(const Layout *source, int rank, int element)
{
    return (float)(source->copies == LAYOUT_COPIES_PARTIAL ? (rank + 1) * 4096 + element
                                                           : element + 1);
}

/* What a destination must get for an element, over the maps of the source. */
static inline float testing_wanted(const Layout *source, const TestingMap *from, int element)
{
    float sum = 0;
    for (int rank = 0; rank < TESTING_RANKS_MAX; rank++) {
        if (from->local[rank][element] >= 0) {
            float value = testing_value(source, rank, element);
            sum = source->copies == LAYOUT_COPIES_PARTIAL ? sum + value : value;
        }
    }
    return sum;
}

#endif
