/* Threads that choose from the rows of a step together.
 *
 * Waking a thread takes longer than choosing from a row. So they are woken ahead of time, while a
 * device computes the logits, and then wait busily, for a few milliseconds at most. Rows are taken
 * one by one, by the thread that asks, too: nobody waits for a thread that has not woken.
 */

#define _POSIX_C_SOURCE 200809L

#include "rows.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

static const int64_t PATIENCE_NS = 3000000; /* to wait busily, before the usual time and beyond it */
static const int BUSY_TRIES = 2000; /* about 50 us */

typedef struct {
    const float *rows;
    int64_t size, count;
    const char *choices;
    float *memory; /* a part for each thread */
    int32_t *tokens;
} Step;

typedef struct Pool Pool;

typedef struct {
    Pool *pool;
    pthread_t thread;
    int64_t number; /* of its part of the memory; 0 is that of who asks */
} Helper;

struct Pool {
    Step step; /* read by whoever has taken a row of it, which it does not end without */
    _Alignas(64) _Atomic int64_t left; /* rows that nobody has taken */
    _Alignas(64) _Atomic int64_t done; /* rows that have their token */
    _Alignas(64) _Atomic int64_t served; /* calls to arms that a step has answered */
    _Alignas(64) pthread_mutex_t mutex; /* of what follows, which is written by who asks alone */
    pthread_cond_t changed;
    int64_t calls; /* to arms */
    int64_t armed_ns, from_ns, until_ns; /* when that was, and when to wait busily */
    int is_closing;
    int64_t usual_ns; /* from a call to its step */
    int64_t helpers;
    Helper helper[];
};

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void sleep_until(int64_t when_ns) {
    int64_t rest_ns = when_ns - now_ns();
    if (rest_ns <= 0) return;
    struct timespec rest = {rest_ns / 1000000000LL, rest_ns % 1000000000LL};
    nanosleep(&rest, NULL);
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Whether there was a row to take. */
static int take_row(Pool *pool, int64_t number) {
    int64_t left = atomic_load_explicit(&pool->left, memory_order_relaxed);
    do {
        if (left == 0) return 0;
    } while (!atomic_compare_exchange_weak(&pool->left, &left, left - 1));
    const Step *step = &pool->step;
    int64_t row = step->count - left;
    choose_tokens(step->rows + row * step->size, step->size, 1, step->choices + row * choice_bytes,
                  step->memory + number * memory_floats(step->size), step->tokens + row);
    atomic_fetch_add(&pool->done, 1);
    return 1;
}

static void *help(void *given) {
    Helper *helper = given;
    Pool *pool = helper->pool;
    for (int64_t seen = 0;;) {
        pthread_mutex_lock(&pool->mutex);
        while (pool->calls == seen && !pool->is_closing)
            pthread_cond_wait(&pool->changed, &pool->mutex);
        seen = pool->calls;
        int is_closing = pool->is_closing;
        int64_t from_ns = pool->from_ns, until_ns = pool->until_ns;
        pthread_mutex_unlock(&pool->mutex);
        if (is_closing) return NULL;
        sleep_until(from_ns);
        while (atomic_load(&pool->served) < seen && now_ns() < until_ns)
            if (!take_row(pool, helper->number)) relax();
    }
}

/* With so many threads beside the one that asks, or fewer if there cannot be so many. */
Pool *open_pool(int64_t helpers) {
    size_t bytes = sizeof(Pool) + (size_t)helpers * sizeof(Helper);
    Pool *pool = aligned_alloc(_Alignof(Pool), (bytes + 63) / 64 * 64);
    if (!pool) return NULL;
    *pool = (Pool){.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    sigset_t all, before; /* signals are for the threads of the program, but for its own faults */
    sigfillset(&all);
    const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    for (int at = 0; at < 4; at++) sigdelset(&all, faults[at]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int64_t at = 0; at < helpers; at++) {
        Helper *helper = &pool->helper[at];
        *helper = (Helper){.pool = pool, .number = at + 1};
        if (pthread_create(&helper->thread, NULL, help, helper)) break;
        pool->helpers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return pool;
}

static void call(Pool *pool, int64_t delay_ns, int is_closing) {
    pthread_mutex_lock(&pool->mutex);
    pool->armed_ns = now_ns();
    pool->from_ns = pool->armed_ns + delay_ns;
    pool->until_ns = pool->armed_ns + pool->usual_ns + PATIENCE_NS;
    pool->is_closing = is_closing;
    pool->calls++;
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->mutex);
}

/* A step is to come: have the threads awake when it usually does. */
void arm_pool(Pool *pool) {
    int64_t early_ns = pool->usual_ns / 4;
    call(pool, pool->usual_ns - (early_ns < PATIENCE_NS ? early_ns : PATIENCE_NS), 0);
}

/* Shorter waits count at once, longer ones little by little: a step with a prompt to read now and
 * then must not have the threads asleep when the next one comes. */
static void note_wait(Pool *pool, int64_t waited_ns) {
    int64_t usual_ns = pool->usual_ns, more_ns = (waited_ns - usual_ns) / 2;
    if (usual_ns == 0) pool->usual_ns = waited_ns;
    else pool->usual_ns += more_ns < usual_ns / 8 ? more_ns : usual_ns / 8;
    if (now_ns() > pool->until_ns) call(pool, 0, 0); /* they have gone to sleep */
}

/* As choose_tokens; `memory` has a part for each thread. */
void choose_tokens_together(Pool *pool, const float *rows, int64_t size, int64_t count,
                            const char *choices, float *memory, int32_t *tokens) {
    if (pool->calls == atomic_load(&pool->served)) call(pool, 0, 0);
    else note_wait(pool, now_ns() - pool->armed_ns);
    pool->step = (Step){rows, size, count, choices, memory, tokens};
    atomic_store(&pool->done, 0);
    atomic_store(&pool->left, count);
    while (take_row(pool, 0)) continue;
    for (int tries = 0; atomic_load(&pool->done) < count; tries++) {
        if (tries < BUSY_TRIES) relax();
        else sched_yield(); /* a thread that has a row may have lost its core */
    }
    atomic_store(&pool->served, pool->calls);
}

void close_pool(Pool *pool) {
    call(pool, 0, 1);
    for (int64_t at = 0; at < pool->helpers; at++) pthread_join(pool->helper[at].thread, NULL);
    free(pool);
}
