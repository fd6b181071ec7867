/* Catalog: the tensors of all modules of a job, put together from what the ranks declare: the stages of a
 * pipeline have different ones, and a module may be on ranks that others know nothing of. The same on all
 * ranks, and the same whatever the layout: sorted by module, then by name, numbers in names by their value
 * ("layers.2" before "layers.10").
 * Threading: the step thread.
 */
#ifndef CHECKPOINT_CATALOG_H
#define CHECKPOINT_CATALOG_H

#include "checkpoint/checkpoint.h"

enum {
    CATALOG_MODULE_BYTES = 32,
    CATALOG_NAME_BYTES = 128,
};

/* In this form from rank to rank. */
typedef struct CatalogTensor {
    char module[CATALOG_MODULE_BYTES];
    char name[CATALOG_NAME_BYTES];
    int64_t dims[TENSOR_DIMS_MAX]; /* global */
    int32_t num_dims;
    int32_t has_state; /* m and v too */
    int32_t rank;      /* the lowest that declares it */
    int32_t unused;    /* 0 */
} CatalogTensor;

_Static_assert(sizeof(CatalogTensor) == 208, "a declaration's form is the same in every build");

typedef struct CatalogModule {
    const char *name;             /* in the catalog's tensors */
    const CatalogTensor *tensors; /* in the catalog */
    int num_tensors;
    int creator;        /* the lowest rank that declares one of its tensors */
    int64_t num_values; /* elements of all its tensors */
    int64_t num_states; /* of those with state */
    bool has_states;    /* there is one, be it of no elements */
} CatalogModule;

typedef struct Catalog {
    CatalogTensor *tensors; /* owned */
    int64_t num_tensors;
    CatalogModule modules[CHECKPOINT_PARTS_MAX];
    int num_modules;
} Catalog;

/* Collective over `world`: of parts with writes_weights, the declarations come together. What peers send
 * is checked: STATUS_INVALID, STATUS_CORRUPT. catalog_done in every case. */
Status catalog_gather(const CheckpointPart *parts, int num_parts, Comm *world, Stream *stream,
                      Catalog *catalog_out) STATUS_CHECKED;
void catalog_done(Catalog *catalog);

/* Builds it of declarations in any order, with their ranks set; takes `tensors`. */
Status catalog_build(CatalogTensor *tensors, int64_t num_tensors,
                     Catalog *catalog_out) STATUS_CHECKED;

/* NULL when there is none of that name. */
const CatalogModule *catalog_find_module(const Catalog *catalog, const char *module);
const CatalogTensor *catalog_find(const Catalog *catalog, const char *module, const char *name);

/* STATUS_INTERNAL unless the tensors of a part, and whether they have state, are the catalog's. */
Status catalog_check_part(const Catalog *catalog, const CheckpointPart *part) STATUS_CHECKED;

/* This part's optimizer has m and v of that parameter, on this rank or another. */
bool catalog_has_state(const CheckpointPart *part, const Param *param);

#endif
