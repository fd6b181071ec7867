#include "train/worker_main.h"

#include "base/log.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    EXIT_USAGE = 2
};

typedef struct Flags {
    const char *coordinator;
    const char *name;
    const char *listen;
    const char *device;
    ConfigList labels;
    bool verbose;
} Flags;

static Status serve(const WorkerProgram *program, const Flags *flags)
{
    static const WorkerEngine engine = {comm_host_create, trainer_create, trainer_run, trainer_stop,
                                        trainer_destroy};
    CommEndpoint *endpoint = NULL;
    TRY(comm_endpoint_open(flags->listen, &endpoint));
    const WorkerOptions options = {
        .role = program->role,
        .name = flags->name,
        .coordinator = flags->coordinator,
        .data_address = comm_endpoint_address(endpoint),
        .device = flags->device,
        .labels = flags->labels,
        .engine = &engine,
        .endpoint = endpoint,
        .modules = program->modules,
        .num_modules = program->num_modules,
    };
    log_info("version %s, data plane at %s", VIADUCT_VERSION, options.data_address);
    Status status = worker_loop_run(&options);
    comm_endpoint_close(endpoint);
    return status;
}

int worker_main(const WorkerProgram *program, int argc, char **argv)
{
    char host[64] = "";
    if (gethostname(host, sizeof host - 1) != 0) {
        snprintf(host, sizeof host, "%s-0", program->role);
    }
    Flags values = {
        .coordinator = "127.0.0.1:7070", .name = host, .listen = "127.0.0.1:0", .device = "cpu"};
    const ConfigFlag flags[] = {
        {"coordinator", 0, CONFIG_KIND_TEXT, &values.coordinator, "HOST:PORT",
         "VIADUCT_COORDINATOR", "the coordinator to serve (default 127.0.0.1:7070)"},
        {"name", 0, CONFIG_KIND_TEXT, &values.name, "NAME", "VIADUCT_WORKER_NAME",
         "a stable name, unlike any other worker's (default: the host's name)"},
        {"listen", 0, CONFIG_KIND_TEXT, &values.listen, "HOST:PORT", "VIADUCT_LISTEN",
         "where peers reach this worker's data plane; port 0 picks one (default 127.0.0.1:0)"},
        {"label", 'l', CONFIG_KIND_LIST, &values.labels, "KEY=VALUE", NULL,
         "a label for the selectors of pools; may be repeated"},
        {"device", 0, CONFIG_KIND_TEXT, &values.device, "NAME", NULL,
         "where the tensors live: cpu (default cpu)"},
        {"verbose", 'v', CONFIG_KIND_SWITCH, &values.verbose, NULL, NULL, "log more"},
    };
    char usage[96];
    snprintf(usage, sizeof usage, "%s [flags]", program->name);
    const ConfigCommand command = {usage, program->about, flags, sizeof flags / sizeof *flags, 0,
                                   0};
    ConfigList rest;
    bool help = false;
    if (config_parse(&command, argc, (const char *const *)argv, &rest, &help) != STATUS_OK) {
        fprintf(stderr, "%s: %s\n", program->name, status_message());
        return EXIT_USAGE;
    }
    if (help) {
        config_print_help(&command, stdout);
        return EXIT_SUCCESS;
    }
    log_set_role(values.name);
    log_set_level(values.verbose ? LOG_LEVEL_DEBUG : LOG_LEVEL_INFO);
    signal(SIGPIPE, SIG_IGN); /* a peer that is gone is an error of the write, not the end */
    Status status = serve(program, &values);
    if (status != STATUS_OK) {
        log_error("%s: %s [%s]", status_name(status), status_message(), status_trail());
        return EXIT_FAILURE;
    }
    return EXIT_SUCCESS;
}
