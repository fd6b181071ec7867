/* Device: where tensors live and kernels run: memory, streams, events. Backends: cpu; cuda as a
 * plugin.
 *
 * A stream runs what is put on it in order. On the CPU it runs at once, in the calling thread; code
 * written against this header must be right for both. The device owns its streams' resources;
 * callers own what they create.
 *
 * Threading: a device may be used by many threads; a stream and its events belong to one.
 */
#ifndef DEVICE_DEVICE_H
#define DEVICE_DEVICE_H

#include "base/status.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct Device Device;
typedef struct Stream Stream;
typedef struct Event Event;

typedef enum DeviceKind {
    DEVICE_KIND_CPU,
    DEVICE_KIND_CUDA,
} DeviceKind;

typedef struct DeviceOps {
    DeviceKind kind;
    const char *name;
    /* Zeroed memory, aligned to a page. May block. STATUS_NO_MEMORY. */
    Status (*alloc)(Device *device, int64_t size_bytes, void **memory_out);
    void (*free)(Device *device, void *memory, int64_t size_bytes);
    /* Memory of the host that copies from and to the device run fastest from. */
    Status (*alloc_host)(Device *device, int64_t size_bytes, void **memory_out);
    void (*free_host)(Device *device, void *memory, int64_t size_bytes);
    Status (*stream_create)(Device *device, Stream **stream_out);
    void (*stream_destroy)(Stream *stream);
    /* Blocks the calling thread until all put on the stream before is done. Reports errors of that
     * work. */
    Status (*stream_wait)(Stream *stream, int64_t deadline_ns);
    /* Does not block; either side may be host or device memory; both must live until the stream
     * passed it. */
    Status (*copy)(Stream *stream, void *to, const void *from, int64_t size_bytes);
    Status (*zero)(Stream *stream, void *memory, int64_t size_bytes);
    Status (*event_create)(Device *device, Event **event_out);
    void (*event_destroy)(Event *event);
    /* Marks the stream's present end; recording again moves the mark. Does not block. */
    Status (*event_record)(Event *event, Stream *stream);
    /* What is put on `stream` from now on runs after the mark. Does not block. */
    Status (*stream_wait_event)(Stream *stream, Event *event);
} DeviceOps;

struct Device {
    const DeviceOps *ops;
    /* Device memory that is allocated now, and the most there was since the device was opened or
     * device_reset_peak. */
    _Atomic int64_t allocated_bytes;
    _Atomic int64_t peak_bytes;
};

struct Stream {
    Device *device;
};

/* Opens device `index` of a backend: "cpu", "cuda". Owned: device_close. STATUS_UNSUPPORTED when it
 * is not built in. */
Status device_open(const char *backend, int index, Device **device_out) STATUS_CHECKED;
void device_close(Device *device);

Status device_alloc(Device *device, int64_t size_bytes, void **memory_out) STATUS_CHECKED;
void device_free(Device *device, void *memory, int64_t size_bytes);
/* The peak begins anew at what is allocated now. */
void device_reset_peak(Device *device);
Status device_alloc_host(Device *device, int64_t size_bytes, void **memory_out) STATUS_CHECKED;
void device_free_host(Device *device, void *memory, int64_t size_bytes);
Status stream_create(Device *device, Stream **stream_out) STATUS_CHECKED;
void stream_destroy(Stream *stream);
Status stream_wait(Stream *stream, int64_t deadline_ns) STATUS_CHECKED;
Status stream_copy(Stream *stream, void *to, const void *from, int64_t size_bytes) STATUS_CHECKED;
Status stream_zero(Stream *stream, void *memory, int64_t size_bytes) STATUS_CHECKED;
Status event_create(Device *device, Event **event_out) STATUS_CHECKED;
void event_destroy(Device *device, Event *event);
Status event_record(Event *event, Stream *stream) STATUS_CHECKED;
Status stream_wait_event(Stream *stream, Event *event) STATUS_CHECKED;

#endif
