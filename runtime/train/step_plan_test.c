/* Properties of plans over random data sets and layouts. The expected placement is worked out here
 * sample by sample, from the rules in the header. */
#include "base/memory.h"
#include "base/rng.h"
#include "train/step_plan.h"

#include <stdio.h>
#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    CASES = 400,
    STEPS = 12,
    SAMPLES_MAX = 60,
    SAMPLE_ITEMS_MAX = 7,
    SEED = 7
};

typedef struct Data {
    SampleItem items[SAMPLES_MAX][SAMPLE_ITEMS_MAX];
    StepSample samples[SAMPLES_MAX];
    int64_t order[SAMPLES_MAX];
    int64_t from[SAMPLES_MAX];
    StepSource source;
} Data;

static int64_t draw(int test, int what, int64_t bound)
{
    return (int64_t)rng_below((Rng){SEED, (uint64_t)test}, (uint64_t)what, (uint64_t)bound);
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Appends an item of `rows` rows after `gap` tokens of text. */
static void add_item(SampleItem *items, StepSample *sample, SampleMedia media, int32_t gap,
                     int32_t rows)
{
    int32_t index = 0;
    for (int32_t i = 0; i < sample->num_items; i++) {
        index += items[i].media == media;
    }
    items[sample->num_items++] = (SampleItem){
        .media = media, .index = index, .rows = rows, .first_token = sample->num_tokens + gap};
    sample->num_tokens += gap + rows;
    sample->items = items;
}

/* Images all have as many rows, clips have what they have, now and then none. */
static void make_sample(Data *data, int test, int i, int64_t items)
{
    int n = (int)draw(test, 1000 + i, items + 1);
    data->samples[i] = (StepSample){.num_labels = i % 5, .items = data->items[i]};
    for (int k = 0; k < n; k++) {
        int at = 10000 + (i * SAMPLE_ITEMS_MAX + k) * 3;
        SampleMedia media = draw(test, at, 2) ? SAMPLE_MEDIA_IMAGE : SAMPLE_MEDIA_AUDIO;
        int32_t rows = media == SAMPLE_MEDIA_IMAGE ? 4 : (int32_t)draw(test, at + 1, 13);
        add_item(data->items[i], &data->samples[i], media, (int32_t)draw(test, at + 2, 4), rows);
    }
    data->samples[i].num_tokens += 1 + (int32_t)draw(test, 2000 + i, 1 + draw(test, 8, 30));
}

/* A data set and a layout; samples with up to 7 items, among them sets without any. */
static void make_data(int test, Data *data)
{
    memset(data, 0, sizeof *data);
    int count = 1 + (int)draw(test, 0, SAMPLES_MAX);
    int64_t items = draw(test, 1, SAMPLE_ITEMS_MAX + 1);
    for (int i = 0; i < count; i++) {
        make_sample(data, test, i, items);
        data->order[i] = count - 1 - i;
        data->from[i] = draw(test, 3000 + i, count);
    }
    data->source = (StepSource){
        .seed = (uint64_t)draw(test, 2, 1000),
        .samples = data->samples,
        .num_samples = count,
        .batch = 1 + (int)draw(test, 3, 40),
        .microbatches = 1 + (int)draw(test, 4, 5),
        .num_encoders = (int)draw(test, 7, 3),
        .encoders = {{.media = draw(test, 9, 2) ? SAMPLE_MEDIA_IMAGE : SAMPLE_MEDIA_AUDIO,
                      .dp = 1 + (int)draw(test, 5, 6)},
                     {.dp = 1 + (int)draw(test, 10, 4)}},
        .llm_dp = 1 + (int)draw(test, 6, 5),
    };
    data->source.encoders[1].media =
        SAMPLE_MEDIA_IMAGE + SAMPLE_MEDIA_AUDIO - data->source.encoders[0].media;
    if (test % 4 == 0) {
        data->source.order = data->order;
        data->source.num_ordered = count;
    }
    if (test % 3 == 0) {
        data->source.items_from = data->from;
    }
}

/* ---- one plan against the rules ---- */

/* Consecutive ranges that cover `whole`. */
static void check_cover(Range whole, const Range *parts, int num)
{
    int64_t at = whole.begin;
    for (int i = 0; i < num; i++) {
        assert_int_equal(parts[i].begin, at);
        assert_true(parts[i].end >= at);
        at = parts[i].end;
    }
    assert_int_equal(at, whole.end);
}

/* Sizes at most one apart. */
static void check_even(const Range *parts, int num)
{
    int64_t low = INT64_MAX;
    int64_t high = 0;
    for (int i = 0; i < num; i++) {
        low = smaller(low, range_count(parts[i]));
        high = larger(high, range_count(parts[i]));
    }
    assert_true(high - low <= 1);
}

static int64_t sum_of(const int64_t *sizes, Range range)
{
    int64_t sum = 0;
    for (int64_t i = range.begin; i < range.end; i++) {
        sum += sizes[i];
    }
    return sum;
}

/* How many parts of at most `most` a run needs: each takes what fits. */
static int count_parts(const int64_t *sizes, Range whole, int64_t most)
{
    int parts = 1;
    int64_t sum = 0;
    for (int64_t i = whole.begin; i < whole.end; i++) {
        if (sizes[i] > most) {
            return INT32_MAX;
        }
        if (sum + sizes[i] > most) {
            parts++;
            sum = 0;
        }
        sum += sizes[i];
    }
    return parts;
}

/* The largest part is less than one element above its share, and could not be smaller. */
static void check_balance(const int64_t *sizes, Range whole, const Range *parts, int num)
{
    check_cover(whole, parts, num);
    int64_t total = sum_of(sizes, whole);
    int64_t most = 0;
    int64_t element = 0;
    for (int i = 0; i < num; i++) {
        most = larger(most, sum_of(sizes, parts[i]));
    }
    for (int64_t i = whole.begin; i < whole.end; i++) {
        element = larger(element, sizes[i]);
    }
    if (total > 0) {
        assert_true(most * num < total + element * num);
        assert_true(count_parts(sizes, whole, most - 1) > num);
    }
}

static int count_media(const StepSample *sample, SampleMedia media)
{
    int count = 0;
    for (int i = 0; i < sample->num_items; i++) {
        count += sample->items[i].media == media;
    }
    return count;
}

/* Item `item` of the plan stands for `expected` of the sample at a position. */
static void check_item(const StepPlan *plan, const StepItem *item, const SampleItem *expected,
                       int64_t position, int64_t first_row)
{
    const StepSource *source = &plan->source;
    int64_t sample = plan->samples[position];
    int64_t shown = source->items_from ? source->items_from[sample] : sample;
    int count = count_media(&source->samples[shown], expected->media);
    assert_int_equal(item->load.sample, count > 0 ? shown : sample);
    assert_int_equal(item->load.index, count > 0 ? expected->index % count : expected->index);
    assert_int_equal(item->load.rows, expected->rows);
    assert_int_equal(item->rows, expected->rows);
    assert_int_equal(item->first_token, expected->first_token);
    assert_int_equal(item->sample, position);
    assert_int_equal(item->first_row, first_row);
}

static void check_crossing(const StepPlan *plan, int e, int m, int64_t *item)
{
    const StepSource *source = &plan->source;
    const StepMicrobatch *part = &plan->microbatches[m];
    const StepCrossing *crossing = &part->crossings[e];
    int64_t *rows = NULL;
    assert_int_equal(MEMORY_NEW(&rows, plan->num_items[e] + 1), STATUS_OK);
    int64_t row = 0;
    assert_int_equal(crossing->items.begin, *item);
    for (int l = 0; l < source->llm_dp; l++) {
        int64_t first = *item;
        int64_t first_row = row;
        assert_int_equal(crossing->llm_items[l].begin, *item);
        for (int64_t s = part->llm_samples[l].begin; s < part->llm_samples[l].end; s++) {
            const StepSample *sample = &source->samples[plan->samples[s]];
            for (int i = 0; i < sample->num_items; i++) {
                if (sample->items[i].media == source->encoders[e].media) {
                    check_item(plan, &plan->items[e][*item], &sample->items[i], s, row);
                    rows[(*item)++] = sample->items[i].rows;
                    row += sample->items[i].rows;
                }
            }
        }
        Range found = step_plan_rows(plan, e, m, (Range){first, *item});
        assert_int_equal(found.begin, first_row);
        assert_int_equal(found.end, row);
    }
    assert_int_equal(crossing->items.end, *item);
    assert_int_equal(crossing->num_rows, row);
    check_cover(crossing->items, crossing->llm_items, source->llm_dp);
    check_balance(rows, crossing->items, crossing->encoder_items, source->encoders[e].dp);
    memory_free(rows);
}

static void check_plan(const StepPlan *plan)
{
    const StepSource *source = &plan->source;
    Range microbatches[8];
    int64_t tokens[64];
    int64_t labels = 0;
    for (int64_t s = 0; s < plan->num_samples; s++) {
        tokens[s] = source->samples[plan->samples[s]].num_tokens;
        labels += source->samples[plan->samples[s]].num_labels;
    }
    assert_int_equal(plan->num_tokens, sum_of(tokens, (Range){0, plan->num_samples}));
    assert_int_equal(plan->num_labels, labels);
    int64_t items[STEP_ENCODERS_MAX] = {0};
    for (int m = 0; m < source->microbatches; m++) {
        const StepMicrobatch *part = &plan->microbatches[m];
        microbatches[m] = part->samples;
        check_balance(tokens, part->samples, part->llm_samples, source->llm_dp);
        for (int e = 0; e < source->num_encoders; e++) {
            check_crossing(plan, e, m, &items[e]);
        }
    }
    check_cover((Range){0, plan->num_samples}, microbatches, source->microbatches);
    check_even(microbatches, source->microbatches);
    for (int e = 0; e < source->num_encoders; e++) {
        assert_int_equal(plan->num_items[e], items[e]);
        assert_true(plan->num_items[e] <= plan->items_max[e]);
    }
}

/* ---- bounds ---- */

/* What the replicas of a plan really meet. */
static StepBounds measure(const StepPlan *plan)
{
    const StepSource *source = &plan->source;
    StepBounds met = {0};
    for (int m = 0; m < source->microbatches; m++) {
        const StepMicrobatch *part = &plan->microbatches[m];
        for (int l = 0; l < source->llm_dp; l++) {
            Range samples = part->llm_samples[l];
            int64_t tokens = 0;
            for (int64_t s = samples.begin; s < samples.end; s++) {
                tokens += source->samples[plan->samples[s]].num_tokens;
            }
            StepBounds one = {.llm_segments = range_count(samples), .llm_tokens = tokens};
            for (int e = 0; e < source->num_encoders; e++) {
                one.llm_rows[e] =
                    range_count(step_plan_rows(plan, e, m, part->crossings[e].llm_items[l]));
            }
            step_bounds_widen(&met, &one);
        }
        for (int e = 0; e < source->num_encoders; e++) {
            for (int i = 0; i < source->encoders[e].dp; i++) {
                Range items = part->crossings[e].encoder_items[i];
                StepBounds one = {0};
                one.encoder_items[e] = range_count(items);
                one.encoder_rows[e] = range_count(step_plan_rows(plan, e, m, items));
                step_bounds_widen(&met, &one);
            }
        }
    }
    return met;
}

/* No larger than the bounds: widening by it changes nothing. */
static void check_bounds(const StepBounds *met, const StepBounds *bounds)
{
    StepBounds wide = *bounds;
    step_bounds_widen(&wide, met);
    assert_memory_equal(&wide, bounds, sizeof wide);
}

static void test_placement(void **state)
{
    (void)state;
    Data data;
    for (int test = 0; test < CASES; test++) {
        make_data(test, &data);
        StepPlan plan;
        StepBounds bounds;
        assert_int_equal(step_plan_init(&plan, &data.source), STATUS_OK);
        assert_int_equal(step_plan_bounds(&data.source, &bounds), STATUS_OK);
        for (int64_t step = 1; step <= STEPS; step++) {
            step_plan_make(&plan, step);
            check_plan(&plan);
            StepBounds met = measure(&plan);
            check_bounds(&met, &bounds);
        }
        step_plan_done(&plan);
    }
}

/* Small sets in many orders, cut in all ways: bounds hold, and most of them are met or nearly
 * so. */
static void test_bounds_of_all_orders(void **state)
{
    (void)state;
    enum {
        SMALL = 6,
        ORDERS = 720
    };
    double tokens = 0;
    double rows = 0;
    for (int test = 0; test < 60; test++) {
        Data data;
        make_data(4 * test, &data);
        StepSource *source = &data.source;
        for (int i = 0; i < SMALL; i++) {
            make_sample(&data, 4 * test, i, SAMPLE_ITEMS_MAX);
            data.order[i] = i;
        }
        source->items_from = NULL;
        source->num_samples = SMALL;
        source->num_ordered = SMALL;
        source->batch = SMALL;
        source->microbatches = 1 + test % 2;
        source->num_encoders = 1;
        source->llm_dp = 1 + test % 4;
        source->encoders[0].dp = 1 + test % 3;
        StepBounds bounds;
        StepBounds met = {0};
        assert_int_equal(step_plan_bounds(source, &bounds), STATUS_OK);
        for (int order = 0; order < ORDERS; order++) {
            int rest = order;
            for (int64_t i = 0; i < SMALL; i++) { /* the permutation of that number */
                data.order[i] = i;
                int64_t j = i - rest % (i + 1);
                rest /= (int)(i + 1);
                data.order[i] = data.order[j];
                data.order[j] = i;
            }
            StepPlan plan;
            assert_int_equal(step_plan_init(&plan, source), STATUS_OK);
            step_plan_make(&plan, 1);
            StepBounds one = measure(&plan);
            step_bounds_widen(&met, &one);
            step_plan_done(&plan);
        }
        check_bounds(&met, &bounds);
        tokens += (double)bounds.llm_tokens / (double)met.llm_tokens / 60;
        rows +=
            (double)larger(bounds.encoder_rows[0], 1) / (double)larger(met.encoder_rows[0], 1) / 60;
    }
    printf("bounds over what is met: tokens %.3f, rows %.3f\n", tokens, rows);
    assert_true(tokens < 1.06 && rows < 1.06);
}

/* Where all samples are alike, bounds are what a plain cut by number gives. */
static void test_bounds_of_equal_samples(void **state)
{
    (void)state;
    SampleItem items[2] = {{0}};
    StepSample samples[20];
    for (int i = 0; i < 20; i++) {
        samples[i] = (StepSample){.num_labels = 3};
        add_item(items, &samples[i], SAMPLE_MEDIA_IMAGE, 2, 16);
        add_item(items, &samples[i], SAMPLE_MEDIA_IMAGE, 1, 16);
        samples[i].num_tokens += 5;
    }
    for (int dp = 1; dp <= 8; dp++) {
        const StepSource source = {.samples = samples,
                                   .num_samples = 20,
                                   .batch = 14,
                                   .microbatches = 2,
                                   .num_encoders = 1,
                                   .encoders = {{SAMPLE_MEDIA_IMAGE, dp}},
                                   .llm_dp = dp};
        StepBounds bounds;
        assert_int_equal(step_plan_bounds(&source, &bounds), STATUS_OK);
        int64_t of_7 = (7 + dp - 1) / dp;
        int64_t of_14 = (14 + dp - 1) / dp;
        assert_int_equal(bounds.llm_segments, of_7);
        assert_int_equal(bounds.llm_tokens, of_7 * 40);
        assert_int_equal(bounds.llm_rows[0], of_7 * 32);
        assert_int_equal(bounds.encoder_items[0], of_14);
        assert_int_equal(bounds.encoder_rows[0], of_14 * 16);
    }
}

/* ---- which samples ---- */

/* Each epoch has each sample once, and epochs differ. */
static void test_epochs(void **state)
{
    (void)state;
    enum {
        COUNT = 37,
        EPOCHS = 4,
        BATCH = 5
    };
    Data data;
    make_data(1, &data);
    StepSource *source = &data.source;
    for (int64_t i = 0; i < COUNT; i++) {
        data.samples[i] = (StepSample){.num_tokens = 9, .num_labels = 3};
    }
    source->num_samples = COUNT;
    source->batch = BATCH;
    int64_t sequence[EPOCHS * COUNT + BATCH] = {0};
    StepPlan plan;
    assert_int_equal(step_plan_init(&plan, source), STATUS_OK);
    for (int at = 0; at < EPOCHS * COUNT; at += BATCH) {
        step_plan_make(&plan, at / BATCH + 1);
        assert_int_equal(plan.num_samples, BATCH);
        memcpy(sequence + at, plan.samples, BATCH * sizeof *sequence);
    }
    step_plan_done(&plan);
    int64_t same = 0;
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        int seen[COUNT] = {0};
        for (int i = 0; i < COUNT; i++) {
            seen[sequence[epoch * COUNT + i]]++;
            same += sequence[epoch * COUNT + i] == sequence[i];
        }
        for (int i = 0; i < COUNT; i++) {
            assert_int_equal(seen[i], 1);
        }
    }
    assert_true(same < COUNT + EPOCHS * 6); /* the first epoch equals itself */
}

