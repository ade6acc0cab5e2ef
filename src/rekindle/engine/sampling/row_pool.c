/* A pool of threads that sample the rows of a step together.
 *
 * Waking a thread takes longer than sampling a row. So the threads are woken ahead of time, while a
 * device computes the logits, and then wait busily, for a few milliseconds at most. All threads,
 * including the caller, take rows one by one, so nobody waits for a thread that has not woken up.
 */

#define _POSIX_C_SOURCE 200809L

#include "rows.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

static const int64_t PATIENCE_NS = 3000000; /* busy waiting before and after the expected time */
static const int BUSY_TRIES = 2000; /* about 50 us */

typedef struct {
    const float *rows;
    int64_t size, count;
    const char *params;
    float *memory; /* a part for each thread */
    int32_t *tokens;
} Step;

typedef struct Pool Pool;

typedef struct {
    Pool *pool;
    pthread_t thread;
    int64_t number; /* of its part of the memory; the caller has part 0 */
} Helper;

struct Pool {
    Step step; /* valid while a thread holds a row of it */
    _Alignas(64) _Atomic int64_t left; /* rows not taken yet */
    _Alignas(64) _Atomic int64_t done; /* finished rows */
    _Alignas(64) _Atomic int64_t served; /* number of the last call that a step followed */
    _Alignas(64) pthread_mutex_t mutex; /* guards the fields below, which only the caller writes */
    pthread_cond_t changed;
    int64_t calls; /* number of times that the threads were woken */
    int64_t armed_ns, from_ns, until_ns; /* time of the last call; when to wait busily */
    int is_closing;
    int64_t expected_ns; /* expected time from a call to its step */
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

/* Samples one row. Returns 0 if no row is left. */
static int take_row(Pool *pool, int64_t number) {
    int64_t left = atomic_load_explicit(&pool->left, memory_order_relaxed);
    do {
        if (left == 0) return 0;
    } while (!atomic_compare_exchange_weak(&pool->left, &left, left - 1));
    const Step *step = &pool->step;
    int64_t row = step->count - left;
    choose_tokens(step->rows + row * step->size, step->size, 1, step->params + row * params_bytes,
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

/* Starts `helpers` threads, or fewer if the system refuses more. */
Pool *open_pool(int64_t helpers) {
    size_t bytes = sizeof(Pool) + (size_t)helpers * sizeof(Helper);
    Pool *pool = aligned_alloc(_Alignof(Pool), (bytes + 63) / 64 * 64);
    if (!pool) return NULL;
    *pool = (Pool){.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    sigset_t all, before; /* block signals in the helpers, except for faults */
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
    pool->until_ns = pool->armed_ns + pool->expected_ns + PATIENCE_NS;
    pool->is_closing = is_closing;
    pool->calls++;
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->mutex);
}

/* Announces a step, so that the threads are awake when it is expected. */
void arm_pool(Pool *pool) {
    int64_t early_ns = pool->expected_ns / 4;
    call(pool, pool->expected_ns - (early_ns < PATIENCE_NS ? early_ns : PATIENCE_NS), 0);
}

/* Updates the expected wait. A shorter wait counts in full, a longer one little by little: an
 * occasional step with prefill must not leave the threads asleep when the next step comes. */
static void note_wait(Pool *pool, int64_t waited_ns) {
    int64_t expected_ns = pool->expected_ns, more_ns = (waited_ns - expected_ns) / 2;
    if (expected_ns == 0) pool->expected_ns = waited_ns;
    else pool->expected_ns += more_ns < expected_ns / 8 ? more_ns : expected_ns / 8;
    if (now_ns() > pool->until_ns) call(pool, 0, 0); /* the threads are asleep again */
}

/* Like choose_tokens, with all threads. `memory` has a part for each of them. */
void choose_tokens_together(Pool *pool, const float *rows, int64_t size, int64_t count,
                            const char *params, float *memory, int32_t *tokens) {
    if (pool->calls == atomic_load(&pool->served)) call(pool, 0, 0);
    else note_wait(pool, now_ns() - pool->armed_ns);
    pool->step = (Step){rows, size, count, params, memory, tokens};
    atomic_store(&pool->done, 0);
    atomic_store(&pool->left, count);
    while (take_row(pool, 0)) continue;
    for (int tries = 0; atomic_load(&pool->done) < count; tries++) {
        if (tries < BUSY_TRIES) relax();
        else sched_yield(); /* a thread with a row may have lost its core */
    }
    atomic_store(&pool->served, pool->calls);
}

void close_pool(Pool *pool) {
    call(pool, 0, 1);
    for (int64_t at = 0; at < pool->helpers; at++) pthread_join(pool->helper[at].thread, NULL);
    free(pool);
}
