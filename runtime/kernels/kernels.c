#include "kernels/kernels.h"

#include "kernels/cpu/cpu.h"

#include <stddef.h>

static const Kernels kernels_cpu = {
    .matmul = matmul_cpu,
    .bias_backward = bias_backward_cpu,
    .layer_norm_forward = layer_norm_forward_cpu,
    .layer_norm_backward = layer_norm_backward_cpu,
    .rms_norm_forward = rms_norm_forward_cpu,
    .rms_norm_backward = rms_norm_backward_cpu,
    .activation_forward = activation_forward_cpu,
    .activation_backward = activation_backward_cpu,
    .swiglu_forward = swiglu_forward_cpu,
    .swiglu_backward = swiglu_backward_cpu,
    .rope = rope_cpu,
    .attention_forward = attention_forward_cpu,
    .attention_backward = attention_backward_cpu,
    .embedding_forward = embedding_forward_cpu,
    .embedding_backward = embedding_backward_cpu,
    .cross_entropy_max = cross_entropy_max_cpu,
    .cross_entropy_sums = cross_entropy_sums_cpu,
    .cross_entropy_finish = cross_entropy_finish_cpu,
    .patches_forward = patches_forward_cpu,
    .unfold = unfold_cpu,
    .unfold_backward = unfold_backward_cpu,
    .add_table = add_table_cpu,
    .add_table_backward = add_table_backward_cpu,
    .gather_rows = gather_rows_cpu,
    .scatter_rows = scatter_rows_cpu,
    .copy_matrix = copy_matrix_cpu,
    .add = add_cpu,
    .accumulate = accumulate_cpu,
    .scale = scale_cpu,
    .sum = sum_cpu,
    .sum_squares = sum_squares_cpu,
    .argmax_rows = argmax_rows_cpu,
    .adamw = adamw_cpu,
    .sgd = sgd_cpu,
};

static const Kernels *const tables[] = {
    [DEVICE_KIND_CPU] = &kernels_cpu,
};

const Kernels *kernels_for(const Device *device)
{
    size_t kind = (size_t)device->ops->kind;
    CHECK(kind < sizeof tables / sizeof tables[0]);
    return tables[kind];
}
