#include "nn/cross_entropy.h"

void cross_entropy_carve(Arena *arena, int64_t n, CrossEntropy *loss_out)
{
    loss_out->max = layer_take(arena, n, 1);
    loss_out->sums = layer_take(arena, n, 2);
    loss_out->losses = layer_take(arena, n, 1);
}

Status cross_entropy_forward(const LayerContext *context, const CrossEntropy *loss, float *logits,
                             const int32_t *labels, int64_t n, Range part, float scale)
{
    const Kernels *kernels = context->kernels;
    int64_t vocabulary = range_count(part); /* V/tp */
    CHECK(vocabulary > 0);
    TRY(kernels->cross_entropy_max(loss->max, logits, n, vocabulary, context->stream));
    if (layer_tp_size(context) > 1) {
        TRY(comm_all_reduce(context->tp, loss->max, n, DTYPE_F32, COMM_REDUCE_MAX,
                            context->stream));
    }
    TRY(kernels->cross_entropy_sums(loss->sums, logits, loss->max, labels, n, vocabulary,
                                    (int32_t)part.begin, context->stream));
    TRY(layer_sum(context, loss->sums, 2 * n));
    return kernels->cross_entropy_finish(loss->losses, logits, loss->max, loss->sums, labels, n,
                                         vocabulary, (int32_t)part.begin, scale, context->stream);
}
