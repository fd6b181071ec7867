/* Reduce: the sum or the largest over the ranks' contributions, element by element in rank order.
 * Threading: pure functions.
 */
#ifndef COMM_REDUCE_H
#define COMM_REDUCE_H

#include "comm/comm.h"

enum {
    REDUCE_BLOCK_BYTES = 8192 /* of all sources at once: fits into the first-level cache */
};

/* out[count] = sources[0][count] (+) sources[1][count] (+) ...; at most REDUCE_BLOCK_BYTES. `out`
 * may be one of the sources. */
void reduce_block(void *out, const void *const *sources, int num_sources, int64_t count,
                  DType dtype, CommReduce reduce);

#endif
