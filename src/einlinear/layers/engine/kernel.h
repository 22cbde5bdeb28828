/* The kernel template. targets.c includes it once per instruction set and type, with

     REAL   float or double                  VEC   a vector of V of them
     TARGET the compiler's target attribute  NAME  makes names for this target and type
     ROWS   rows of a tile that is two vectors wide
     LOAD STORE SPLAT FMA                    on vectors
     MASK MASK_OF MLOAD MSTORE               on the first few lanes of a vector

   Every result is the sum over k in one lane, from the first term to the last, by one FMA each (or,
   where the target has none, a multiply and an add). The result does not depend on which rows share
   a tile, how wide the tile is, or where k is cut into blocks. */

/* What all tiles of one matrix multiply share. It is repeated `count` times, along the innermost loop. */
typedef struct {
    long n, k, s_i, s_k, w_k, c_i;
    long count, c_f, s_f, w_f;
    int add;          /* start from the values in C */
    int sums;         /* the innermost loop adds up in C */
    int has_epilogue; /* multiply by scale and add the bias (if any) before storing */
    REAL scale;
} NAME(Shape);

INLINE TARGET void NAME(tile)(const int R, const int NV, const int PART, const REAL *s,
                              const REAL *w, REAL *c, const REAL *bias, const NAME(Shape) * p,
                              const int add, MASK mask) {
    VEC acc[24];
    const long s_i = p->s_i, c_i = p->c_i, s_k = p->s_k, w_k = p->w_k;
    if (add) {
        const REAL *from = c; /* its address is found again at the end: there are few registers */
        OPAQUE(from);
        UNROLL for (int i = 0; i < R; i++) {
            UNROLL for (int j = 0; j < NV; j++) acc[i * NV + j] =
                PART && j == NV - 1 ? MLOAD(from + j * V, mask) : LOAD(from + j * V);
            from += c_i;
        }
    } else {
        UNROLL for (int i = 0; i < R * NV; i++) acc[i] = SPLAT(0);
    }
    const REAL *group[4]; /* one address for every three rows: few enough to stay in registers */
    UNROLL for (int g = 0; 3 * g < R; g++) {
        group[g] = s + 3 * g * s_i;
        OPAQUE(group[g]);
    }
    for (long k = p->k; k > 0; k--) {
        VEC b[8];
        UNROLL for (int j = 0; j < NV; j++) b[j] =
            PART && j == NV - 1 ? MLOAD(w + j * V, mask) : LOAD(w + j * V);
        UNROLL for (int i = 0; i < R; i++) {
            const VEC a = SPLAT(group[i / 3][i % 3 * s_i]);
            UNROLL for (int j = 0; j < NV; j++) acc[i * NV + j] = FMA(a, b[j], acc[i * NV + j]);
        }
        UNROLL for (int g = 0; 3 * g < R; g++) group[g] += s_k;
        w += w_k;
    }
    if (p->has_epilogue) {
        const VEC scale = SPLAT(p->scale);
        UNROLL for (int j = 0; j < NV; j++) {
            VEC shift = SPLAT(0);
            if (bias) shift = PART && j == NV - 1 ? MLOAD(bias + j * V, mask) : LOAD(bias + j * V);
            UNROLL for (int i = 0; i < R; i++) acc[i * NV + j] = FMA(acc[i * NV + j], scale, shift);
        }
    }
    OPAQUE(c);
    UNROLL for (int i = 0; i < R; i++) {
        UNROLL for (int j = 0; j < NV; j++) {
            if (PART && j == NV - 1)
                MSTORE(c + j * V, mask, acc[i * NV + j]);
            else
                STORE(c + j * V, acc[i * NV + j]);
        }
        c += c_i;
    }
}

