/* Bell: how a thread that waits for rings is woken, also by another process: one futex word in
 * shared memory.
 *
 * The sleeper:  armed = bell_arm(bell);  looks at its rings once more;  bell_sleep(bell, armed,
 * deadline). The others:   publish data (or room) with a sequentially consistent store, then
 * bell_ring(bell). Either the sleeper's second look sees what was published, or the ringer sees the
 * sleeper: no wake-up is lost.
 *
 * Threading: one sleeper; anybody may ring.
 */
#ifndef COMM_BELL_H
#define COMM_BELL_H

#include <stdatomic.h>
#include <stdint.h>

typedef struct Bell {
    _Atomic uint32_t count;     /* the futex word: how often the bell woke its sleeper */
    _Atomic uint32_t is_asleep; /* the owner sleeps or is about to */
    char unused[56];            /* a bell has its own cache line */
} Bell;

_Static_assert(sizeof(Bell) == 64, "bells lie in shared memory, one per cache line");

/* Takes a sleeper's notice away and tells whether there was one: then it must be woken. */
static inline int bell_claim(Bell *bell)
{
    return atomic_load(&bell->is_asleep) != 0 && atomic_exchange(&bell->is_asleep, 0) != 0;
}

/* Wakes the owner if it sleeps; else costs one load. */
void bell_ring(Bell *bell);

/* Wakes the owner even if somebody claimed its notice and died before waking it. */
void bell_ring_always(Bell *bell);

/* From here on bell_ring wakes. The value belongs to bell_sleep. */
uint32_t bell_arm(Bell *bell);
void bell_disarm(Bell *bell);

/* Returns when rung since bell_arm, at the deadline, or for no reason. */
void bell_sleep(Bell *bell, uint32_t armed, int64_t deadline_ns);

#endif
