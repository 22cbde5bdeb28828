/* Threads: run a function once per worker, in parallel. */

#ifndef EINLINEAR_POOL_H
#define EINLINEAR_POOL_H

enum { MAX_THREADS = 256 };

typedef void (*Work)(void *context, int worker);

/* Call work(context, w) for every w < workers, and return when all are done. */
void run_parallel(Work work, void *context, int workers);

/* From now on, use libgomp's pool: the addresses of GOMP_parallel, omp_get_thread_num and
   omp_get_num_threads. */
void use_gomp(void *parallel, void *thread_number, void *num_threads);

#endif
