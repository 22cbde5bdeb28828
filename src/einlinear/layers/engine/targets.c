/* The kernel template (kernel.h) compiled for each instruction set, and the choice between them. */

#include "targets.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "abi.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#define HAS_X86 1
#elif defined(__aarch64__)
#include <arm_neon.h>
#define HAS_NEON 1
#endif

#define INLINE static inline __attribute__((always_inline))
#if defined(UNROLL) /* sanitizer builds define it as nothing, to compile faster */
#elif defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 24")
#endif

enum { MOST_TRANSPOSED = 4096 }; /* numbers of a matrix that stay in cache while columns are read */

/* The compiler must not derive this address from another one. */
#define OPAQUE(address) __asm__("" : "+r"(address))

/* ---- bfloat16: the upper 16 bits of a float; rounds to nearest even, keeps NaN ---- */

INLINE float bfloat16_to_float(uint16_t value) {
    const uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

INLINE uint16_t float_to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

/* ---- x86 ---- */

#ifdef HAS_X86
static const int32_t MASK_BITS[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};

/* to[j][i] = from[i][j] for i, j < 8 */
INLINE __attribute__((target("avx2,fma"))) void transpose8(const float *from, long from_row,
                                                           float *to, long to_row) {
    __m256 a[8], b[8];
    UNROLL for (int i = 0; i < 4; i++) {
        /* the lower halves of rows i and i + 4 side by side, then the upper halves */
        const __m256 low = _mm256_loadu_ps(from + i * from_row);
        const __m256 high = _mm256_loadu_ps(from + (i + 4) * from_row);
        a[i] = _mm256_permute2f128_ps(low, high, 0x20);
        a[i + 4] = _mm256_permute2f128_ps(low, high, 0x31);
    }
    UNROLL for (int k = 0; k < 8; k += 4) {
        b[0] = _mm256_unpacklo_ps(a[k], a[k + 1]);
        b[1] = _mm256_unpackhi_ps(a[k], a[k + 1]);
        b[2] = _mm256_unpacklo_ps(a[k + 2], a[k + 3]);
        b[3] = _mm256_unpackhi_ps(a[k + 2], a[k + 3]);
        _mm256_storeu_ps(to + (k + 0) * to_row, _mm256_shuffle_ps(b[0], b[2], 0x44));
        _mm256_storeu_ps(to + (k + 1) * to_row, _mm256_shuffle_ps(b[0], b[2], 0xee));
        _mm256_storeu_ps(to + (k + 2) * to_row, _mm256_shuffle_ps(b[1], b[3], 0x44));
        _mm256_storeu_ps(to + (k + 3) * to_row, _mm256_shuffle_ps(b[1], b[3], 0xee));
    }
}

#define TARGET __attribute__((target("avx2,fma")))
#define ROWS 6
#define REAL float
#define VEC __m256
#define V 8
#define NAME(x) x##_avx2_float
#define TRANSPOSE8 transpose8
#define LOAD(p) _mm256_loadu_ps(p)
#define STORE(p, a) _mm256_storeu_ps(p, a)
#define SPLAT(a) _mm256_set1_ps(a)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define MASK __m256i
#define MASK_OF(n) _mm256_loadu_si256((const __m256i *)(MASK_BITS + 8 - (n)))
#define MLOAD(p, m) _mm256_maskload_ps(p, m)
#define MSTORE(p, m, a) _mm256_maskstore_ps(p, m, a)
#include "kernel.h"

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
#include "kernel.h"
#undef TARGET
#undef ROWS

#define TARGET __attribute__((target("avx512f,avx2,fma")))
#define ROWS 12
#define REAL float
#define VEC __m512
#define V 16
#define NAME(x) x##_avx512_float
#define NARROW(x) x##_avx2_float
#define TRANSPOSE8 transpose8
#define LOAD(p) _mm512_loadu_ps(p)
#define STORE(p, a) _mm512_storeu_ps(p, a)
#define SPLAT(a) _mm512_set1_ps(a)
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define MASK __mmask16
#define MASK_OF(n) ((__mmask16)((1u << (n)) - 1u))
#define MLOAD(p, m) _mm512_maskz_loadu_ps(m, p)
#define MSTORE(p, m, a) _mm512_mask_storeu_ps(p, m, a)
#include "kernel.h"

#define REAL double
#define VEC __m512d
#define V 8
#define NAME(x) x##_avx512_double
#define NARROW(x) x##_avx2_double
#define LOAD(p) _mm512_loadu_pd(p)
#define STORE(p, a) _mm512_storeu_pd(p, a)
#define SPLAT(a) _mm512_set1_pd(a)
#define FMA(a, b, c) _mm512_fmadd_pd(a, b, c)
#define MASK __mmask8
#define MASK_OF(n) ((__mmask8)((1u << (n)) - 1u))
#define MLOAD(p, m) _mm512_maskz_loadu_pd(m, p)
#define MSTORE(p, m, a) _mm512_mask_storeu_pd(p, m, a)
#include "kernel.h"
#undef TARGET
#undef ROWS
#endif

/* ---- generic: vectors of 16 bytes, which gcc and clang have for every machine ----

   On aarch64 this is NEON, and FMA is one instruction; elsewhere it is a multiply and an add. */
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
/* kernel.h undefines STORE and MSTORE at its end; these two remain for the second type. */
#define PLAIN_STORE(p, a)                    \
    do {                                     \
        const VEC stored = (a);              \
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
#include "kernel.h"

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
#include "kernel.h"

/* ---- the choice ---- */

static int is_supported(int target) {
#ifdef HAS_X86
    __builtin_cpu_init();
    if (target == TARGET_AVX2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (target == TARGET_AVX512)
        return __builtin_cpu_supports("avx512f") && is_supported(TARGET_AVX2);
#endif
    return target == TARGET_GENERIC;
}

static _Atomic int chosen_target = -1;

int choose_target(int target) {
    if (target < 0)
        for (target = TARGET_AVX512; !is_supported(target); target--) {
        }
    if (!is_supported(target)) return -1;
    atomic_store(&chosen_target, target);
    return target;
}

const Kernels *current_kernels(int is_double) {
    if (atomic_load(&chosen_target) < 0) choose_target(-1);
#ifdef HAS_X86
    const int target = atomic_load(&chosen_target);
    if (target == TARGET_AVX2) return is_double ? &kernels_avx2_double : &kernels_avx2_float;
    if (target == TARGET_AVX512) return is_double ? &kernels_avx512_double : &kernels_avx512_float;
#endif
    return is_double ? &kernels_generic_double : &kernels_generic_float;
}

int has_neon(void) {
#ifdef HAS_NEON
    return 1;
#else
    return 0;
#endif
}
