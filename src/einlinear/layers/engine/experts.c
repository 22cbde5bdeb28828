/* Many experts with one program, each multiplied with the rows of its own tokens.

   The work is a list of pairs (token, expert), sorted by expert. Each worker takes a run of pairs, so
   experts of any load are shared out evenly. If a run ends inside an expert, two workers compute with
   that expert, and their sums of weight gradients are joined at the end.

   The row of a pair's token is read where it is; nothing is gathered beforehand. A result is kept
   until all results of its token are there. The worker with the last one adds them up, in the order
   of the experts, so that the sum does not depend on the threads. */

#include <stdatomic.h>
#include <string.h>

#include "arena.h"
#include "call.h"
#include "pool.h"

enum {
    COMBINE_AT_ONCE = 8,
    LEAST_RUN = 8,               /* fewer pairs of an expert are not worth a second worker */
    MOST_KEPT_BYTES = 256 << 20, /* release a larger workspace after the call */
};

typedef struct {
    Call call; /* what all experts share; its factors and gradients are those of expert 0 */
    long num_experts, num_pairs, num_tokens;
    const int64_t *pair_tokens, *ends;
    int x_by_token, y_by_token; /* whether rows of x and of y are tokens; else they are pairs */
    int combines;               /* whether rows of the result are tokens */
    const void *weights;        /* of pairs; NULL: all are 1 */
    void *grad_weights;
    int needs_dots;
    const double *stds;
    void *scales; /* of normalisation: steps x experts */
    int is_known; /* whether the scales are given */
    void *result;
    long result_row, width;
    double *times;                 /* per pair: weight times scales */
    double *dots;                  /* per pair: <input, gradient of the input> */
    int32_t *first, *next, *count; /* linked lists of the pairs of each token */
    _Atomic int32_t *done;         /* per token: how many results are there */
    char *rows;                    /* results of pairs that wait for the others */
    int64_t cuts[MAX_THREADS + 1];
} Group;

static long begin_of(const Group *group, long expert) {
    return expert ? group->ends[expert - 1] : 0;
}

static const char *expert_factor(const Group *group, long s, long expert) {
    const Call *call = &group->call;
    return (const char *)call->factors[s] + expert * sizes_of(call)[s] * call->outer_size;
}

static char *expert_gradient(const Group *group, long s, long expert) {
    const Call *call = &group->call;
    return (char *)call->gradients[s] + expert * sizes_of(call)[s] * call->outer_size;
}

/* The sum of squares of a factor. */
static double sum_of_squares(const Group *group, long s, long expert, char *line) {
    const Call *call = &group->call;
    const char *factor = expert_factor(group, s, expert);
    const long size = sizes_of(call)[s];
    if (!call->is_bfloat16) return call->kernels->dot(factor, factor, size);
    const long most = (long)line_bytes(call) / call->size;
    double total = 0;
    for (long i = 0; i < size; i += most) {
        const long n = size - i < most ? size - i : most;
        call->kernels->stage_row(factor + 2 * i, n, line, n, 1, 1);
        total += call->kernels->dot(line, line, n);
    }
    return total;
}

/* The product of the scales of an expert's factors. */
static double expert_scale(const Group *group, long expert, char *line) {
    const Call *call = &group->call;
    double product = 1;
    if (!group->stds) return 1;
    for (long s = 0; s < call->program[HEADER_STEPS]; s++) {
        const long at = s * group->num_experts + expert;
        if (!group->is_known) {
            const double mean = sum_of_squares(group, s, expert, line) / (double)sizes_of(call)[s];
            const double excess = mean / (group->stds[s] * group->stds[s]);
            const double scale = excess > 1 || excess != excess ? 1 / __builtin_sqrt(excess) : 1;
            set_real(call->size, group->scales, at, scale);
        }
        product *= real_at(call->size, group->scales, at);
    }
    return product;
}

