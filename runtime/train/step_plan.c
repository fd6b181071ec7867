#include "train/step_plan.h"

#include "base/hash.h"
#include "base/memory.h"
#include "base/rng.h"

#include <stdlib.h>

static int64_t divide_up(int64_t count, int64_t parts)
{
    return (count + parts - 1) / parts;
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* ---------------------------------------------------------------- bounds */

/* What is summed over samples. */
typedef enum Size {
    SIZE_TOKENS,
    SIZE_ITEMS, /* of one media, as the next */
    SIZE_ROWS,
} Size;

/* One size of all samples that a step may have. */
typedef struct Sizes {
    int64_t *sorted; /* [count] the largest first */
    int64_t count;
    int64_t often; /* how often one sample can occur in a microbatch, or a step */
} Sizes;

/* Sizes of single items of one media, over all samples. */
typedef struct ItemSizes {
    int64_t smallest; /* 0 without items */
    int64_t largest;
} ItemSizes;

static int64_t count_sources(const StepSource *source)
{
    return source->order ? source->num_ordered : source->num_samples;
}

static const StepSample *sample_at(const StepSource *source, int64_t index)
{
    return &source->samples[source->order ? source->order[index] : index];
}

/* How often one sample can occur among `count` consecutive positions. */
static int64_t repeats(const StepSource *source, int64_t count)
{
    if (source->order) {
        return 1;
    }
    return (count + source->num_samples - 2) / source->num_samples + 1;
}

static int64_t size_of(const StepSample *sample, Size size, SampleMedia media)
{
    if (size == SIZE_TOKENS) {
        return sample->num_tokens;
    }
    int64_t sum = 0;
    for (int32_t i = 0; i < sample->num_items; i++) {
        if (sample->items[i].media == media) {
            sum += size == SIZE_ITEMS ? 1 : sample->items[i].rows;
        }
    }
    return sum;
}

static int descending(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a;
    int64_t y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

/* For `positions` consecutive ones. Free sorted. */
static Status sizes_make(const StepSource *source, Size size, SampleMedia media, int64_t positions,
                         Sizes *sizes_out)
{
    Sizes sizes = {.count = count_sources(source), .often = repeats(source, positions)};
    TRY(MEMORY_NEW(&sizes.sorted, sizes.count + 1)); /* never NULL */
    for (int64_t i = 0; i < sizes.count; i++) {
        sizes.sorted[i] = size_of(sample_at(source, i), size, media);
    }
    qsort(sizes.sorted, (size_t)sizes.count, sizeof *sizes.sorted, descending);
    *sizes_out = sizes;
    return STATUS_OK;
}

/* The largest sum over `positions` that can stand side by side. */
static int64_t largest_sum(const Sizes *sizes, int64_t positions)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < sizes->count && positions > 0; i++) {
        int64_t taken = smaller(sizes->often, positions);
        sum += taken * sizes->sorted[i];
        positions -= taken;
    }
    return sum;
}

/* How many of the smallest together do not exceed `sum`, at most `positions`. */
static int64_t most_within(const Sizes *sizes, int64_t sum, int64_t positions)
{
    int64_t most = 0;
    for (int64_t i = sizes->count - 1; i >= 0 && most < positions; i--) {
        int64_t size = sizes->sorted[i];
        int64_t taken = smaller(sizes->often, positions - most);
        int64_t fitting = size > 0 ? smaller(taken, sum / size) : taken;
        sum -= fitting * size;
        most += fitting;
        if (fitting < taken) {
            break;
        }
    }
    return most;
}

/* What the largest of `parts` parts cannot exceed, of a run with at most `total` whose elements are
 * at most `largest`. Parts of so much, filled one after another, take it all: each but the last is
 * left with less room than the next element needs, so it has more than bound - largest, and what
 * remains for the last is at most total - (parts - 1) * (bound - largest + 1) <= bound. */
static int64_t part_bound(int64_t total, int64_t largest, int64_t parts)
{
    if (parts == 1 || total == 0) {
        return total;
    }
    return smaller(total, divide_up(total + (parts - 1) * (larger(largest, 1) - 1), parts));
}

