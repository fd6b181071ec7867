/* Embedding: a table [V, D] of token vectors whose rows are cut over tp; the decoder's head may use
 * it again (tied). Threading: as layer.h.
 */
#ifndef NN_EMBEDDING_H
#define NN_EMBEDDING_H

#include "nn/linear.h"

typedef struct Embedding {
    int table;  /* parameter index, [V/tp, D] */
    Range part; /* of the vocabulary */
    int64_t width;
} Embedding;

/* Adds "<prefix>.<name>.weight". */
Status embedding_declare(const LayerContext *context, const char *prefix, const char *name,
                         int64_t vocabulary, int64_t width, float init_std,
                         Embedding *embedding_out) STATUS_CHECKED;

/* The product with the transposed table, [N, D] -> [N, V/tp]. */
Linear embedding_as_head(const Embedding *embedding);

/* out [n, D] = the rows of ids [N], summed over tp: each id is on one rank, the others add zeros.
 * `full` [N, D] is scratch for rows that are cut over tp; else not used and may be NULL. */
Status embedding_forward(const LayerContext *context, const Embedding *embedding,
                         const ShardRows *rows, float *out, float *full,
                         const int32_t *ids) STATUS_CHECKED;

/* table_grad += ; out_grad [n, D]; `full` as above. Nothing when the table is frozen. */
Status embedding_backward(const LayerContext *context, const Embedding *embedding,
                          const ShardRows *rows, const float *out_grad, float *full,
                          const int32_t *ids) STATUS_CHECKED;

#endif
