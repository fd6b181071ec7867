#include "train/image_cache.h"

#include "base/memory.h"

#include <string.h>

static Status allocate(ImageCache *cache)
{
    TRY(MEMORY_NEW(&cache->is_there, cache->num_images));
    return memory_alloc((size_t)cache->num_images, (size_t)cache->image_bytes,
                        (void **)&cache->pixels);
}

Status image_cache_init(ImageCache *cache, const StepSample *samples, int64_t num_samples,
                        int64_t image_bytes, int64_t size_bytes_max)
{
    *cache = (ImageCache){.image_bytes = image_bytes, .num_samples = num_samples};
    TRY(MEMORY_NEW(&cache->first, num_samples));
    int64_t num_images = 0;
    for (int64_t i = 0; i < num_samples; i++) {
        cache->first[i] = num_images;
        num_images += samples[i].num_images;
    }
    if (num_images > size_bytes_max / image_bytes) {
        return STATUS_OK;
    }
    cache->num_images = num_images;
    Status status = allocate(cache);
    if (status != STATUS_OK) {
        image_cache_done(cache);
        return status_trace(status, __FILE__, __LINE__);
    }
    return STATUS_OK;
}

void image_cache_done(ImageCache *cache)
{
    memory_free(cache->first);
    memory_free(cache->is_there);
    memory_free(cache->pixels);
    *cache = (ImageCache){0};
}

static int64_t number_of(const ImageCache *cache, const LoaderItem *item)
{
    CHECK(item->sample >= 0 && item->sample < cache->num_samples);
    int64_t number = cache->first[item->sample] + item->image;
    CHECK(number < cache->num_images);
    return number;
}

const uint8_t *image_cache_find(const ImageCache *cache, const LoaderItem *item)
{
    if (cache->num_images == 0) {
        return NULL;
    }
    int64_t number = number_of(cache, item);
    return cache->is_there[number] ? cache->pixels + number * cache->image_bytes : NULL;
}

void image_cache_put(ImageCache *cache, const LoaderItem *item, const uint8_t *pixels)
{
    if (cache->num_images == 0) {
        return;
    }
    int64_t number = number_of(cache, item);
    memcpy(cache->pixels + number * cache->image_bytes, pixels, (size_t)cache->image_bytes);
    cache->is_there[number] = 1;
}
