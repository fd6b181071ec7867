#include "train/item_cache.h"

#include "base/memory.h"

#include <string.h>

static int64_t count_items(ItemCache *cache, const StepSample *samples, SampleMedia media)
{
    int64_t num = 0;
    for (int64_t i = 0; i < cache->num_samples; i++) {
        cache->first[i] = num;
        for (int32_t j = 0; j < samples[i].num_items; j++) {
            num += samples[i].items[j].media == media;
        }
    }
    return num;
}

static void place_items(ItemCache *cache, const StepSample *samples, SampleMedia media,
                        int64_t item_bytes, int64_t row_bytes)
{
    for (int64_t i = 0; i < cache->num_samples; i++) {
        for (int32_t j = 0; j < samples[i].num_items; j++) {
            const SampleItem *item = &samples[i].items[j];
            if (item->media == media) { /* sizes first, sums of them below */
                cache->begins[cache->first[i] + item->index + 1] =
                    item_bytes + item->rows * row_bytes;
            }
        }
    }
    for (int64_t i = 0; i < cache->num_items; i++) {
        cache->begins[i + 1] += cache->begins[i];
    }
}

static Status allocate(ItemCache *cache, int64_t size_bytes_max)
{
    int64_t size_bytes = cache->begins[cache->num_items];
    if (size_bytes > size_bytes_max) {
        cache->num_items = 0;
        return STATUS_OK;
    }
    TRY(MEMORY_NEW(&cache->is_there, cache->num_items));
    return memory_alloc((size_t)size_bytes, 1, (void **)&cache->data);
}

Status item_cache_init(ItemCache *cache, const StepSample *samples, int64_t num_samples,
                       SampleMedia media, int64_t item_bytes, int64_t row_bytes,
                       int64_t size_bytes_max)
{
    *cache = (ItemCache){.num_samples = num_samples};
    Status status = MEMORY_NEW(&cache->first, num_samples);
    if (status == STATUS_OK) {
        cache->num_items = count_items(cache, samples, media);
        status = MEMORY_NEW(&cache->begins, cache->num_items + 1);
    }
    if (status == STATUS_OK) {
        place_items(cache, samples, media, item_bytes, row_bytes);
        status = allocate(cache, size_bytes_max);
    }
    if (status != STATUS_OK) {
        item_cache_done(cache);
        return status_trace(status, __FILE__, __LINE__);
    }
    return STATUS_OK;
}

void item_cache_done(ItemCache *cache)
{
    memory_free(cache->first);
    memory_free(cache->begins);
    memory_free(cache->is_there);
    memory_free(cache->data);
    *cache = (ItemCache){0};
}

static int64_t number_of(const ItemCache *cache, const LoaderItem *item)
{
    CHECK(item->sample >= 0 && item->sample < cache->num_samples);
    int64_t number = cache->first[item->sample] + item->index;
    CHECK(number < cache->num_items);
    return number;
}

const uint8_t *item_cache_find(const ItemCache *cache, const LoaderItem *item)
{
    if (cache->num_items == 0) {
        return NULL;
    }
    int64_t number = number_of(cache, item);
    return cache->is_there[number] ? cache->data + cache->begins[number] : NULL;
}

void item_cache_put(ItemCache *cache, const LoaderItem *item, const uint8_t *data)
{
    if (cache->num_items == 0) {
        return;
    }
    int64_t number = number_of(cache, item);
    int64_t size_bytes = cache->begins[number + 1] - cache->begins[number];
    memcpy(cache->data + cache->begins[number], data, (size_t)size_bytes);
    cache->is_there[number] = 1;
}
