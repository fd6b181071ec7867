#include "train/feed.h"

#include "base/clock.h"
#include "base/memory.h"
#include "train/item_cache.h"
#include "train/job_graph.h"
#include "train/module.h"

#include <inttypes.h>

enum {
    FEED_DEPTH = 3,     /* batches at a loader: one taken, one being decoded, one behind it */
    FEED_SLICE_MS = 100 /* how soon a stop is noticed */
};

/* What was asked of the loader for one microbatch: the items that the cache did not have then. */
typedef struct FeedRequest {
    LoaderItem *items; /* [items_max] */
    int64_t num;
} FeedRequest;

/* One encoder's items. */
typedef struct FeedLane {
    int encoder;
    int dp;         /* this rank's replica */
    Loader *loader; /* NULL: this rank needs none of them */
    ItemCache cache;
    StepPlan ahead;     /* plan of the step whose items are asked for next */
    int64_t ahead_step; /* past last_step when all are asked for */
    int ahead_microbatch;
    FeedRequest requests[FEED_DEPTH]; /* a ring: those under way, oldest first */
    int first;
    int under_way;
} FeedLane;

struct Feed {
    FeedOptions options;
    StepPlan plan;
    FeedLane lanes[STEP_ENCODERS_MAX];
};

Status feed_open_dataset(const JobSpec *spec, char *const *patterns, size_t num_patterns,
                         Dataset **dataset_out)
{
    bool has_vision = job_spec_module(spec, "vision") != NULL;
    bool has_audio = job_spec_module(spec, "audio") != NULL;
    const DatasetOptions options = {
        .patterns = patterns,
        .num_patterns = (int)num_patterns,
        .prompt = spec->data->prompt,
        .rows_per_image = has_vision ? module_rows_per_image(spec->model) : 0,
        .image_size = has_vision ? spec->model->vision->image_size : 0,
        .mels = has_audio ? spec->model->audio->mels : 0,
        .max_seconds = has_audio ? spec->model->audio->max_seconds : 0.0,
        .max_tokens = spec->model->llm->max_tokens,
    };
    return dataset_open(&options, dataset_out);
}

StepSource feed_source(const JobSpec *spec, const Place *place, const StepSample *samples,
                       int64_t num_samples)
{
    StepSource source = {
        .seed = spec->training->seed,
        .samples = samples,
        .num_samples = num_samples,
        .batch = spec->training->global_batch,
        .microbatches = spec->training->microbatches,
        .num_encoders = place_num_encoders(place),
        .llm_dp = place_decoder(place)->grid.sizes[GRID_AXIS_DP],
    };
    for (int e = 0; e < source.num_encoders; e++) {
        source.encoders[e] = (StepEncoder){.media = job_graph_media(place->modules[e].name),
                                           .dp = place->modules[e].grid.sizes[GRID_AXIS_DP]};
    }
    return source;
}

Status feed_read_sizes(const Dataset *dataset, StepSample **samples_out)
{
    int64_t count = dataset_count(dataset);
    StepSample *samples = NULL;
    TRY(MEMORY_NEW(&samples, count));
    for (int64_t i = 0; i < count; i++) {
        const SampleInfo *info = dataset_sample(dataset, i);
        samples[i] = (StepSample){.num_tokens = info->num_tokens,
                                  .num_labels = info->num_labels,
                                  .num_items = info->num_items,
                                  .items = info->items};
    }
    *samples_out = samples;
    return STATUS_OK;
}

/* ---------------------------------------------------------------- asking ahead */

static Range own_items(const FeedLane *lane, const StepPlan *plan, int microbatch)
{
    return plan->microbatches[microbatch].crossings[lane->encoder].encoder_items[lane->dp];
}

static Status request_items(FeedLane *lane, const StepItem *items, int64_t num_items)
{
    FeedRequest *request = &lane->requests[(lane->first + lane->under_way) % FEED_DEPTH];
    request->num = 0;
    for (int64_t i = 0; i < num_items; i++) {
        if (!item_cache_find(&lane->cache, &items[i].load)) {
            request->items[request->num++] = items[i].load;
        }
    }
    TRY(loader_request(lane->loader, request->items, request->num));
    lane->under_way++;
    return STATUS_OK;
}

/* Keeps the loader's threads busy. */
static Status request_ahead(Feed *feed, FeedLane *lane)
{
    while (lane->under_way < FEED_DEPTH && lane->ahead_step <= feed->options.last_step) {
        Range items = own_items(lane, &lane->ahead, lane->ahead_microbatch);
        TRY(request_items(lane, lane->ahead.items[lane->encoder] + items.begin,
                          range_count(items)));
        lane->ahead_microbatch++;
        if (lane->ahead_microbatch == lane->ahead.source.microbatches) {
            lane->ahead_microbatch = 0;
            lane->ahead_step++;
            step_plan_make(&lane->ahead, lane->ahead_step);
        }
    }
    return STATUS_OK;
}

/* ---------------------------------------------------------------- create */

