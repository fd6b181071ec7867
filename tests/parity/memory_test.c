/* What each rank really allocates against what is accounted before the run; and that the peak does
 * not grow with the number of microbatches. */
#include "comm/comm_paper.h"
#include "tests/parity/parity_data.h"
#include "tests/parity/parity_job.h"

#include <math.h>
#include <stdio.h>
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

enum {
    SEED = 3,
    SAMPLES_A_MICROBATCH = 4,
    WIDENING = 8 /* the reshard's staging, which grows as it is needed, is small beside it */
};

static const double allowed = 0.1; /* of what was accounted */

typedef struct Peaks {
    int64_t bytes[PARITY_RANKS_MAX];
} Peaks;

static void keep_peak(ParityRank *rank, const TrainerStep *step)
{
    (void)step;
    Peaks *peaks = rank->run->context;
    peaks->bytes[rank->rank] = rank->device->peak_bytes;
}

static int64_t account(const JobSpec *spec, int rank, int num_ranks)
{
    Device *device = NULL;
    Comm *world = NULL;
    TrainerAccount account = {0};
    assert_int_equal(device_open("cpu", 0, &device), STATUS_OK);
    assert_int_equal(comm_paper_create(num_ranks, rank, "world", &world), STATUS_OK);
    const TrainerOptions options = {.spec = spec,
                                    .world = world,
                                    .device = device,
                                    .modules = parity_modules,
                                    .num_modules = parity_num_modules};
    if (trainer_account(&options, &account, NULL) != STATUS_OK) {
        fail_msg("rank %d: %s", rank, status_message());
    }
    assert_int_equal(device->allocated_bytes, 0);
    comm_destroy(world);
    device_close(device);
    return account.bytes;
}

/* Runs the job; fills the ranks' peaks and returns the worst difference from the accounts. */
static double run_job(const ParityOptions *options, Peaks *peaks, int *num_ranks)
{
    static ParityRank ranks[PARITY_RANKS_MAX];
    JobSpec *spec = parity_spec(options);
    ParityRun run = {.spec = spec, .visit = keep_peak, .context = peaks};
    parity_run(&run, ranks);
    parity_expect_good(&run, ranks, "memory");
    *num_ranks = parity_ranks(&run);
    double worst = 0;
    for (int i = 0; i < *num_ranks; i++) {
        double expected = (double)account(spec, i, *num_ranks);
        double difference = fabs((double)peaks->bytes[i] - expected) / expected;
        worst = difference > worst ? difference : worst;
    }
    viaduct__v1__job_spec__free_unpacked(spec, NULL);
    return worst;
}

static const ParityLayout layouts[] = {
    {.vision = {.dp = 2}, .llm = {.tp = 2}},
    {.vision = {.tp = 2, .recompute = "FULL"}, .llm = {.pp = 2, .recompute = "SELECTIVE"}},
    {.vision = {.cp = 2, .dp = 2},
     .llm = {.tp = 2, .cp = 2, .pp = 2, .is_sequence_parallel = true}},
    {.vision = {.dp = 4}, .llm = {.tp = 2, .pp = 2}, .is_colocated = true},
    {.vision = {.dp = 2}, .llm = {.pp = 2, .chunks = 2}, .is_colocated = true},
};

static void test_accounts(void **state)
{
    (void)state;
    static const int images[] = {1, 2, 1, 1, 2, 1, 0, 1};
    ParityData data;
    parity_data_write(&data, images, NULL, 8);
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        for (int sharded = 0; sharded < 2; sharded++) {
            Peaks peaks;
            int num_ranks = 0;
            const ParityOptions options = {.shard = data.shard,
                                           .layout = layouts[l],
                                           .steps = 2,
                                           .batch = 4 * SAMPLES_A_MICROBATCH,
                                           .microbatches = 4,
                                           .seed = SEED,
                                           .is_adamw = true,
                                           .widening = WIDENING,
                                           .is_sharded = sharded};
            double worst = run_job(&options, &peaks, &num_ranks);
            printf("layout %zu%s: %lld KiB on rank 0, at most %.1f %% from its account\n", l,
                   sharded ? " sharded" : "", (long long)(peaks.bytes[0] >> 10), 100 * worst);
            assert_true(worst <= allowed);
        }
    }
    parity_data_remove(&data);
}

static void test_microbatches(void **state)
{
    (void)state;
    static const int counts[] = {4, 16, 64};
    static const int images[] = {1, 2, 1, 1, 2, 1, 0, 1};
    ParityData data;
    parity_data_write(&data, images, NULL, 8);
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        Peaks peaks[3];
        int num_ranks = 0;
        for (int c = 0; c < 3; c++) {
            const ParityOptions options = {.shard = data.shard,
                                           .layout = layouts[l],
                                           .steps = 1,
                                           .batch = counts[c] * SAMPLES_A_MICROBATCH,
                                           .microbatches = counts[c],
                                           .window = 2,
                                           .widening = WIDENING,
                                           .seed = SEED};
            (void)run_job(&options, &peaks[c], &num_ranks);
        }
        for (int i = 0; i < num_ranks; i++) {
            printf(
                "layout %zu, rank %d: peak KiB %lld with 4 microbatches, %lld with 16, %lld with "
                "64\n",
                l, i, (long long)(peaks[0].bytes[i] >> 10), (long long)(peaks[1].bytes[i] >> 10),
                (long long)(peaks[2].bytes[i] >> 10));
            /* The rest is staging of rows, which grows with the first uneven microbatch. */
            assert_true(peaks[2].bytes[i] <= peaks[0].bytes[i] + (peaks[0].bytes[i] >> 5));
        }
    }
    parity_data_remove(&data);
}

int main(void)
{
    printf("seed %d\n", SEED);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_accounts),
        cmocka_unit_test(test_microbatches),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
