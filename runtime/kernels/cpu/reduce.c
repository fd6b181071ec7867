#include "kernels/cpu/cpu.h"
#include "kernels/cpu/row.h"

enum {
    PARTS = 64 /* pieces of a sum: the same for any number of threads, and enough for all of them */
};

static double sum_part(const float *x, int64_t count)
{
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) {
        sum += (double)x[i];
    }
    return sum;
}

static double sum_squares_part(const float *x, int64_t count)
{
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) {
        sum += (double)x[i] * (double)x[i];
    }
    return sum;
}

static double sum_in_parts(double (*part)(const float *x, int64_t count), const float *x,
                           int64_t count)
{
    double sums[PARTS];
#pragma omp parallel for if (count >= CPU_PARALLEL_MIN) schedule(static)
    for (int i = 0; i < PARTS; i++) {
        Range range = range_part(count, PARTS, i);
        sums[i] = part(x + range.begin, range_count(range));
    }
    double sum = 0.0;
    for (int i = 0; i < PARTS; i++) {
        sum += sums[i];
    }
    return sum;
}

Status sum_cpu(double *sum, const float *x, int64_t count, Stream *stream)
{
    (void)stream;
    *sum += sum_in_parts(sum_part, x, count);
    return STATUS_OK;
}

Status sum_squares_cpu(double *sum, const float *x, int64_t count, Stream *stream)
{
    (void)stream;
    *sum += sum_in_parts(sum_squares_part, x, count);
    return STATUS_OK;
}

/* NaN is passed over; a row without any number gives -infinity and its first index. */
Status argmax_rows_cpu(float *value, int32_t *index, const float *x, int64_t n, int64_t v,
                       int32_t first, Stream *stream)
{
    (void)stream;
#pragma omp parallel for if (n * v >= CPU_PARALLEL_MIN) schedule(static)
    for (int64_t i = 0; i < n; i++) {
        const float *row = x + i * v;
        float largest = row_max(row, v);
        int64_t at = 0;
        while (at < v && row[at] != largest) {
            at++;
        }
        value[i] = largest;
        index[i] = first + (int32_t)(at < v ? at : 0);
    }
    return STATUS_OK;
}
