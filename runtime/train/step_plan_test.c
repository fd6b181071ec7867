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
    SAMPLES_MAX = 60,
    ITEMS_MAX = 2048,
    SEED = 7
};

typedef struct Data {
    StepSample samples[SAMPLES_MAX];
    int64_t order[SAMPLES_MAX];
    StepSource source;
} Data;

static int64_t draw(int test, int what, int64_t bound)
{
    return (int64_t)rng_below((Rng){SEED, (uint64_t)test}, (uint64_t)what, (uint64_t)bound);
}

/* A data set and a layout; images 0 to 7, among them sets without any. */
static void make_data(int test, Data *data)
{
    memset(data, 0, sizeof *data);
    int64_t count = 1 + draw(test, 0, SAMPLES_MAX);
    int64_t images = draw(test, 1, 8);
    for (int64_t i = 0; i < count; i++) {
        int32_t n = (int32_t)draw(test, 100 + (int)i, images + 1);
        data->samples[i] = (StepSample){.num_images = n,
                                        .num_tokens = n * 4 + 3 + (int32_t)(i * 7 % 11),
                                        .num_labels = (int32_t)(i % 5)};
        data->order[i] = count - 1 - i;
    }
    data->source = (StepSource){
        .seed = (uint64_t)draw(test, 2, 1000),
        .samples = data->samples,
        .num_samples = count,
        .batch = 1 + (int)draw(test, 3, 40),
        .microbatches = 1 + (int)draw(test, 4, 5),
        .encoder_dp = 1 + (int)draw(test, 5, 6),
        .llm_dp = 1 + (int)draw(test, 6, 5),
        .rows_per_image = 1 + (int)draw(test, 7, 9),
    };
    if (test % 4 == 0) {
        data->source.order = data->order;
        data->source.num_ordered = count;
    }
}

/* ---- one plan against the rules ---- */

/* Consecutive ranges that cover `whole`, sizes at most one apart. */
static void check_parts(Range whole, const Range *parts, int num, bool is_even)
{
    int64_t at = whole.begin;
    int64_t low = INT64_MAX;
    int64_t high = 0;
    for (int i = 0; i < num; i++) {
        assert_int_equal(parts[i].begin, at);
        at = parts[i].end;
        int64_t size = range_count(parts[i]);
        low = size < low ? size : low;
        high = size > high ? size : high;
    }
    assert_int_equal(at, whole.end);
    if (is_even) {
        assert_true(high - low <= 1);
    }
}

static void check_microbatch(const StepPlan *plan, int m, int64_t *item)
{
    const StepSource *source = &plan->source;
    const StepMicrobatch *part = &plan->microbatches[m];
    assert_int_equal(part->items.begin, *item);
    for (int l = 0; l < source->llm_dp; l++) {
        assert_int_equal(part->llm_items[l].begin, *item);
        for (int64_t s = part->llm_samples[l].begin; s < part->llm_samples[l].end; s++) {
            for (int32_t i = 0; i < source->samples[plan->samples[s]].num_images; i++) {
                assert_int_equal(plan->items[*item].sample, plan->samples[s]);
                assert_int_equal(plan->items[*item].image, i);
                (*item)++;
            }
        }
    }
    assert_int_equal(part->items.end, *item);
    check_parts(part->samples, part->llm_samples, source->llm_dp, true);
    check_parts(part->items, part->llm_items, source->llm_dp, false);
    check_parts(part->items, part->encoder_items, source->encoder_dp, true);
    Range rows = step_plan_rows(plan, m, part->items);
    assert_int_equal(rows.begin, 0);
    assert_int_equal(rows.end, range_count(part->items) * source->rows_per_image);
}

static void check_plan(const StepPlan *plan)
{
    const StepSource *source = &plan->source;
    Range microbatches[8];
    int64_t item = 0;
    for (int m = 0; m < source->microbatches; m++) {
        microbatches[m] = plan->microbatches[m].samples;
        check_microbatch(plan, m, &item);
    }
    check_parts((Range){0, plan->num_samples}, microbatches, source->microbatches, true);
    assert_int_equal(plan->num_items, item);
    int64_t tokens = 0;
    int64_t labels = 0;
    for (int64_t s = 0; s < plan->num_samples; s++) {
        tokens += source->samples[plan->samples[s]].num_tokens;
        labels += source->samples[plan->samples[s]].num_labels;
    }
    assert_int_equal(plan->num_tokens, tokens);
    assert_int_equal(plan->num_labels, labels);
}

