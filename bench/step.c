/* One training step (forward, backward, AdamW) of a ViT or a decoder, timed on demand: the child
 * that bench/step.py drives.
 *
 * Usage: bench_step vit|decoder    then lines "run N" on standard input; each answers with the
 * seconds that N steps took bench_step peak           prints the float32 GFLOP/s of a large matrix
 * product
 */
#include "base/clock.h"
#include "base/memory.h"
#include "base/rng.h"
#include "encoder_worker/vision_encoder.h"
#include "llm_worker/llm.h"

#include <stdio.h>
#include <string.h>

enum {
    WIDTH = 384,
    HEADS = 6,
    IMAGES = 8,
    SAMPLES = 4,
    SAMPLE_TOKENS = 256,
    VOCABULARY = 4096
};

typedef struct Bench {
    Device *device;
    Stream *stream;
    const Kernels *kernels;
    Module *module;
    ModuleBatch batch;
    float *rows; /* vit: output and its gradient, [images * rows per image, width] */
    float *rows_grad;
    float *grad; /* [tokens, width] */
    SequencesBuffer *buffer;
    Sequences sequences;
    float *m;
    float *v;
    int64_t step;
} Bench;

static void set_model(const char *name, VisionSpec *vision, ProjectorSpec *projector,
                      DecoderSpec *llm)
{
    bool is_vit = strcmp(name, "vit") == 0;
    *vision = (VisionSpec)VIADUCT__V1__VISION_SPEC__INIT;
    vision->image_size = 224;
    vision->patch_size = 16;
    vision->width = WIDTH;
    vision->layers = 12;
    vision->heads = HEADS;
    vision->mlp_width = 4 * WIDTH;
    vision->activation = VIADUCT__V1__ACTIVATION__GELU;
    vision->class_token = true;
    vision->feature_layer = -1;
    vision->norm_epsilon = 1e-5;
    *projector = (ProjectorSpec)VIADUCT__V1__PROJECTOR_SPEC__INIT;
    *llm = (DecoderSpec)VIADUCT__V1__DECODER_SPEC__INIT;
    llm->vocabulary = VOCABULARY;
    llm->width = is_vit ? 8 : WIDTH; /* PyTorch's ViT has no projector: ours is made negligible */
    projector->width = 8;
    llm->layers = 4;
    llm->heads = HEADS;
    llm->kv_heads = HEADS;
    llm->head_width = WIDTH / HEADS;
    llm->mlp_width = 1024;
    llm->rope_theta = 10000.0;
    llm->norm_epsilon = 1e-5;
    llm->max_tokens = SAMPLE_TOKENS;
}

static Status make_images(Bench *bench)
{
    int64_t size = (int64_t)IMAGES * 224 * 224 * 3;
    uint8_t *pixels = NULL;
    TRY(device_alloc(bench->device, size, (void **)&pixels));
    for (int64_t i = 0; i < size; i++) {
        pixels[i] = (uint8_t)rng_bits((Rng){1, 1}, (uint64_t)i);
    }
    bench->batch = (ModuleBatch){.num_items = IMAGES, .pixels = pixels};
    int64_t row_bytes = (int64_t)IMAGES * 196 * 8 * (int64_t)sizeof(float);
    TRY(device_alloc(bench->device, row_bytes, (void **)&bench->rows));
    TRY(device_alloc(bench->device, row_bytes, (void **)&bench->rows_grad));
    for (int64_t i = 0; i < row_bytes / (int64_t)sizeof(float); i++) {
        bench->rows_grad[i] = 1.0f;
    }
    return STATUS_OK;
}

static Status make_tokens(Bench *bench)
{
    enum {
        TOKENS = SAMPLES * SAMPLE_TOKENS
    };
    int32_t *ids = NULL; /* [tokens]; behind them labels [tokens] and begins [samples + 1] */
    TRY(device_alloc(bench->device, (int64_t)(2 * TOKENS + SAMPLES + 1) * (int64_t)sizeof(int32_t),
                     (void **)&ids));
    int32_t *labels = ids + TOKENS;
    int32_t *begins = labels + TOKENS;
    for (int32_t i = 0; i < TOKENS; i++) {
        ids[i] = (int32_t)rng_below((Rng){1, 2}, (uint64_t)i, VOCABULARY);
        labels[i] = (int32_t)rng_below((Rng){1, 3}, (uint64_t)i, VOCABULARY);
    }
    for (int32_t i = 0; i <= SAMPLES; i++) {
        begins[i] = i * SAMPLE_TOKENS;
    }
    TRY(sequences_buffer_create(bench->device, (ShardRank){1, 0, 1, 0}, TOKENS, SAMPLES, true,
                                &bench->buffer));
    TRY(sequences_make(bench->buffer, begins, SAMPLES, bench->stream, &bench->sequences));
    bench->batch = (ModuleBatch){
        .sequences = &bench->sequences,
        .ids = ids,
        .labels = labels,
        .loss_scale = 1.0f / TOKENS,
    };
    return STATUS_OK;
}

