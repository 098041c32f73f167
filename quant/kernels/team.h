/* The threads of one call: who starts them, and how they meet between its parts. */
#ifndef ADAPT_TEAM_H
#define ADAPT_TEAM_H

#include <stdatomic.h>
#include <stdint.h>

#ifdef _WIN32
#define YIELD() ((void)0)
#else
#include <sched.h>
#define YIELD() ((void)sched_yield())
#endif
#if defined(__x86_64__) || defined(__i386__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() ((void)0)
#endif

/* GOMP_parallel of the OpenMP runtime that torch has loaded: its threads are the ones that spin between calls, and a
 * second pool would fight with them for the cores. */
typedef void (*Team)(void (*run)(void *), void *data, unsigned threads, unsigned flags);

enum { SPINS = 4000 };

/* Work on `count` things that need nothing of each other, for whichever thread comes next, `step` of them at a time. */
typedef struct {
    void (*work)(const void *what, int64_t first, int64_t last);
    const void *what;
    int64_t count, step;
    atomic_llong next;
} Shared;

static inline void take_shares(void *data) {
    Shared *shared = data;
    for (;;) {
        int64_t first = atomic_fetch_add_explicit(&shared->next, shared->step, memory_order_relaxed);
        if (first >= shared->count) return;
        int64_t last = first + shared->step;
        shared->work(shared->what, first, last < shared->count ? last : shared->count);
    }
}

/* Do all of it; with one thread, or without a team, the caller does. */
static inline void share(Shared *shared, Team team, int64_t threads) {
    int64_t pieces = (shared->count + shared->step - 1) / shared->step;
    int64_t most = threads < pieces ? threads : pieces;
    atomic_init(&shared->next, 0);
    if (team && most > 1) team(take_shares, shared, (unsigned)most, 0);
    else take_shares(shared);
}

typedef struct {
    atomic_llong entered, arrived, rounds;
} Meeting;

static inline void open_meeting(Meeting *meeting) {
    atomic_init(&meeting->entered, 0);
    atomic_init(&meeting->arrived, 0);
    atomic_init(&meeting->rounds, 0);
}

/* Wait until all `threads` have come here. */
static inline void meet(Meeting *meeting, int64_t threads) {
    if (threads < 2) return;
    long long round = atomic_load_explicit(&meeting->rounds, memory_order_acquire);
    if (atomic_fetch_add_explicit(&meeting->arrived, 1, memory_order_acq_rel) + 1 == threads) {
        atomic_store_explicit(&meeting->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&meeting->rounds, round + 1, memory_order_release);
        return;
    }
    for (int turns = 0; atomic_load_explicit(&meeting->rounds, memory_order_acquire) == round; turns++) {
        if (turns < SPINS) RELAX();
        else YIELD();
    }
}

#endif
