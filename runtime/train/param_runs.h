/* ParamRuns: neighbouring trained parameters of a set that are treated alike, as ranges of the flat
 * buffers: a few long loops instead of many short ones.
 * Threading: plain data, owned by the caller: param_runs_done.
 */
#ifndef TRAIN_PARAM_RUNS_H
#define TRAIN_PARAM_RUNS_H

#include "base/range.h"
#include "nn/param.h"

typedef struct ParamRuns {
    int num;
    Range *runs;   /* elements, ascending */
    int64_t count; /* elements of all runs */
} ParamRuns;

typedef bool (*ParamChoice)(const Param *param);

/* Of the trained parameters for which `choice` says true, what lies in `within` (elements of the
 * flat buffers); as few runs as there can be. */
Status param_runs_make(const ParamSet *params, ParamChoice choice, Range within,
                       ParamRuns *runs_out) STATUS_CHECKED;
void param_runs_done(ParamRuns *runs);

#endif
