/* Cross-entropy over a vocabulary that is cut over tp: no rank ever holds whole logits; two small
 * reductions [N] and [N, 2] are all that is exchanged.
 *
 * Threading: as layer.h.
 */
#ifndef NN_CROSS_ENTROPY_H
#define NN_CROSS_ENTROPY_H

#include "nn/layer.h"

typedef struct CrossEntropy {
    float *max;    /* [N] */
    float *sums;   /* [N, 2] */
    float *losses; /* [N], nats; 0 where the label is -1; equal on all tp ranks */
} CrossEntropy;

void cross_entropy_carve(Arena *arena, int64_t n, CrossEntropy *loss_out);

/* logits [N, V/tp] (this rank's `part` of the vocabulary) become their gradient, scale * d losses /
 * d logits, in place. labels [N] are global ids. */
Status cross_entropy_forward(const LayerContext *context, const CrossEntropy *loss, float *logits,
                             const int32_t *labels, int64_t n, Range part,
                             float scale) STATUS_CHECKED;

#endif
