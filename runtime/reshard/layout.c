#include "reshard/layout.h"

#include "base/memory.h"

#include <stdio.h>
#include <string.h>

/* One multiplication per value: layouts of hundreds of boxes are digested for every microbatch. */
static uint64_t mix(uint64_t digest, int64_t value)
{
    uint64_t mixed = (digest ^ (uint64_t)value) * UINT64_C(0x9e3779b97f4a7c15);
    return mixed ^ mixed >> 29;
}

void layout_init(Layout *layout, int num_dims, const int64_t *dims, LayoutCopies copies)
{
    *layout = (Layout){0};
    layout_reset(layout, num_dims, dims, copies);
}

void layout_reset(Layout *layout, int num_dims, const int64_t *dims, LayoutCopies copies)
{
    CHECK(num_dims >= 1 && num_dims <= LAYOUT_DIMS_MAX);
    layout->num_dims = num_dims;
    layout->copies = copies;
    layout->num_pieces = 0;
    layout->num_ranks = 0;
    layout->digest = mix(mix(UINT64_C(0x243f6a8885a308d3), num_dims), (int64_t)copies);
    for (int d = 0; d < LAYOUT_DIMS_MAX; d++) {
        layout->dims[d] = d < num_dims ? dims[d] : 1;
        CHECK(layout->dims[d] >= 0);
        layout->digest = mix(layout->digest, layout->dims[d]);
    }
}

void layout_done(Layout *layout)
{
    memory_free(layout->pieces);
    memory_free(layout->rank_counts);
    *layout = (Layout){0};
}

static Status reserve_rank(Layout *layout, int rank)
{
    if (rank < layout->num_ranks) {
        return STATUS_OK;
    }
    TRY(memory_grow((void **)&layout->rank_counts, &layout->rank_capacity, (size_t)rank + 1,
                    sizeof *layout->rank_counts));
    while (layout->num_ranks <= rank) {
        layout->rank_counts[layout->num_ranks++] = 0;
    }
    return STATUS_OK;
}

Status layout_add(Layout *layout, int rank, Box box)
{
    CHECK(rank >= 0 && rank < LAYOUT_RANKS_MAX);
    for (int d = layout->num_dims; d < LAYOUT_DIMS_MAX; d++) {
        box.ranges[d] = (Range){0, 1};
    }
    for (int d = 0; d < layout->num_dims; d++) {
        Range range = box.ranges[d];
        CHECK(0 <= range.begin && range.begin <= range.end && range.end <= layout->dims[d]);
    }
    int64_t count = box_count(&box, layout->num_dims);
    if (count == 0) {
        return STATUS_OK;
    }
    TRY(memory_grow((void **)&layout->pieces, &layout->capacity, (size_t)layout->num_pieces + 1,
                    sizeof *layout->pieces));
    TRY(reserve_rank(layout, rank));
    layout->pieces[layout->num_pieces++] =
        (LayoutPiece){.rank = rank, .box = box, .offset = layout->rank_counts[rank]};
    layout->rank_counts[rank] += count;
    layout->digest = mix(layout->digest, rank);
    for (int d = 0; d < layout->num_dims; d++) {
        layout->digest = mix(mix(layout->digest, box.ranges[d].begin), box.ranges[d].end);
    }
    return STATUS_OK;
}

Status layout_add_rows(Layout *layout, int rank, Range rows)
{
    Box box = {.ranges = {rows}};
    for (int d = 1; d < LAYOUT_DIMS_MAX; d++) {
        box.ranges[d] = (Range){0, layout->dims[d]};
    }
    return layout_add(layout, rank, box);
}

int64_t layout_rank_count(const Layout *layout, int rank)
{
    return rank >= 0 && rank < layout->num_ranks ? layout->rank_counts[rank] : 0;
}

int64_t box_count(const Box *box, int num_dims)
{
    int64_t count = 1;
    for (int d = 0; d < num_dims; d++) {
        count *= range_count(box->ranges[d]);
    }
    return count;
}

Box box_intersect(const Box *a, const Box *b)
{
    Box common;
    for (int d = 0; d < LAYOUT_DIMS_MAX; d++) {
        common.ranges[d] = range_intersect(a->ranges[d], b->ranges[d]);
    }
    return common;
}

int64_t box_offset(const Box *outer, const Box *inner)
{
    int64_t offset = 0;
    for (int d = 0; d < LAYOUT_DIMS_MAX; d++) {
        offset = offset * range_count(outer->ranges[d]) +
                 (inner->ranges[d].begin - outer->ranges[d].begin);
    }
    return offset;
}

bool box_is_contiguous(const Box *outer, const Box *inner)
{
    int d = 0;
    while (d < LAYOUT_DIMS_MAX && range_count(inner->ranges[d]) == 1) {
        d++;
    }
    /* Dim d may be a part; all dims inside it must be whole. */
    for (d++; d < LAYOUT_DIMS_MAX; d++) {
        if (range_count(inner->ranges[d]) != range_count(outer->ranges[d])) {
            return false;
        }
    }
    return true;
}

char *box_print(const Box *box, int num_dims, char *text)
{
    size_t used = 0;
    text[0] = '\0';
    for (int d = 0; d < num_dims && used < BOX_TEXT_BYTES; d++) {
        int length = snprintf(text + used, BOX_TEXT_BYTES - used, "%s%lld:%lld", d ? ", " : "[",
                              (long long)box->ranges[d].begin, (long long)box->ranges[d].end);
        used += length > 0 ? (size_t)length : 0;
    }
    if (used + 1 < BOX_TEXT_BYTES) {
        memcpy(text + used, "]", 2);
    }
    return text;
}
