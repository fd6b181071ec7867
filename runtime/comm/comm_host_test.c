/* The host backend among processes: killed peers, strangers at the port, members that do not come,
 * hosts that share no memory. */
#include "base/clock.h"
#include "base/memory.h"
#include "comm/comm_host.h"
#include "comm/endpoint.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    NUM_RANKS = 4,
    VICTIM = 2,
    REPORT_MS = 30000,
};

/* What a child tells its parent: its address first, then how far it is and what it saw. */
typedef struct Report {
    char address[80];
    int rank;
    Status status;
    int64_t seen_ns;
    char message[600];
} Report;

typedef struct Child {
    pid_t pid;
    int from; /* pipe: reports of the child */
    int to;   /* pipe: all addresses */
} Child;

/* Where and how a rank runs. */
typedef struct Job {
    int rank;
    int num_ranks;
    bool tcp_only;
    const char *address;
    const char *namespace_name; /* network namespace; NULL: the test's own */
    CommEndpoint *endpoint;
    Comm *comm;
} Job;

static void send_report(int fd, const Job *job, Status status)
{
    Report report = {.rank = job->rank, .status = status, .seen_ns = clock_now_ns()};
    if (job->endpoint) {
        snprintf(report.address, sizeof report.address, "%s", comm_endpoint_address(job->endpoint));
    }
    snprintf(report.message, sizeof report.message, "%s", status_message());
    if (write(fd, &report, sizeof report) != sizeof report) {
        _exit(3);
    }
}

/* A child: opens its endpoint, joins the world, and does the same sums as all others until
 * something happens. */
static void child_run(Job *job, int to_parent, int from_parent)
{
    alarm(60);
    if (job->namespace_name) {
        char path[128];
        snprintf(path, sizeof path, "/var/run/netns/%s", job->namespace_name);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || setns(fd, CLONE_NEWNET) != 0) {
            _exit(4);
        }
    }
    Status status = comm_endpoint_open(job->address, &job->endpoint);
    send_report(to_parent, job, status);
    char addresses[NUM_RANKS][80];
    const char *members[NUM_RANKS];
    if (read(from_parent, addresses, sizeof addresses) != sizeof addresses) {
        _exit(2);
    }
    for (int i = 0; i < NUM_RANKS; i++) {
        members[i] = addresses[i];
    }
    CommHostWorld options = {.addresses = members,
                             .size = job->num_ranks,
                             .rank = job->rank,
                             .key = 99,
                             .timeout_ms = 30000,
                             .connect_timeout_ms = 20000,
                             .tcp_only = job->tcp_only};
    status = comm_host_create(job->endpoint, &options, &job->comm);
    float data[3000];
    for (int i = 0; status == STATUS_OK && i < 20; i++) {
        for (int k = 0; k < 3000; k++) {
            data[k] = (float)(job->rank + k);
        }
        status = comm_all_reduce(job->comm, data, 3000, DTYPE_F32, COMM_REDUCE_SUM, NULL);
        if (status == STATUS_OK && data[2999] != 4 * 2999 + 6) {
            status = STATUS_INTERNAL;
        }
    }
    send_report(to_parent, job, status);
    if (job->rank == VICTIM) {
        pause();
    }
    if (status == STATUS_OK) {
        status = comm_all_reduce(job->comm, data, 3000, DTYPE_F32, COMM_REDUCE_SUM, NULL);
    }
    send_report(to_parent, job, status);
    comm_destroy(job->comm);
    comm_endpoint_close(job->endpoint);
    _exit(0);
}

static void start_child(Child *children, Job job)
{
    int rank = job.rank;
    int up[2];
    int down[2];
    assert_int_equal(pipe(up), 0);
    assert_int_equal(pipe(down), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        child_run(&job, up[1], down[0]);
    }
    close(up[1]);
    close(down[0]);
    children[rank] = (Child){.pid = pid, .from = up[0], .to = down[1]};
}

static Report read_report(const Child *child)
{
    Report report;
    assert_true(address_wait(child->from, POLLIN, clock_deadline_in_ms(REPORT_MS)));
    assert_int_equal(read(child->from, &report, sizeof report), sizeof report);
    return report;
}

