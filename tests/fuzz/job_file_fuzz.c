#include "job/job_file.h"
#include "job/job_spec.h"
#include "tests/fuzz/fuzz.h"

#include <string.h>

/* A job file is parsed, filled up and checked, as the command line and the coordinator do. */
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size_bytes)
{
    enum {
        PROBLEMS = 16
    };
    static JobProblem problems[PROBLEMS];
    JobSpec *spec = NULL;
    if (job_file_parse("fuzz.yaml", (const char *)bytes, size_bytes, &spec) != STATUS_OK) {
        CHECK(strncmp(status_message(), "fuzz.yaml", 9) == 0); /* it names the file */
        return 0;
    }
    if (job_spec_resolve(spec) == STATUS_OK) {
        int count = job_spec_check(spec, problems, PROBLEMS);
        CHECK(count >= 0);
    }
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
    return 0;
}

static const char *const seeds[] = {
    "model:\n  vision: {image_size: 64, patch_size: 16, width: 128, layers: 3, heads: 4}\n"
    "  llm:\n    width: 128\n    layers: 3\n    heads: 4\n    mlp_width: 384\n"
    "data:\n  train: [a.tar, 'b-*.tar']\n  prompt: \"<image>\\u00e4\"\n  tokenizer: BYTES\n"
    "modules:\n  - {name: vision, pool: e, dp: 2}\n  - {name: llm, pool: l, tp: 2}\n"
    "pools:\n  - {name: e, role: encoder, selector: {zone: north}}\n  - {name: l, role: llm}\n"
    "training: {steps: 300, global_batch: 32, seed: 18446744073709551615}\n",
    "# comment\noptimizer: {kind: ADAMW, learning_rate: 1e-3, max_grad_norm: 1.0}\n"
    "timeouts: {start: 5m, transfer: 1h30m, step: 1.5s, drain: 250ms}\npriority: -3\n"
    "checkpoint:\n  directory: &x out\n  every_steps: 10\nevaluation: {captions: 8}\n"
    "transport: TRANSPORT_HOST\n---\n"};

size_t fuzz_seed(int index, uint8_t *out)
{
    if (index >= (int)(sizeof seeds / sizeof *seeds)) {
        return 0;
    }
    memcpy(out, seeds[index], strlen(seeds[index]));
    return strlen(seeds[index]);
}