static void check_bounds(const StepPlan *plan, const StepBounds *bounds)
{
    const StepSource *source = &plan->source;
    for (int m = 0; m < source->microbatches; m++) {
        const StepMicrobatch *part = &plan->microbatches[m];
        for (int e = 0; e < source->encoder_dp; e++) {
            assert_true(range_count(part->encoder_items[e]) <= bounds->encoder_images);
        }
        for (int l = 0; l < source->llm_dp; l++) {
            Range samples = part->llm_samples[l];
            int64_t tokens = 0;
            for (int64_t s = samples.begin; s < samples.end; s++) {
                tokens += source->samples[plan->samples[s]].num_tokens;
            }
            assert_true(range_count(samples) <= bounds->llm_segments);
            assert_true(tokens <= bounds->llm_tokens);
            assert_true(range_count(part->llm_items[l]) * source->rows_per_image <=
                        bounds->llm_rows);
        }
    }
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
        for (int64_t step = 1; step <= 12; step++) {
            step_plan_make(&plan, step);
            check_plan(&plan);
            check_bounds(&plan, &bounds);
        }
        step_plan_done(&plan);
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
        data.samples[i] = (StepSample){1, 9, 3};
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
    other.encoder_dp += 3;
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
        assert_int_equal(a.num_items, b.num_items);
        for (int64_t i = 0; i < a.num_items; i++) {
            assert_int_equal(a.items[i].sample, b.items[i].sample);
            assert_int_equal(a.items[i].image, b.items[i].image);
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
    assert_int_equal(plan.num_items, 0);
    step_plan_done(&plan);
}

/* ---- images of others, identity ---- */

static void test_images_of_others(void **state)
{
    (void)state;
    static const StepSample samples[3] = {{2, 10, 1}, {0, 5, 1}, {3, 12, 1}};
    static const int64_t from[3] = {2, 1, 0};
    static const int64_t order[3] = {0, 1, 2};
    const StepSource source = {.samples = samples,
                               .num_samples = 3,
                               .order = order,
                               .num_ordered = 3,
                               .image_from = from,
                               .batch = 3,
                               .microbatches = 1,
                               .encoder_dp = 2,
                               .llm_dp = 1,
                               .rows_per_image = 4};
    static const LoaderItem expected[5] = {{2, 0}, {2, 1}, {0, 0}, {0, 1}, {0, 0}};
    StepPlan plan;
    assert_int_equal(step_plan_init(&plan, &source), STATUS_OK);
    step_plan_make(&plan, 1);
    assert_int_equal(plan.num_items, 5);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(plan.items[i].sample, expected[i].sample);
        assert_int_equal(plan.items[i].image, expected[i].image);
    }
    step_plan_done(&plan);
}

static uint64_t identity(const StepSource *source, int64_t step)
{
    StepPlan plan;
    assert_int_equal(step_plan_init(&plan, source), STATUS_OK);
    step_plan_make(&plan, step);
    uint64_t value = plan.microbatches[0].identity;
    step_plan_done(&plan);
    return value;
}

/* Anything that would pair rows and tokens otherwise changes it; two samples swapped do, though all
 * shapes stay the same. */
static void test_identity(void **state)
{
    (void)state;
    static const StepSample samples[4] = {{1, 9, 2}, {1, 9, 2}, {1, 9, 2}, {1, 9, 2}};
    static const int64_t order[4] = {0, 1, 2, 3};
    static const int64_t swapped[4] = {0, 2, 1, 3};
    const StepSource source = {.samples = samples,
                               .num_samples = 4,
                               .order = order,
                               .num_ordered = 4,
                               .batch = 4,
                               .microbatches = 1,
                               .encoder_dp = 2,
                               .llm_dp = 1,
                               .rows_per_image = 4};
    uint64_t base = identity(&source, 1);
    assert_true(base == identity(&source, 1));
    StepSource other = source;
    other.order = swapped;
    assert_true(base != identity(&other, 1));
    other = source;
    other.image_from = swapped;
    assert_true(base != identity(&other, 1));
    other = source;
    other.encoder_dp = 3;
    assert_true(base != identity(&other, 1));
    other = source;
    other.llm_dp = 2;
    assert_true(base != identity(&other, 1));
    other.batch = 2;
    assert_true(identity(&other, 1) != identity(&other, 2));
}

int main(void)
{
    printf("seed %d\n", SEED);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_placement),
        cmocka_unit_test(test_epochs),
        cmocka_unit_test(test_layout_changes_nothing),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_images_of_others),
        cmocka_unit_test(test_identity),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