/* R rows, all n, all indices of the innermost loop: tiles of NV vectors, then of fewer. */
INLINE TARGET void NAME(panel)(const int R, const int NV, const REAL *s, const REAL *w, REAL *c,
                               const REAL *bias, const NAME(Shape) * p, MASK mask) {
    for (long f = 0; f < p->count; f++) {
        const int add = p->add | (p->sums && f > 0);
        const REAL *s_f = s + f * p->s_f, *w_f = w + f * p->w_f;
        REAL *c_f = c + f * p->c_f;
        const REAL *bias_f = bias ? bias + f * p->c_f : 0;
        long j = 0, left = p->n;
        if (add) { /* sums of weight gradients exceed the cache: prefetch the next ones */
            const REAL *next = c_f + (p->count > 1 ? p->c_f : R * p->c_i);
            for (int i = 0; i < R; i++)
                for (long at = 0; at < left; at += 64 / (long)sizeof(REAL))
                    __builtin_prefetch(next + i * p->c_i + at, 1, 3);
        }
#define TILE(NVECS, PART) \
    NAME(tile)(R, NVECS, PART, s_f, w_f + j, c_f + j, bias_f ? bias_f + j : 0, p, add, mask)
        if (NV > 2)
            for (; left >= NV * V; j += NV * V, left -= NV * V) TILE(NV, 0);
        if (NV > 1)
            for (; left >= 2 * V; j += 2 * V, left -= 2 * V) TILE(2, 0);
        if (NV > 1 && left > V)
            TILE(2, 1);
        else if (left == V)
            TILE(1, 0);
        else if (left > 0)
            TILE(1, 1);
#undef TILE
    }
}

static TARGET void NAME(rows)(long r, const REAL *s, const REAL *w, REAL *c, const REAL *bias,
                              const NAME(Shape) * p) {
    const long part = p->n % V;
    const MASK mask = MASK_OF(part);
#define CASE(R, NV)                                 \
    case R:                                         \
        NAME(panel)(R, NV, s, w, c, bias, p, mask); \
        break;
    if (p->n <= V) {
        switch (r) {
            CASE(1, 1)
            CASE(2, 1)
            CASE(3, 1)
            CASE(4, 1)
            CASE(5, 1)
            CASE(6, 1)
            CASE(7, 1)
            CASE(8, 1)
            CASE(9, 1)
            CASE(10, 1)
            CASE(11, 1)
            CASE(12, 1)
        }
    } else {
        switch (r) {
            CASE(1, 8)
            CASE(2, 4)
            CASE(3, 4)
            CASE(4, 2)
            CASE(5, 2)
            CASE(6, 2)
#if ROWS > 6
            CASE(7, 2)
            CASE(8, 2)
            CASE(9, 2)
            CASE(10, 2)
            CASE(11, 2)
            CASE(12, 2)
#endif
        }
    }
#undef CASE
}

/* to[f][q] = from[q][f] for f < num_f, q < num_q; rows of `to` are `apart` numbers apart. */
static TARGET void NAME(gather)(const REAL *from, long from_q, long num_q, long num_f, REAL *to,
                                long apart) {
    long f = 0;
#ifdef TRANSPOSE8
    for (; f + 8 <= num_f; f += 8) {
        long q = 0;
        for (; q + 8 <= num_q; q += 8)
            TRANSPOSE8(from + q * from_q + f, from_q, to + f * apart + q, apart);
        for (; q < num_q; q++)
            for (long g = f; g < f + 8; g++) to[g * apart + q] = from[q * from_q + g];
    }
#endif
    for (; f < num_f; f++)
        for (long q = 0; q < num_q; q++) to[f * apart + q] = from[q * from_q + f];
}

/* Run a multiply on the tokens in the buffers; flat.py explains its fields.

   If S is contiguous along the innermost loop rather than along k or i, each cache line of S holds
   numbers for several indices of that loop. Such a group of indices is then computed together. If the
   operation asks for it, S is first gathered for the group into `scratch`, where it is contiguous. */