static int64_t batch_max(const StepSource *source)
{
    return source->order ? smaller(source->num_ordered, source->batch) : source->batch;
}

static ItemSizes item_sizes(const StepSource *source, SampleMedia media)
{
    ItemSizes sizes = {.smallest = INT64_MAX};
    for (int64_t i = 0; i < count_sources(source); i++) {
        const StepSample *sample = sample_at(source, i);
        for (int32_t k = 0; k < sample->num_items; k++) {
            if (sample->items[k].media == media) {
                sizes.smallest = smaller(sizes.smallest, sample->items[k].rows);
                sizes.largest = larger(sizes.largest, sample->items[k].rows);
            }
        }
    }
    sizes.smallest = sizes.smallest == INT64_MAX ? 0 : sizes.smallest;
    return sizes;
}

static Status bound_llm(const StepSource *source, int64_t microbatch, StepBounds *bounds)
{
    Sizes tokens = {0};
    TRY(sizes_make(source, SIZE_TOKENS, SAMPLE_MEDIA_COUNT, microbatch, &tokens));
    /* The largest part is no larger than with a cut by number of samples. */
    bounds->llm_tokens = smaller(
        part_bound(largest_sum(&tokens, microbatch), largest_sum(&tokens, 1), source->llm_dp),
        largest_sum(&tokens, divide_up(microbatch, source->llm_dp)));
    bounds->llm_segments = most_within(&tokens, bounds->llm_tokens, microbatch);
    memory_free(tokens.sorted);
    return STATUS_OK;
}

/* After bound_llm. */
static Status bound_encoder(const StepSource *source, int encoder, int64_t microbatch,
                            StepBounds *bounds)
{
    SampleMedia media = source->encoders[encoder].media;
    int dp = source->encoders[encoder].dp;
    Sizes sizes = {0};
    TRY(sizes_make(source, SIZE_ITEMS, media, microbatch, &sizes));
    int64_t items = largest_sum(&sizes, microbatch);
    memory_free(sizes.sorted);
    TRY(sizes_make(source, SIZE_ROWS, media, microbatch, &sizes));
    int64_t rows = largest_sum(&sizes, microbatch);
    int64_t segments_rows = largest_sum(&sizes, bounds->llm_segments);
    memory_free(sizes.sorted);

    ItemSizes item = item_sizes(source, media);
    int64_t rows_max =
        smaller(part_bound(rows, item.largest, dp), divide_up(items, dp) * item.largest);
    bounds->encoder_rows[encoder] = rows_max;
    bounds->encoder_items[encoder] =
        item.smallest > 0 ? smaller(items, rows_max / item.smallest) : items;
    /* Rows are tokens of their sample. */
    bounds->llm_rows[encoder] = smaller(segments_rows, bounds->llm_tokens);
    return STATUS_OK;
}

Status step_plan_bounds(const StepSource *source, StepBounds *bounds_out)
{
    StepBounds bounds = {0};
    int64_t microbatch = divide_up(batch_max(source), source->microbatches);
    TRY(bound_llm(source, microbatch, &bounds));
    for (int e = 0; e < source->num_encoders; e++) {
        TRY(bound_encoder(source, e, microbatch, &bounds));
    }
    *bounds_out = bounds;
    return STATUS_OK;
}

void step_bounds_widen(StepBounds *bounds, const StepBounds *other)
{
    for (int e = 0; e < STEP_ENCODERS_MAX; e++) {
        bounds->encoder_items[e] = larger(bounds->encoder_items[e], other->encoder_items[e]);
        bounds->encoder_rows[e] = larger(bounds->encoder_rows[e], other->encoder_rows[e]);
        bounds->llm_rows[e] = larger(bounds->llm_rows[e], other->llm_rows[e]);
    }
    bounds->llm_segments = larger(bounds->llm_segments, other->llm_segments);
    bounds->llm_tokens = larger(bounds->llm_tokens, other->llm_tokens);
}

int64_t step_plan_count(const StepSource *source)
{
    return divide_up(source->num_ordered, source->batch);
}