static int count_files(const char *path)
{
    DIR *folder = opendir(path);
    int count = 0;
    while (folder && readdir(folder)) {
        count++;
    }
    if (folder) {
        closedir(folder);
    }
    return count;
}

/* Four processes; one is killed while the others wait for it in a sum. */
static void kill_one(const Job *jobs)
{
    int files_before = count_files("/dev/shm");
    Child children[NUM_RANKS];
    char addresses[NUM_RANKS][80];
    for (int rank = 0; rank < NUM_RANKS; rank++) {
        start_child(children, jobs[rank]);
    }
    for (int rank = 0; rank < NUM_RANKS; rank++) {
        Report report = read_report(&children[rank]);
        assert_int_equal(report.status, STATUS_OK);
        snprintf(addresses[rank], sizeof addresses[rank], "%s", report.address);
    }
    for (int rank = 0; rank < NUM_RANKS; rank++) {
        assert_int_equal(write(children[rank].to, addresses, sizeof addresses), sizeof addresses);
    }
    for (int rank = 0; rank < NUM_RANKS; rank++) {
        Report report = read_report(&children[rank]);
        if (report.status != STATUS_OK) {
            fail_msg("rank %d: %s", rank, report.message);
        }
    }
    /* Enough for the others to be asleep in the sum that waits for the victim; it is right without,
     * too. */
    (void)address_wait(children[VICTIM].from, POLLIN, clock_deadline_in_ms(30));
    int64_t killed_ns = clock_now_ns();
    assert_int_equal(kill(children[VICTIM].pid, SIGKILL), 0);
    for (int rank = 0; rank < NUM_RANKS; rank++) {
        if (rank != VICTIM) {
            Report report = read_report(&children[rank]);
            assert_int_equal(report.status, STATUS_PEER_LOST);
            assert_non_null(strstr(report.message, "rank 2"));
            assert_non_null(strstr(report.message, addresses[VICTIM]));
            assert_non_null(strstr(report.message, "all_reduce on 'world'"));
            assert_true(report.seen_ns - killed_ns < CLOCK_NS_PER_S / 2);
            printf("rank %d saw it after %.2f ms\n", rank,
                   (double)(report.seen_ns - killed_ns) / 1e6);
        }
    }
    for (int rank = 0; rank < NUM_RANKS; rank++) {
        int status = 0;
        assert_int_equal(waitpid(children[rank].pid, &status, 0), children[rank].pid);
        assert_true(rank == VICTIM ? WIFSIGNALED(status)
                                   : WIFEXITED(status) && WEXITSTATUS(status) == 0);
        close(children[rank].from);
        close(children[rank].to);
    }
    assert_int_equal(count_files("/dev/shm"), files_before);
}

static void kill_one_here(int num_tcp_only)
{
    Job jobs[NUM_RANKS];
    for (int rank = 0; rank < NUM_RANKS; rank++) {
        jobs[rank] = (Job){.rank = rank,
                           .num_ranks = NUM_RANKS,
                           .tcp_only = rank >= NUM_RANKS - num_tcp_only,
                           .address = "127.0.0.1:0"};
    }
    kill_one(jobs);
}

static void test_killed_peer_shared_memory(void **state)
{
    (void)state;
    kill_one_here(0);
}

static void test_killed_peer_tcp(void **state)
{
    (void)state;
    kill_one_here(NUM_RANKS);
}

/* Ranks 0 and 1 share memory; 2, which dies, and 3 are reached over TCP. */
static void test_killed_peer_mixed(void **state)
{
    (void)state;
    kill_one_here(2);
}

/* Runs a command of iproute2 quietly. */
static bool run_ip(const char *format, const char *first, const char *second)
{
    char command[256];
    char arguments[160];
    snprintf(arguments, sizeof arguments, format, first, second);
    snprintf(command, sizeof command, "ip %s >/dev/null 2>&1", arguments);
    return system(command) == 0;
}

/* Two hosts made of network namespaces with a cable between them: ranks 0, 2 on one, 1, 3 on the
 * other. */