/* Before a pass: what to multiply each pair by, and zeros for experts and tokens without pairs. */
static void prepare_experts(void *context, int worker) {
    Group *group = context;
    const Call *call = &group->call;
    const long workers = call->workers, size = call->outer_size;
    char *line = call->memory + call->per_worker * worker + call->at_line;
    for (long e = group->num_experts * worker / workers;
         e < group->num_experts * (worker + 1) / workers; e++) {
        const long begin = begin_of(group, e), end = group->ends[e];
        const double scale = begin < end || !group->is_known ? expert_scale(group, e, line) : 1;
        for (long p = begin; p < end; p++)
            group->times[p] = scale * (group->weights ? real_at(call->size, group->weights, p) : 1);
        for (long s = 0; s < call->program[HEADER_STEPS] && begin == end; s++)
            if (call->gradients[s])
                memset(expert_gradient(group, s, e), 0, (size_t)(sizes_of(call)[s] * size));
    }
    if (!group->combines || !group->result) return;
    for (long t = group->num_tokens * worker / workers;
         t < group->num_tokens * (worker + 1) / workers; t++) {
        char *row = (char *)group->result + t * group->result_row * size;
        if (group->count[t]) continue;
        memset(row, 0, (size_t)(group->width * size));
        if (call->bias) memcpy(row, call->bias, (size_t)(group->width * size));
    }
}

static int is_combined(const Group *group, long t) {
    return group->combines && group->count[t] > 1;
}

static char *result_row(const Group *group, long t) {
    return (char *)group->result + t * group->result_row * group->call.outer_size;
}

static char *kept_row(const Group *group, long p) {
    return group->rows + p * group->width * group->call.size;
}

/* Where the sum of the results of a token begins: the row of its first pair would be another pass
   through memory, but a row of the caller's can only hold numbers of the engine's type. */
static char *sum_row(const Group *group, long t) {
    return group->call.is_bfloat16 ? kept_row(group, group->first[t]) : result_row(group, t);
}

/* to = bias + the weighted sum of all results of a token; that of pair p is own_row. */
static void combine_rows(const Group *group, long t, long p, const void *own_row, char *line) {
    const Call *call = &group->call;
    const int is_begun = is_combined(group, t); /* with the first pair */
    char *to = result_row(group, t), *sum = call->is_bfloat16 ? line : to;
    const void *start = is_begun ? sum_row(group, t) : call->epilogue.bias, *rows[COMBINE_AT_ONCE];
    double times[COMBINE_AT_ONCE];
    long terms = 0;
    for (long q = is_begun ? group->next[group->first[t]] : p; q >= 0;
         q = is_begun ? group->next[q] : -1) {
        if (terms == COMBINE_AT_ONCE) {
            call->kernels->combine(sum, start, rows, times, terms, group->width);
            start = sum, terms = 0;
        }
        rows[terms] = q == p ? own_row : kept_row(group, q);
        times[terms++] = group->times[q];
    }
    call->kernels->combine(sum, start, rows, times, terms, group->width);
    if (call->is_bfloat16) call->kernels->stage_out(line, 0, to, 0, group->width, 1, 1);
}

/* Keep the result of a pair for the last of its token. The first one, in the order of experts, begins
   the sum. Counts only grow, so if all others are done, this pair is the last and need not be kept. */
static void keep(const Group *group, long p, const void *row) {
    const Call *call = &group->call;
    const long t = group->combines ? group->pair_tokens[p] : p;
    if (!is_combined(group, t)) return;
    if (p == group->first[t])
        call->kernels->combine(sum_row(group, t), call->epilogue.bias, &row, &group->times[p], 1,
                               group->width);
    else if (atomic_load_explicit(&group->done[t], memory_order_relaxed) < group->count[t] - 1)
        memcpy(kept_row(group, p), row, (size_t)(group->width * call->size));
}

/* Add up the results of a pair's token if this one was the last. */
static void deliver(const Group *group, long p, const void *row, char *line) {
    const long t = group->combines ? group->pair_tokens[p] : p;
    const int32_t others = is_combined(group, t) ? group->count[t] - 1 : 0;
    if (others && atomic_load_explicit(&group->done[t], memory_order_acquire) < others &&
        atomic_fetch_add_explicit(&group->done[t], 1, memory_order_acq_rel) < others)
        return;
    combine_rows(group, t, p, row, line);
}