static TARGET void NAME(multiply)(const int64_t *op, long tokens, void *const *base,
                                  const int64_t *row, int add, const Epilogue *epilogue,
                                  void *scratch) {
#ifdef NARROW /* the target whose vectors are half as long */
    if (op[MULTIPLY_N] <= V / 2) {
        NARROW(multiply)(op, tokens, base, row, add, epilogue, scratch);
        return;
    }
#endif
    const int64_t *loop = op + MULTIPLY_LOOPS;
    const long num_loops = (op[OP_LENGTH] - MULTIPLY_LOOPS) / LOOP_LENGTH;
    const int64_t C = op[MULTIPLY_C], S = op[MULTIPLY_S], W = op[MULTIPLY_W];
    const int rows_are_tokens = op[MULTIPLY_ROWS] == TOKENS_EXTENT;
    const int sums_tokens = op[MULTIPLY_K] == TOKENS_EXTENT;
    const long rows = rows_are_tokens ? tokens : op[MULTIPLY_ROWS];
    const long n = op[MULTIPLY_N], k = sums_tokens ? tokens : op[MULTIPLY_K];
    const long k_block = op[MULTIPLY_K_BLOCK], n_block = op[MULTIPLY_N_BLOCK];
    const long group = op[MULTIPLY_GROUP];
    NAME(Shape) p;
    p.c_i = rows_are_tokens ? row[C] : op[MULTIPLY_C_I];
    p.s_i = rows_are_tokens ? row[S] : op[MULTIPLY_S_I];
    p.s_k = sums_tokens ? row[S] : op[MULTIPLY_S_K];
    p.w_k = sums_tokens ? row[W] : op[MULTIPLY_W_K];
    p.scale = (REAL)epilogue->scale;
    long inner = 1, index[MAX_LOOPS];
    p.c_f = p.s_f = p.w_f = 0;
    if (num_loops) {
        const int64_t *last = loop + LOOP_LENGTH * (num_loops - 1);
        inner = last[0], p.c_f = last[1], p.s_f = last[2], p.w_f = last[3];
    }
    p.sums = num_loops && p.c_f == 0;
    const long outer = num_loops ? num_loops - 1 : 0;
    for (long l = 0; l < outer; l++) index[l] = 0;
    const int gathers = op[MULTIPLY_GATHER] != 0;
    const long num_q = rows_are_tokens ? k : rows, s_q = rows_are_tokens ? p.s_k : p.s_i;
    const long wide = op[MULTIPLY_MOST_ROWS] < ROWS ? op[MULTIPLY_MOST_ROWS] : ROWS;
    /* Half a cache line of C at a time, in rows a page apart: 12 rows would evict each other before
       the other half is written. */
    const int shares_sets = n * sizeof(REAL) < 64 && p.c_i * sizeof(REAL) % 4096 == 0;
    const long most = n > V ? wide : shares_sets ? 6 : 12, tiles = (rows + most - 1) / most;
    const long tile = rows / tiles, longer = rows % tiles;
    REAL *gathered = (REAL *)scratch;
    if (gathers) {
        p.s_i = rows_are_tokens ? num_q : 1;
        p.s_k = rows_are_tokens ? 1 : num_q;
    }
    const REAL *s = (const REAL *)base[S], *w = (const REAL *)base[W];
    REAL *c = (REAL *)base[C];
    const REAL *bias = (const REAL *)epilogue->bias;
    for (;;) {
        int again = add;
        for (long l = 0; l < outer; l++) again |= loop[LOOP_LENGTH * l + 1] == 0 && index[l] > 0;
        for (long f0 = 0; f0 < inner; f0 += group) {
            const long rest = inner - f0, size = rest < group ? rest : group;
            if (gathers)
                for (long t = 0; t < tokens; t++)
                    NAME(gather)(s + t * row[S] + f0, s_q, num_q, size, gathered + t * num_q,
                                 tokens * num_q);
            p.count = gathers ? 1 : size;
            for (long f = f0; f < f0 + size; f += p.count)
                for (long j = 0; j < n; j += n_block)
                    for (long at = 0; at < k; at += k_block) {
                        p.n = n - j < n_block ? n - j : n_block;
                        p.k = k - at < k_block ? k - at : k_block;
                        p.add = again | (at > 0) | (p.sums && f > 0);
                        p.has_epilogue = epilogue->is_wanted && at + k_block >= k;
                        const long c_at = f * p.c_f + j;
                        const REAL *s_at =
                            (gathers ? gathered + (f - f0) * tokens * num_q : s + f * p.s_f) +
                            at * p.s_k;
                        const REAL *w_at = w + f * p.w_f + at * p.w_k + j;
                        for (long i = 0, t = 0; t < tiles; t++) {
                            const long r = tile + (t < longer);
                            NAME(rows)(r, s_at + i * p.s_i, w_at, c + c_at + i * p.c_i,
                                       bias ? bias + c_at : 0, &p);
                            i += r;
                        }
                    }
        }
        long l = outer - 1;
        for (; l >= 0; l--) {
            const int64_t *d = loop + LOOP_LENGTH * l;
            c += d[1], s += d[2], w += d[3];
            if (bias) bias += d[1];
            if (++index[l] < d[0]) break;
            c -= d[0] * d[1], s -= d[0] * d[2], w -= d[0] * d[3];
            if (bias) bias -= d[0] * d[1];
            index[l] = 0;
        }
        if (l < 0) return;
    }
}