static Status open_bench(const char *name, Bench *bench)
{
    bool is_vit = strcmp(name, "vit") == 0;
    TRY(device_open("cpu", 0, &bench->device));
    TRY(stream_create(bench->device, &bench->stream));
    bench->kernels = kernels_for(bench->device);
    VisionSpec vision;
    ProjectorSpec projector;
    DecoderSpec llm;
    set_model(name, &vision, &projector, &llm);
    ModelSpec model = VIADUCT__V1__MODEL_SPEC__INIT;
    model.vision = &vision;
    model.projector = &projector;
    model.llm = &llm;
    ModuleContext context = {
        .device = bench->device, .kernels = bench->kernels, .stream = bench->stream};
    ModuleLimits limits = {.slots = {1},
                           .items = IMAGES,
                           .keys = (int64_t)SAMPLES * SAMPLE_TOKENS,
                           .segments = SAMPLES};
    const ModuleOps *ops = is_vit ? &vision_module_ops : &llm_module_ops;
    TRY(ops->create(&model, &context, &limits, &bench->module));
    ParamSet *params = &bench->module->params;
    TRY(param_set_fill(params, 1, bench->stream));
    TRY(device_alloc(bench->device, params->count * (int64_t)sizeof(float), (void **)&bench->m));
    TRY(device_alloc(bench->device, params->count * (int64_t)sizeof(float), (void **)&bench->v));
    TRY(device_alloc(bench->device,
                     bench->module->local_max * bench->module->width * (int64_t)sizeof(float),
                     (void **)&bench->grad));
    return is_vit ? make_images(bench) : make_tokens(bench);
}

static Status run_step(Bench *bench)
{
    const ModuleOps *ops = bench->module->ops;
    ParamSet *params = &bench->module->params;
    double loss = 0.0;
    TRY(stream_zero(bench->stream, params->grads, params->count * (int64_t)sizeof(float)));
    TRY(ops->forward(bench->module, 0, 0, &bench->batch, bench->rows, &loss));
    TRY(ops->backward(bench->module, 0, 0, &bench->batch, bench->grad, bench->rows_grad));
    AdamWStep step = {.learning_rate = 1e-4f,
                      .beta1 = 0.9f,
                      .beta2 = 0.999f,
                      .epsilon = 1e-8f,
                      .weight_decay = 0.01f,
                      .grad_scale = 1.0f,
                      .step = ++bench->step};
    return bench->kernels->adamw(params->values, bench->m, bench->v, params->grads, params->count,
                                 &step, bench->stream);
}

static Status print_peak(void)
{
    enum {
        SIZE = 1536,
        REPEATS = 4,
        TRIALS = 5
    };
    Device *device = NULL;
    Stream *stream = NULL;
    float *memory = NULL;
    TRY(device_open("cpu", 0, &device));
    TRY(stream_create(device, &stream));
    const int64_t count = (int64_t)SIZE * SIZE;
    const int64_t size_bytes = 3 * count * (int64_t)sizeof(float);
    TRY(device_alloc(device, size_bytes, (void **)&memory));
    MatMul matmul = {
        .c = memory, .a = memory + count, .b = memory + 2 * count, .m = SIZE, .n = SIZE, .k = SIZE};
    double best = 0.0;
    for (int trial = 0; trial < TRIALS; trial++) {
        int64_t begin_ns = clock_now_ns();
        for (int i = 0; i < REPEATS; i++) {
            TRY(kernels_for(device)->matmul(&matmul, stream));
        }
        double rate = 2.0 * SIZE * SIZE * SIZE * REPEATS / (double)(clock_now_ns() - begin_ns);
        best = rate > best ? rate : best;
    }
    printf("%.1f\n", best);
    device_free(device, memory, size_bytes);
    stream_destroy(stream);
    device_close(device);
    return STATUS_OK;
}

static Status serve(const char *name)
{
    Bench bench = {0};
    TRY(open_bench(name, &bench));
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        if (strncmp(line, "run ", 4) != 0) {
            return fail(STATUS_INVALID, "expected \"run N\", got \"%s\"", line);
        }
        long steps = strtol(line + 4, NULL, 10);
        int64_t begin_ns = clock_now_ns();
        for (long i = 0; i < steps; i++) {
            TRY(run_step(&bench));
        }
        printf("%.6f\n", (double)(clock_now_ns() - begin_ns) / (double)CLOCK_NS_PER_S);
        fflush(stdout);
    }
    return STATUS_OK; /* the process ends here: its memory goes with it */
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: bench_step vit|decoder|peak\n");
        return 2;
    }
    Status status = strcmp(argv[1], "peak") == 0 ? print_peak() : serve(argv[1]);
    if (status != STATUS_OK) {
        fprintf(stderr, "bench_step: %s (%s)\n", status_message(), status_trail());
        return 1;
    }
    return 0;
}
