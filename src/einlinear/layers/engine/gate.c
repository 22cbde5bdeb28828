/* The gate of a mixture. Forward, one call computes the logits, chooses the experts of each token,
   weights them by a softmax and sorts the pairs (token, expert) by expert. Backward, one call goes from
   the gradients of the weights to those of the logits, adds the gate's share to the gradient of the
   input, and computes the gradient of the gate.

   The products run on the kernels of programs. Every result is one chain of multiply-adds in a fixed
   order, so it depends neither on the number of threads nor on the other tokens. Rows are first copied
   to rows an odd number of cache lines apart: rows of x tend to share a few cache sets. */

#include "gate.h"

#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "arena.h"
#include "call.h"
#include "pool.h"

enum {
    PANEL = 32,               /* experts at a time */
    BLOCK_NUMBERS = 48 << 10, /* numbers of the rows at a time */
    SUM_PAIRS = 8,            /* rows at a time for the gradient of the gate, from pairs */
    SUM_TOKENS = 128,         /* tokens at a time for the gradient of the gate, */
    SUM_COLUMNS = 512,        /* and columns; */
    LEAST_COLUMNS = 32,       /* workers share out columns by as many */
    TERMS = 256,              /* of a sum before the next rows */
    W_NUMBERS = 8192,         /* of W that all rows use before the next */
    MOST_ROWS = 8,            /* of a tile */
    LEAST_UNUSED = 4,         /* experts per active one that pay for a sum over pairs */
    LOW_BITS = 16,            /* of a logit in double that ties ignore, as in routing.py */
};

typedef struct {
    const GateArguments *of;
    const Kernels *kernels;
    long size, block, row, workers;
    char *gate;         /* forward: PANEL rows at a time, transposed; backward: rows apart */
    char *weights;      /* forward: of the chosen experts */
    char *grads;        /* backward: of the logits */
    double *pair_grads; /* backward: what the weights of pairs add to them */
    double *sums;       /* backward: of weight times gradient, per token */
    double *shares;     /* backward: per token, pair_grads of its pairs */
    const void **used;  /* backward: and the gate's rows of their experts */
    int64_t *num_used;  /* backward: per token */
    char *memory;       /* of the first worker */
    size_t at_best;     /* in a worker's memory, after its rows */
    size_t per_worker;
    _Atomic int is_tied;
} Gate;

/* C[i, n] (+)= sum over k of S[i, k] * W[k, n], see flat.py */
typedef struct {
    void *c;
    const void *s, *w;
    long rows, n, k, c_i, s_i, s_k, w_k, n_block;
    int add;
} Product;

static void multiply(const Gate *g, const Product *p) {
    const int64_t op[] = {
        MULTIPLY_LOOPS, KIND_MULTIPLY, ROLE_FORWARD, 0,      0,      1, 2,     p->rows,    p->n,
        p->k,           p->c_i,        p->s_i,       p->s_k, p->w_k, 1, TERMS, p->n_block, 0,
        MOST_ROWS};
    const int64_t no_rows[] = {0, 0, 0};
    void *const base[] = {p->c, (void *)(uintptr_t)p->s, (void *)(uintptr_t)p->w};
    const Epilogue no_epilogue = {0, 1, 0};
    g->kernels->multiply(op, 0, base, no_rows, p->add, &no_epilogue, 0);
}

/* Rows of at least `width` numbers, an odd number of cache lines apart. */
static long row_apart(long width, long size) {
    const long line = 64 / size;
    return ((width + line - 1) / line | 1) * line;
}

static int start_gate(Gate *g, const GateArguments *of) {
    memset(g, 0, sizeof *g);
    if (of->dtype != DTYPE_FLOAT32 && of->dtype != DTYPE_FLOAT64) return STATUS_UNKNOWN_DTYPE;
    if (of->num_experts < 1) return STATUS_EXPERT_COUNT;
    if (of->num_active < 1 || of->num_active > of->num_experts) return STATUS_ACTIVE_COUNT;
    if (of->tokens < 0 || of->tokens > INT32_MAX / of->num_active) return STATUS_PAIR_COUNT;
    g->of = of;
    g->kernels = current_kernels(of->dtype == DTYPE_FLOAT64);
    g->size = of->dtype == DTYPE_FLOAT64 ? 8 : 4;
    g->row = row_apart(of->width, g->size);
    g->block = BLOCK_NUMBERS / g->row;
    if (g->block < 12) g->block = 12;
    const double macs = (double)of->tokens * (double)of->width * (double)of->num_experts;
    g->workers = count_workers(macs, (of->tokens + g->block - 1) / g->block, of->threads);
    const long most = (of->tokens + g->workers - 1) / g->workers;  // tokens of a worker
    if (g->block > most) g->block = most > 0 ? most : 1;
    return STATUS_OK;
}

