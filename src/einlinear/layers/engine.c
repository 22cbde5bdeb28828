/* The compiled engine: structured linear layers at the speed of their multiply-adds.

   Every product of a structured layer (a forward step, the gradient of its input, the gradient of
   its factor) is

       C[i, n] (+)= sum over k of  S[i, k] * W[k, n]          n with stride 1 in C and W

   where S is read one number at a time, from any address, and spread over a vector. A permutation
   of edges is therefore only another stride: nothing is transposed between steps, nothing is packed.
   flat.py turns a plan into a list of such products with their strides; this file runs the list for
   a few tokens at a time, so that what lies between the steps never leaves the cache.

   A thread takes a run of tokens. Weight gradients are summed per thread and added up at the end, in
   order. All memory beyond the caller's arrays comes from one arena per calling thread, which is
   kept. bfloat16 is float32 inside, converted where rows enter and leave.

   No Python, no torch, no OpenMP: parallel sections run on a pool that the caller hands in (that of
   libgomp, if the process has one), or on a small pool of threads of our own. */

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#define HAS_X86 1
#elif defined(__aarch64__)
#include <arm_neon.h>
#define HAS_NEON 1
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#if defined(UNROLL) /* by whoever builds it: loops that stay loops compile sooner */
#elif defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 24")
#endif

/* ---- the numbers of a flat program; keep in step with flat.py ---- */

enum {
    VERSION_NUMBER = 3,
    H_VERSION = 0, H_D_IN, H_D_OUT, H_D_IN_PADDED, H_D_OUT_PADDED, H_MACS, H_STEPS, H_BLOCK,
    H_CHUNK, H_SCRATCH, H_ROW_BUFFERS, H_FORWARD, H_BACKWARD, H_TURNS, H_COLLECTS, H_LENGTH
};
enum { OP_LENGTH, OP_KIND, OP_ROLE, OP_STEP };
enum {
    OP_C = 4, OP_S, OP_W, OP_ROWS, OP_N, OP_K, OP_C_I, OP_S_I, OP_S_K, OP_W_K, OP_GROUP,
    OP_K_BLOCK, OP_N_BLOCK, OP_GATHER, OP_LOOPS
};
enum { OP_TO = 4, OP_FROM, OP_DIMS };
enum { FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, PACK };
enum { BUFFER_X, BUFFER_Y, BUFFER_GY, BUFFER_GX, BUFFER_INNER };
enum { DTYPE_FLOAT, DTYPE_DOUBLE, DTYPE_HALF };
enum { MAX_STEPS = 32, MAX_BUFFERS = 256, MAX_LOOPS = 64, COPY_BLOCK = 16, PIECE = 16384, PAGE = 4096 };

typedef struct {
    int wanted;
    double scale;
    const void *bias;
} Finish;

typedef struct {
    void (*multiply)(const int64_t *, long, void *const *, const int64_t *, int, const Finish *,
                     void *);
    void (*stage_in)(const void *, long, long, void *, long, long, long, int);
    void (*stage_out)(const void *, long, void *, long, long, long, int);
    void (*add_rows)(const void *, long, long, long, void *, int);
    double (*dot)(const void *, const void *, long);
    void (*adjust)(void *, const void *, long, double, double);
    void (*copy)(const int64_t *, long, long, const void *, int, void *, int, long, long);
    void (*take)(const void *, long, void *, long, double, int);
    void (*mix)(void *, const void *, const void *const *, const double *, long, long);
} Kernels;

/* ---- bfloat16: the upper half of a float32; to nearest, ties to even, NaN stays NaN ---- */