/* ---------------------------------------------------------------- memory */

static void check_sample(const StepSample *sample)
{
    int32_t end = 0;
    for (int32_t i = 0; i < sample->num_items; i++) {
        const SampleItem *item = &sample->items[i];
        CHECK(item->rows >= 0 && item->first_token >= end);
        end = item->first_token + item->rows;
    }
    CHECK(end <= sample->num_tokens);
}

static void check_source(const StepSource *source)
{
    CHECK(source->num_samples > 0 && source->batch > 0 && source->microbatches > 0);
    CHECK(source->llm_dp > 0);
    CHECK(source->num_encoders >= 0 && source->num_encoders <= STEP_ENCODERS_MAX);
    for (int e = 0; e < source->num_encoders; e++) {
        CHECK(source->encoders[e].dp > 0);
    }
    for (int64_t i = 0; i < source->num_samples; i++) {
        check_sample(&source->samples[i]);
        int64_t from = source->items_from ? source->items_from[i] : i;
        CHECK(from >= 0 && from < source->num_samples);
    }
    for (int64_t i = 0; i < source->num_ordered; i++) {
        CHECK(source->order[i] >= 0 && source->order[i] < source->num_samples);
    }
}

static Status allocate_items(StepPlan *plan)
{
    const StepSource *source = &plan->source;
    int64_t cut_max = source->batch;
    for (int e = 0; e < source->num_encoders; e++) {
        Sizes items = {0};
        TRY(sizes_make(source, SIZE_ITEMS, source->encoders[e].media, source->batch, &items));
        plan->items_max[e] = largest_sum(&items, batch_max(source));
        memory_free(items.sorted);
        TRY(MEMORY_NEW(&plan->items[e], plan->items_max[e] + 1)); /* never NULL */
        cut_max = larger(cut_max, plan->items_max[e]);
    }
    return MEMORY_NEW(&plan->sums, cut_max + 1);
}