/* Whose sample it is does not depend on the layout, and a plan does not depend on the one before.
 * */
static void test_layout_changes_nothing(void **state)
{
    (void)state;
    Data data;
    make_data(3, &data);
    StepSource other = data.source;
    other.encoders[0].dp += 3;
    other.llm_dp += 2;
    StepPlan a;
    StepPlan b;
    assert_int_equal(step_plan_init(&a, &data.source), STATUS_OK);
    assert_int_equal(step_plan_init(&b, &other), STATUS_OK);
    for (int64_t step = 9; step >= 1; step -= 2) {
        step_plan_make(&a, 10 - step);
        step_plan_make(&a, step);
        step_plan_make(&b, step);
        assert_int_equal(a.num_labels, b.num_labels);
        assert_memory_equal(a.samples, b.samples, (size_t)a.num_samples * sizeof *a.samples);
        for (int e = 0; e < data.source.num_encoders; e++) {
            assert_int_equal(a.num_items[e], b.num_items[e]);
            for (int64_t i = 0; i < a.num_items[e]; i++) {
                assert_memory_equal(&a.items[e][i].load, &b.items[e][i].load,
                                    sizeof a.items[e][i].load);
            }
        }
    }
    step_plan_done(&a);
    step_plan_done(&b);
}

static void test_order(void **state)
{
    (void)state;
    Data data;
    make_data(0, &data);
    StepSource *source = &data.source;
    StepPlan plan;
    assert_int_equal(step_plan_init(&plan, source), STATUS_OK);
    int64_t at = 0;
    int64_t steps = step_plan_count(source);
    for (int64_t step = 1; step <= steps; step++) {
        step_plan_make(&plan, step);
        for (int64_t i = 0; i < plan.num_samples; i++) {
            assert_int_equal(plan.samples[i], source->order[at++]);
        }
    }
    assert_int_equal(at, source->num_ordered);
    step_plan_make(&plan, steps + 1);
    assert_int_equal(plan.num_samples, 0);
    assert_int_equal(plan.microbatches[0].crossings[0].num_rows, 0);
    step_plan_done(&plan);
}

