#include "cli/layout_text.h"

#include "job/job_layout.h"

#include <string.h>

void layout_text_describe(const JobSpec *spec, char *text_out, size_t size)
{
    size_t used = 0;
    text_out[0] = '\0';
    for (size_t i = 0; i < spec->n_modules && used < size; i++) {
        const ModuleSpec *module = spec->modules[i];
        int length =
            snprintf(text_out + used, size - used, "%s%s %d/%d/%d/%d %s", i > 0 ? ", " : "",
                     module->name, module->tp, module->cp, module->pp, module->dp, module->pool);
        used += length > 0 ? (size_t)length : 0;
    }
}

void layout_text_print(FILE *file, const JobSpec *spec)
{
    JobLayout layout = job_layout_make(spec);
    for (int i = 0; i < layout.num_modules; i++) {
        const JobLayoutModule *module = &layout.modules[i];
        const JobLayoutPool *pool = &layout.pools[module->pool];
        const ModuleSpec *axes = module->spec;
        fprintf(file, "  %-6s tp %d, cp %d, pp %d, dp %d on pool \"%s\"%s, ", axes->name, axes->tp,
                axes->cp, axes->pp, axes->dp, pool->spec->name,
                pool->num_modules > 1 ? " (shared)" : "");
        if (module->num_ranks > 1) {
            fprintf(file, "ranks %d to %d\n", module->first_rank,
                    module->first_rank + module->num_ranks - 1);
        } else {
            fprintf(file, "rank %d\n", module->first_rank);
        }
    }
}

const char *layout_text_inputs(const JobSpec *spec)
{
    bool has_images = job_spec_module(spec, "vision") != NULL;
    bool has_clips = job_spec_module(spec, "audio") != NULL;
    if (has_images) {
        return has_clips ? "images and clips" : "images";
    }
    return has_clips ? "clips" : "";
}

bool layout_text_has_encoder_pool(const JobSpec *spec)
{
    for (size_t i = 0; i < spec->n_pools; i++) {
        if (strcmp(spec->pools[i]->role, "encoder") == 0) {
            return true;
        }
    }
    return false;
}