/* The dot product of a pair's input and the gradient of its input, as if its weight were 1. */
static double compare_rows(const Group *group, const char *x, const void *gradient, char *line) {
    const Call *call = &group->call;
    const long width = call->program[HEADER_D_IN];
    if (!call->is_bfloat16) return call->kernels->dot(x, gradient, width);
    call->kernels->stage_row(x, width, line, width, 1, 1);
    return call->kernels->dot(line, gradient, width);
}

/* The rows of x and of the gradient of y that a pair reads. */
static const char *input_row(const Group *group, long p) {
    const Call *call = &group->call;
    return (const char *)call->x +
           (group->x_by_token ? group->pair_tokens[p] : p) * call->x_row * call->outer_size;
}

static const char *gradient_row(const Group *group, long p) {
    const Call *call = &group->call;
    return (const char *)call->gy +
           (group->y_by_token ? group->pair_tokens[p] : p) * call->gy_row * call->outer_size;
}

/* Run a pass for `tokens` pairs of one expert, from `start` on. */
static void run_pairs(const Group *group, const Call *own, char *memory, long start, long tokens,
                      int is_first) {
    const Kernels *kernels = own->kernels;
    const int64_t *program = own->program;
    const long d_in = program[HEADER_D_IN], d_out = program[HEADER_D_OUT];
    const int is_backward = own->is_backward;
    char *line = memory + own->at_line;
    void *base[MAX_BUFFERS];
    int64_t row[MAX_BUFFERS];
    find_buffers(own, memory, base, row);
    for (long i = 0; i < tokens; i++) {
        const long p = start + i;
        kernels->stage_row(
            input_row(group, p), d_in, (char *)base[BUFFER_X] + i * row[BUFFER_X] * own->size,
            program[HEADER_D_IN_PADDED], is_backward ? group->times[p] : 1, own->is_bfloat16);
        if (!is_backward) continue;
        char *to = (char *)base[BUFFER_GY] + i * row[BUFFER_GY] * own->size;
        kernels->stage_row(gradient_row(group, p), d_out, to, program[HEADER_D_OUT_PADDED], 1,
                           own->is_bfloat16);
        if (own->gbias && group->first[group->pair_tokens[p]] == p)
            kernels->adjust(memory + own->at_bias_sum, to, d_out, 1, -1);
    }
    run_operations(own, memory, tokens, is_first, base, row);
    const long out = is_backward ? BUFFER_GX : BUFFER_Y;
    const char *made = (const char *)base[out];
    const long apart = row[out] * own->size;
    for (long i = 0; i < tokens; i++) {
        const long p = start + i;
        if (group->needs_dots)
            group->dots[p] = compare_rows(group, input_row(group, p), made + i * apart, line);
        if (group->result) keep(group, p, made + i * apart);
    }
    /* Only now the atomic counts: each waits until the rows before it are written. */
    for (long i = 0; group->result && i < tokens; i++)
        deliver(group, start + i, made + i * apart, line);
}

/* Write an expert's gradients from its sums of weight gradients, through normalisation. */
static void collect_expert(const Group *group, const Call *own, char *memory, long expert) {
    const Kernels *kernels = own->kernels;
    const int64_t *sizes = sizes_of(own), *op = own->program + own->program[HEADER_COLLECTS];
    double common = 0;
    const int has_common = group->stds && group->needs_dots; /* else no factor has a gradient */
    for (long p = begin_of(group, expert); has_common && p < group->ends[expert]; p++)
        common += group->times[p] * group->dots[p];
    for (long count = *op++; count > 0; count--, op += op[OP_LENGTH]) {
        const long s = op[OP_STEP], at = s * group->num_experts + expert;
        if (!own->gradients[s]) continue;
        /* In bfloat16, use the memory of the transposed factor, which is no longer needed. */
        void *to = own->is_bfloat16 ? own->transposed[s] : own->gradients[s];
        kernels->copy(op, 0, copy_units(op), memory + own->at_sum[s], 0, to, 0, 1, 0);
        const double scale = group->stds ? real_at(own->size, group->scales, at) : 1;
        if (scale < 1 || scale != scale) {
            const double ratio = scale / group->stds[s]; /* 1 / rms */
            kernels->adjust(to, own->weights[s], sizes[s], 1,
                            common * ratio * ratio / (double)sizes[s]);
        }
        if (own->is_bfloat16) kernels->stage_out(to, 0, own->gradients[s], 0, sizes[s], 1, 1);
    }
}