/* Copy rows into padded rows, and fill the padding with zeros. */
static TARGET void NAME(stage_in)(const void *from, long from_row, long width, void *to,
                                  long to_row, long padded, long tokens, int is_bfloat16) {
    for (long t = 0; t < tokens; t++) {
        REAL *d = (REAL *)to + t * to_row;
        if (is_bfloat16)
            for (long i = 0; i < width; i++)
                d[i] = (REAL)bfloat16_to_float(((const uint16_t *)from)[t * from_row + i]);
        else
            memcpy(d, (const REAL *)from + t * from_row, sizeof(REAL) * width);
        for (long i = width; i < padded; i++) d[i] = 0;
    }
}

static TARGET void NAME(stage_out)(const void *from, long from_row, void *to, long to_row,
                                   long width, long tokens, int is_bfloat16) {
    for (long t = 0; t < tokens; t++) {
        const REAL *s = (const REAL *)from + t * from_row;
        if (is_bfloat16) {
            uint16_t *d = (uint16_t *)to + t * to_row;
            for (long i = 0; i < width; i++) d[i] = float_to_bfloat16((float)s[i]);
        } else {
            memcpy((REAL *)to + t * to_row, s, sizeof(REAL) * width);
        }
    }
}

/* Copy one row into a padded row, times a number. */
static TARGET void NAME(stage_row)(const void *from, long width, void *to, long padded,
                                   double scale, int is_bfloat16) {
    REAL *d = (REAL *)to;
    const REAL times = (REAL)scale;
    if (is_bfloat16)
        for (long i = 0; i < width; i++)
            d[i] = times * (REAL)bfloat16_to_float(((const uint16_t *)from)[i]);
    else
        for (long i = 0; i < width; i++) d[i] = times * ((const REAL *)from)[i];
    for (long i = width; i < padded; i++) d[i] = 0;
}

/* to[i] = start[i] (0 if NULL) + the sum of weights[j] * rows[j][i], in order */
static TARGET void NAME(combine)(void *to, const void *start, const void *const *rows,
                                 const double *weights, long terms, long width) {
    REAL *d = (REAL *)to;
    const REAL *s = (const REAL *)start;
    const MASK mask = MASK_OF(width % V);
    for (long i = 0; i < width; i += V) {
        const int is_part = width - i < V;
        VEC acc = SPLAT(0);
        if (s) acc = is_part ? MLOAD(s + i, mask) : LOAD(s + i);
        for (long j = 0; j < terms; j++) {
            const REAL *row = (const REAL *)rows[j] + i;
            const VEC number = is_part ? MLOAD(row, mask) : LOAD(row);
            acc = FMA(SPLAT((REAL)weights[j]), number, acc);
        }
        if (is_part) {
            MSTORE(d + i, mask, acc);
        } else {
            STORE(d + i, acc);
        }
    }
}