static char *own_memory(const Gate *g, int worker) {
    return g->memory + g->per_worker * (size_t)worker;
}

/* ---- forward ---- */

static void transpose_gate(void *context, int worker) {
    const Gate *g = context;
    const long width = g->of->width, experts = g->of->num_experts;
    for (long e = 0; e < experts; e += PANEL) {
        const long n = experts - e < PANEL ? experts - e : PANEL;
        const int64_t op[] = {COPY_DIMS + 2 * DIM_LENGTH,
                              KIND_COPY,
                              ROLE_TRANSPOSE,
                              0,
                              0,
                              0,
                              width,
                              n,
                              1,
                              n,
                              1,
                              width};
        const long units = copy_units(op);
        g->kernels->copy(op, units * worker / g->workers, units * (worker + 1) / g->workers,
                         (const char *)g->of->gate + e * width * g->size, 0,
                         g->gate + e * width * g->size, 0, 1, 0);
    }
}

/* The bits that decide whether two logits are equal. */
static int64_t coarse_bits(double logit) {
    const double within = fmax(-DBL_MAX, fmin(logit, DBL_MAX)) + 0.0;
    int64_t bits;
    memcpy(&bits, &within, sizeof bits);
    return bits >> LOW_BITS;
}

/* Choose the experts of a token, the best first, and weight them. Returns 0 if equal logits decide,
   or some that are no numbers. `best` and `at` have room for one more than are active. */
static int choose_experts(const Gate *g, long t, double *best, int64_t *at) {
    const long active = g->of->num_active, experts = g->of->num_experts;
    const long most = active < experts ? active + 1 : active;
    long found = 0;
    for (long e = 0; e < experts; e++) {
        const double logit = real_at(g->size, g->of->logits, t * experts + e);
        if (logit != logit) return 0;
        if (found == most && logit <= best[most - 1]) continue;
        long place = found < most ? found++ : most - 1;
        for (; place > 0 && best[place - 1] < logit; place--)
            best[place] = best[place - 1], at[place] = at[place - 1];
        best[place] = logit, at[place] = e;
    }
    for (long i = 1; i < most; i++)
        if (coarse_bits(best[i - 1]) == coarse_bits(best[i])) return 0;
    memcpy(g->of->chosen + t * active, at, (size_t)active * sizeof *at);
    const double top = best[0];
    double sum = 0;
    for (long i = 0; i < active; i++) sum += best[i] = exp(best[i] - top);
    for (long i = 0; i < active; i++) set_real(g->size, g->weights, t * active + i, best[i] / sum);
    return 1;
}

static void route_tokens(void *context, int worker) {
    Gate *g = context;
    const GateArguments *of = g->of;
    const long width = of->width, experts = of->num_experts;
    const long first = of->tokens * worker / g->workers;
    const long last = of->tokens * (worker + 1) / g->workers;
    char *rows = own_memory(g, worker);
    double *best = (double *)(rows + g->at_best);
    int64_t *at = (int64_t *)(best + of->num_active + 1);
    int is_tied = 0;
    for (long start = first; start < last; start += g->block) {
        const long tokens = last - start < g->block ? last - start : g->block;
        const char *x = (const char *)of->x + start * of->x_row * g->size;
        char *logits = (char *)of->logits + start * experts * g->size;
        g->kernels->stage_in(x, of->x_row, width, rows, g->row, width, tokens, 0);
        for (long e = 0; e < experts; e += PANEL) {
            const long n = experts - e < PANEL ? experts - e : PANEL;
            multiply(g, &(Product){.c = logits + e * g->size,
                                   .c_i = experts,
                                   .s = rows,
                                   .s_i = g->row,
                                   .s_k = 1,
                                   .w = g->gate + e * width * g->size,
                                   .w_k = n,
                                   .rows = tokens,
                                   .n = n,
                                   .k = width,
                                   .n_block = n});
        }
        for (long t = start; t < start + tokens && !is_tied; t++)
            is_tied = !choose_experts(g, t, best, at);
    }
    if (is_tied) atomic_store(&g->is_tied, 1);
}

