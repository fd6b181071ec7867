/* ModuleCost: how much work a module's parts are, for the schedule's order and for what is shown to
 * users. Counts the products of matrices: 2 operations for each weight and token, and attention's
 * two products with the keys that a token sees (Narayanan et al. 2021, section 5.1). Threading:
 * pure.
 */
#ifndef TRAIN_MODULE_COST_H
#define TRAIN_MODULE_COST_H

#include "job/job_layout.h"

/* A microbatch of one replica, on average. */
typedef struct ModuleCostBatch {
    double tokens;  /* that go through the module's blocks */
    double segment; /* tokens that see each other */
} ModuleCostBatch;

/* Floating point operations of a forward pass of the whole module. */
double module_cost_forward(const ModelSpec *model, const char *module,
                           const ModuleCostBatch *batch);

#endif
