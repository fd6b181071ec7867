/* Range: half-open intervals of indices, and how a length is cut into parts without a divisibility
 * rule. Threading: pure functions.
 */
#ifndef BASE_RANGE_H
#define BASE_RANGE_H

#include <stdint.h>

typedef struct Range {
    int64_t begin;
    int64_t end; /* one past the last */
} Range;

static inline int64_t range_count(Range range)
{
    return range.end - range.begin;
}

/* Part `index` of [0, length) cut into `parts`: sizes differ by at most one, larger parts first. */
static inline Range range_part(int64_t length, int64_t parts, int64_t index)
{
    int64_t size = length / parts;
    int64_t larger = length % parts;
    int64_t begin = index * size + (index < larger ? index : larger);
    return (Range){begin, begin + size + (index < larger ? 1 : 0)};
}

/* The common part; empty ranges come out with begin == end. */
static inline Range range_intersect(Range a, Range b)
{
    int64_t begin = a.begin > b.begin ? a.begin : b.begin;
    int64_t end = a.end < b.end ? a.end : b.end;
    return (Range){begin, end > begin ? end : begin};
}

#endif