/* Sort the pairs by expert; those of an expert stay in the order of tokens. */
static void sort_pairs(const Gate *g) {
    const GateArguments *of = g->of;
    int64_t *next = of->expert_ends, pairs = of->tokens * of->num_active, total = 0;
    memset(next, 0, (size_t)of->num_experts * sizeof *next);
    for (int64_t i = 0; i < pairs; i++) next[of->chosen[i]]++;
    for (long e = 0; e < of->num_experts; e++) {
        const int64_t count = next[e];
        next[e] = total, total += count;
    }
    for (int64_t t = 0, i = 0; t < of->tokens; t++)
        for (const int64_t end = i + of->num_active; i < end; i++) {
            const int64_t p = next[of->chosen[i]]++;
            of->pair_order[p] = i, of->pair_tokens[p] = t;
            set_real(g->size, of->pair_weights, p, real_at(g->size, g->weights, i));
        }
}

int run_gate_forward(const GateArguments *arguments) {
    Gate g;
    const int status = start_gate(&g, arguments);
    if (status) return status;
    const size_t size = (size_t)g.size, tokens = (size_t)arguments->tokens;
    const size_t active = (size_t)arguments->num_active;
    const size_t gate = round_up((size_t)(arguments->width * arguments->num_experts) * size);
    const size_t weights = round_up(tokens * active * size);
    g.at_best = round_up((size_t)(g.block * g.row) * size);
    g.per_worker = round_up(g.at_best + (active + 1) * (sizeof(double) + sizeof(int64_t)));
    const size_t bytes = gate + weights + g.per_worker * (size_t)g.workers;
    g.gate = reserve_arena(bytes);
    if (!g.gate) return STATUS_NO_MEMORY;
    g.weights = unpoisoned(g.gate, bytes) + gate;
    g.memory = g.weights + weights;
    run_parallel(transpose_gate, &g, (int)g.workers);
    run_parallel(route_tokens, &g, (int)g.workers);
    if (atomic_load(&g.is_tied)) return STATUS_TIED_LOGITS;
    sort_pairs(&g);
    return STATUS_OK;
}

/* ---- backward ---- */

typedef struct {
    long first, last;
} Columns;

/* Each worker has its own columns of the gate's gradient, so that no sum is shared. */
static Columns own_columns(const Gate *g, int worker) {
    const long width = g->of->width, units = (width + LEAST_COLUMNS - 1) / LEAST_COLUMNS;
    const long end = units * (worker + 1) / g->workers * LEAST_COLUMNS;
    return (Columns){units * worker / g->workers * LEAST_COLUMNS, end < width ? end : width};
}

/* What the weights of pairs add to the gradients of the logits, through the softmax over the experts
   of each token. */
static void find_pair_gradients(const Gate *g) {
    const GateArguments *of = g->of;
    const long pairs = of->tokens * of->num_active;
    memset(g->sums, 0, (size_t)of->tokens * sizeof *g->sums);
    for (long p = 0; p < pairs; p++)
        g->sums[of->pair_tokens[p]] +=
            real_at(g->size, of->pair_weights, p) * real_at(g->size, of->grad_pair_weights, p);
    for (long p = 0; p < pairs; p++)
        g->pair_grads[p] =
            real_at(g->size, of->pair_weights, p) *
            (real_at(g->size, of->grad_pair_weights, p) - g->sums[of->pair_tokens[p]]);
}

/* Whether the tables of pairs fit each other. How often a token occurs is not checked. */
static int check_pairs(const GateArguments *of) {
    const long pairs = of->tokens * of->num_active;
    for (long e = 0, begin = 0; e < of->num_experts; begin = of->expert_ends[e++])
        if (of->expert_ends[e] < begin) return STATUS_EXPERT_ENDS;
    if (of->expert_ends[of->num_experts - 1] != pairs) return STATUS_EXPERT_ENDS;
    for (long p = 0; p < pairs; p++)
        if (of->pair_tokens[p] < 0 || of->pair_tokens[p] >= of->tokens) return STATUS_PAIR_TOKENS;
    return STATUS_OK;
}

/* ---- backward, if only the weights of pairs have gradients: experts that a token does not use
   have none, and are most of the work ---- */

/* List what is added to each token's row of the input gradient, in the order of experts. Returns 0 if
   a token has too many. */
