/* viaduct-coordinator: the server that users and workers talk to. */
#include "base/clock.h"
#include "base/config.h"
#include "base/log.h"
#include "coordinator/service.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

enum {
    EXIT_USAGE = 2,
    GRACE_MS = 2000
};

typedef struct Program {
    const char *listen;
    int64_t lease_ms;
    int64_t heartbeat_ms;
    bool verbose;
    uv_loop_t loop;
    uv_signal_t signals[2];
    Rpc *rpc;
    Store *store;
    Service *service;
    bool is_stopping;
} Program;

static void on_service_done(void *context)
{
    Program *program = context;
    for (int i = 0; i < 2; i++) {
        uv_close((uv_handle_t *)&program->signals[i], NULL);
    }
    uv_stop(&program->loop); /* the rpc's own handle would keep it alive */
}

static void on_signal(uv_signal_t *handle, int number)
{
    Program *program = handle->data;
    if (!program->is_stopping) {
        program->is_stopping = true;
        log_info("signal %d: stopping", number);
        service_shutdown(program->service, GRACE_MS, on_service_done, program);
    }
}

static Status start(Program *program)
{
    uint64_t seed = 0;
    if (getrandom(&seed, sizeof seed, 0) != (ssize_t)sizeof seed) {
        return fail(STATUS_IO, "the system gives no random numbers");
    }
    int64_t now_ms = clock_now_ns() / CLOCK_NS_PER_MS;
    const ServiceOptions options = {
        .address = program->listen,
        .store = program->store,
        .cluster = {.lease_ms = program->lease_ms,
                    .heartbeat_ms = program->heartbeat_ms,
                    .settle_ms = program->heartbeat_ms + 500,
                    .wall_offset_ms = clock_wall_ns() / CLOCK_NS_PER_MS - now_ms,
                    .seed = seed},
    };
    TRY(service_create(&program->loop, program->rpc, &options, &program->service));
    static const int numbers[] = {SIGTERM, SIGINT};
    for (int i = 0; i < 2; i++) {
        program->signals[i].data = program;
        CHECK(uv_signal_init(&program->loop, &program->signals[i]) == 0);
        CHECK(uv_signal_start(&program->signals[i], on_signal, numbers[i]) == 0);
    }
    return STATUS_OK;
}

static Status run(Program *program)
{
    CHECK(uv_loop_init(&program->loop) == 0);
    TRY(store_open_memory(&program->store));
    Status status = rpc_create(&program->loop, &program->rpc);
    if (status == STATUS_OK) {
        status = start(program);
    }
    if (status == STATUS_OK) {
        const char *colon = strrchr(program->listen, ':');
        int port = service_port(program->service);
        log_info("listening on %s, port %d", program->listen, port);
        /* Data for whoever started this program with port 0. */
        printf("%.*s:%d\n", colon ? (int)(colon - program->listen) : 0, program->listen, port);
        fflush(stdout);
        uv_run(&program->loop, UV_RUN_DEFAULT);
    }
    if (program->rpc) {
        rpc_destroy(program->rpc);
    }
    uv_run(&program->loop, UV_RUN_DEFAULT);
    store_close(program->store);
    int closed = uv_loop_close(&program->loop);
    CHECK(status != STATUS_OK || closed == 0);
    return status;
}

static bool check_times(const Program *program)
{
    bool is_good = program->heartbeat_ms >= 10 && 3 * program->heartbeat_ms <= program->lease_ms &&
                   program->lease_ms <= 600000;
    if (!is_good) {
        fprintf(stderr,
                "viaduct-coordinator: --heartbeat-ms is %" PRId64 " and --lease-ms %" PRId64
                ", expected 10 <= heartbeat, 3 * heartbeat <= lease <= 600000\n",
                program->heartbeat_ms, program->lease_ms);
    }
    return is_good;
}

int main(int argc, char **argv)
{
    Program program = {.listen = "127.0.0.1:7070", .lease_ms = 10000, .heartbeat_ms = 1000};
    const ConfigFlag flags[] = {
        {"listen", 0, CONFIG_KIND_TEXT, &program.listen, "HOST:PORT", "VIADUCT_LISTEN",
         "where users and workers reach it; port 0 picks one, printed on standard output "
         "(default 127.0.0.1:7070)"},
        {"lease-ms", 0, CONFIG_KIND_INTEGER, &program.lease_ms, "N", NULL,
         "a worker silent for so long is lost (default 10000)"},
        {"heartbeat-ms", 0, CONFIG_KIND_INTEGER, &program.heartbeat_ms, "N", NULL,
         "how often workers say that they live (default 1000)"},
        {"verbose", 'v', CONFIG_KIND_SWITCH, &program.verbose, NULL, NULL, "log more"},
    };
    const ConfigCommand command = {
        "viaduct-coordinator [flags]",
        "Accepts jobs and workers over gRPC and decides who runs what. Without TLS yet: listen on "
        "loopback\nor a private network. SIGTERM stops it.",
        flags,
        sizeof flags / sizeof *flags,
        0,
        0};
    ConfigList rest;
    bool help = false;
    if (config_parse(&command, argc, (const char *const *)argv, &rest, &help) != STATUS_OK) {
        fprintf(stderr, "viaduct-coordinator: %s\n", status_message());
        return EXIT_USAGE;
    }
    if (help) {
        config_print_help(&command, stdout);
        return EXIT_SUCCESS;
    }
    if (!check_times(&program)) {
        return EXIT_USAGE;
    }
    log_set_role("coordinator");
    log_set_level(program.verbose ? LOG_LEVEL_DEBUG : LOG_LEVEL_INFO);
    Status status = run(&program);
    if (status != STATUS_OK) {
        log_error("%s: %s [%s]", status_name(status), status_message(), status_trail());
        return EXIT_FAILURE;
    }
    return EXIT_SUCCESS;
}