static Status open_lane(Feed *feed, FeedLane *lane)
{
    const FeedOptions *options = &feed->options;
    const StepSource *source = options->source;
    SampleMedia media = source->encoders[lane->encoder].media;
    StepBounds bounds;
    TRY(step_plan_bounds(source, &bounds));
    TRY(step_plan_init(&lane->ahead, source));
    lane->ahead_step = options->first_step;
    if (lane->ahead_step <= options->last_step) {
        step_plan_make(&lane->ahead, lane->ahead_step);
    }
    int64_t items_max = bounds.encoder_items[lane->encoder];
    for (int i = 0; i < FEED_DEPTH; i++) {
        TRY(MEMORY_NEW(&lane->requests[i].items, items_max));
    }
    TRY(loader_create(options->dataset, media, options->loader_threads, FEED_DEPTH, items_max,
                      bounds.encoder_rows[lane->encoder], &lane->loader));
    int64_t item_bytes = loader_item_bytes(lane->loader, 0);
    TRY(item_cache_init(&lane->cache, source->samples, source->num_samples, media, item_bytes,
                        loader_item_bytes(lane->loader, 1) - item_bytes, options->cache_bytes));
    return request_ahead(feed, lane);
}

static Status open_lanes(Feed *feed)
{
    const Place *place = feed->options.place;
    TRY(step_plan_init(&feed->plan, feed->options.source));
    for (int e = 0; e < place_num_encoders(place); e++) {
        const PlaceModule *module = &place->modules[e];
        FeedLane *lane = &feed->lanes[e];
        lane->encoder = e;
        if (module->is_here && place_is_first_stage(module)) {
            lane->dp = module->coords.at[GRID_AXIS_DP];
            TRY(open_lane(feed, lane));
        }
    }
    return STATUS_OK;
}

Status feed_create(const FeedOptions *options, Feed **feed_out)
{
    Feed *feed = NULL;
    TRY(MEMORY_NEW(&feed, 1));
    feed->options = *options;
    Status status = open_lanes(feed);
    if (status != STATUS_OK) {
        feed_destroy(feed);
        return status_trace(status, __FILE__, __LINE__);
    }
    *feed_out = feed;
    return STATUS_OK;
}

void feed_destroy(Feed *feed)
{
    if (!feed) {
        return;
    }
    for (int e = 0; e < STEP_ENCODERS_MAX; e++) {
        FeedLane *lane = &feed->lanes[e];
        loader_destroy(lane->loader);
        item_cache_done(&lane->cache);
        for (int i = 0; i < FEED_DEPTH; i++) {
            memory_free(lane->requests[i].items);
        }
        step_plan_done(&lane->ahead);
    }
    step_plan_done(&feed->plan);
    memory_free(feed);
}

void feed_begin(Feed *feed, int64_t step)
{
    step_plan_make(&feed->plan, step);
}

const StepPlan *feed_plan(const Feed *feed)
{
    return &feed->plan;
}

const Dataset *feed_dataset(const Feed *feed)
{
    return feed->options.dataset;
}

uint64_t feed_kind(const Feed *feed)
{
    return feed->options.kind;
}

/* ---------------------------------------------------------------- taking */

/* In slices, since a stop cannot wake the loader. */
static Status wait_items(const Feed *feed, FeedLane *lane, const uint8_t **data_out)
{
    const FeedOptions *options = &feed->options;
    int64_t deadline_ns = clock_deadline_in_ms(options->timeout_ms);
    for (;;) {
        Status status = loader_take(lane->loader, clock_deadline_in_ms(FEED_SLICE_MS), data_out);
        if (status != STATUS_TIMEOUT) {
            TRY(status);
            return STATUS_OK;
        }
        if (atomic_load(options->stop)) {
            return fail(STATUS_ABORTED, "stopped while waiting for images or clips");
        }
        if (clock_is_past(deadline_ns)) {
            return fail(STATUS_TIMEOUT,
                        "no images or clips after %" PRId64 " ms; use more loader_threads",
                        options->timeout_ms);
        }
    }
}

/* Puts the items together from those decoded, which are in the same order, and those that the cache
 * had already when they were asked for. */
static Status place_items(const Feed *feed, FeedLane *lane, Range items, const uint8_t *decoded,
                          uint8_t *data, Stream *stream)
{
    const FeedRequest *request = &lane->requests[lane->first];
    int64_t at = 0;
    for (int64_t i = items.begin; i < items.end; i++) {
        const LoaderItem *item = &feed->plan.items[lane->encoder][i].load;
        int64_t size_bytes = loader_item_bytes(lane->loader, item->rows);
        bool is_decoded = at < request->num && request->items[at].sample == item->sample &&
                          request->items[at].index == item->index;
        const uint8_t *from = decoded;
        if (is_decoded) {
            item_cache_put(&lane->cache, item, from);
            decoded += size_bytes;
            at++;
        } else {
            from = item_cache_find(&lane->cache, item);
            CHECK(from);
        }
        TRY(stream_copy(stream, data, from, size_bytes));
        data += size_bytes;
    }
    CHECK(at == request->num);
    return stream_wait(stream, clock_deadline_in_ms(feed->options.timeout_ms));
}

Status feed_take_items(Feed *feed, int encoder, int microbatch, uint8_t *data, Stream *stream)
{
    FeedLane *lane = &feed->lanes[encoder];
    Range items = own_items(lane, &feed->plan, microbatch);
    const uint8_t *decoded = NULL;
    TRY(wait_items(feed, lane, &decoded));
    TRY(place_items(feed, lane, items, decoded, data, stream));
    loader_release(lane->loader);
    lane->first = (lane->first + 1) % FEED_DEPTH;
    lane->under_way--;
    return request_ahead(feed, lane);
}