/* ---- items of others, identity ---- */

/* Sample 0: image, clip, image. 1: nothing. 2: clip, image. */
static void make_three(SampleItem items[3][3], StepSample samples[3])
{
    memset(samples, 0, 3 * sizeof *samples);
    add_item(items[0], &samples[0], SAMPLE_MEDIA_IMAGE, 1, 4);
    add_item(items[0], &samples[0], SAMPLE_MEDIA_AUDIO, 0, 7);
    add_item(items[0], &samples[0], SAMPLE_MEDIA_IMAGE, 2, 4);
    add_item(items[2], &samples[2], SAMPLE_MEDIA_AUDIO, 3, 9);
    add_item(items[2], &samples[2], SAMPLE_MEDIA_IMAGE, 0, 4);
    for (int i = 0; i < 3; i++) {
        samples[i].num_tokens += 2;
    }
}

/* As long as the sample's own. */
static void test_items_of_others(void **state)
{
    (void)state;
    SampleItem items[3][3];
    StepSample samples[3];
    make_three(items, samples);
    static const int64_t from[3] = {2, 0, 1};
    static const int64_t order[3] = {0, 1, 2};
    const StepSource source = {
        .samples = samples,
        .num_samples = 3,
        .order = order,
        .num_ordered = 3,
        .items_from = from,
        .batch = 3,
        .microbatches = 1,
        .num_encoders = 2,
        .encoders = {{SAMPLE_MEDIA_IMAGE, 2}, {SAMPLE_MEDIA_AUDIO, 1}},
        .llm_dp = 1,
    };
    static const LoaderItem images[3] = {{2, 0, 4}, {2, 0, 4}, {2, 0, 4}};
    static const LoaderItem clips[2] = {{2, 0, 7}, {2, 0, 9}};
    StepPlan plan;
    assert_int_equal(step_plan_init(&plan, &source), STATUS_OK);
    step_plan_make(&plan, 1);
    assert_int_equal(plan.num_items[0], 3);
    assert_int_equal(plan.num_items[1], 2);
    for (int i = 0; i < 3; i++) {
        assert_memory_equal(&plan.items[0][i].load, &images[i], sizeof *images);
    }
    for (int i = 0; i < 2; i++) {
        assert_memory_equal(&plan.items[1][i].load, &clips[i], sizeof *clips);
    }
    step_plan_done(&plan);
}