/* sums[i] (+)= the sum of column i */
static TARGET void NAME(add_rows)(const void *from, long row, long width, long tokens, void *sums,
                                  int add) {
    REAL *d = (REAL *)sums;
    for (long i = 0; i < width; i += 64) {
        const long n = width - i < 64 ? width - i : 64;
        REAL total[64];
        for (long j = 0; j < n; j++) total[j] = add ? d[i + j] : 0;
        const REAL *s = (const REAL *)from + i;
        for (long t = 0; t < tokens; t++, s += row) {
            if (n == 64)
                for (long j = 0; j < 64; j++) total[j] += s[j];
            else
                for (long j = 0; j < n; j++) total[j] += s[j];
        }
        for (long j = 0; j < n; j++) d[i + j] = total[j];
    }
}

/* The sum of a[i] * b[i]: in the lanes of four vectors for a few thousand terms, then in double. */
static TARGET double NAME(dot)(const void *from_a, const void *from_b, long count) {
    const REAL *a = (const REAL *)from_a, *b = (const REAL *)from_b;
    double total = 0;
    while (count > 0) {
        const long n = count < 4096 ? count : 4096;
        REAL lane[4 * V];
        VEC acc[4];
        long i = 0;
        UNROLL for (int j = 0; j < 4; j++) acc[j] = SPLAT(0);
        for (; i + 4 * V <= n; i += 4 * V) UNROLL for (int j = 0; j < 4; j++) {
                acc[j] = FMA(LOAD(a + i + j * V), LOAD(b + i + j * V), acc[j]);
            }
        UNROLL for (int j = 0; j < 4; j++) STORE(lane + j * V, acc[j]);
        for (int j = 0; j < 4 * V; j++) total += (double)lane[j];
        for (; i < n; i++) total += (double)a[i] * (double)b[i];
        a += n, b += n;
        count -= n;
    }
    return total;
}

/* to[i] = scale * to[i] - amount * from[i] */
static TARGET void NAME(adjust)(void *to, const void *from, long count, double scale,
                                double amount) {
    REAL *d = (REAL *)to;
    const REAL *s = (const REAL *)from, times = (REAL)scale, less = (REAL)amount;
    for (long i = 0; i < count; i++) d[i] = times * d[i] - less * s[i];
}

/* to[i] = the sum of `terms` arrays of n numbers, `apart` numbers apart, in order. */
INLINE TARGET void NAME(sum_terms)(const void *from, long at, int is_bfloat16, long n, long terms,
                                   long apart, REAL *to) {
    if (is_bfloat16)
        for (long i = 0; i < n; i++)
            to[i] = (REAL)bfloat16_to_float(((const uint16_t *)from)[at + i]);
    else
        for (long i = 0; i < n; i++) to[i] = ((const REAL *)from)[at + i];
    for (long term = 1; term < terms; term++)
        for (long i = 0; i < n; i++) to[i] += ((const REAL *)from)[at + term * apart + i];
}

/* Run units first..last - 1 of a copy. A unit is a block of COPY_BLOCK indices of the second last
   dimension (a), along which `from` is contiguous if it is not along the last (b); `to` is contiguous
   along b. Blocks go through a small tile, so that both sides are read and written in runs. */
