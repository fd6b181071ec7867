#include "base/config.h"
#include "cli/job_input.h"
#include "cli/watch.h"

#include <inttypes.h>
#include <stdio.h>
#include <sys/random.h>

typedef struct SubmitFlags {
    const char *coordinator;
    const char *file;
    const char *id;
    const char *resume_from;
    ConfigList settings;
    bool wait;
    bool validate_only;
    int64_t timeout_s;
} SubmitFlags;

static ExitCode send_job(Session *session, const SubmitFlags *values, JobSpec *spec, char *name_out,
                         size_t size)
{
    Viaduct__V1__CreateJobRequest request = VIADUCT__V1__CREATE_JOB_REQUEST__INIT;
    Viaduct__V1__Job job = VIADUCT__V1__JOB__INIT;
    char request_id[40];
    uint64_t random[2];
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random) {
        fprintf(stderr, "viaduct: the system gives no random numbers\n");
        return EXIT_CODE_FAILED;
    }
    snprintf(request_id, sizeof request_id, "%016" PRIx64 "%016" PRIx64, random[0], random[1]);
    job.spec = spec;
    request.job = &job;
    request.job_id = (char *)values->id;
    request.request_id = request_id;
    request.validate_only = values->validate_only;
    request.resume_from = (char *)values->resume_from;
    ProtobufCMessage *response = NULL;
    RpcError error = session_call(session, SESSION_JOBS, "CreateJob", &request.base, &response);
    if (error.code != RPC_CODE_OK) {
        return verbs_fail_call(values->coordinator, &error);
    }
    snprintf(name_out, size, "%s", ((const Viaduct__V1__Job *)response)->name);
    protobuf_c_message_free_unpacked(response, NULL);
    return EXIT_CODE_OK;
}

static ExitCode submit(const SubmitFlags *values, JobSpec *spec)
{
    Session session;
    session_init(&session);
    char name[96];
    Status status = session_connect(&session, values->coordinator);
    ExitCode code = status == STATUS_OK ? send_job(&session, values, spec, name, sizeof name)
                                        : verbs_fail_status(status);
    if (code == EXIT_CODE_OK && values->validate_only) {
        printf("the job is good\n");
    } else if (code == EXIT_CODE_OK) {
        printf("%s\n", name);
        fflush(stdout);
        if (values->wait) {
            code = watch_follow(&session, name, stderr, values->timeout_s * 1000);
        }
    }
    session_close(&session);
    return code;
}

ExitCode submit_verb(int argc, const char *const *argv)
{
    SubmitFlags values = {.coordinator = SESSION_DEFAULT, .file = "", .id = "", .resume_from = ""};
    const ConfigFlag flags[] = {
        SESSION_FLAG(&values.coordinator),
        {"file", 'f', CONFIG_KIND_TEXT, &values.file, "FILE", NULL, "the job, in YAML"},
        {"id", 0, CONFIG_KIND_TEXT, &values.id, "ID", NULL,
         "the job's name (default: the coordinator makes one)"},
        {"set", 0, CONFIG_KIND_LIST, &values.settings, "FIELD=VALUE", NULL,
         "changes one field, such as training.steps=100; may be repeated"},
        {"resume-from", 0, CONFIG_KIND_TEXT, &values.resume_from, "DIRECTORY", NULL,
         "start from this checkpoint"},
        {"wait", 0, CONFIG_KIND_SWITCH, &values.wait, NULL, NULL, "follow the job to its end"},
        {"timeout", 0, CONFIG_KIND_INTEGER, &values.timeout_s, "SECONDS", NULL,
         "with --wait: stop waiting after so long, with exit status 6"},
        {"validate-only", 0, CONFIG_KIND_SWITCH, &values.validate_only, NULL, NULL,
         "let the coordinator check the job, run nothing"},
    };
    const ConfigCommand command = {"viaduct submit -f FILE [flags]",
                                   "Gives a job to a coordinator and prints its name.",
                                   flags,
                                   sizeof flags / sizeof *flags,
                                   0,
                                   0};
    ConfigList rest;
    bool help = false;
    Status status = config_parse(&command, argc, argv, &rest, &help);
    if (status == STATUS_OK && !help && !values.file[0]) {
        status = fail(STATUS_INVALID, "no job given; usage: %s", command.usage);
    }
    if (status != STATUS_OK) {
        return verbs_fail_status(status);
    }
    if (help) {
        config_print_help(&command, stdout);
        return EXIT_CODE_OK;
    }
    JobSpec *spec = NULL;
    ExitCode code = job_input_read(values.file, &values.settings, &spec);
    if (code == EXIT_CODE_OK) {
        code = submit(&values, spec);
        viaduct__v1__job_spec__free_unpacked(spec, NULL);
    }
    return code;
}
