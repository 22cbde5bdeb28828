/* The thread pools: libgomp's, if the process has one, else a small one of our own.

   A second OpenMP runtime would spin against the threads of the first. So the engine does not link
   to OpenMP: Python passes in the functions of the libgomp that torch has loaded. */

#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#else
#define PAUSE() sched_yield()
#endif

typedef struct {
    Work work;
    void *context;
    int workers;
} Section;

/* ---- libgomp ---- */

static void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*gomp_thread_number)(void);
static int (*gomp_num_threads)(void);

void use_gomp(void *parallel, void *thread_number, void *num_threads) {
    memcpy(&gomp_thread_number, &thread_number, sizeof thread_number);
    memcpy(&gomp_num_threads, &num_threads, sizeof num_threads);
    memcpy(&gomp_parallel, &parallel, sizeof parallel);
}

/* libgomp may start fewer threads than requested, so each thread strides over the workers. */
static void run_gomp_section(void *argument) {
    const Section *section = argument;
    const int num_threads = gomp_num_threads();
    for (int w = gomp_thread_number(); w < section->workers; w += num_threads)
        section->work(section->context, w);
}

/* ---- our own pool ----

   It runs one section at a time. Its threads wait for the generation to change, first spinning, then
   sleeping, and take workers off the section until none is left. */

enum { SPINS = 4000 };

static struct {
    pthread_mutex_t in_use, lock;
    pthread_cond_t wake, done;
    int threads;
    Section section;
    _Atomic unsigned generation;
    _Atomic int next, busy;
} pool = {PTHREAD_MUTEX_INITIALIZER,
          PTHREAD_MUTEX_INITIALIZER,
          PTHREAD_COND_INITIALIZER,
          PTHREAD_COND_INITIALIZER,
          0,
          {0, 0, 0},
          0,
          0,
          0};

static void take_workers(void) {
    int w;
    while ((w = atomic_fetch_add(&pool.next, 1)) < pool.section.workers)
        pool.section.work(pool.section.context, w);
}

static void *run_pool_thread(void *generation_at_start) {
    unsigned seen = (unsigned)(uintptr_t)generation_at_start;
    for (;;) {
        for (int i = 0; i < SPINS && atomic_load(&pool.generation) == seen; i++) PAUSE();
        if (atomic_load(&pool.generation) == seen) {
            pthread_mutex_lock(&pool.lock);
            while (atomic_load(&pool.generation) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
            pthread_mutex_unlock(&pool.lock);
        }
        seen = atomic_load(&pool.generation);
        take_workers();
        if (atomic_fetch_sub(&pool.busy, 1) == 1) {
            pthread_mutex_lock(&pool.lock);
            pthread_cond_signal(&pool.done);
            pthread_mutex_unlock(&pool.lock);
        }
    }
    return 0;
}

/* A forked child has neither libgomp's threads nor ours: start again with an empty pool. */
static void reset_after_fork(void) {
    const pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    const pthread_cond_t cond = PTHREAD_COND_INITIALIZER;
    gomp_parallel = 0;
    memcpy(&pool.in_use, &mutex, sizeof mutex);
    memcpy(&pool.lock, &mutex, sizeof mutex);
    memcpy(&pool.wake, &cond, sizeof cond);
    memcpy(&pool.done, &cond, sizeof cond);
    pool.threads = 0;
    atomic_store(&pool.busy, 0);
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(0, 0, reset_after_fork);
}

static void grow_pool(int wanted) {
    pthread_attr_t attributes;
    if (wanted > MAX_THREADS) wanted = MAX_THREADS;
    if (pool.threads >= wanted || pthread_attr_init(&attributes)) return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (pool.threads < wanted) {
        pthread_t thread;
        void *seen = (void *)(uintptr_t)atomic_load(&pool.generation);
        if (pthread_create(&thread, &attributes, run_pool_thread, seen)) break;
        pool.threads++;
    }
    pthread_attr_destroy(&attributes);
}

static void run_in_own_pool(Section section) {
    grow_pool(section.workers - 1);
    pool.section = section;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.busy, pool.threads);
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.generation, 1);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    take_workers();
    for (int i = 0; i < SPINS && atomic_load(&pool.busy); i++) PAUSE();
    pthread_mutex_lock(&pool.lock);
    while (atomic_load(&pool.busy)) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

void run_parallel(Work work, void *context, int workers) {
    Section section = {work, context, workers};
    if (workers > 1 && gomp_parallel) {
        gomp_parallel(run_gomp_section, &section, (unsigned)workers, 0);
    } else if (workers > 1 && pthread_mutex_trylock(&pool.in_use) == 0) {
        run_in_own_pool(section);
        pthread_mutex_unlock(&pool.in_use);
    } else { /* one worker, or another caller is using the pool: run serially */
        for (int w = 0; w < workers; w++) work(context, w);
    }
}
