#include "train/step_plan.h"

#include "base/hash.h"
#include "base/memory.h"
#include "base/rng.h"

#include <string.h>

static int64_t divide_up(int64_t count, int64_t parts)
{
    return (count + parts - 1) / parts;
}

/* ---------------------------------------------------------------- bounds */

/* How often one sample can occur among `count` consecutive positions. */
static int64_t repeats(const StepSource *source, int64_t count)
{
    if (source->order) {
        return 1;
    }
    return (count + source->num_samples - 2) / source->num_samples + 1;
}

static int descending(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a;
    int32_t y = *(const int32_t *)b;
    return (x < y) - (x > y);
}

/* The largest sum over any `count` positions that can stand side by side. sizes [num_samples],
 * largest first. */
static int64_t largest_sum(const StepSource *source, const int32_t *sizes, int64_t count)
{
    CHECK(sizes);
    int64_t often = repeats(source, count);
    int64_t sum = 0;
    for (int64_t i = 0; i < source->num_samples && count > 0; i++) {
        int64_t taken = often < count ? often : count;
        sum += taken * sizes[i];
        count -= taken;
    }
    return sum;
}

static int64_t batch_max(const StepSource *source)
{
    if (source->order && source->num_ordered < source->batch) {
        return source->num_ordered;
    }
    return source->batch;
}

static Status sort_sizes(const StepSource *source, int32_t **images_out, int32_t **tokens_out)
{
    int32_t *sizes = NULL;
    TRY(MEMORY_NEW(&sizes, 2 * source->num_samples));
    int32_t *tokens = sizes + source->num_samples;
    for (int64_t i = 0; i < source->num_samples; i++) {
        sizes[i] = source->samples[i].num_images;
        tokens[i] = source->samples[i].num_tokens;
    }
    qsort(sizes, (size_t)source->num_samples, sizeof *sizes, descending);
    qsort(tokens, (size_t)source->num_samples, sizeof *tokens, descending);
    *images_out = sizes;
    *tokens_out = tokens;
    return STATUS_OK;
}

Status step_plan_bounds(const StepSource *source, StepBounds *bounds_out)
{
    int32_t *images = NULL;
    int32_t *tokens = NULL;
    TRY(sort_sizes(source, &images, &tokens));
    int64_t microbatch = divide_up(batch_max(source), source->microbatches);
    int64_t segments = divide_up(microbatch, source->llm_dp);
    *bounds_out = (StepBounds){
        .encoder_images = divide_up(largest_sum(source, images, microbatch), source->encoder_dp),
        .llm_segments = segments,
        .llm_tokens = largest_sum(source, tokens, segments),
        .llm_rows = largest_sum(source, images, segments) * source->rows_per_image,
    };
    memory_free(images);
    return STATUS_OK;
}

int64_t step_plan_count(const StepSource *source)
{
    return divide_up(source->num_ordered, source->batch);
}

/* ---------------------------------------------------------------- memory */

static void check_source(const StepSource *source)
{
    CHECK(source->num_samples > 0 && source->batch > 0 && source->microbatches > 0);
    CHECK(source->encoder_dp > 0 && source->llm_dp > 0 && source->rows_per_image > 0);
    for (int64_t i = 0; i < source->num_ordered; i++) {
        CHECK(source->order[i] >= 0 && source->order[i] < source->num_samples);
    }
}

static Status allocate(StepPlan *plan)
{
    const StepSource *source = &plan->source;
    int32_t *images = NULL;
    int32_t *tokens = NULL;
    TRY(sort_sizes(source, &images, &tokens));
    plan->items_max = largest_sum(source, images, batch_max(source));
    memory_free(images);
    int64_t ranges = 2 * (int64_t)source->llm_dp + source->encoder_dp;
    TRY(MEMORY_NEW(&plan->samples, source->batch));
    TRY(MEMORY_NEW(&plan->items, plan->items_max + 1)); /* never NULL */
    TRY(MEMORY_NEW(&plan->microbatches, source->microbatches));
    TRY(MEMORY_NEW(&plan->ranges, ranges * source->microbatches));
    for (int m = 0; m < source->microbatches; m++) {
        StepMicrobatch *microbatch = &plan->microbatches[m];
        microbatch->llm_samples = plan->ranges + m * ranges;
        microbatch->llm_items = microbatch->llm_samples + source->llm_dp;
        microbatch->encoder_items = microbatch->llm_items + source->llm_dp;
    }
    return STATUS_OK;
}

Status step_plan_init(StepPlan *plan, const StepSource *source)
{
    check_source(source);
    *plan = (StepPlan){.source = *source};
    Status status = allocate(plan);
    if (status != STATUS_OK) {
        step_plan_done(plan);
        return status_trace(status, __FILE__, __LINE__);
    }
    return STATUS_OK;
}