static void test_killed_peer_two_hosts(void **state)
{
    (void)state;
    char hosts[2][32];
    for (int i = 0; i < 2; i++) {
        snprintf(hosts[i], sizeof hosts[i], "commtest%d%c", (int)getpid(), 'a' + i);
    }
    bool is_made =
        run_ip("netns add %s", hosts[0], "") && run_ip("netns add %s", hosts[1], "") &&
        run_ip("-n %s link add c0 type veth peer name c0 netns %s", hosts[0], hosts[1]) &&
        run_ip("-n %s addr add 10.213.7.1/24 dev c0", hosts[0], "") &&
        run_ip("-n %s addr add 10.213.7.2/24 dev c0", hosts[1], "") &&
        run_ip("-n %s link set c0 up", hosts[0], "") &&
        run_ip("-n %s link set c0 up", hosts[1], "") &&
        run_ip("-n %s link set lo up", hosts[0], "") &&
        run_ip("-n %s link set lo up", hosts[1], "");
    if (is_made) {
        Job jobs[NUM_RANKS];
        for (int rank = 0; rank < NUM_RANKS; rank++) {
            jobs[rank] = (Job){.rank = rank,
                               .num_ranks = NUM_RANKS,
                               .address = rank % 2 ? "10.213.7.2:0" : "10.213.7.1:0",
                               .namespace_name = hosts[rank % 2]};
        }
        kill_one(jobs);
    }
    (void)run_ip("netns del %s", hosts[0], "");
    (void)run_ip("netns del %s", hosts[1], "");
    if (!is_made) {
        skip(); /* no right to make namespaces, or no iproute2 */
    }
}

typedef struct Joiner {
    CommEndpoint *endpoint;
    CommHostWorld options;
    Comm *comm;
    Status status;
    char message[600];
    pthread_t thread;
} Joiner;

static void *join_run(void *argument)
{
    Joiner *joiner = argument;
    joiner->status = comm_host_create(joiner->endpoint, &joiner->options, &joiner->comm);
    snprintf(joiner->message, sizeof joiner->message, "%s", status_message());
    return NULL;
}

static void start_joiner(Joiner *joiner)
{
    assert_int_equal(pthread_create(&joiner->thread, NULL, join_run, joiner), 0);
}

/* Two endpoints, and the world of both as each sees it. */
static void open_pair(Joiner joiners[2], const char *addresses[2])
{
    for (int rank = 0; rank < 2; rank++) {
        joiners[rank] = (Joiner){0};
        assert_int_equal(comm_endpoint_open("127.0.0.1:0", &joiners[rank].endpoint), STATUS_OK);
        addresses[rank] = comm_endpoint_address(joiners[rank].endpoint);
        joiners[rank].options = (CommHostWorld){.addresses = addresses,
                                                .size = 2,
                                                .rank = rank,
                                                .key = 5,
                                                .timeout_ms = 20000,
                                                .connect_timeout_ms = 20000};
    }
}

static void close_pair(Joiner joiners[2])
{
    for (int rank = 0; rank < 2; rank++) {
        comm_endpoint_close(joiners[rank].endpoint);
    }
}

/* Each side alone finds out who is missing, within its time. */
static void test_missing_member(void **state)
{
    (void)state;
    Joiner joiners[2];
    const char *addresses[2];
    open_pair(joiners, addresses);
    for (int rank = 0; rank < 2; rank++) {
        joiners[rank].options.connect_timeout_ms = 100;
        start_joiner(&joiners[rank]);
        pthread_join(joiners[rank].thread, NULL);
        assert_int_equal(joiners[rank].status, STATUS_TIMEOUT);
        assert_non_null(strstr(joiners[rank].message, addresses[1 - rank]));
    }
    close_pair(joiners);
}

/* The same key with another list of members is refused at once; another key (an old epoch) is not
 * answered. */
