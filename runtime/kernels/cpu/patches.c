#include "kernels/cpu/cpu.h"

/* One patch: out [3, patch, patch] from pixels [patch, patch, 3] with `row_bytes` between rows. */
static void cut_patch(float *out, const uint8_t *pixels, const float factor[3],
                      const float offset[3], int64_t row_bytes, int patch)
{
    for (int c = 0; c < 3; c++) {
        for (int y = 0; y < patch; y++) {
            const uint8_t *from = pixels + y * row_bytes + c;
            float *to = out + ((int64_t)c * patch + y) * patch;
            for (int64_t x = 0; x < patch; x++) {
                to[x] = (float)from[3 * x] * factor[c] + offset[c];
            }
        }
    }
}

Status patches_forward_cpu(float *patches, const uint8_t *pixels, const float mean[3],
                           const float std[3], int64_t images, int size, int patch, Stream *stream)
{
    (void)stream;
    CHECK(patch > 0 && size >= 0 && size % patch == 0);
    float factor[3];
    float offset[3];
    for (int c = 0; c < 3; c++) {
        factor[c] = 1.0f / (255.0f * std[c]);
        offset[c] = -mean[c] / std[c];
    }
    int64_t side = size / patch;
    int64_t row_bytes = 3 * (int64_t)size;
    int64_t patch_elements = 3 * (int64_t)patch * patch;
    int64_t total = images * side * side;
#pragma omp parallel for if (total * patch_elements >= CPU_PARALLEL_MIN) schedule(static)
    for (int64_t i = 0; i < total; i++) {
        int64_t image = i / (side * side);
        int64_t y = i / side % side * patch;
        int64_t x = i % side * patch;
        const uint8_t *from = pixels + (image * size + y) * row_bytes + 3 * x;
        cut_patch(patches + i * patch_elements, from, factor, offset, row_bytes, patch);
    }
    return STATUS_OK;
}
