#include "train/param_runs.h"

#include "base/memory.h"

Status param_runs_make(const ParamSet *params, ParamChoice choice, ParamRuns *runs_out)
{
    ParamRuns runs = {0};
    TRY(MEMORY_NEW(&runs.runs, params->num_params + 1));
    for (int i = 0; i < params->num_params; i++) {
        const Param *param = &params->params[i];
        int64_t count = tensor_count(&param->value);
        if (count == 0 || !choice(param)) {
            continue;
        }
        if (runs.num > 0 && runs.runs[runs.num - 1].end == param->offset) {
            runs.runs[runs.num - 1].end += count;
        } else {
            runs.runs[runs.num++] = (Range){param->offset, param->offset + count};
        }
        runs.count += count;
    }
    *runs_out = runs;
    return STATUS_OK;
}

void param_runs_done(ParamRuns *runs)
{
    memory_free(runs->runs);
    *runs = (ParamRuns){0};
}
