/* The CPU as a device: memory from mmap, streams that run at once in the calling thread.
 * Threading: as device.h.
 */
#ifndef DEVICE_DEVICE_CPU_H
#define DEVICE_DEVICE_CPU_H

#include "device/device.h"

Status device_cpu_open(int index, Device **device_out) STATUS_CHECKED;
void device_cpu_close(Device *device);

#endif