static int list_used(const Gate *g) {
    const GateArguments *of = g->of;
    memset(g->num_used, 0, (size_t)of->tokens * sizeof *g->num_used);
    for (long e = 0, p = 0; e < of->num_experts; e++)
        for (; p < of->expert_ends[e]; p++) {
            const long t = of->pair_tokens[p];
            if (g->num_used[t] == of->num_active) return 0;
            const long at = t * of->num_active + g->num_used[t]++;
            g->used[at] = (const char *)of->gate + e * of->width * g->size;
            g->shares[at] = g->pair_grads[p];
        }
    return 1;
}

static void add_used_rows(void *context, int worker) {
    const Gate *g = context;
    const GateArguments *of = g->of;
    for (long t = of->tokens * worker / g->workers; t < of->tokens * (worker + 1) / g->workers;
         t++) {
        char *row = (char *)of->grad_x + t * of->grad_x_row * g->size;
        g->kernels->combine(row, row, g->used + t * of->num_active, g->shares + t * of->num_active,
                            of->num_active, of->width);
    }
}

static void sum_used_rows(void *context, int worker) {
    const Gate *g = context;
    const GateArguments *of = g->of;
    const Columns own = own_columns(g, worker);
    for (long e = 0, p = 0; e < of->num_experts; e++) {
        char *to = (char *)of->grad_gate + (e * of->width + own.first) * g->size;
        if (p == of->expert_ends[e]) memset(to, 0, (size_t)((own.last - own.first) * g->size));
        for (const void *start = 0; p < of->expert_ends[e]; start = to) {
            const void *rows[SUM_PAIRS];
            const long rest = of->expert_ends[e] - p, pairs = rest < SUM_PAIRS ? rest : SUM_PAIRS;
            for (long i = 0; i < pairs; i++)
                rows[i] = (const char *)of->x +
                          (of->pair_tokens[p + i] * of->x_row + own.first) * g->size;
            g->kernels->combine(to, start, rows, g->pair_grads + p, pairs, own.last - own.first);
            p += pairs;
        }
    }
}

/* ---- backward, if the caller gives gradients of the logits, or if tokens use most experts: a product
   with all of them ---- */

static void find_logit_gradients(const Gate *g) {
    const GateArguments *of = g->of;
    const long experts = of->num_experts;
    const size_t bytes = (size_t)(of->tokens * experts * g->size);
    if (of->grad_logits)
        memcpy(g->grads, of->grad_logits, bytes);
    else
        memset(g->grads, 0, bytes);
    for (long e = 0, p = 0; e < experts; e++)
        for (; p < of->expert_ends[e]; p++) {
            const long at = of->pair_tokens[p] * experts + e;
            set_real(g->size, g->grads, at, real_at(g->size, g->grads, at) + g->pair_grads[p]);
        }
}

static void copy_gate(void *context, int worker) {
    const Gate *g = context;
    const long width = g->of->width, experts = g->of->num_experts;
    const long first = experts * worker / g->workers, last = experts * (worker + 1) / g->workers;
    g->kernels->stage_in((const char *)g->of->gate + first * width * g->size, width, width,
                         g->gate + first * g->row * g->size, g->row, width, last - first, 0);
}

static void add_input_gradients(void *context, int worker) {
    const Gate *g = context;
    const GateArguments *of = g->of;
    const long first = of->tokens * worker / g->workers, experts = of->num_experts;
    const long last = of->tokens * (worker + 1) / g->workers;
    const long n_block = W_NUMBERS / (experts < TERMS ? experts : TERMS) / PANEL * PANEL;
    for (long start = first; start < last; start += g->block) {
        const long tokens = last - start < g->block ? last - start : g->block;
        multiply(g, &(Product){.c = (char *)of->grad_x + start * of->grad_x_row * g->size,
                               .c_i = of->grad_x_row,
                               .s = g->grads + start * experts * g->size,
                               .s_i = experts,
                               .s_k = 1,
                               .w = g->gate,
                               .w_k = g->row,
                               .rows = tokens,
                               .n = of->width,
                               .k = experts,
                               .n_block = n_block,
                               .add = 1});
    }
}