static void test_wrong_members(void **state)
{
    (void)state;
    Joiner joiners[2];
    const char *addresses[2];
    open_pair(joiners, addresses);
    const char *others[3] = {addresses[0], addresses[1], "127.0.0.1:9"};
    joiners[1].options.addresses = others;
    joiners[1].options.size = 3;
    joiners[0].options.connect_timeout_ms = 1000;
    start_joiner(&joiners[0]);
    start_joiner(&joiners[1]);
    pthread_join(joiners[1].thread, NULL);
    pthread_join(joiners[0].thread, NULL);
    assert_int_equal(joiners[1].status, STATUS_CONFLICT);
    assert_int_equal(joiners[0].status, STATUS_TIMEOUT);
    close_pair(joiners);
    open_pair(joiners, addresses);
    for (int rank = 0; rank < 2; rank++) {
        joiners[rank].options.key = 6 + (uint64_t)rank;
        joiners[rank].options.connect_timeout_ms = 100;
        start_joiner(&joiners[rank]);
    }
    for (int rank = 0; rank < 2; rank++) {
        pthread_join(joiners[rank].thread, NULL);
        assert_int_equal(joiners[rank].status, STATUS_TIMEOUT);
    }
    close_pair(joiners);
}

static void test_bad_addresses(void **state)
{
    (void)state;
    CommEndpoint *endpoint = NULL;
    assert_int_equal(comm_endpoint_open("127.0.0.1", &endpoint), STATUS_INVALID);
    assert_int_equal(comm_endpoint_open(":80", &endpoint), STATUS_INVALID);
    assert_int_equal(comm_endpoint_open("::1:80", &endpoint), STATUS_INVALID);
    assert_int_equal(comm_endpoint_open("127.0.0.1:no", &endpoint), STATUS_INVALID);
    assert_int_equal(comm_endpoint_open("0.0.0.0:0", &endpoint), STATUS_INVALID);
    assert_null(endpoint);
    assert_int_equal(comm_endpoint_open("127.0.0.1:0", &endpoint), STATUS_OK);
    CommEndpoint *second = NULL;
    assert_int_equal(comm_endpoint_open(comm_endpoint_address(endpoint), &second), STATUS_CONFLICT);
    Comm *comm = NULL;
    const char *twice[] = {comm_endpoint_address(endpoint), comm_endpoint_address(endpoint)};
    CommHostWorld options = {.addresses = twice, .size = 2, .key = 1};
    assert_int_equal(comm_host_create(endpoint, &options, &comm), STATUS_INVALID);
    const char *wrong[] = {"127.0.0.1:9", comm_endpoint_address(endpoint)};
    options.addresses = wrong;
    assert_int_equal(comm_host_create(endpoint, &options, &comm), STATUS_INVALID);
    comm_endpoint_close(endpoint);
}

/* IPv6 addresses need brackets; skipped where the machine has no IPv6. */
static void test_ipv6(void **state)
{
    (void)state;
    CommEndpoint *endpoint = NULL;
    if (comm_endpoint_open("[::1]:0", &endpoint) != STATUS_OK) {
        skip();
    }
    assert_true(strncmp(comm_endpoint_address(endpoint), "[::1]:", 6) == 0);
    Comm *comm = NULL;
    const char *addresses[] = {comm_endpoint_address(endpoint)};
    CommHostWorld options = {.addresses = addresses, .size = 1, .key = 1, .timeout_ms = 1000};
    assert_int_equal(comm_host_create(endpoint, &options, &comm), STATUS_OK);
    assert_int_equal(comm_barrier(comm, NULL), STATUS_OK);
    comm_destroy(comm);
    comm_endpoint_close(endpoint);
}

static int stranger(const char *address_text, const void *data, size_t data_bytes)
{
    Address address;
    assert_int_equal(address_parse(address_text, &address), STATUS_OK);
    int fd = address_connect_tcp(&address, clock_deadline_in_ms(2000));
    assert_true(fd >= 0);
    assert_int_equal(send(fd, data, data_bytes, MSG_NOSIGNAL), data_bytes);
    return fd;
}

/* The endpoint ends the connection. */
static void expect_cut_off(int fd)
{
    char answer[256];
    ssize_t received = 1;
    while (received > 0) {
        assert_true(address_wait(fd, POLLIN, clock_deadline_in_ms(10000)));
        received = recv(fd, answer, sizeof answer, 0);
    }
    close(fd);
}

static void *use_run(void *argument)
{
    Joiner *joiner = argument;
    join_run(joiner);
    for (int i = 0; joiner->status == STATUS_OK && i < 300; i++) {
        double sum = 1;
        joiner->status = comm_all_reduce(joiner->comm, &sum, 1, DTYPE_F64, COMM_REDUCE_SUM, NULL);
    }
    return NULL;
}

