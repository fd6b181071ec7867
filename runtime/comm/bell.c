#include "comm/bell.h"

#include "base/clock.h"

#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Not the private kind of futex: sleeper and ringer may be in two processes. */
static void wake(Bell *bell)
{
    atomic_fetch_add(&bell->count, 1);
    syscall(SYS_futex, &bell->count, FUTEX_WAKE, 1, NULL, NULL, 0);
}

void bell_ring(Bell *bell)
{
    if (bell_claim(bell)) {
        wake(bell);
    }
}

void bell_ring_always(Bell *bell)
{
    atomic_store(&bell->is_asleep, 0);
    wake(bell);
}

uint32_t bell_arm(Bell *bell)
{
    uint32_t count = atomic_load(&bell->count);
    atomic_store(&bell->is_asleep, 1);
    return count;
}

void bell_disarm(Bell *bell)
{
    atomic_store(&bell->is_asleep, 0);
}

void bell_sleep(Bell *bell, uint32_t armed, int64_t deadline_ns)
{
    /* FUTEX_WAIT_BITSET takes an absolute time of CLOCK_MONOTONIC: our deadlines. */
    struct timespec until = clock_timespec(deadline_ns);
    syscall(SYS_futex, &bell->count, FUTEX_WAIT_BITSET, armed, &until, NULL,
            FUTEX_BITSET_MATCH_ANY);
    bell_disarm(bell);
}
