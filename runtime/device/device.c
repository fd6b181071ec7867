#include "device/device.h"

#include "device/device_cpu.h"

#include <stdatomic.h>
#include <string.h>

typedef struct Backend {
    const char *name;
    Status (*open)(int index, Device **device_out);
} Backend;

static const Backend backends[] = {
    {"cpu", device_cpu_open},
};

Status device_open(const char *backend, int index, Device **device_out)
{
    for (size_t i = 0; i < sizeof backends / sizeof backends[0]; i++) {
        if (strcmp(backends[i].name, backend) == 0) {
            return backends[i].open(index, device_out);
        }
    }
    return fail(STATUS_UNSUPPORTED, "device backend \"%s\" is not in this build; there is: cpu",
                backend);
}

void device_close(Device *device)
{
    if (device) {
        device_cpu_close(device);
    }
}

Status device_alloc(Device *device, int64_t size_bytes, void **memory_out)
{
    CHECK(size_bytes >= 0);
    TRY(device->ops->alloc(device, size_bytes, memory_out));
    int64_t now = atomic_fetch_add(&device->allocated_bytes, size_bytes) + size_bytes;
    int64_t peak = atomic_load(&device->peak_bytes);
    while (now > peak && !atomic_compare_exchange_weak(&device->peak_bytes, &peak, now)) {
    }
    return STATUS_OK;
}

void device_free(Device *device, void *memory, int64_t size_bytes)
{
    if (memory) {
        atomic_fetch_sub(&device->allocated_bytes, size_bytes);
        device->ops->free(device, memory, size_bytes);
    }
}

void device_reset_peak(Device *device)
{
    atomic_store(&device->peak_bytes, atomic_load(&device->allocated_bytes));
}

Status device_alloc_host(Device *device, int64_t size_bytes, void **memory_out)
{
    CHECK(size_bytes >= 0);
    return device->ops->alloc_host(device, size_bytes, memory_out);
}

void device_free_host(Device *device, void *memory, int64_t size_bytes)
{
    if (memory) {
        device->ops->free_host(device, memory, size_bytes);
    }
}

Status stream_create(Device *device, Stream **stream_out)
{
    return device->ops->stream_create(device, stream_out);
}

void stream_destroy(Stream *stream)
{
    if (stream) {
        stream->device->ops->stream_destroy(stream);
    }
}

Status stream_wait(Stream *stream, int64_t deadline_ns)
{
    return stream->device->ops->stream_wait(stream, deadline_ns);
}

Status stream_copy(Stream *stream, void *to, const void *from, int64_t size_bytes)
{
    CHECK(size_bytes >= 0);
    return stream->device->ops->copy(stream, to, from, size_bytes);
}

Status stream_zero(Stream *stream, void *memory, int64_t size_bytes)
{
    CHECK(size_bytes >= 0);
    return stream->device->ops->zero(stream, memory, size_bytes);
}

Status event_create(Device *device, Event **event_out)
{
    return device->ops->event_create(device, event_out);
}

void event_destroy(Device *device, Event *event)
{
    if (event) {
        device->ops->event_destroy(event);
    }
}

Status event_record(Event *event, Stream *stream)
{
    return stream->device->ops->event_record(event, stream);
}

Status stream_wait_event(Stream *stream, Event *event)
{
    return stream->device->ops->stream_wait_event(stream, event);
}