static void sum_gate_gradient(void *context, int worker) {
    const Gate *g = context;
    const GateArguments *of = g->of;
    const Columns own = own_columns(g, worker);
    char *rows = own_memory(g, worker);
    for (long at = own.first; at < own.last; at += SUM_COLUMNS) {
        const long columns = own.last - at < SUM_COLUMNS ? own.last - at : SUM_COLUMNS;
        const long row = row_apart(columns, g->size);
        for (long start = 0; start < of->tokens; start += SUM_TOKENS) {
            const long rest = of->tokens - start, tokens = rest < SUM_TOKENS ? rest : SUM_TOKENS;
            const char *x = (const char *)of->x + (start * of->x_row + at) * g->size;
            g->kernels->stage_in(x, of->x_row, columns, rows, row, columns, tokens, 0);
            multiply(g, &(Product){.c = (char *)of->grad_gate + at * g->size,
                                   .c_i = of->width,
                                   .s = g->grads + start * of->num_experts * g->size,
                                   .s_i = 1,
                                   .s_k = of->num_experts,
                                   .w = rows,
                                   .w_k = row,
                                   .rows = of->num_experts,
                                   .n = columns,
                                   .k = tokens,
                                   .n_block = PANEL,
                                   .add = start > 0});
        }
    }
}

static int run_backward_by_pairs(Gate *g) {
    const GateArguments *of = g->of;
    const size_t tokens = (size_t)of->tokens, pairs = tokens * (size_t)of->num_active;
    g->workers = count_workers((double)pairs * (double)of->width, of->tokens, of->threads);
    const size_t sums = round_up(tokens * sizeof(double));
    const size_t grads = round_up(pairs * sizeof(double));
    const size_t bytes = 2 * sums + 3 * grads;
    char *memory = reserve_arena(bytes);
    if (!memory) return STATUS_NO_MEMORY;
    g->sums = (double *)unpoisoned(memory, bytes);
    g->num_used = (int64_t *)(memory + sums);
    g->pair_grads = (double *)(memory + 2 * sums);
    g->shares = (double *)(memory + 2 * sums + grads);
    g->used = (const void **)(memory + 2 * sums + 2 * grads);
    find_pair_gradients(g);
    if (of->grad_x) {
        if (!list_used(g)) return STATUS_PAIR_TOKENS;
        run_parallel(add_used_rows, g, (int)g->workers);
    }
    if (of->grad_gate) run_parallel(sum_used_rows, g, (int)g->workers);
    return STATUS_OK;
}

static int run_backward_by_products(Gate *g) {
    const GateArguments *of = g->of;
    const size_t size = (size_t)g->size, tokens = (size_t)of->tokens;
    const size_t gate = round_up((size_t)(g->row * of->num_experts) * size);
    const size_t grads = round_up(tokens * (size_t)of->num_experts * size);
    const size_t sums = round_up(tokens * sizeof(double));
    const size_t pairs = round_up(tokens * (size_t)of->num_active * sizeof(double));
    const long columns = of->width < SUM_COLUMNS ? of->width : SUM_COLUMNS;
    g->per_worker = round_up((size_t)(SUM_TOKENS * row_apart(columns, g->size)) * size);
    const size_t bytes = gate + grads + sums + pairs + g->per_worker * (size_t)g->workers;
    g->gate = reserve_arena(bytes);
    if (!g->gate) return STATUS_NO_MEMORY;
    g->grads = unpoisoned(g->gate, bytes) + gate;
    g->sums = (double *)(g->grads + grads);
    g->pair_grads = (double *)(g->grads + grads + sums);
    g->memory = g->grads + grads + sums + pairs;
    find_pair_gradients(g);
    find_logit_gradients(g);
    if (of->grad_x) {
        run_parallel(copy_gate, g, (int)g->workers);
        run_parallel(add_input_gradients, g, (int)g->workers);
    }
    if (of->grad_gate) run_parallel(sum_gate_gradient, g, (int)g->workers);
    return STATUS_OK;
}

int run_gate_backward(const GateArguments *arguments) {
    Gate g;
    const int status = start_gate(&g, arguments);
    if (status) return status;
    if (!arguments->tokens) {
        const size_t count = (size_t)(arguments->width * arguments->num_experts);
        if (arguments->grad_gate) memset(arguments->grad_gate, 0, count * (size_t)g.size);
        return STATUS_OK;
    }
    const int invalid = check_pairs(arguments);
    if (invalid) return invalid;
    const int is_sparse = LEAST_UNUSED * arguments->num_active <= arguments->num_experts;
    return is_sparse && !arguments->grad_logits ? run_backward_by_pairs(&g)
                                                : run_backward_by_products(&g);
}
