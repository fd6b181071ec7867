#include "base/memory.h"
#include "coordinator/store.h"

#include <string.h>

typedef struct Row {
    char *uid;
    char *request_id;
    uint64_t request_hash;
    uint8_t *bytes; /* the packed job */
    size_t size;
} Row;

typedef struct StoreMemory {
    Store store;
    Row *rows; /* oldest first */
    size_t capacity;
    size_t count;
} StoreMemory;

static void free_row(Row *row)
{
    memory_free(row->uid);
    memory_free(row->request_id);
    memory_free(row->bytes);
}

static size_t find_row(const StoreMemory *self, const char *uid)
{
    size_t i = 0;
    while (i < self->count && strcmp(self->rows[i].uid, uid) != 0) {
        i++;
    }
    return i;
}

static Status fill_row(Row *row, const StoreRecord *record)
{
    TRY(memory_copy_text(record->job->uid, &row->uid));
    TRY(memory_copy_text(record->request_id, &row->request_id));
    row->request_hash = record->request_hash;
    row->size = viaduct__v1__job__get_packed_size(record->job);
    TRY(MEMORY_NEW(&row->bytes, row->size + 1));
    viaduct__v1__job__pack(record->job, row->bytes);
    return STATUS_OK;
}

static Status memory_put(Store *store, const StoreRecord *record)
{
    StoreMemory *self = (StoreMemory *)store;
    Row row = {0};
    Status status = fill_row(&row, record);
    void *rows = self->rows;
    if (status == STATUS_OK) {
        status = memory_grow(&rows, &self->capacity, self->count + 1, sizeof *self->rows);
        self->rows = rows;
    }
    if (status != STATUS_OK) {
        free_row(&row);
        return status_trace(status, __FILE__, __LINE__);
    }
    size_t index = find_row(self, row.uid);
    if (index < self->count) {
        free_row(&self->rows[index]);
    } else {
        self->count++;
    }
    self->rows[index] = row;
    return STATUS_OK;
}

static Status memory_remove(Store *store, const char *uid)
{
    StoreMemory *self = (StoreMemory *)store;
    size_t index = find_row(self, uid);
    if (index < self->count) {
        free_row(&self->rows[index]);
        self->count--;
        memmove(&self->rows[index], &self->rows[index + 1],
                (self->count - index) * sizeof *self->rows);
    }
    return STATUS_OK;
}

static Status memory_each(Store *store, StoreVisit visit, void *context)
{
    const StoreMemory *self = (const StoreMemory *)store;
    for (size_t i = 0; i < self->count; i++) {
        const Row *row = &self->rows[i];
        Viaduct__V1__Job *job = viaduct__v1__job__unpack(NULL, row->size, row->bytes);
        if (!job) {
            return fail(STATUS_NO_MEMORY, "no memory for job %s of the store", row->uid);
        }
        StoreRecord record = {job, row->request_id, row->request_hash};
        visit(context, &record);
        viaduct__v1__job__free_unpacked(job, NULL);
    }
    return STATUS_OK;
}

static void memory_close(Store *store)
{
    StoreMemory *self = (StoreMemory *)store;
    for (size_t i = 0; i < self->count; i++) {
        free_row(&self->rows[i]);
    }
    memory_free(self->rows);
    memory_free(self);
}

static const StoreOps store_ops_memory = {
    .name = "memory",
    .put = memory_put,
    .remove = memory_remove,
    .each = memory_each,
    .close = memory_close,
};

Status store_open_memory(Store **store_out)
{
    StoreMemory *self = NULL;
    TRY(MEMORY_NEW(&self, 1));
    self->store.ops = &store_ops_memory;
    *store_out = &self->store;
    return STATUS_OK;
}