static uint64_t identity(const StepSource *source, int64_t step)
{
    StepPlan plan;
    assert_int_equal(step_plan_init(&plan, source), STATUS_OK);
    step_plan_make(&plan, step);
    uint64_t value = plan.microbatches[0].crossings[0].identity;
    step_plan_done(&plan);
    return value;
}

/* Anything that would pair rows and tokens otherwise changes it; two samples swapped do, though all
 * shapes stay the same. */
static void test_identity(void **state)
{
    (void)state;
    SampleItem items[4][1];
    StepSample samples[4] = {{0}};
    for (int i = 0; i < 4; i++) {
        add_item(items[i], &samples[i], SAMPLE_MEDIA_IMAGE, 1, 4);
        samples[i].num_tokens += 4;
    }
    static const int64_t order[4] = {0, 1, 2, 3};
    static const int64_t swapped[4] = {0, 2, 1, 3};
    const StepSource source = {.samples = samples,
                               .num_samples = 4,
                               .order = order,
                               .num_ordered = 4,
                               .batch = 4,
                               .microbatches = 1,
                               .num_encoders = 1,
                               .encoders = {{SAMPLE_MEDIA_IMAGE, 2}},
                               .llm_dp = 1};
    uint64_t base = identity(&source, 1);
    assert_true(base == identity(&source, 1));
    StepSource other = source;
    other.order = swapped;
    assert_true(base != identity(&other, 1));
    other = source;
    other.items_from = swapped;
    assert_true(base != identity(&other, 1));
    other = source;
    other.encoders[0].dp = 3;
    assert_true(base != identity(&other, 1));
    other = source;
    other.llm_dp = 2;
    assert_true(base != identity(&other, 1));
    other.batch = 2;
    assert_true(identity(&other, 1) != identity(&other, 2));
    items[3][0].first_token++;
    assert_true(base != identity(&source, 1));
}

int main(void)
{
    printf("seed %d\n", SEED);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_placement),
        cmocka_unit_test(test_bounds_of_all_orders),
        cmocka_unit_test(test_bounds_of_equal_samples),
        cmocka_unit_test(test_epochs),
        cmocka_unit_test(test_layout_changes_nothing),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_items_of_others),
        cmocka_unit_test(test_identity),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
