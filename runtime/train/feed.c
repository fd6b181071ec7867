#include "train/feed.h"

#include "base/clock.h"
#include "base/memory.h"
#include "train/image_cache.h"

#include <inttypes.h>

enum {
    FEED_DEPTH = 3,     /* batches at the loader: one taken, one being decoded, one behind it */
    FEED_SLICE_MS = 100 /* how soon a stop is noticed */
};

/* What was asked of the loader for one microbatch: the images that the cache did not have then. */
typedef struct FeedRequest {
    LoaderItem *items; /* [images_max] */
    int64_t num;
} FeedRequest;

struct Feed {
    FeedOptions options;
    StepPlan plan;
    /* encoder ranks only */
    Loader *loader;
    ImageCache cache;
    StepPlan ahead;     /* plan of the step whose images are asked for next */
    int64_t ahead_step; /* past last_step when all are asked for */
    int ahead_microbatch;
    FeedRequest requests[FEED_DEPTH]; /* a ring: those under way, oldest first */
    int first;
    int under_way;
    int64_t image_bytes;
};

Status feed_read_sizes(const Dataset *dataset, StepSample **samples_out)
{
    int64_t count = dataset_count(dataset);
    StepSample *samples = NULL;
    TRY(MEMORY_NEW(&samples, count));
    for (int64_t i = 0; i < count; i++) {
        const SampleInfo *info = dataset_sample(dataset, i);
        samples[i] = (StepSample){.num_images = info->num_images,
                                  .num_tokens = info->num_tokens,
                                  .num_labels = info->num_labels};
    }
    *samples_out = samples;
    return STATUS_OK;
}

static Status open_loader(Feed *feed)
{
    const FeedOptions *options = &feed->options;
    StepBounds bounds;
    TRY(step_plan_bounds(options->source, &bounds));
    TRY(step_plan_init(&feed->ahead, options->source));
    feed->ahead_step = options->first_step;
    if (feed->ahead_step <= options->last_step) {
        step_plan_make(&feed->ahead, feed->ahead_step);
    }
    int64_t side = dataset_image_size(options->dataset);
    feed->image_bytes = side * side * 3;
    for (int i = 0; i < FEED_DEPTH; i++) {
        TRY(MEMORY_NEW(&feed->requests[i].items, bounds.encoder_images));
    }
    TRY(image_cache_init(&feed->cache, options->source->samples, options->source->num_samples,
                         feed->image_bytes, options->cache_bytes));
    return loader_create(options->dataset, options->loader_threads, FEED_DEPTH,
                         bounds.encoder_images, &feed->loader);
}

static Range own_items(const Feed *feed, const StepPlan *plan, int microbatch)
{
    return plan->microbatches[microbatch].encoder_items[feed->options.place->dp];
}

static Status request_items(Feed *feed, const LoaderItem *items, int64_t num_items)
{
    FeedRequest *request = &feed->requests[(feed->first + feed->under_way) % FEED_DEPTH];
    request->num = 0;
    for (int64_t i = 0; i < num_items; i++) {
        if (!image_cache_find(&feed->cache, &items[i])) {
            request->items[request->num++] = items[i];
        }
    }
    TRY(loader_request(feed->loader, request->items, request->num));
    feed->under_way++;
    return STATUS_OK;
}

/* Keeps the loader's threads busy. */
static Status request_ahead(Feed *feed)
{
    const FeedOptions *options = &feed->options;
    while (feed->under_way < FEED_DEPTH && feed->ahead_step <= options->last_step) {
        Range items = own_items(feed, &feed->ahead, feed->ahead_microbatch);
        TRY(request_items(feed, feed->ahead.items + items.begin, range_count(items)));
        feed->ahead_microbatch++;
        if (feed->ahead_microbatch == feed->ahead.source.microbatches) {
            feed->ahead_microbatch = 0;
            feed->ahead_step++;
            step_plan_make(&feed->ahead, feed->ahead_step);
        }
    }
    return STATUS_OK;
}

static Status open_feed(Feed *feed)
{
    TRY(step_plan_init(&feed->plan, feed->options.source));
    if (feed->options.place->is_encoder) {
        TRY(open_loader(feed));
        TRY(request_ahead(feed));
    }
    return STATUS_OK;
}

Status feed_create(const FeedOptions *options, Feed **feed_out)
{
    Feed *feed = NULL;
    TRY(MEMORY_NEW(&feed, 1));
    feed->options = *options;
    Status status = open_feed(feed);
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
    loader_destroy(feed->loader);
    image_cache_done(&feed->cache);
    for (int i = 0; i < FEED_DEPTH; i++) {
        memory_free(feed->requests[i].items);
    }
    step_plan_done(&feed->plan);
    step_plan_done(&feed->ahead);
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

/* In slices, since a stop cannot wake the loader. */
static Status wait_images(Feed *feed, const uint8_t **pixels_out)
{
    const FeedOptions *options = &feed->options;
    int64_t deadline_ns = clock_deadline_in_ms(options->timeout_ms);
    for (;;) {
        Status status = loader_take(feed->loader, clock_deadline_in_ms(FEED_SLICE_MS), pixels_out);
        if (status != STATUS_TIMEOUT) {
            TRY(status);
            return STATUS_OK;
        }
        if (atomic_load(options->stop)) {
            return fail(STATUS_ABORTED, "stopped while waiting for images");
        }
        if (clock_is_past(deadline_ns)) {
            return fail(STATUS_TIMEOUT, "no images after %" PRId64 " ms; use more loader_threads",
                        options->timeout_ms);
        }
    }
}

/* Puts the images of `items` together from those decoded, which are in the same order, and those
 * that the cache had already when they were asked for. */
static Status place_images(Feed *feed, const LoaderItem *items, int64_t num_items,
                           const uint8_t *decoded, uint8_t *pixels, Stream *stream)
{
    const FeedRequest *request = &feed->requests[feed->first];
    int64_t at = 0;
    for (int64_t i = 0; i < num_items; i++) {
        bool is_decoded = at < request->num && request->items[at].sample == items[i].sample &&
                          request->items[at].image == items[i].image;
        const uint8_t *from = NULL;
        if (is_decoded) {
            from = decoded + at++ * feed->image_bytes;
            image_cache_put(&feed->cache, &items[i], from);
        } else {
            from = image_cache_find(&feed->cache, &items[i]);
            CHECK(from);
        }
        TRY(stream_copy(stream, pixels + i * feed->image_bytes, from, feed->image_bytes));
    }
    CHECK(at == request->num);
    return stream_wait(stream, clock_deadline_in_ms(feed->options.timeout_ms));
}

Status feed_take_images(Feed *feed, int microbatch, uint8_t *pixels, Stream *stream)
{
    Range items = own_items(feed, &feed->plan, microbatch);
    const uint8_t *decoded = NULL;
    TRY(wait_images(feed, &decoded));
    TRY(place_images(feed, feed->plan.items + items.begin, range_count(items), decoded, pixels,
                     stream));
    loader_release(feed->loader);
    feed->first = (feed->first + 1) % FEED_DEPTH;
    feed->under_way--;
    return request_ahead(feed);
}