static Status allocate(StepPlan *plan)
{
    const StepSource *source = &plan->source;
    int64_t num_ranges = source->llm_dp;
    for (int e = 0; e < source->num_encoders; e++) {
        num_ranges += source->llm_dp + source->encoders[e].dp;
    }
    TRY(allocate_items(plan));
    TRY(MEMORY_NEW(&plan->samples, source->batch));
    TRY(MEMORY_NEW(&plan->microbatches, source->microbatches));
    TRY(MEMORY_NEW(&plan->ranges, num_ranges * source->microbatches));
    Range *next = plan->ranges;
    for (int m = 0; m < source->microbatches; m++) {
        plan->microbatches[m].llm_samples = next;
        next += source->llm_dp;
        for (int e = 0; e < source->num_encoders; e++) {
            StepCrossing *crossing = &plan->microbatches[m].crossings[e];
            crossing->llm_items = next;
            crossing->encoder_items = next + source->llm_dp;
            next += source->llm_dp + source->encoders[e].dp;
        }
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
    for (int e = 0; e < STEP_ENCODERS_MAX; e++) {
        memory_free(plan->items[e]);
    }
    memory_free(plan->samples);
    memory_free(plan->microbatches);
    memory_free(plan->ranges);
    memory_free(plan->sums);
    *plan = (StepPlan){0};
}

/* ---------------------------------------------------------------- cutting */

/* A run of `count` neighbours, to be cut into `parts`. */
typedef struct Cut {
    const int64_t *sums; /* [count + 1] running sums, the first 0 */
    int64_t count;
    int parts;
} Cut;

/* The last index, from `from` on, whose running sum is at most `sum`. */
static int64_t last_within(const Cut *cut, int64_t from, int64_t sum)
{
    int64_t low = from;
    int64_t high = cut->count;
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;
        if (cut->sums[middle] <= sum) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

/* The first index, up to `to`, whose running sum is at least `sum`. */
static int64_t first_from(const Cut *cut, int64_t to, int64_t sum)
{
    int64_t low = 0;
    int64_t high = to;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (cut->sums[middle] >= sum) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

/* Whether parts of at most `most`, filled one after another, take the whole run. */
static bool is_enough(const Cut *cut, int64_t most)
{
    int64_t at = 0;
    for (int p = 0; p < cut->parts && at < cut->count; p++) {
        at = last_within(cut, at, cut->sums[at] + most);
    }
    return at == cut->count;
}

/* The smallest that the largest part can be. */
static int64_t least_largest(const Cut *cut)
{
    int64_t low = divide_up(cut->sums[cut->count], cut->parts);
    int64_t high = cut->sums[cut->count];
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (is_enough(cut, middle)) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

/* The index whose running sum is nearest to that of `part` equal shares; of two the later. */
static int64_t nearest_cut(const Cut *cut, int part)
{
    int64_t total = cut->sums[cut->count];
    int64_t at = last_within(cut, 0, total * part / cut->parts);
    if (at < cut->count && (cut->sums[at] + cut->sums[at + 1]) * cut->parts <= 2 * total * part) {
        at++;
    }
    return at;
}

/* Cuts the run; indices in parts_out count from `first`. */
static void cut_run(const Cut *cut, int64_t first, Range *parts_out)
{
    int64_t most = least_largest(cut);
    /* From the back: where each part must begin at least, so that it and those after it take the
     * rest. */
    int64_t at = cut->count;
    for (int p = cut->parts - 1; p > 0; p--) {
        at = first_from(cut, at, cut->sums[at] - most);
        parts_out[p].begin = at;
    }
    at = 0;
    for (int p = 0; p < cut->parts; p++) {
        int64_t end = cut->count;
        if (p + 1 < cut->parts) {
            int64_t lowest = larger(at, parts_out[p + 1].begin);
            int64_t highest = last_within(cut, at, cut->sums[at] + most);
            end = smaller(larger(nearest_cut(cut, p + 1), lowest), highest);
        }
        parts_out[p] = (Range){first + at, first + end};
        at = end;
    }
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

static void cut_samples(StepPlan *plan, StepMicrobatch *microbatch)
{
    const StepSource *source = &plan->source;
    int64_t count = range_count(microbatch->samples);
    plan->sums[0] = 0;
    for (int64_t i = 0; i < count; i++) {
        const StepSample *sample = &source->samples[plan->samples[microbatch->samples.begin + i]];
        plan->sums[i + 1] = plan->sums[i] + sample->num_tokens;
        plan->num_labels += sample->num_labels;
    }
    plan->num_tokens += plan->sums[count];
    cut_run(&(Cut){plan->sums, count, source->llm_dp}, microbatch->samples.begin,
            microbatch->llm_samples);
}

/* What to decode for an item: that of the same number of the sample that is shown instead, which
 * yields as many rows as the item has tokens. A sample with no such items is not shown. */
static LoaderItem item_load(const StepSource *source, int64_t sample, const SampleItem *item)
{
    int64_t from = source->items_from ? source->items_from[sample] : sample;
    int32_t count = (int32_t)size_of(&source->samples[from], SIZE_ITEMS, item->media);
    if (count == 0) {
        from = sample;
        count = item->index + 1;
    }
    return (LoaderItem){.sample = from, .index = item->index % count, .rows = item->rows};
}

/* Adds the items of the sample at `position`, whose rows follow `first_row`; returns what follows
 * them. */
static int64_t add_items(StepPlan *plan, int encoder, int64_t position, int64_t first_row)
{
    const StepSource *source = &plan->source;
    const StepSample *sample = &source->samples[plan->samples[position]];
    for (int32_t i = 0; i < sample->num_items; i++) {
        const SampleItem *item = &sample->items[i];
        if (item->media != source->encoders[encoder].media) {
            continue;
        }
        CHECK(plan->num_items[encoder] < plan->items_max[encoder]);
        plan->items[encoder][plan->num_items[encoder]++] =
            (StepItem){.load = item_load(source, plan->samples[position], item),
                       .rows = item->rows,
                       .first_row = first_row,
                       .sample = position,
                       .first_token = item->first_token};
        first_row += item->rows;
    }
    return first_row;
}

static uint64_t hash_ends(uint64_t hash, const Range *ranges, int num)
{
    for (int i = 0; i < num; i++) {
        hash = hash_u64(hash, (uint64_t)ranges[i].end);
    }
    return hash;
}

/* Both ends of the boundary compute this from their own plan; their messages carry it. */
static uint64_t identify(const StepPlan *plan, const StepMicrobatch *microbatch, int encoder)
{
    const StepCrossing *crossing = &microbatch->crossings[encoder];
    uint64_t hash = hash_u64(HASH_SEED, (uint64_t)plan->step);
    hash = hash_u64(hash, (uint64_t)encoder);
    for (int64_t i = microbatch->samples.begin; i < microbatch->samples.end; i++) {
        hash = hash_u64(hash, (uint64_t)plan->samples[i]);
    }
    for (int64_t i = crossing->items.begin; i < crossing->items.end; i++) {
        const StepItem *item = &plan->items[encoder][i];
        hash = hash_u64(hash, (uint64_t)item->load.sample);
        hash = hash_u64(hash, (uint64_t)item->load.index);
        hash = hash_u64(hash, (uint64_t)item->rows);
        hash = hash_u64(hash, (uint64_t)item->sample);
        hash = hash_u64(hash, (uint64_t)item->first_token);
    }
    hash = hash_ends(hash, microbatch->llm_samples, plan->source.llm_dp);
    hash = hash_ends(hash, crossing->llm_items, plan->source.llm_dp);
    return hash_ends(hash, crossing->encoder_items, plan->source.encoders[encoder].dp);
}

static void plan_crossing(StepPlan *plan, StepMicrobatch *microbatch, int encoder)
{
    const StepSource *source = &plan->source;
    StepCrossing *crossing = &microbatch->crossings[encoder];
    int64_t row = 0;
    crossing->items.begin = plan->num_items[encoder];
    for (int l = 0; l < source->llm_dp; l++) {
        Range samples = microbatch->llm_samples[l];
        crossing->llm_items[l].begin = plan->num_items[encoder];
        for (int64_t i = samples.begin; i < samples.end; i++) {
            row = add_items(plan, encoder, i, row);
        }
        crossing->llm_items[l].end = plan->num_items[encoder];
    }
    crossing->items.end = plan->num_items[encoder];
    crossing->num_rows = row;

    int64_t count = range_count(crossing->items);
    for (int64_t i = 0; i < count; i++) {
        plan->sums[i] = plan->items[encoder][crossing->items.begin + i].first_row;
    }
    plan->sums[count] = row;
    cut_run(&(Cut){plan->sums, count, source->encoders[encoder].dp}, crossing->items.begin,
            crossing->encoder_items);
    crossing->identity = identify(plan, microbatch, encoder);
}

void step_plan_make(StepPlan *plan, int64_t step)
{
    CHECK(step >= 1);
    const StepSource *source = &plan->source;
    plan->step = step;
    plan->num_tokens = 0;
    plan->num_labels = 0;
    for (int e = 0; e < source->num_encoders; e++) {
        plan->num_items[e] = 0;
    }
    choose_samples(plan);
    for (int m = 0; m < source->microbatches; m++) {
        StepMicrobatch *microbatch = &plan->microbatches[m];
        microbatch->samples = range_part(plan->num_samples, source->microbatches, m);
        cut_samples(plan, microbatch);
        for (int e = 0; e < source->num_encoders; e++) {
            plan_crossing(plan, microbatch, e);
        }
    }
}

Range step_plan_rows(const StepPlan *plan, int encoder, int microbatch, Range items)
{
    const StepCrossing *crossing = &plan->microbatches[microbatch].crossings[encoder];
    CHECK(crossing->items.begin <= items.begin && items.end <= crossing->items.end);
    const StepItem *all = plan->items[encoder];
    return (Range){
        items.begin < crossing->items.end ? all[items.begin].first_row : crossing->num_rows,
        items.end < crossing->items.end ? all[items.end].first_row : crossing->num_rows,
    };
}