static TARGET void NAME(copy)(const int64_t *op, long first, long last, const void *from,
                              int from_bfloat16, void *to, int to_bfloat16, long terms,
                              long apart) {
    const int64_t *dim = op + COPY_DIMS;
    const long num = (op[OP_LENGTH] - COPY_DIMS) / DIM_LENGTH;
    const int64_t *a = dim + DIM_LENGTH * (num - 2), *b = dim + DIM_LENGTH * (num - 1);
    const long pieces = (a[0] + COPY_BLOCK - 1) / COPY_BLOCK;
    const int is_plain = terms == 1 && !from_bfloat16 && !to_bfloat16;
#ifdef TRANSPOSE8
    const long outer = num > 2 ? dim[0] : 1;
    if (is_plain && num <= 3 && a[2] == 1 && b[1] == 1 && first == 0 && last == outer * pieces &&
        a[0] * b[0] <= MOST_TRANSPOSED) {
        for (long l = 0; l < outer; l++) /* all units: a few small transposed matrices */
            NAME(gather)((const REAL *)from + l * dim[2], b[2], b[0], a[0], (REAL *)to + l * dim[1],
                         a[1]);
        return;
    }
#endif
    REAL tile[COPY_BLOCK][COPY_BLOCK];
    for (long unit = first; unit < last; unit++) {
        long rest = unit / pieces, d_at = 0, s_at = 0;
        const long j0 = unit % pieces * COPY_BLOCK;
        const long num_j = a[0] - j0 < COPY_BLOCK ? a[0] - j0 : COPY_BLOCK;
        for (long l = num - 3; l >= 0; l--) {
            const int64_t *d = dim + DIM_LENGTH * l;
            d_at += rest % d[0] * d[1], s_at += rest % d[0] * d[2];
            rest /= d[0];
        }
        d_at += j0 * a[1], s_at += j0 * a[2];
        for (long i0 = 0; i0 < b[0]; i0 += COPY_BLOCK) {
            const long num_i = b[0] - i0 < COPY_BLOCK ? b[0] - i0 : COPY_BLOCK;
            const long d = d_at + i0 * b[1], s = s_at + i0 * b[2];
            if (b[2] == 1 && b[1] == 1) {
                for (long j = 0; j < num_j; j++) {
                    if (to_bfloat16) {
                        NAME(sum_terms)(from, s + j * a[2], from_bfloat16, num_i, terms, apart,
                                        tile[0]);
                        for (long i = 0; i < num_i; i++)
                            ((uint16_t *)to)[d + j * a[1] + i] =
                                float_to_bfloat16((float)tile[0][i]);
                    } else {
                        NAME(sum_terms)(from, s + j * a[2], from_bfloat16, num_i, terms, apart,
                                        (REAL *)to + d + j * a[1]);
                    }
                }
                continue;
            }
            if (a[2] == 1 && b[1] == 1 && is_plain) {
                NAME(gather)((const REAL *)from + s, b[2], num_i, num_j, (REAL *)to + d, a[1]);
                continue;
            }
            if (a[2] == 1)
                for (long i = 0; i < num_i; i++)
                    NAME(sum_terms)(from, s + i * b[2], from_bfloat16, num_j, terms, apart,
                                    tile[i]);
            else
                for (long i = 0; i < num_i; i++)
                    for (long j = 0; j < num_j; j++)
                        NAME(sum_terms)(from, s + i * b[2] + j * a[2], from_bfloat16, 1, terms,
                                        apart, &tile[i][j]);
            if (to_bfloat16) {
                for (long j = 0; j < num_j; j++)
                    for (long i = 0; i < num_i; i++)
                        ((uint16_t *)to)[d + i * b[1] + j * a[1]] =
                            float_to_bfloat16((float)tile[i][j]);
            } else {
                REAL *out = (REAL *)to + d;
                if (b[1] == 1)
                    for (long j = 0; j < num_j; j++)
                        for (long i = 0; i < num_i; i++) out[j * a[1] + i] = tile[i][j];
                else
                    for (long j = 0; j < num_j; j++)
                        for (long i = 0; i < num_i; i++) out[i * b[1] + j * a[1]] = tile[i][j];
            }
        }
    }
}

#include "activation.h"

static const Kernels NAME(kernels) = {NAME(multiply), NAME(stage_in),     NAME(stage_out),
                                      NAME(add_rows), NAME(dot),          NAME(adjust),
                                      NAME(copy),     NAME(stage_row),    NAME(combine),
                                      NAME(activate), NAME(multiply_rows)};

#undef REAL
#undef VEC
#undef V
#undef NAME
#undef LOAD
#undef STORE
#undef SPLAT
#undef FMA
#undef MASK
#undef MASK_OF
#undef MLOAD
#undef MSTORE
#undef TRANSPOSE8
#undef NARROW
