/* A client that shares no line with ours, gRPC's Python library, against a server of ours. */
#include "rpc/health.h"

#include <stdio.h>
#include <string.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    TIMEOUT_MS = 60000,
    EXIT_SKIPPED = 77
};

typedef struct Child {
    uv_process_t process;
    bool is_over;
    int64_t status;
    int signal;
} Child;

static void on_exit_of_child(uv_process_t *process, int64_t status, int signal)
{
    Child *child = process->data;
    child->is_over = true;
    child->status = status;
    child->signal = signal;
    uv_close((uv_handle_t *)process, NULL);
}

static void on_timeout(uv_timer_t *timer)
{
    Child *child = timer->data;
    uv_process_kill(&child->process, SIGKILL);
}

/* Runs the script against `target`; its standard error is ours. */
static Child run_script(uv_loop_t *loop, const char *script, char *target)
{
    Child child = {.process.data = &child};
    char *arguments[] = {(char *)"/usr/bin/python3", (char *)script, target, NULL};
    uv_stdio_container_t streams[3] = {{.flags = UV_IGNORE},
                                       {.flags = UV_INHERIT_FD, .data.fd = 2},
                                       {.flags = UV_INHERIT_FD, .data.fd = 2}};
    uv_process_options_t options = {.exit_cb = on_exit_of_child,
                                    .file = arguments[0],
                                    .args = arguments,
                                    .stdio = streams,
                                    .stdio_count = 3};
    int error = uv_spawn(loop, &child.process, &options);
    if (error != 0) {
        fprintf(stderr, "skipped: %s: %s\n", arguments[0], uv_strerror(error));
        child.status = EXIT_SKIPPED;
        uv_close((uv_handle_t *)&child.process, NULL);
        uv_run(loop, UV_RUN_NOWAIT);
        return child;
    }
    uv_timer_t timer;
    uv_timer_init(loop, &timer);
    timer.data = &child;
    uv_timer_start(&timer, on_timeout, TIMEOUT_MS, 0);
    while (!child.is_over) {
        uv_run(loop, UV_RUN_ONCE);
    }
    uv_close((uv_handle_t *)&timer, NULL);
    uv_run(loop, UV_RUN_NOWAIT);
    return child;
}

static void on_server_done(void *context)
{
    *(bool *)context = true;
}

static void test_python(void **state)
{
    (void)state;
    uv_loop_t loop;
    Rpc *rpc = NULL;
    Health *health = NULL;
    RpcServer *server = NULL;
    assert_int_equal(uv_loop_init(&loop), 0);
    assert_int_equal(rpc_create(&loop, &rpc), STATUS_OK);
    assert_int_equal(health_create(&health), STATUS_OK);
    assert_int_equal(health_set(health, "", true), STATUS_OK);
    assert_int_equal(health_set(health, "down", false), STATUS_OK);
    RpcService service = health_service(health);
    RpcServerOptions options = {.address = "127.0.0.1:0", .services = &service, .num_services = 1};
    assert_int_equal(rpc_server_create(rpc, &options, &server), STATUS_OK);
    char target[32];
    snprintf(target, sizeof target, "127.0.0.1:%d", rpc_server_port(server));

    Child child = run_script(&loop, "../../tests/clients/rpc_health.py", target);

    bool is_done = false;
    rpc_server_shutdown(server, 0, on_server_done, &is_done);
    while (!is_done) {
        uv_run(&loop, UV_RUN_ONCE);
    }
    health_destroy(health);
    rpc_destroy(rpc);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&loop), 0);
    if (child.status == EXIT_SKIPPED) {
        skip();
    }
    assert_int_equal(child.signal, 0);
    assert_int_equal(child.status, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_python)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
