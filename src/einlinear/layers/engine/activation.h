/* Activations and their slopes, on rows of hidden numbers. kernel.h includes this file, once per
   instruction set and type.

   float is computed by polynomials, to about two units in the last place; double by the C library,
   number by number. NaN stays NaN. */

typedef __typeof__((VEC){0} < (VEC){0}) NAME(Lanes);

INLINE TARGET VEC NAME(select)(NAME(Lanes) mask, VEC yes, VEC no) {
    return (VEC)((mask & (NAME(Lanes))yes) | (~mask & (NAME(Lanes))no));
}

/* exp(v) where |v| <= 86: 2^n times a polynomial of the rest, which is at most log(2) / 2. Adding
   1.5 * 2^23 rounds to a whole number n and leaves it in the lowest bits. */
INLINE TARGET VEC NAME(exponential)(VEC v) {
    if (sizeof(REAL) == 8) {
        for (int i = 0; i < V; i++) v[i] = (REAL)exp((double)v[i]);
        return v;
    }
    const VEC round = SPLAT((REAL)12582912);
    const VEC shifted = FMA(v, SPLAT((REAL)1.44269504), round), n = shifted - round;
    const VEC high = SPLAT((REAL)-0.693359375), low = SPLAT((REAL)2.12194440e-4);
    const VEC rest = FMA(n, low, FMA(n, high, v)); /* n * high is exact */
    VEC y = SPLAT((REAL)(1.0 / 720));
    y = FMA(y, rest, SPLAT((REAL)(1.0 / 120)));
    y = FMA(y, rest, SPLAT((REAL)(1.0 / 24)));
    y = FMA(y, rest, SPLAT((REAL)(1.0 / 6)));
    y = FMA(y, rest, SPLAT((REAL)0.5));
    y = FMA(y, rest, SPLAT((REAL)1));
    y = FMA(y, rest, SPLAT((REAL)1));
    return (VEC)((NAME(Lanes))y + ((NAME(Lanes))shifted << 23));
}

/* exp(-v), or 0 where it is below about 1e-37; at most e^86. */
INLINE TARGET VEC NAME(decay)(VEC v) {
    const VEC most = SPLAT((REAL)86), least = SPLAT((REAL)-86);
    VEC near = NAME(select)(v > most, most, v);
    near = NAME(select)(near < least, least, near);
    return NAME(select)(v > most, SPLAT(0), NAME(exponential)(-near));
}

/* The upper tail of the normal distribution for u >= 0, given exp(-u^2 / 2): this times a polynomial
   in 1 / (1 + 0.26 u), fitted for the least relative error, 1.3e-8. */
INLINE TARGET VEC NAME(upper_tail)(VEC u, VEC bell) {
    if (sizeof(REAL) == 8) {
        for (int i = 0; i < V; i++) u[i] = (REAL)(0.5 * erfc((double)u[i] * 0.70710678118654752));
        return u;
    }
    static const float terms[] = {0.0339247405f, -0.170509102f,  0.29095456f,  -0.200766661f,
                                  0.200073016f,  0.031236163f,   0.109469816f, 0.10171842f,
                                  0.103906183f,  -7.14060597e-6f};
    const VEC t = SPLAT(1) / FMA(u, SPLAT((REAL)0.26), SPLAT(1));
    VEC y = SPLAT((REAL)terms[0]);
    UNROLL for (int i = 1; i < 10; i++) y = FMA(y, t, SPLAT((REAL)terms[i]));
    return y * bell;
}

/* The activation of x; its slope too. */
INLINE TARGET VEC NAME(activated)(const int64_t activation, VEC x, VEC *slope) {
    const VEC zero = SPLAT(0), one = SPLAT(1), square = x * x;
    if (activation == ACTIVATION_RELU) {
        *slope = NAME(select)(x <= zero, zero, one);
        return NAME(select)(x <= zero, zero, x);
    }
    if (activation == ACTIVATION_GELU) { /* x times the probability of a normal number below x */
        const VEC bell = NAME(decay)(square * SPLAT((REAL)0.5));
        const VEC tail = NAME(upper_tail)(NAME(select)(x < zero, -x, x), bell);
        const VEC below = NAME(select)(x > zero, one - tail, tail);
        *slope = FMA(x * SPLAT((REAL)0.39894228040143268), bell, below);
        return x * below;
    }
    VEC v = x, v_slope = one; /* x times the logistic function of v */
    if (activation == ACTIVATION_GELU_TANH) {
        const REAL a = (REAL)1.5957691216057308, b = (REAL)(1.5957691216057308 * 0.044715);
        v = x * FMA(square, SPLAT(b), SPLAT(a));
        v_slope = FMA(square, SPLAT(3 * b), SPLAT(a));
    }
    /* Of exp(v) and exp(-v), the one below 1: neither overflows, and small results stay exact.
       The slope of the logistic function is the product of its value and one minus its value. */
    const VEC small = NAME(decay)(NAME(select)(v < zero, -v, v)), part = one / (one + small);
    const VEC below = NAME(select)(v < zero, small * part, part);
    *slope = FMA(x * (small * part * part), v_slope, below);
    return x * below;
}

INLINE TARGET void NAME(activate_rows)(const int64_t activation, const int is_gated,
                                       const int wants_slopes, REAL *h, REAL *g, REAL *a,
                                       long width, long row, long tokens) {
    for (long t = 0; t < tokens; t++, h += row, a += row, g += is_gated ? row : 0) {
        for (long i = 0; i < width; i += V) {
            VEC slope, y = NAME(activated)(activation, LOAD(h + i), &slope);
            if (is_gated) {
                const VEC value = LOAD(g + i);
                if (wants_slopes) STORE(g + i, y);
                y *= value, slope *= value;
            }
            if (wants_slopes) STORE(h + i, slope);
            STORE(a + i, y);
        }
        for (long i = width; i < row; i++) a[i] = 0;
    }
}

/* a = the activation of h, times g if there is one; zeros after `width`. With slopes, h and g become
   the derivatives of a with respect to them. a may be h unless slopes are wanted. */
static TARGET void NAME(activate)(int64_t activation, int wants_slopes, void *h, void *g, void *a,
                                  long width, long row, long tokens) {
#define ACTIVATE(NAME_OF, GATED, SLOPES) \
    NAME(activate_rows)(NAME_OF, GATED, SLOPES, (REAL *)h, (REAL *)g, (REAL *)a, width, row, tokens)
#define CASE(NAME_OF)                \
    case NAME_OF:                    \
        if (g && wants_slopes)       \
            ACTIVATE(NAME_OF, 1, 1); \
        else if (g)                  \
            ACTIVATE(NAME_OF, 1, 0); \
        else if (wants_slopes)       \
            ACTIVATE(NAME_OF, 0, 1); \
        else                         \
            ACTIVATE(NAME_OF, 0, 0); \
        break;
    switch (activation) {
        CASE(ACTIVATION_RELU)
        CASE(ACTIVATION_GELU)
        CASE(ACTIVATION_GELU_TANH)
        CASE(ACTIVATION_SILU)
    }
#undef CASE
#undef ACTIVATE
}

/* to[i] *= by[i] in rows of the same length; zeros after `width`. */
static TARGET void NAME(multiply_rows)(void *to, const void *by, long width, long row,
                                       long tokens) {
    REAL *d = (REAL *)to;
    const REAL *s = (const REAL *)by;
    for (long t = 0; t < tokens; t++, d += row, s += row) {
        for (long i = 0; i < width; i += V) STORE(d + i, LOAD(d + i) * LOAD(s + i));
        for (long i = width; i < row; i++) d[i] = 0;
    }
}
