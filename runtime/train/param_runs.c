#include "train/param_runs.h"

#include "base/memory.h"

Status param_runs_make(const ParamSet *params, ParamChoice choice, Range within,
                       ParamRuns *runs_out)
{
    ParamRuns runs = {0};
    TRY(MEMORY_NEW(&runs.runs, params->num_params + 1));
    for (int i = 0; i < params->num_params; i++) {
        const Param *param = &params->params[i];
        Range all = {param->offset, param->offset + tensor_count(&param->value)};
        Range part = range_intersect(all, within);
        if (range_count(part) == 0 || !param->is_trained || !choice(param)) {
            continue;
        }
        if (runs.num > 0 && runs.runs[runs.num - 1].end == part.begin) {
            runs.runs[runs.num - 1].end = part.end;
        } else {
            runs.runs[runs.num++] = part;
        }
        runs.count += range_count(part);
    }
    *runs_out = runs;
    return STATUS_OK;
}

void param_runs_done(ParamRuns *runs)
{
    memory_free(runs->runs);
    *runs = (ParamRuns){0};
}