/* Point a worker's call at one expert; convert and transpose its factors. */
static void load_expert(const Group *group, Call *own, char *memory, long expert) {
    const int64_t *sizes = sizes_of(own), steps = own->program[HEADER_STEPS];
    for (long s = 0; s < steps; s++) {
        own->factors[s] = expert_factor(group, s, expert);
        if (own->gradients[s]) own->gradients[s] = expert_gradient(group, s, expert);
    }
    locate_weights(own, memory);
    for (long s = 0; s < steps && own->is_bfloat16; s++)
        own->kernels->stage_row(own->factors[s], sizes[s], (void *)own->weights[s], sizes[s], 1, 1);
    if (!own->is_backward) return;
    const int64_t *op = own->program + own->program[HEADER_TRANSPOSES];
    for (long count = *op++; count > 0; count--, op += op[OP_LENGTH]) {
        const long s = op[OP_STEP];
        own->kernels->copy(op, 0, copy_units(op), own->weights[s], 0, own->transposed[s], 0, 1, 0);
    }
}

static long find_expert(const Group *group, long pair) {
    long low = 0, high = group->num_experts - 1;
    while (low < high) {
        const long middle = (low + high) / 2;
        if (group->ends[middle] > pair)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static void run_experts(void *context, int worker) {
    Group *group = context;
    char *memory = group->call.memory + group->call.per_worker * worker;
    if (group->call.gbias)
        memset(memory + group->call.at_bias_sum, 0,
               (size_t)(group->call.program[HEADER_D_OUT] * group->call.size));
    const long last = group->cuts[worker + 1];
    long at = group->cuts[worker];
    while (at < last) {
        Call own = group->call;
        const long expert = find_expert(group, at), end = group->ends[expert];
        const long begin = at, stop = end < last ? end : last;
        load_expert(group, &own, memory, expert);
        const int is_begun = begin > begin_of(group, expert); /* by another worker */
        if (is_begun) memcpy(own.at_sum, own.at_split, sizeof own.at_sum);
        const long blocks = (stop - begin + own.block - 1) / own.block;
        for (long b = 0; b < blocks; b++) {
            const long start = begin + (stop - begin) * b / blocks;
            run_pairs(group, &own, memory, start, begin + (stop - begin) * (b + 1) / blocks - start,
                      b == 0);
        }
        if (own.is_backward && !is_begun && stop == end)
            collect_expert(group, &own, memory, expert);
        at = stop;
    }
}

/* If several workers computed with an expert, the first of them joins their sums. */
static void join_experts(void *context, int worker) {
    const Group *group = context;
    const Call *call = &group->call;
    const long begin = group->cuts[worker], last = group->cuts[worker + 1];
    if (begin == last) return;
    const long expert = find_expert(group, last - 1), end = group->ends[expert];
    if (end == last || begin > begin_of(group, expert)) return;
    char *memory = call->memory + call->per_worker * worker;
    for (int w = worker + 1; w < call->workers && group->cuts[w] < end; w++) {
        const char *other = call->memory + call->per_worker * w;
        for (long s = 0; s < call->program[HEADER_STEPS] && group->cuts[w + 1] > group->cuts[w];
             s++)
            if (call->gradients[s])
                call->kernels->adjust(memory + call->at_sum[s], other + call->at_split[s],
                                      sizes_of(call)[s], 1, -1);
    }
    Call own = *call;
    for (long s = 0; s < call->program[HEADER_STEPS]; s++) {
        own.factors[s] = expert_factor(group, s, expert);
        if (own.gradients[s]) own.gradients[s] = expert_gradient(group, s, expert);
    }
    locate_weights(&own, memory);
    collect_expert(group, &own, memory, expert);
}

/* Choose where the runs of pairs begin: at the start of an expert if that is near. */
static void cut_pairs(Group *group) {
    const long workers = group->call.workers;
    group->cuts[0] = 0;
    for (long w = 1; w <= workers; w++) {
        long at = group->num_pairs * w / workers;
        if (w < workers && group->num_pairs) {
            const long expert = find_expert(group, at);
            const long begin = begin_of(group, expert), end = group->ends[expert];
            if (at - begin < LEAST_RUN)
                at = begin;
            else if (end - at < LEAST_RUN)
                at = end;
        }
        group->cuts[w] = at > group->cuts[w - 1] ? at : group->cuts[w - 1];
    }
}

/* Link the pairs of each token, in the order of experts. */
static void link_pairs(Group *group) {
    for (long t = 0; t < group->num_tokens; t++) {
        group->first[t] = -1, group->count[t] = 0;
        atomic_init(&group->done[t], 0);
    }
    for (long p = group->num_pairs - 1; p >= 0; p--) {
        const long t = group->pair_tokens[p];
        group->next[p] = group->first[t];
        group->first[t] = (int32_t)p;
        group->count[t]++;
    }
}

/* Choose the workers, lay out the memory, build the tables. Returns 0 if there is no memory. */
static int prepare_group(Group *group, long block, long threads) {
    Call *call = &group->call;
    const size_t pairs = (size_t)group->num_pairs, targets = (size_t)group->num_tokens;
    const int links = group->combines || call->gbias;
    const size_t at_dots = round_up(pairs * sizeof(double));
    const size_t at_links = at_dots + round_up(group->needs_dots ? pairs * sizeof(double) : 0);
    const size_t at_rows = at_links + round_up(links ? (pairs + 3 * targets) * sizeof(int32_t) : 0);
    call->is_grouped = 1;
    call->stage_x = call->stage_y = call->stage_gy = call->stage_gx = 1;
    call->tokens = group->num_pairs;
    call->block = block < group->num_pairs ? block : group->num_pairs;
    if (call->block < 1) call->block = 1;
    call->workers = choose_workers(call, threads);
    call->shared_prefix =
        at_rows +
        (group->combines && group->result ? pairs * (size_t)(group->width * call->size) : 0);
    if (!lay_out(call, 0)) return 0;
    group->times = (double *)call->shared;
    group->dots = (double *)(call->shared + at_dots);
    group->next = (int32_t *)(call->shared + at_links);
    group->first = group->next + pairs;
    group->count = group->first + targets;
    group->done = (_Atomic int32_t *)(group->count + targets);
    group->rows = call->shared + at_rows;
    if (links) link_pairs(group);
    cut_pairs(group);
    return 1;
}

/* Read the arguments that both passes have, and check that the tables fit each other. */
static int start_group(Group *group, const CallArguments *arguments, int is_backward) {
    memset(group, 0, sizeof *group);
    const int status = start_call(&group->call, arguments, is_backward);
    if (status) return status;
    group->num_experts = arguments->num_experts;
    group->num_pairs = arguments->num_pairs;
    group->num_tokens = arguments->tokens;
    group->pair_tokens = arguments->pair_tokens;
    group->ends = arguments->expert_ends;
    group->weights = arguments->pair_weights;
    group->x_by_token = arguments->x_by_token != 0;
    group->y_by_token = arguments->y_by_token != 0;
    group->stds = arguments->stds;
    group->scales = arguments->scales;
    if (group->num_experts < 1) return STATUS_EXPERT_COUNT;
    if (group->num_pairs < 0 || group->num_pairs > INT32_MAX) return STATUS_PAIR_COUNT;
    if (group->num_pairs && !group->call.x) return STATUS_NO_INPUT;
    for (long e = 0; e < group->num_experts; e++)
        if (group->ends[e] < begin_of(group, e)) return STATUS_EXPERT_ENDS;
    if (group->ends[group->num_experts - 1] != group->num_pairs) return STATUS_EXPERT_ENDS;
    for (long p = 0; (group->x_by_token || group->y_by_token) && p < group->num_pairs; p++)
        if (group->pair_tokens[p] < 0 || group->pair_tokens[p] >= group->num_tokens)
            return STATUS_PAIR_TOKENS;
    return STATUS_OK;
}

/* The workspace of many tokens is large: keep it for the next call only up to a limit. */
static void finish_group(void) {
    if (arena_size() > MOST_KEPT_BYTES) release_arena();
}

int run_experts_forward(const CallArguments *arguments) {
    Group group;
    Call *call = &group.call;
    const int status = start_group(&group, arguments, 0);
    if (status) return status;
    group.combines = group.y_by_token;
    group.result = call->y, group.result_row = call->y_row;
    group.width = call->program[HEADER_D_OUT];
    if (!prepare_group(&group, call->program[HEADER_BLOCK], arguments->threads))
        return STATUS_NO_MEMORY;
    call->tokens = group.combines ? group.num_tokens : group.num_pairs;
    request_large_pages(call->y, call->y_row, call);
    run_parallel(prepare_experts, &group, call->workers);
    run_parallel(run_experts, &group, call->workers);
    finish_group();
    return STATUS_OK;
}

static void write_weight_gradients(const Group *group) {
    const Call *call = &group->call;
    for (long e = 0; e < group->num_experts; e++) {
        double scale = 1;
        for (long s = 0; group->stds && s < call->program[HEADER_STEPS]; s++)
            scale *= real_at(call->size, group->scales, s * group->num_experts + e);
        for (long p = begin_of(group, e); p < group->ends[e]; p++)
            set_real(call->size, group->grad_weights, p, group->dots[p] * scale);
    }
}

/* The gradient of the bias has a term for every token, with or without pairs. */
static void write_bias_gradient(const Group *group) {
    const Call *call = &group->call;
    const long d_out = call->program[HEADER_D_OUT];
    char *line = call->memory + call->at_line;
    for (long t = 0; t < group->num_tokens; t++) {
        if (group->count[t]) continue;
        const char *row = (const char *)call->gy + t * call->gy_row * call->outer_size;
        call->kernels->stage_row(row, d_out, line, d_out, 1, call->is_bfloat16);
        call->kernels->add_rows(line, 0, d_out, 1, call->memory + call->at_bias_sum, 1);
    }
    collect_bias(call);
}

int run_experts_backward(const CallArguments *arguments) {
    Group group;
    Call *call = &group.call;
    const int status = start_group(&group, arguments, 1);
    if (status) return status;
    if (call->gbias && !(group.x_by_token && group.y_by_token)) return STATUS_BIAS_ROWS;
    int has_gradients = 0;
    for (long s = 0; s < call->program[HEADER_STEPS]; s++) has_gradients |= call->gradients[s] != 0;
    group.is_known = 1;
    group.grad_weights = arguments->grad_pair_weights;
    group.combines = group.x_by_token;
    group.result = call->gx, group.result_row = call->gx_row;
    group.width = call->program[HEADER_D_IN];
    group.needs_dots = group.grad_weights || (group.stds && has_gradients);
    /* The dots need the gradient of x even if the caller does not: any address but NULL says so. */
    if (!call->gx && group.needs_dots) call->gx = (void *)(intptr_t)call->x;
    if (!prepare_group(&group, call->program[HEADER_CHUNK], arguments->threads))
        return STATUS_NO_MEMORY;
    call->tokens = group.combines ? group.num_tokens : group.num_pairs;
    request_large_pages(group.result, group.result_row, call);
    run_parallel(prepare_experts, &group, call->workers);
    run_parallel(run_experts, &group, call->workers);
    run_parallel(join_experts, &group, call->workers);
    if (group.grad_weights) write_weight_gradients(&group);
    if (call->gbias) write_bias_gradient(&group);
    finish_group();
    return STATUS_OK;
}
