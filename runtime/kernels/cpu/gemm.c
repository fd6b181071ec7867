#include "kernels/cpu/gemm.h"

#include <dnnl.h>
#include <omp.h>

/* dnnl_sgemm has no state, so there is nothing to cache per shape, and it is as fast here as
 * oneDNN's matmul primitive. */
bool gemm_compute(const Gemm *g)
{
    /* Outside parallel regions oneDNN would start all threads, and may cut k between them. */
    int threads = omp_in_parallel() ? 1 : omp_get_max_threads();
    if (threads > 1) {
        omp_set_num_threads(1);
    }
    dnnl_status_t status =
        dnnl_sgemm(g->transpose_a ? 'T' : 'N', g->transpose_b ? 'T' : 'N', g->m, g->n, g->k,
                   g->alpha, g->a, g->a_stride, g->b, g->b_stride, g->beta, g->c, g->c_stride);
    if (threads > 1) {
        omp_set_num_threads(threads);
    }
    return status == dnnl_success;
}