/* Garbage, a half Hello, silence, and a good Hello that is nobody's: more of them than the endpoint
 * keeps, while a world connects and works. */
static void test_strangers(void **state)
{
    (void)state;
    enum {
        NUM_SILENT = 80
    };
    Joiner joiners[2];
    const char *addresses[2];
    open_pair(joiners, addresses);
    joiners[1].options.tcp_only = true;
    int silent[NUM_SILENT];
    for (int i = 0; i < NUM_SILENT; i++) {
        silent[i] = stranger(addresses[0], "", 0);
    }
    /* The oldest makes room for others long before its time to say Hello is over. */
    int64_t begin_ns = clock_now_ns();
    expect_cut_off(silent[0]);
    assert_true(clock_now_ns() - begin_ns < 3 * CLOCK_NS_PER_S / 2);
    for (int rank = 0; rank < 2; rank++) {
        assert_int_equal(pthread_create(&joiners[rank].thread, NULL, use_run, &joiners[rank]), 0);
    }
    Hello hello = {.magic = HELLO_MAGIC, .version = HELLO_VERSION, .lane = 77, .key = 5, .from = 1};
    for (int i = 0; i < 20; i++) {
        expect_cut_off(stranger(addresses[i % 2], "GET / HTTP/1.1\r\n\r\n", 18));
        hello.from = i - 10;
        hello.lane = 77 - i * 30;
        expect_cut_off(stranger(addresses[i % 2], &hello, sizeof hello));
        hello.version = (uint32_t)i + 2;
        expect_cut_off(stranger(addresses[i % 2], &hello, sizeof hello));
        hello.version = HELLO_VERSION;
        close(stranger(addresses[i % 2], &hello, sizeof hello / 2));
    }
    for (int rank = 0; rank < 2; rank++) {
        pthread_join(joiners[rank].thread, NULL);
        assert_int_equal(joiners[rank].status, STATUS_OK);
    }
    /* Also those that say nothing are cut off in the end. */
    for (int i = 1; i < NUM_SILENT; i++) {
        expect_cut_off(silent[i]);
    }
    for (int rank = 0; rank < 2; rank++) {
        comm_destroy(joiners[rank].comm);
    }
    close_pair(joiners);
}

/* Two worlds of different epochs live side by side on the same endpoints; the end of one does not
 * touch the other. */
static void test_two_worlds(void **state)
{
    (void)state;
    Joiner joiners[2];
    const char *addresses[2];
    open_pair(joiners, addresses);
    Joiner later[2] = {joiners[0], joiners[1]};
    for (int rank = 0; rank < 2; rank++) {
        later[rank].options.key = 6;
        start_joiner(&joiners[rank]);
        start_joiner(&later[rank]);
    }
    for (int rank = 0; rank < 2; rank++) {
        pthread_join(joiners[rank].thread, NULL);
        pthread_join(later[rank].thread, NULL);
        assert_int_equal(joiners[rank].status, STATUS_OK);
        assert_int_equal(later[rank].status, STATUS_OK);
    }
    comm_abort(joiners[0].comm, "old epoch");
    comm_destroy(joiners[0].comm);
    comm_destroy(joiners[1].comm);
    char byte = 7;
    CommTransfer send = {1, true, &byte, 1, 0};
    CommTransfer receive = {0, false, &byte, 1, 0};
    assert_int_equal(comm_exchange(later[0].comm, &send, 1, NULL), STATUS_OK);
    assert_int_equal(comm_exchange(later[1].comm, &receive, 1, NULL), STATUS_OK);
    comm_destroy(later[0].comm);
    comm_destroy(later[1].comm);
    close_pair(joiners);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_killed_peer_shared_memory),
        cmocka_unit_test(test_killed_peer_tcp),
        cmocka_unit_test(test_killed_peer_mixed),
        cmocka_unit_test(test_killed_peer_two_hosts),
        cmocka_unit_test(test_missing_member),
        cmocka_unit_test(test_wrong_members),
        cmocka_unit_test(test_bad_addresses),
        cmocka_unit_test(test_ipv6),
        cmocka_unit_test(test_strangers),
        cmocka_unit_test(test_two_worlds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