INLINE float from_half(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint16_t to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

/* ---- the targets ---- */

#ifdef HAS_X86
static const int32_t MASK_BITS[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};

/* to[j][i] = from[i][j] for i, j < 8 */
INLINE __attribute__((target("avx2,fma"))) void turn8(const float *from, long from_row, float *to,
                                                      long to_row) {
    __m256 a[8], b[8];
    UNROLL for (int i = 0; i < 4; i++) {
        /* rows i and i + 4 side by side, lower and upper halves */
        const __m256 low = _mm256_loadu_ps(from + i * from_row);
        const __m256 high = _mm256_loadu_ps(from + (i + 4) * from_row);
        a[i] = _mm256_permute2f128_ps(low, high, 0x20);
        a[i + 4] = _mm256_permute2f128_ps(low, high, 0x31);
    }
    UNROLL for (int half = 0; half < 8; half += 4) {
        b[0] = _mm256_unpacklo_ps(a[half], a[half + 1]);
        b[1] = _mm256_unpackhi_ps(a[half], a[half + 1]);
        b[2] = _mm256_unpacklo_ps(a[half + 2], a[half + 3]);
        b[3] = _mm256_unpackhi_ps(a[half + 2], a[half + 3]);
        _mm256_storeu_ps(to + (half + 0) * to_row, _mm256_shuffle_ps(b[0], b[2], 0x44));
        _mm256_storeu_ps(to + (half + 1) * to_row, _mm256_shuffle_ps(b[0], b[2], 0xee));
        _mm256_storeu_ps(to + (half + 2) * to_row, _mm256_shuffle_ps(b[1], b[3], 0x44));
        _mm256_storeu_ps(to + (half + 3) * to_row, _mm256_shuffle_ps(b[1], b[3], 0xee));
    }
}

#define TARGET __attribute__((target("avx2,fma")))
#define ROWS 6
#define REAL float
#define VEC __m256
#define V 8
#define NAME(x) x##_avx2_float
#define TURN8 turn8
#define LOAD(p) _mm256_loadu_ps(p)
#define STORE(p, a) _mm256_storeu_ps(p, a)
#define SPLAT(a) _mm256_set1_ps(a)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define MASK __m256i
#define MASK_OF(n) _mm256_loadu_si256((const __m256i *)(MASK_BITS + 8 - (n)))
#define MLOAD(p, m) _mm256_maskload_ps(p, m)
#define MSTORE(p, m, a) _mm256_maskstore_ps(p, m, a)
#include "engine_kernel.h"

#define REAL double
#define VEC __m256d
#define V 4
#define NAME(x) x##_avx2_double
#define LOAD(p) _mm256_loadu_pd(p)
#define STORE(p, a) _mm256_storeu_pd(p, a)
#define SPLAT(a) _mm256_set1_pd(a)
#define FMA(a, b, c) _mm256_fmadd_pd(a, b, c)
#define MASK __m256i
#define MASK_OF(n) _mm256_loadu_si256((const __m256i *)(MASK_BITS + 8 - 2 * (n)))
#define MLOAD(p, m) _mm256_maskload_pd(p, m)
#define MSTORE(p, m, a) _mm256_maskstore_pd(p, m, a)
#include "engine_kernel.h"
#undef TARGET
#undef ROWS

#define TARGET __attribute__((target("avx512f,avx2,fma")))
#define ROWS 12
#define REAL float
#define VEC __m512
#define V 16
#define NAME(x) x##_avx512_float
#define TURN8 turn8
#define LOAD(p) _mm512_loadu_ps(p)
#define STORE(p, a) _mm512_storeu_ps(p, a)
#define SPLAT(a) _mm512_set1_ps(a)
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define MASK __mmask16
#define MASK_OF(n) ((__mmask16)((1u << (n)) - 1u))
#define MLOAD(p, m) _mm512_maskz_loadu_ps(m, p)
#define MSTORE(p, m, a) _mm512_mask_storeu_ps(p, m, a)
#include "engine_kernel.h"

#define REAL double
#define VEC __m512d
#define V 8
#define NAME(x) x##_avx512_double
#define LOAD(p) _mm512_loadu_pd(p)
#define STORE(p, a) _mm512_storeu_pd(p, a)
#define SPLAT(a) _mm512_set1_pd(a)
#define FMA(a, b, c) _mm512_fmadd_pd(a, b, c)
#define MASK __mmask8
#define MASK_OF(n) ((__mmask8)((1u << (n)) - 1u))
#define MLOAD(p, m) _mm512_maskz_loadu_pd(m, p)
#define MSTORE(p, m, a) _mm512_mask_storeu_pd(p, m, a)
#include "engine_kernel.h"
#undef TARGET
#undef ROWS
#endif

/* Vectors of 16 bytes, which every compiler of this family has for every machine. On aarch64 this
   is NEON: FMA is then one instruction; elsewhere it is multiply, then add. */
typedef float float4 __attribute__((vector_size(16)));
typedef double double2 __attribute__((vector_size(16)));

INLINE float4 load_float4(const float *p) {
    float4 v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE double2 load_double2(const double *p) {
    double2 v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE float4 part_float4(const float *p, long n) {
    const float4 v = {p[0], n > 1 ? p[1] : 0, n > 2 ? p[2] : 0, 0};
    return v;
}
INLINE double2 part_double2(const double *p, long n) {
    (void)n; /* always 1 */
    const double2 v = {p[0], 0};
    return v;
}
/* The kernel text undoes STORE and MSTORE behind itself; these stay for both types. */
#define PLAIN_STORE(p, a)                  \
    do {                                   \
        const VEC stored = (a);            \
        memcpy((p), &stored, sizeof stored); \
    } while (0)
#define PLAIN_MSTORE(p, n, a) \
    for (long lane_ = 0; lane_ < (n); lane_++) (p)[lane_] = (a)[lane_]

#define STORE(p, a) PLAIN_STORE(p, a)
#define MSTORE(p, n, a) PLAIN_MSTORE(p, n, a)

#define TARGET
#define ROWS 6
#define REAL float
#define VEC float4
#define V 4
#define NAME(x) x##_generic_float
#define LOAD(p) load_float4(p)
#define SPLAT(a) ((float4){(a), (a), (a), (a)})
#ifdef HAS_NEON
#define FMA(a, b, c) ((float4)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#endif
#define MASK long
#define MASK_OF(n) (n)
#define MLOAD(p, n) part_float4(p, n)
#include "engine_kernel.h"

#define STORE(p, a) PLAIN_STORE(p, a)
#define MSTORE(p, n, a) PLAIN_MSTORE(p, n, a)
#define REAL double
#define VEC double2
#define V 2
#define NAME(x) x##_generic_double
#define LOAD(p) load_double2(p)
#define SPLAT(a) ((double2){(a), (a)})
#ifdef HAS_NEON
#define FMA(a, b, c) ((double2)vfmaq_f64((float64x2_t)(c), (float64x2_t)(a), (float64x2_t)(b)))
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#endif
#define MASK long
#define MASK_OF(n) (n)
#define MLOAD(p, n) part_double2(p, n)
#include "engine_kernel.h"

enum { GENERIC, AVX2, AVX512, NUM_TARGETS };

static int is_supported(int target) {
#ifdef HAS_X86
    __builtin_cpu_init();
    if (target == AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (target == AVX512) return __builtin_cpu_supports("avx512f") && is_supported(AVX2);
#endif
    return target == GENERIC;
}

static const Kernels *kernels_of(int target, int is_double) {
#ifdef HAS_X86
    if (target == AVX2) return is_double ? &kernels_avx2_double : &kernels_avx2_float;
    if (target == AVX512) return is_double ? &kernels_avx512_double : &kernels_avx512_float;
#endif
    (void)target;
    return is_double ? &kernels_generic_double : &kernels_generic_float;
}

static _Atomic int chosen_target = -1;

/* Choose a target, or the best one (-1). Returns the target in use, or -1 if it cannot run here. */
EXPORT int einlinear_target(int target) {
    if (target < 0)
        for (target = NUM_TARGETS - 1; !is_supported(target); target--) {}
    if (target >= NUM_TARGETS || !is_supported(target)) return -1;
    atomic_store(&chosen_target, target);
    return target;
}

#ifdef HAS_NEON
EXPORT int einlinear_has_neon(void) { return 1; }
#else
EXPORT int einlinear_has_neon(void) { return 0; }
#endif

/* ---- threads ---- */

typedef void (*Work)(void *context, int worker);

static void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*gomp_thread)(void);
static int (*gomp_threads)(void);

/* Run parallel sections on libgomp's pool: the addresses of GOMP_parallel, omp_get_thread_num and
   omp_get_num_threads. */
EXPORT void einlinear_use_gomp(void *parallel, void *thread, void *threads) {
    memcpy(&gomp_thread, &thread, sizeof thread);
    memcpy(&gomp_threads, &threads, sizeof threads);
    memcpy(&gomp_parallel, &parallel, sizeof parallel);
}

typedef struct {
    Work work;
    void *context;
    int workers;
} Section;

static void gomp_section(void *argument) {
    const Section *section = argument;
    const int given = gomp_threads(); /* may be fewer than asked for: all shares must be done */
    for (int w = gomp_thread(); w < section->workers; w += given) section->work(section->context, w);
}

/* Our own pool. One section at a time: who finds it taken works alone. Its threads wait for a new
   generation, spinning a little before they sleep, and take shares until none is left. */
enum { MAX_THREADS = 256, SPINS = 4000 };

static struct {
    pthread_mutex_t in_use, lock;
    pthread_cond_t wake, done;
    int threads;
    Section section;
    _Atomic unsigned generation;
    _Atomic int next, busy;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER,
          PTHREAD_COND_INITIALIZER, 0, {0, 0, 0}, 0, 0, 0};

static void pause_a_little(void) {
#ifdef HAS_X86
    _mm_pause();
#else
    sched_yield();
#endif
}

static void take_shares(void) {
    int w;
    while ((w = atomic_fetch_add(&pool.next, 1)) < pool.section.workers)
        pool.section.work(pool.section.context, w);
}

static void *pool_thread(void *seen_at_start) {
    unsigned seen = (unsigned)(uintptr_t)seen_at_start;
    for (;;) {
        for (int i = 0; i < SPINS && atomic_load(&pool.generation) == seen; i++) pause_a_little();
        if (atomic_load(&pool.generation) == seen) {
            pthread_mutex_lock(&pool.lock);
            while (atomic_load(&pool.generation) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
            pthread_mutex_unlock(&pool.lock);
        }
        seen = atomic_load(&pool.generation);
        take_shares();
        if (atomic_fetch_sub(&pool.busy, 1) == 1) {
            pthread_mutex_lock(&pool.lock);
            pthread_cond_signal(&pool.done);
            pthread_mutex_unlock(&pool.lock);
        }
    }
    return 0;
}

static void after_fork(void) {
    const pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    const pthread_cond_t cond = PTHREAD_COND_INITIALIZER;
    gomp_parallel = 0; /* neither libgomp's threads nor ours live on in the child */
    memcpy(&pool.in_use, &mutex, sizeof mutex);
    memcpy(&pool.lock, &mutex, sizeof mutex);
    memcpy(&pool.wake, &cond, sizeof cond);
    memcpy(&pool.done, &cond, sizeof cond);
    pool.threads = 0;
    atomic_store(&pool.busy, 0);
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(0, 0, after_fork); }

static void grow_pool(int wanted) {
    pthread_attr_t attributes;
    if (wanted > MAX_THREADS) wanted = MAX_THREADS;
    if (pool.threads >= wanted || pthread_attr_init(&attributes)) return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (pool.threads < wanted) {
        pthread_t thread;
        void *seen = (void *)(uintptr_t)atomic_load(&pool.generation);
        if (pthread_create(&thread, &attributes, pool_thread, seen)) break;
        pool.threads++;
    }
    pthread_attr_destroy(&attributes);
}

static void parallel(Work work, void *context, int workers) {
    if (workers > 1 && gomp_parallel) {
        Section section = {work, context, workers};
        gomp_parallel(gomp_section, &section, (unsigned)workers, 0);
        return;
    }
    if (workers > 1 && pthread_mutex_trylock(&pool.in_use) == 0) {
        grow_pool(workers - 1);
        pool.section = (Section){work, context, workers};
        atomic_store(&pool.next, 0);
        atomic_store(&pool.busy, pool.threads);
        pthread_mutex_lock(&pool.lock);
        atomic_fetch_add(&pool.generation, 1);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
        take_shares();
        for (int i = 0; i < SPINS && atomic_load(&pool.busy); i++) pause_a_little();
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.busy)) pthread_cond_wait(&pool.done, &pool.lock);
        pthread_mutex_unlock(&pool.lock);
        pthread_mutex_unlock(&pool.in_use);
        return;
    }
    for (int w = 0; w < workers; w++) work(context, w);
}

/* ---- memory: one arena per calling thread, grown and kept ---- */

typedef struct {
    char *start;
    size_t size;
} Arena;

/* Under AddressSanitizer only the buffers of the call at hand may be touched, not what lies between
   them; and what is in them before they are written is no number. */
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
static char *opened(char *start, size_t size) {
    __asan_unpoison_memory_region(start, size);
    return start;
}
static void close_all(const Arena *arena) {
    memset(opened(arena->start, arena->size), 0xff, arena->size);
    __asan_poison_memory_region(arena->start, arena->size);
}
#else
#define opened(start, size) (start)
#define close_all(arena) ((void)0)
#endif

static pthread_key_t arena_key;
static pthread_once_t arena_once = PTHREAD_ONCE_INIT;

static void free_arena(void *arena) {
    free(((Arena *)arena)->start);
    free(arena);
}

static void make_key(void) { pthread_key_create(&arena_key, free_arena); }

static char *reserve(size_t size) {
    pthread_once(&arena_once, make_key);
    Arena *arena = pthread_getspecific(arena_key);
    if (!arena) {
        arena = calloc(1, sizeof *arena);
        if (!arena || pthread_setspecific(arena_key, arena)) {
            free(arena);
            return 0;
        }
    }
    if (size > arena->size) {
        size += size / 4;
        void *start = 0;
        free(arena->start);
        arena->start = 0, arena->size = 0;
        if (posix_memalign(&start, PAGE, size)) return 0;
        arena->start = start, arena->size = size;
    }
    close_all(arena);
    return arena->start;
}

/* How many bytes the calling thread's arena holds; given back if wanted. */
EXPORT int64_t einlinear_workspace(int release) {
    pthread_once(&arena_once, make_key);
    Arena *arena = pthread_getspecific(arena_key);
    if (!arena) return 0;
    if (release) {
        free(arena->start);
        arena->start = 0, arena->size = 0;
    }
    return (int64_t)arena->size;
}

/* ---- one call ---- */

typedef struct {
    const int64_t *program;
    const Kernels *kernels;
    long tokens, block, size; /* size: bytes of a number inside */
    int half, workers, is_backward;
    int is_grouped; /* of many experts: see engine_experts.h */
    size_t extra;   /* bytes at the start of what is shared */
    const void *x, *gy;
    void *y, *gx;
    long x_row, y_row, gy_row, gx_row;
    int stage_x, stage_y, stage_gy, stage_gx; /* these rows go through the workspace */
    const void *bias;
    void *gbias;
    Finish finish;
    const void *factors[MAX_STEPS];  /* as given */
    const void *weights[MAX_STEPS];  /* as computed with */
    void *gradients[MAX_STEPS];      /* as given */
    char *turned[MAX_STEPS];
    int64_t at_row[MAX_BUFFERS];     /* of row buffers, in a worker's memory */
    int64_t at_sum[MAX_STEPS], at_bias_sum, at_scratch;
    int64_t at_weights[MAX_STEPS], at_turned[MAX_STEPS]; /* in what is shared, or in a worker's */
    int64_t at_split[MAX_STEPS], at_line;                /* only of many experts */
    char *shared;
    char *memory;                    /* of the workers */
    size_t per_worker;
    double *partial;                 /* sums over pieces of a factor */
    const double *amounts;           /* how much of a factor to take off its gradient */
} Call;

static const int64_t *sizes_of(const Call *call) {
    return call->program + H_LENGTH + call->program[H_ROW_BUFFERS];
}

static size_t round_up(size_t bytes) { return (bytes + 63) & ~(size_t)63; }
static size_t round_to_page(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static long copy_units(const int64_t *op) {
    const int64_t *dims = op + OP_DIMS, num = (op[OP_LENGTH] - OP_DIMS) / 3;
    long units = (dims[3 * (num - 2)] + COPY_BLOCK - 1) / COPY_BLOCK;
    for (long d = 0; d < num - 2; d++) units *= dims[3 * d];
    return units;
}

/* Which operations of the backward pass there is a use for. */
static int is_needed(const Call *call, const int64_t *op) {
    const long step = op[OP_STEP], steps = call->program[H_STEPS];
    if (op[OP_ROLE] == WEIGHT_GRADIENT || op[OP_ROLE] == PACK) return call->gradients[step] != 0;
    if (op[OP_ROLE] == INPUT_GRADIENT) {
        if (call->gx) return 1;
        for (long s = 0; s < step; s++)
            if (call->gradients[s]) return 1;
        return 0;
    }
    for (long s = step + 1; s < steps; s++)
        if (call->gradients[s]) return 1;
    return !call->is_backward;
}

/* Where the buffers of a worker are, and how far apart their rows. */
static void find_buffers(const Call *call, char *memory, void **base, int64_t *row) {
    const int64_t *program = call->program;
    const long row_buffers = program[H_ROW_BUFFERS], steps = program[H_STEPS];
    for (long b = 0; b < row_buffers; b++) {
        base[b] = memory + call->at_row[b];
        row[b] = program[H_LENGTH + b];
    }
    for (long s = 0; s < steps; s++) {
        base[row_buffers + s] = (void *)call->weights[s];
        base[row_buffers + steps + s] = call->turned[s];
        base[row_buffers + 2 * steps + s] = memory + call->at_sum[s];
    }
}

/* The operations of a pass on the rows in the buffers. */
static void run_operations(const Call *call, char *memory, long tokens, int is_first,
                           void *const *base, const int64_t *row) {
    const Kernels *kernels = call->kernels;
    const Finish no_finish = {0, 1, 0};
    const int64_t *op = call->program + call->program[call->is_backward ? H_BACKWARD : H_FORWARD];
    for (long count = *op++; count > 0; count--, op += op[OP_LENGTH]) {
        if (call->is_backward && !is_needed(call, op)) continue;
        if (op[OP_ROLE] == PACK) {
            const long units = copy_units(op);
            for (long t = 0; t < tokens; t++)
                kernels->copy(op, 0, units,
                              (char *)base[op[OP_FROM]] + t * row[op[OP_FROM]] * call->size, 0,
                              (char *)base[op[OP_TO]] + t * row[op[OP_TO]] * call->size, 0, 1, 0);
            continue;
        }
        kernels->multiply(op, tokens, base, row, op[OP_ROLE] == WEIGHT_GRADIENT && !is_first,
                          op[OP_C] == BUFFER_Y || op[OP_C] == BUFFER_GX ? &call->finish : &no_finish,
                          memory + call->at_scratch);
    }
}

/* The tokens start..start+tokens. */
static void run_block(const Call *call, char *memory, long start, long tokens, int is_first) {
    const int64_t *program = call->program;
    const Kernels *kernels = call->kernels;
    const long outer = call->half ? 2 : call->size, d_in = program[H_D_IN], d_out = program[H_D_OUT];
    void *base[MAX_BUFFERS];
    int64_t row[MAX_BUFFERS];
    find_buffers(call, memory, base, row);
    const char *x = (const char *)call->x + start * call->x_row * outer;
    const char *gy = call->gy ? (const char *)call->gy + start * call->gy_row * outer : 0;
    char *y = call->y ? (char *)call->y + start * call->y_row * outer : 0;
    char *gx = call->gx ? (char *)call->gx + start * call->gx_row * outer : 0;
    if (call->stage_x)
        kernels->stage_in(x, call->x_row, d_in, base[BUFFER_X], row[BUFFER_X],
                          program[H_D_IN_PADDED], tokens, call->half);
    else
        base[BUFFER_X] = (void *)x, row[BUFFER_X] = call->x_row;
    if (gy && call->stage_gy)
        kernels->stage_in(gy, call->gy_row, d_out, base[BUFFER_GY], row[BUFFER_GY],
                          program[H_D_OUT_PADDED], tokens, call->half);
    else
        base[BUFFER_GY] = (void *)gy, row[BUFFER_GY] = call->gy_row;
    if (!call->stage_y) base[BUFFER_Y] = y, row[BUFFER_Y] = call->y_row;
    if (!call->stage_gx) base[BUFFER_GX] = gx, row[BUFFER_GX] = call->gx_row;
    run_operations(call, memory, tokens, is_first, base, row);
    if (call->gbias)
        kernels->add_rows(base[BUFFER_GY], row[BUFFER_GY], d_out, tokens,
                          memory + call->at_bias_sum, !is_first);
    if (gx && call->stage_gx)
        kernels->stage_out(base[BUFFER_GX], row[BUFFER_GX], gx, call->gx_row, d_in, tokens,
                           call->half);
    if (y && call->stage_y)
        kernels->stage_out(base[BUFFER_Y], row[BUFFER_Y], y, call->y_row, d_out, tokens, call->half);
}

/* A worker's share of the tokens, in blocks of about equal length. */
static void run_share(void *context, int worker) {
    const Call *call = context;
    const long first = call->tokens * worker / call->workers;
    const long last = call->tokens * (worker + 1) / call->workers;
    const long blocks = (last - first + call->block - 1) / call->block;
    char *memory = call->memory + call->per_worker * worker;
    for (long b = 0; b < blocks; b++) {
        const long start = first + (last - first) * b / blocks;
        const long end = first + (last - first) * (b + 1) / blocks;
        run_block(call, memory, start, end - start, b == 0);
    }
}

static long smallest_wanted(const Call *call) {
    const int64_t *sizes = sizes_of(call);
    long found = -1;
    for (long s = 0; s < call->program[H_STEPS]; s++)
        if (call->gradients[s] && (found < 0 || sizes[s] < sizes[found])) found = s;
    return found;
}

/* Work on weights is cut into pieces, and every worker takes an equal run of each factor's. */

static void prepare_share(void *context, int worker) {
    const Call *call = context;
    const int64_t *sizes = sizes_of(call);
    const long steps = call->program[H_STEPS], workers = call->workers;
    long piece = 0;
    for (long s = 0; s < steps; s++) {
        const long pieces = (sizes[s] + PIECE - 1) / PIECE;
        for (long p = pieces * worker / workers; p < pieces * (worker + 1) / workers; p++) {
            const long start = p * PIECE, rest = sizes[s] - start;
            const long count = rest < PIECE ? rest : PIECE;
            if (call->half)
                call->kernels->stage_in((const uint16_t *)call->factors[s] + start, 0, count,
                                        (float *)call->weights[s] + start, 0, count, 1, 1);
            if (call->partial && !call->is_backward)
                call->partial[piece + p] =
                    call->kernels->dot((const char *)call->weights[s] + start * call->size,
                                       (const char *)call->weights[s] + start * call->size, count);
        }
        piece += pieces;
    }
    if (!call->is_backward) return;
    const int64_t *op = call->program + call->program[H_TURNS];
    for (long count = *op++; count > 0; count--, op += op[OP_LENGTH]) {
        const long units = copy_units(op), s = op[OP_STEP];
        call->kernels->copy(op, units * worker / workers, units * (worker + 1) / workers,
                            call->factors[s], call->half, call->turned[s], 0, 1, 0);
    }
}

static void collect_share(void *context, int worker) {
    const Call *call = context;
    const int64_t *op = call->program + call->program[H_COLLECTS];
    const long workers = call->workers;
    for (long count = *op++; count > 0; count--, op += op[OP_LENGTH]) {
        const long units = copy_units(op), s = op[OP_STEP];
        if (!call->gradients[s]) continue;
        call->kernels->copy(op, units * worker / workers, units * (worker + 1) / workers,
                            call->memory + call->at_sum[s], 0, call->gradients[s], call->half,
                            workers, (long)(call->per_worker / call->size));
    }
}

static void collect_bias(const Call *call) {
    const int64_t op[] = {OP_DIMS + 6, 2, 0, 0, 0, 0, 1, 0, 0, call->program[H_D_OUT], 1, 1};
    call->kernels->copy(op, 0, 1, call->memory + call->at_bias_sum, 0, call->gbias, call->half,
                        call->workers, (long)(call->per_worker / call->size));
}

/* Of the smallest factor with a gradient: what it and its gradient have in common, piece by piece. */
static void compare_share(void *context, int worker) {
    const Call *call = context;
    const long s = smallest_wanted(call), workers = call->workers, size = sizes_of(call)[s];
    const long pieces = (size + PIECE - 1) / PIECE;
    for (long p = pieces * worker / workers; p < pieces * (worker + 1) / workers; p++) {
        const long start = p * PIECE, count = size - start < PIECE ? size - start : PIECE;
        call->partial[p] = call->kernels->dot((const char *)call->factors[s] + start * call->size,
                                              (const char *)call->gradients[s] + start * call->size,
                                              count);
    }
}

static void adjust_share(void *context, int worker) {
    const Call *call = context;
    const int64_t *sizes = sizes_of(call);
    for (long s = 0; s < call->program[H_STEPS]; s++) {
        if (!call->gradients[s]) continue;
        const long first = sizes[s] * worker / call->workers;
        const long last = sizes[s] * (worker + 1) / call->workers;
        call->kernels->adjust((char *)call->gradients[s] + first * call->size,
                              (const char *)call->factors[s] + first * call->size, last - first,
                              call->finish.scale, call->amounts[s]);
    }
}

/* Turn gradients of used factors s M into those of M, where s = min(1, std / rms(M)).

   The output is S f(M, ...), S the product of all s and f linear in every M. With g the gradient of
   f, the gradient of M is S g, less, where s < 1, S <g, M> / (n rms^2) M; and <g, M> = <grad y, f> is
   the same for every factor. */
static void finish_gradients(Call *call, const double *stds, const double *scales) {
    const int64_t *sizes = sizes_of(call);
    const long pivot = smallest_wanted(call);
    double amounts[MAX_STEPS], common = 0;
    if (pivot < 0) return;
    parallel(compare_share, call, call->workers);
    for (long p = 0; p < (sizes[pivot] + PIECE - 1) / PIECE; p++) common += call->partial[p];
    for (long s = 0; s < call->program[H_STEPS]; s++) {
        const double ratio = scales[s] / stds[s]; /* 1 / rms, where s < 1 */
        amounts[s] =
            scales[s] < 1 ? call->finish.scale * common * ratio * ratio / (double)sizes[s] : 0;
    }
    call->amounts = amounts;
    parallel(adjust_share, call, call->workers);
}

static int choose_workers(const Call *call, long threads) {
    const double macs = (double)call->program[H_MACS] * (double)call->tokens;
    const long blocks = (call->tokens + call->block - 1) / call->block;
    if (macs < 200e3 || threads < 1) threads = 1;
    if (threads > blocks) threads = blocks;
    return (int)(threads > MAX_THREADS ? MAX_THREADS : threads);
}

/* What forward and backward calls have in common. */
static int start_call(Call *call, const int64_t *program, int64_t dtype, int64_t tokens) {
    memset(call, 0, offsetof(Call, at_row));
    if (program[H_VERSION] != VERSION_NUMBER || program[H_STEPS] > MAX_STEPS ||
        program[H_ROW_BUFFERS] + 3 * program[H_STEPS] > MAX_BUFFERS)
        return -2;
    if (atomic_load(&chosen_target) < 0) einlinear_target(-1);
    call->program = program;
    call->kernels = kernels_of(atomic_load(&chosen_target), dtype == DTYPE_DOUBLE);
    call->tokens = tokens;
    call->half = dtype == DTYPE_HALF;
    call->size = dtype == DTYPE_DOUBLE ? 8 : 4;
    call->stage_x = call->stage_gx = call->half || program[H_D_IN] != program[H_D_IN_PADDED];
    call->stage_y = call->stage_gy = call->half || program[H_D_OUT] != program[H_D_OUT_PADDED];
    return 0;
}

/* Whether a row buffer lies in the workspace. */
static int has_rows(const Call *call, long buffer) {
    switch (buffer) {
        case BUFFER_X: return call->stage_x;
        case BUFFER_Y: return call->stage_y && !call->is_backward;
        case BUFFER_GY: return call->stage_gy && call->is_backward;
        case BUFFER_GX: return call->stage_gx && call->is_backward;
    }
    return call->is_backward || buffer < BUFFER_INNER + call->program[H_STEPS] - 1;
}

/* Where the factors are that a pass computes with. */
static void open_weights(Call *call, char *memory) {
    const int64_t *sizes = sizes_of(call), steps = call->program[H_STEPS];
    (void)sizes; /* only AddressSanitizer asks */
    for (long s = 0; s < steps; s++) {
        call->weights[s] = call->factors[s];
        if (call->half)
            call->weights[s] =
                opened(memory + call->at_weights[s], (size_t)(sizes[s] * call->size));
        if (call->is_backward)
            call->turned[s] =
                opened(memory + call->at_turned[s], (size_t)(sizes[steps + s] * call->size));
    }
}

/* Of one row, of the input or of the output. */
static size_t line_bytes(const Call *call) {
    const int64_t d_in = call->program[H_D_IN_PADDED], d_out = call->program[H_D_OUT_PADDED];
    return (size_t)((d_in > d_out ? d_in : d_out) * call->size);
}

static void open_own(const Call *call) {
#ifdef __SANITIZE_ADDRESS__
    const int64_t *program = call->program, per_token = call->block * call->size;
    for (long w = 0; w < call->workers; w++) {
        char *own = call->memory + call->per_worker * w;
        for (long b = 0; b < program[H_ROW_BUFFERS]; b++)
            if (has_rows(call, b)) opened(own + call->at_row[b], program[H_LENGTH + b] * per_token);
        for (long s = 0; s < program[H_STEPS]; s++)
            if (call->gradients[s]) {
                opened(own + call->at_sum[s], sizes_of(call)[s] * call->size);
                if (call->is_grouped)
                    opened(own + call->at_split[s], sizes_of(call)[s] * call->size);
            }
        if (call->is_grouped) opened(own + call->at_line, line_bytes(call));
        opened(own + call->at_scratch, program[H_SCRATCH] * per_token);
        if (call->gbias) opened(own + call->at_bias_sum, program[H_D_OUT] * call->size);
    }
#else
    (void)call;
#endif
}

/* Lay out the memory: what workers share first, then each worker's own. Returns 0 if there is none.

   What a step reads and what it writes lie half a page apart modulo a page: a processor takes a load
   to depend on a store before it that agrees in the lower 12 bits of the address, and would wait.
   That can halve the speed of a step. */
static int lay_out(Call *call, int norm) {
    const int64_t *program = call->program, *sizes = sizes_of(call);
    const long steps = program[H_STEPS];
    const long rows = program[H_ROW_BUFFERS];
    size_t shared = round_up(call->extra), own = 0, at_bias, at_partial, pieces = 0;
    for (long s = 0; s < steps; s++) {
        size_t *place = call->is_grouped ? &own : &shared;
        call->at_weights[s] = (int64_t)*place;
        if (call->half) *place += round_up((size_t)(sizes[s] * call->size));
        call->at_turned[s] = (int64_t)*place;
        if (call->is_backward) *place += round_up((size_t)(sizes[steps + s] * call->size));
        pieces += (size_t)((sizes[s] + PIECE - 1) / PIECE);
    }
    const int pad_bias = call->bias && (call->half || program[H_D_OUT] != program[H_D_OUT_PADDED]);
    at_bias = shared;
    if (pad_bias) shared += round_up((size_t)(program[H_D_OUT_PADDED] * call->size));
    at_partial = shared;
    if (norm) shared += round_up(pieces * sizeof(double));
    own = round_to_page(own);
    const size_t phase = call->stage_x ? 0 : (size_t)call->x & (PAGE / 2 - 64);
    for (long b = 0; b < rows; b++) {
        call->at_row[b] = 0;
        if (!has_rows(call, b)) continue;
        const long inner = b - BUFFER_INNER;
        const int is_odd = inner >= 0 && inner % (steps > 1 ? steps - 1 : 1) % 2 == 0;
        call->at_row[b] = (int64_t)(own + (phase + (is_odd ? PAGE / 2 : 0)) % PAGE);
        own += round_to_page((size_t)(program[H_LENGTH + b] * call->block * call->size)) + PAGE;
    }
    for (long s = 0; s < steps; s++) {
        call->at_sum[s] = (int64_t)(own + phase);
        if (call->is_backward && call->gradients[s])
            own += round_to_page((size_t)(sizes[s] * call->size)) + PAGE;
        call->at_split[s] = (int64_t)(own + phase);
        if (call->is_backward && call->gradients[s] && call->is_grouped)
            own += round_to_page((size_t)(sizes[s] * call->size)) + PAGE;
    }
    call->at_line = (int64_t)own;
    if (call->is_grouped) own += round_up(line_bytes(call));
    call->at_scratch = (int64_t)(own + phase + PAGE / 4);
    own += round_to_page((size_t)(program[H_SCRATCH] * call->block * call->size)) + PAGE;
    call->at_bias_sum = (int64_t)own;
    if (call->gbias) own += round_up((size_t)(program[H_D_OUT_PADDED] * call->size));
    own = round_to_page(own);
    shared = round_to_page(shared);
    char *memory = reserve(shared + own * (size_t)call->workers);
    if (!memory) return 0;
    call->shared = opened(memory, call->extra);
    if (!call->is_grouped) open_weights(call, memory);
    call->finish.bias = call->bias;
    if (pad_bias) {
        char *bias = opened(memory + at_bias, (size_t)(program[H_D_OUT_PADDED] * call->size));
        call->kernels->stage_in(call->bias, 0, program[H_D_OUT], bias, 0, program[H_D_OUT_PADDED], 1,
                                call->half);
        call->finish.bias = bias;
    }
    call->partial = norm ? (double *)opened(memory + at_partial, pieces * sizeof(double)) : 0;
    call->memory = memory + shared;
    call->per_worker = own;
    open_own(call);
    return 1;
}

/* 1 / max(1, rms / std) per factor, from the sums of squares; their product. */
static double find_scales(const Call *call, const double *stds, double *scales) {
    const int64_t *sizes = sizes_of(call);
    double product = 1;
    long piece = 0;
    for (long s = 0; s < call->program[H_STEPS]; s++) {
        double total = 0;
        for (long p = (sizes[s] + PIECE - 1) / PIECE; p > 0; p--) total += call->partial[piece++];
        const double excess = total / (double)sizes[s] / (stds[s] * stds[s]);
        scales[s] = excess > 1 || excess != excess ? 1 / __builtin_sqrt(excess) : 1;
        product *= scales[s];
    }
    return product;
}

/* Ask for large pages for rows that are about to be written: where they are fresh from the system,
   as large tensors are at every call, faults on pages of 4 KB cost as much as the arithmetic. */
static void ask_for_large_pages(void *rows, int64_t row, const Call *call) {
#ifdef MADV_HUGEPAGE
    const uintptr_t large = 2 << 20, first = ((uintptr_t)rows + large - 1) / large * large;
    const uintptr_t bytes = (uintptr_t)(row * call->tokens * (call->half ? 2 : call->size));
    const uintptr_t last = ((uintptr_t)rows + bytes) / large * large;
    if (rows && bytes >= 2 * large && last > first)
        madvise((void *)first, last - first, MADV_HUGEPAGE); /* a wish: failure changes nothing */
#else
    (void)rows, (void)row, (void)call;
#endif
}

/* What the callers must agree on: flat programs and the arguments below. */
EXPORT int einlinear_version(void) { return VERSION_NUMBER; }

/* Arguments: program dtype tokens threads x x_row bias y y_row stds scales scales_known factors...
   Addresses and whole numbers, all of 8 bytes. With stds, factors are normalised: the scales are
   written to `scales` (if that is not 0), or read from there if known. */
EXPORT int einlinear_forward(const int64_t *a) {
    Call call;
    const int failed = start_call(&call, (const int64_t *)(intptr_t)a[0], a[1], a[2]);
    if (failed || call.tokens <= 0) return failed;
    const int64_t *program = call.program;
    call.x = (const void *)(intptr_t)a[4], call.x_row = a[5];
    call.bias = (const void *)(intptr_t)a[6];
    call.y = (void *)(intptr_t)a[7], call.y_row = a[8];
    const double *stds = (const double *)(intptr_t)a[9];
    double *scales = (double *)(intptr_t)a[10];
    const int known = a[11] != 0;
    double unread[MAX_STEPS];
    for (long s = 0; s < program[H_STEPS]; s++) call.factors[s] = (const void *)(intptr_t)a[12 + s];
    call.block = program[H_BLOCK] < call.tokens ? program[H_BLOCK] : call.tokens;
    ask_for_large_pages(call.y, call.y_row, &call);
    call.workers = choose_workers(&call, a[3]);
    if (!lay_out(&call, stds && !known)) return -1;
    if (call.half || (stds && !known)) parallel(prepare_share, &call, call.workers);
    call.finish.scale = 1;
    if (stds && !known) {
        call.finish.scale = find_scales(&call, stds, scales ? scales : unread);
    } else if (scales && known) {
        for (long s = 0; s < program[H_STEPS]; s++) call.finish.scale *= scales[s];
    }
    call.finish.wanted = call.finish.bias != 0 || stds != 0 || scales != 0;
    parallel(run_share, &call, call.workers);
    return 0;
}

/* Arguments: program dtype tokens threads x x_row gy gy_row gx gx_row gbias stds scales
   factors... gradients...
   An address of 0 for gx, gbias or a gradient leaves it out; x may be 0 if all gradients are. With stds and scales, those that the
   forward pass found, gradients are of the factors before normalisation; not for bfloat16. */
EXPORT int einlinear_backward(const int64_t *a) {
    Call call;
    const int failed = start_call(&call, (const int64_t *)(intptr_t)a[0], a[1], a[2]);
    if (failed) return failed;
    const int64_t *program = call.program, steps = program[H_STEPS];
    call.is_backward = 1;
    call.x = (const void *)(intptr_t)a[4], call.x_row = a[5];
    call.gy = (const void *)(intptr_t)a[6], call.gy_row = a[7];
    call.gx = (void *)(intptr_t)a[8], call.gx_row = a[9];
    call.gbias = (void *)(intptr_t)a[10];
    for (long s = 0; s < steps; s++) {
        call.factors[s] = (const void *)(intptr_t)a[13 + s];
        call.gradients[s] = (void *)(intptr_t)a[13 + steps + s];
    }
    const double *stds = (const double *)(intptr_t)a[11];
    const double *scales = (const double *)(intptr_t)a[12];
    if (scales && call.half) return -2;
    const size_t outer = call.half ? 2 : (size_t)call.size;
    if (call.tokens <= 0) {
        for (long s = 0; s < steps; s++)
            if (call.gradients[s]) memset(call.gradients[s], 0, outer * sizes_of(&call)[s]);
        if (call.gbias) memset(call.gbias, 0, outer * program[H_D_OUT]);
        return 0;
    }
    call.block = program[H_CHUNK] < call.tokens ? program[H_CHUNK] : call.tokens;
    ask_for_large_pages(call.gx, call.gx_row, &call);
    call.workers = choose_workers(&call, a[3]);
    /* A weight gradient walks down columns: rows a power of two apart share a few cache sets. */
    call.stage_x |= call.x_row * call.size % (PAGE / 4) == 0;
    if (!call.x) { /* not needed where no factor has a gradient */
        if (smallest_wanted(&call) >= 0) return -3;
        call.stage_x = 0;
    }
    call.stage_gy |= call.gy_row * call.size % (PAGE / 4) == 0;
    if (!lay_out(&call, scales != 0)) return -1;
    call.finish.scale = 1;
    call.finish.wanted = scales != 0;
    for (long s = 0; scales && s < steps; s++) call.finish.scale *= scales[s];
    parallel(prepare_share, &call, call.workers);
    parallel(run_share, &call, call.workers);
    parallel(collect_share, &call, call.workers);
    if (scales) finish_gradients(&call, stds, scales);
    if (call.gbias) collect_bias(&call);
    return 0;
}

#include "engine_experts.h"
