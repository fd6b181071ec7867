#include "cli/job_input.h"

#include "job/job_file.h"

#include <ctype.h>
#include <string.h>

enum {
    PROBLEMS_MAX = 64
};

static ExitCode check(const char *path, const JobSpec *spec)
{
    JobProblem problems[PROBLEMS_MAX];
    int count = job_spec_check(spec, problems, PROBLEMS_MAX);
    if (count == 0) {
        return EXIT_CODE_OK;
    }
    fprintf(stderr, "viaduct: %s: the job has %d problem%s:\n", path, count, count == 1 ? "" : "s");
    for (int i = 0; i < count && i < PROBLEMS_MAX; i++) {
        fprintf(stderr, "  %s: %s\n", problems[i].field, problems[i].message);
    }
    return EXIT_CODE_USAGE;
}

ExitCode job_input_read(const char *path, const ConfigList *settings, JobSpec **spec_out)
{
    JobSpec *spec = NULL;
    Status status = job_file_read(path, &spec);
    for (int i = 0; status == STATUS_OK && i < settings->count; i++) {
        status = job_file_set(spec, settings->items[i]);
    }
    if (status == STATUS_OK) {
        status = job_spec_resolve(spec);
    }
    ExitCode code = status == STATUS_OK ? check(path, spec) : verbs_fail_status(status);
    if (code == EXIT_CODE_OK) {
        *spec_out = spec;
    } else {
        viaduct__v1__job_spec__free_unpacked(spec, NULL);
    }
    return code;
}

/* The part of a path that says most: the file's name, or its folder's where files are just called
 * job.yaml. */
static const char *telling_part(const char *path)
{
    const char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    if (!slash || slash == path || strncmp(name, "job.", 4) != 0) {
        return name;
    }
    const char *folder = slash;
    while (folder > path && folder[-1] != '/') {
        folder--;
    }
    return isalpha((unsigned char)*folder) ? folder : name;
}

void job_input_id(const char *path, char *id_out, size_t size)
{
    size_t used = 0;
    for (const char *c = telling_part(path);
         *c && !strchr("./", *c) && used + 1 < size && used < 40; c++) {
        bool is_good = isalnum((unsigned char)*c) && (unsigned char)*c < 0x80;
        char put = '-';
        if (is_good) {
            put = (char)tolower((unsigned char)*c);
        }
        bool is_letter = put >= 'a' && put <= 'z';
        if (used > 0 || is_letter) {
            id_out[used++] = put;
        }
    }
    while (used > 0 && id_out[used - 1] == '-') {
        used--;
    }
    id_out[used] = '\0';
    if (used == 0) {
        snprintf(id_out, size, "job");
    }
}