void step_plan_done(StepPlan *plan)
{
    memory_free(plan->samples);
    memory_free(plan->items);
    memory_free(plan->microbatches);
    memory_free(plan->ranges);
    *plan = (StepPlan){0};
}

/* ---------------------------------------------------------------- planning */

/* Fills the samples of the step: positions [(step - 1) * batch, step * batch) of the endless or the
 * ordered sequence. */
static void choose_samples(StepPlan *plan)
{
    const StepSource *source = &plan->source;
    int64_t first = (plan->step - 1) * source->batch;
    plan->num_samples = 0;
    for (int64_t position = first; position < first + source->batch; position++) {
        if (!source->order) {
            int64_t epoch = position / source->num_samples;
            Rng rng = {source->seed, hash_u64(hash_text("sample order"), (uint64_t)epoch)};
            plan->samples[plan->num_samples++] =
                rng_permute(rng, position % source->num_samples, source->num_samples);
        } else if (position < source->num_ordered) {
            plan->samples[plan->num_samples++] = source->order[position];
        }
    }
}

static void add_items(StepPlan *plan, int64_t sample)
{
    const StepSource *source = &plan->source;
    int64_t from = source->image_from ? source->image_from[sample] : sample;
    for (int32_t i = 0; i < source->samples[sample].num_images; i++) {
        CHECK(plan->num_items < plan->items_max);
        plan->items[plan->num_items++] =
            (LoaderItem){.sample = from, .image = i % source->samples[from].num_images};
    }
}

static Range shift(Range range, int64_t by)
{
    return (Range){range.begin + by, range.end + by};
}

/* Both ends of the boundary compute this from their own plan; their messages carry it. */
static uint64_t identify(const StepPlan *plan, const StepMicrobatch *microbatch)
{
    const StepSource *source = &plan->source;
    uint64_t hash = hash_u64(HASH_SEED, (uint64_t)plan->step);
    for (int64_t i = microbatch->samples.begin; i < microbatch->samples.end; i++) {
        hash = hash_u64(hash, (uint64_t)plan->samples[i]);
    }
    for (int64_t i = microbatch->items.begin; i < microbatch->items.end; i++) {
        hash = hash_u64(hash, (uint64_t)plan->items[i].sample);
        hash = hash_u64(hash, (uint64_t)plan->items[i].image);
    }
    for (int l = 0; l < source->llm_dp; l++) {
        hash = hash_u64(hash, (uint64_t)microbatch->llm_samples[l].end);
        hash = hash_u64(hash, (uint64_t)microbatch->llm_items[l].end);
    }
    for (int e = 0; e < source->encoder_dp; e++) {
        hash = hash_u64(hash, (uint64_t)microbatch->encoder_items[e].end);
    }
    return hash;
}

static void plan_microbatch(StepPlan *plan, int m)
{
    const StepSource *source = &plan->source;
    StepMicrobatch *microbatch = &plan->microbatches[m];
    microbatch->samples = range_part(plan->num_samples, source->microbatches, m);
    microbatch->items.begin = plan->num_items;
    for (int l = 0; l < source->llm_dp; l++) {
        Range part = range_part(range_count(microbatch->samples), source->llm_dp, l);
        microbatch->llm_samples[l] = shift(part, microbatch->samples.begin);
        microbatch->llm_items[l].begin = plan->num_items;
        for (int64_t i = microbatch->llm_samples[l].begin; i < microbatch->llm_samples[l].end;
             i++) {
            const StepSample *sample = &source->samples[plan->samples[i]];
            plan->num_tokens += sample->num_tokens;
            plan->num_labels += sample->num_labels;
            add_items(plan, plan->samples[i]);
        }
        microbatch->llm_items[l].end = plan->num_items;
    }
    microbatch->items.end = plan->num_items;
    for (int e = 0; e < source->encoder_dp; e++) {
        Range part = range_part(range_count(microbatch->items), source->encoder_dp, e);
        microbatch->encoder_items[e] = shift(part, microbatch->items.begin);
    }
    microbatch->identity = identify(plan, microbatch);
}

void step_plan_make(StepPlan *plan, int64_t step)
{
    CHECK(step >= 1);
    plan->step = step;
    plan->num_items = 0;
    plan->num_tokens = 0;
    plan->num_labels = 0;
    choose_samples(plan);
    for (int m = 0; m < plan->source.microbatches; m++) {
        plan_microbatch(plan, m);
    }
}

Range step_plan_rows(const StepPlan *plan, int microbatch, Range items)
{
    int64_t first = plan->microbatches[microbatch].items.begin;
    return (Range){(items.begin - first) * plan->source.rows_per_image,
                   (items.end - first) * plan->source.rows_per_image};
}
