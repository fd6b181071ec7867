#include "device/device_cpu.h"

#include "base/memory.h"

#include <string.h>
#include <sys/mman.h>

struct Event {
    char unused; /* work is done when it is put on the stream: there is nothing to mark */
};

static Status cpu_alloc(Device *device, int64_t size_bytes, void **memory_out)
{
    (void)device;
    size_t length = size_bytes > 0 ? (size_t)size_bytes : 1;
    void *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return fail(STATUS_NO_MEMORY, "no memory for %lld bytes on the cpu", (long long)size_bytes);
    }
    /* Fewer page faults for weights and activations; a kernel that refuses changes nothing else. */
    (void)madvise(memory, length, MADV_HUGEPAGE);
    *memory_out = memory;
    return STATUS_OK;
}

static void cpu_free(Device *device, void *memory, int64_t size_bytes)
{
    (void)device;
    CHECK(munmap(memory, size_bytes > 0 ? (size_t)size_bytes : 1) == 0);
}

static Status cpu_stream_create(Device *device, Stream **stream_out)
{
    Stream *stream = NULL;
    TRY(MEMORY_NEW(&stream, 1));
    stream->device = device;
    *stream_out = stream;
    return STATUS_OK;
}

static void cpu_stream_destroy(Stream *stream)
{
    memory_free(stream);
}

static Status cpu_stream_wait(Stream *stream, int64_t deadline_ns)
{
    (void)stream;
    (void)deadline_ns;
    return STATUS_OK;
}

static Status cpu_copy(Stream *stream, void *to, const void *from, int64_t size_bytes)
{
    (void)stream;
    if (size_bytes > 0) {
        memmove(to, from, (size_t)size_bytes);
    }
    return STATUS_OK;
}

static Status cpu_zero(Stream *stream, void *memory, int64_t size_bytes)
{
    (void)stream;
    if (size_bytes > 0) {
        memset(memory, 0, (size_t)size_bytes);
    }
    return STATUS_OK;
}

static Status cpu_event_create(Device *device, Event **event_out)
{
    (void)device;
    return MEMORY_NEW(event_out, 1);
}

static void cpu_event_destroy(Event *event)
{
    memory_free(event);
}

static Status cpu_event_record(Event *event, Stream *stream)
{
    (void)event;
    (void)stream;
    return STATUS_OK;
}

static Status cpu_stream_wait_event(Stream *stream, Event *event)
{
    (void)event;
    (void)stream;
    return STATUS_OK;
}

static const DeviceOps device_ops_cpu = {
    .kind = DEVICE_KIND_CPU,
    .name = "cpu",
    .alloc = cpu_alloc,
    .free = cpu_free,
    .alloc_host = cpu_alloc,
    .free_host = cpu_free,
    .stream_create = cpu_stream_create,
    .stream_destroy = cpu_stream_destroy,
    .stream_wait = cpu_stream_wait,
    .copy = cpu_copy,
    .zero = cpu_zero,
    .event_create = cpu_event_create,
    .event_destroy = cpu_event_destroy,
    .event_record = cpu_event_record,
    .stream_wait_event = cpu_stream_wait_event,
};

Status device_cpu_open(int index, Device **device_out)
{
    if (index != 0) {
        return fail(STATUS_NOT_FOUND, "cpu device %d: there is only device 0", index);
    }
    Device *device = NULL;
    TRY(MEMORY_NEW(&device, 1));
    device->ops = &device_ops_cpu;
    *device_out = device;
    return STATUS_OK;
}

void device_cpu_close(Device *device)
{
    memory_free(device);
}
