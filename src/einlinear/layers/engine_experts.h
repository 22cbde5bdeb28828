/* Many experts of one program, each multiplied with rows of its own; engine.c includes it at its end.

   The work is a list of pairs (token, expert), sorted by expert. A thread takes a run of pairs, so
   experts of any load are shared out evenly; where a run ends inside an expert, two threads compute
   with it, and their sums of weight gradients are joined at the end.

   The rows of a pair's token are read where they are, a few tokens at a time. A result is kept until
   all results of its token are there; who brings the last adds them up, in the order of the experts,
   so that the sum does not depend on the threads. */

enum { MIX_AT_ONCE = 8, LEAST_RUN = 8, KEPT = 256 << 20 };

typedef struct {
    Call call; /* what all have in common: factors and gradients are those of expert 0 */
    long experts, pairs, targets;
    const int64_t *tokens, *ends; /* the token of each pair; where the pairs of each expert end */
    int takes, adds;              /* whether rows of x, rows of y are tokens; else they are pairs */
    int mixes;                    /* whether rows of the result are tokens */
    const void *weights;          /* of pairs; 1 without */
    void *grad_weights;
    int needs_dots;
    const double *stds;
    void *scales; /* of normalisation: steps x experts */
    int is_known;
    void *result;
    long result_row, width;
    double *times, *dots; /* of pairs: weight times scales; input times gradient of the input */
    int32_t *first, *next, *count; /* a token's pairs */
    _Atomic int32_t *done;         /* how many of them have their results */
    char *rows;                    /* results of pairs that wait */
    int64_t cuts[MAX_THREADS + 1];
} Group;

static double real_at(const Call *call, const void *numbers, long i) {
    return call->size == 8 ? ((const double *)numbers)[i] : (double)((const float *)numbers)[i];
}

static void set_real(const Call *call, void *numbers, long i, double value) {
    if (call->size == 8)
        ((double *)numbers)[i] = value;
    else
        ((float *)numbers)[i] = (float)value;
}

static long begin_of(const Group *group, long expert) { return expert ? group->ends[expert - 1] : 0; }

static long outer_size(const Call *call) { return call->half ? 2 : call->size; }

static const char *expert_factor(const Group *group, long s, long expert) {
    const Call *call = &group->call;
    return (const char *)call->factors[s] + expert * sizes_of(call)[s] * outer_size(call);
}

static char *expert_gradient(const Group *group, long s, long expert) {
    const Call *call = &group->call;
    return (char *)call->gradients[s] + expert * sizes_of(call)[s] * outer_size(call);
}

/* The sum of squares of a factor. */
static double sum_of_squares(const Group *group, long s, long expert, char *line) {
    const Call *call = &group->call;
    const char *factor = expert_factor(group, s, expert);
    const long size = sizes_of(call)[s];
    if (!call->half) return call->kernels->dot(factor, factor, size);
    const long most = (long)line_bytes(call) / call->size;
    double total = 0;
    for (long i = 0; i < size; i += most) {
        const long n = size - i < most ? size - i : most;
        call->kernels->take(factor + 2 * i, n, line, n, 1, 1);
        total += call->kernels->dot(line, line, n);
    }
    return total;
}

/* What normalisation makes of an expert: the product of the scales of its factors. */
static double expert_scale(const Group *group, long expert, char *line) {
    const Call *call = &group->call;
    double product = 1;
    if (!group->stds) return 1;
    for (long s = 0; s < call->program[H_STEPS]; s++) {
        const long at = s * group->experts + expert;
        if (!group->is_known) {
            const double mean = sum_of_squares(group, s, expert, line) / (double)sizes_of(call)[s];
            const double excess = mean / (group->stds[s] * group->stds[s]);
            const double scale = excess > 1 || excess != excess ? 1 / __builtin_sqrt(excess) : 1;
            set_real(call, group->scales, at, scale);
        }
        product *= real_at(call, group->scales, at);
    }
    return product;
}

/* Before the work: the factors of pairs, zeros where no pair brings anything. */
static void prepare_experts(void *context, int worker) {
    Group *group = context;
    const Call *call = &group->call;
    const long workers = call->workers, size = outer_size(call);
    char *line = call->memory + call->per_worker * worker + call->at_line;
    for (long e = group->experts * worker / workers; e < group->experts * (worker + 1) / workers; e++) {
        const long begin = begin_of(group, e), end = group->ends[e];
        const double scale = begin < end || !group->is_known ? expert_scale(group, e, line) : 1;
        for (long p = begin; p < end; p++)
            group->times[p] = scale * (group->weights ? real_at(call, group->weights, p) : 1);
        for (long s = 0; s < call->program[H_STEPS] && begin == end; s++)
            if (call->gradients[s])
                memset(expert_gradient(group, s, e), 0, (size_t)(sizes_of(call)[s] * size));
    }
    if (!group->mixes || !group->result) return;
    for (long t = group->targets * worker / workers; t < group->targets * (worker + 1) / workers; t++) {
        char *row = (char *)group->result + t * group->result_row * size;
        if (group->count[t]) continue;
        memset(row, 0, (size_t)(group->width * size));
        if (call->bias) memcpy(row, call->bias, (size_t)(group->width * size));
    }
}

/* to = bias + the weighted sum of all rows of a token, one of which may not lie with the others. */
static void mix_rows(const Group *group, long t, long p, const void *own_row, char *line) {
    const Call *call = &group->call;
    char *to = (char *)group->result + t * group->result_row * outer_size(call);
    char *sum = call->half ? line : to;
    const void *start = call->finish.bias, *rows[MIX_AT_ONCE];
    double times[MIX_AT_ONCE];
    long terms = 0;
    for (long q = group->mixes ? group->first[t] : p; q >= 0; q = group->mixes ? group->next[q] : -1) {
        if (terms == MIX_AT_ONCE) {
            call->kernels->mix(sum, start, rows, times, terms, group->width);
            start = sum, terms = 0;
        }
        rows[terms] = q == p ? own_row : group->rows + q * group->width * call->size;
        times[terms++] = group->times[q];
    }
    call->kernels->mix(sum, start, rows, times, terms, group->width);
    if (call->half) call->kernels->stage_out(line, 0, to, 0, group->width, 1, 1);
}

/* The result of a pair: kept, or added up with the others of its token if it is the last. */
static void deliver(const Group *group, long p, const void *row, char *line) {
    const long t = group->mixes ? group->tokens[p] : p;
    const int32_t others = group->mixes ? group->count[t] - 1 : 0;
    if (others && atomic_load_explicit(&group->done[t], memory_order_acquire) < others) {
        const size_t bytes = (size_t)(group->width * group->call.size);
        memcpy(group->rows + p * (long)bytes, row, bytes);
        if (atomic_fetch_add_explicit(&group->done[t], 1, memory_order_acq_rel) < others) return;
    }
    mix_rows(group, t, p, row, line);
}

/* The product of a pair's input and the gradient of its input, were its weight 1. */
static double compare_rows(const Group *group, const char *x, const void *gradient, char *line) {
    const Call *call = &group->call;
    const long width = call->program[H_D_IN];
    if (!call->half) return call->kernels->dot(x, gradient, width);
    call->kernels->take(x, width, line, width, 1, 1);
    return call->kernels->dot(line, gradient, width);
}

/* The rows of x and of the gradient of y that a pair reads. */
static const char *input_row(const Group *group, long p) {
    const Call *call = &group->call;
    return (const char *)call->x +
           (group->takes ? group->tokens[p] : p) * call->x_row * outer_size(call);
}

static const char *gradient_row(const Group *group, long p) {
    const Call *call = &group->call;
    return (const char *)call->gy +
           (group->adds ? group->tokens[p] : p) * call->gy_row * outer_size(call);
}

/* Pairs start..start+tokens of one expert. */
static void run_pairs(const Group *group, const Call *own, char *memory, long start, long tokens,
                      int is_first) {
    const Kernels *kernels = own->kernels;
    const int64_t *program = own->program;
    const long d_in = program[H_D_IN], d_out = program[H_D_OUT];
    const int is_backward = own->is_backward;
    char *line = memory + own->at_line;
    void *base[MAX_BUFFERS];
    int64_t row[MAX_BUFFERS];
    find_buffers(own, memory, base, row);
    for (long i = 0; i < tokens; i++) {
        const long p = start + i;
        kernels->take(input_row(group, p), d_in,
                      (char *)base[BUFFER_X] + i * row[BUFFER_X] * own->size,
                      program[H_D_IN_PADDED], is_backward ? group->times[p] : 1, own->half);
        if (!is_backward) continue;
        char *to = (char *)base[BUFFER_GY] + i * row[BUFFER_GY] * own->size;
        kernels->take(gradient_row(group, p), d_out, to, program[H_D_OUT_PADDED], 1, own->half);
        if (own->gbias && group->first[group->tokens[p]] == p)
            kernels->add_rows(to, 0, d_out, 1, memory + own->at_bias_sum, 1);
    }
    run_operations(own, memory, tokens, is_first, base, row);
    const long out = is_backward ? BUFFER_GX : BUFFER_Y;
    for (long i = 0; i < tokens; i++) {
        const long p = start + i;
        const char *made = (const char *)base[out] + i * row[out] * own->size;
        if (group->needs_dots)
            group->dots[p] = compare_rows(group, input_row(group, p), made, line);
        if (group->result) deliver(group, p, made, line);
    }
}

/* The sums of weight gradients of one expert -> its gradients, through normalisation. */
static void collect_expert(const Group *group, const Call *own, char *memory, long expert) {
    const Kernels *kernels = own->kernels;
    const int64_t *sizes = sizes_of(own), *op = own->program + own->program[H_COLLECTS];
    double common = 0;
    const int has_common = group->stds && group->needs_dots; /* else no factor has a gradient */
    for (long p = begin_of(group, expert); has_common && p < group->ends[expert]; p++)
        common += group->times[p] * group->dots[p];
    for (long count = *op++; count > 0; count--, op += op[OP_LENGTH]) {
        const long s = op[OP_STEP], at = s * group->experts + expert;
        if (!own->gradients[s]) continue;
        /* In bfloat16 the turned factor, which has done its work, gives its place. */
        void *to = own->half ? own->turned[s] : own->gradients[s];
        kernels->copy(op, 0, copy_units(op), memory + own->at_sum[s], 0, to, 0, 1, 0);
        const double scale = group->stds ? real_at(own, group->scales, at) : 1;
        if (scale < 1 || scale != scale) {
            const double ratio = scale / group->stds[s]; /* 1 / rms */
            kernels->adjust(to, own->weights[s], sizes[s], 1,
                            common * ratio * ratio / (double)sizes[s]);
        }
        if (own->half) kernels->stage_out(to, 0, own->gradients[s], 0, sizes[s], 1, 1);
    }
}

/* A worker's view of one expert. */
static void open_expert(const Group *group, Call *own, char *memory, long expert) {
    const int64_t *sizes = sizes_of(own), steps = own->program[H_STEPS];
    for (long s = 0; s < steps; s++) {
        own->factors[s] = expert_factor(group, s, expert);
        if (own->gradients[s]) own->gradients[s] = expert_gradient(group, s, expert);
    }
    open_weights(own, memory);
    for (long s = 0; s < steps && own->half; s++)
        own->kernels->take(own->factors[s], sizes[s], (void *)own->weights[s], sizes[s], 1, 1);
    if (!own->is_backward) return;
    const int64_t *op = own->program + own->program[H_TURNS];
    for (long count = *op++; count > 0; count--, op += op[OP_LENGTH]) {
        const long s = op[OP_STEP];
        own->kernels->copy(op, 0, copy_units(op), own->weights[s], 0, own->turned[s], 0, 1, 0);
    }
}

static long find_expert(const Group *group, long pair) {
    long low = 0, high = group->experts - 1;
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
               (size_t)(group->call.program[H_D_OUT] * group->call.size));
    const long last = group->cuts[worker + 1];
    long at = group->cuts[worker];
    while (at < last) {
        Call own = group->call;
        const long expert = find_expert(group, at), end = group->ends[expert];
        const long begin = at, stop = end < last ? end : last;
        open_expert(group, &own, memory, expert);
        const int is_begun = begin > begin_of(group, expert); /* by another worker */
        if (is_begun) memcpy(own.at_sum, own.at_split, sizeof own.at_sum);
        const long blocks = (stop - begin + own.block - 1) / own.block;
        for (long b = 0; b < blocks; b++) {
            const long start = begin + (stop - begin) * b / blocks;
            run_pairs(group, &own, memory, start, begin + (stop - begin) * (b + 1) / blocks - start,
                      b == 0);
        }
        if (own.is_backward && !is_begun && stop == end) collect_expert(group, &own, memory, expert);
        at = stop;
    }
}

/* Experts that several workers computed with: the first of them joins the sums. */
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
        for (long s = 0; s < call->program[H_STEPS] && group->cuts[w + 1] > group->cuts[w]; s++)
            if (call->gradients[s])
                call->kernels->adjust(memory + call->at_sum[s], other + call->at_split[s],
                                      sizes_of(call)[s], 1, -1);
    }
    Call own = *call;
    for (long s = 0; s < call->program[H_STEPS]; s++) {
        own.factors[s] = expert_factor(group, s, expert);
        if (own.gradients[s]) own.gradients[s] = expert_gradient(group, s, expert);
    }
    open_weights(&own, memory);
    collect_expert(group, &own, memory, expert);
}

/* Where the runs of pairs begin: at the start of an expert if that is near. */
static void cut_pairs(Group *group) {
    const long workers = group->call.workers;
    group->cuts[0] = 0;
    for (long w = 1; w <= workers; w++) {
        long at = group->pairs * w / workers;
        if (w < workers && group->pairs) {
            const long expert = find_expert(group, at);
            const long begin = begin_of(group, expert), end = group->ends[expert];
            if (at - begin < LEAST_RUN) at = begin;
            else if (end - at < LEAST_RUN) at = end;
        }
        group->cuts[w] = at > group->cuts[w - 1] ? at : group->cuts[w - 1];
    }
}

/* The pairs of every token, in the order of experts. */
static void link_pairs(Group *group) {
    for (long t = 0; t < group->targets; t++) {
        group->first[t] = -1, group->count[t] = 0;
        atomic_init(&group->done[t], 0);
    }
    for (long p = group->pairs - 1; p >= 0; p--) {
        const long t = group->tokens[p];
        group->next[p] = group->first[t];
        group->first[t] = (int32_t)p;
        group->count[t]++;
    }
}

/* Memory, tables, workers. Returns 0 if there is no memory. */
static int open_group(Group *group, long block, long threads) {
    Call *call = &group->call;
    const size_t pairs = (size_t)group->pairs, targets = (size_t)group->targets;
    const int links = group->mixes || call->gbias;
    const size_t at_dots = round_up(pairs * sizeof(double));
    const size_t at_links = at_dots + round_up(group->needs_dots ? pairs * sizeof(double) : 0);
    const size_t at_rows =
        at_links + round_up(links ? (pairs + 3 * targets) * sizeof(int32_t) : 0);
    call->is_grouped = 1;
    call->stage_x = call->stage_y = call->stage_gy = call->stage_gx = 1;
    call->tokens = group->pairs;
    call->block = block < group->pairs ? block : group->pairs;
    if (call->block < 1) call->block = 1;
    call->workers = choose_workers(call, threads);
    if (call->workers < 1) call->workers = 1;
    call->extra = at_rows + (group->mixes && group->result
                                 ? pairs * (size_t)(group->width * call->size)
                                 : 0);
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

/* Read the arguments that both passes have at `a`:
   experts pairs tokens ends weights takes adds rows stds scales
   rows is the number of tokens. Returns -4 if the tables do not fit each other. */
static int read_group(Group *group, const int64_t *a) {
    group->experts = a[0], group->pairs = a[1];
    group->tokens = (const int64_t *)(intptr_t)a[2];
    group->ends = (const int64_t *)(intptr_t)a[3];
    group->weights = (const void *)(intptr_t)a[4];
    group->takes = a[5] != 0, group->adds = a[6] != 0;
    group->targets = a[7];
    group->stds = (const double *)(intptr_t)a[8];
    group->scales = (void *)(intptr_t)a[9];
    if (group->experts < 1 || group->pairs < 0 || group->pairs > INT32_MAX) return -4;
    for (long e = 0; e < group->experts; e++)
        if (group->ends[e] < begin_of(group, e)) return -4;
    if (group->ends[0] < 0 || group->ends[group->experts - 1] != group->pairs) return -4;
    if (!group->takes && !group->adds) return 0;
    for (long p = 0; p < group->pairs; p++)
        if (group->tokens[p] < 0 || group->tokens[p] >= group->targets) return -4;
    return 0;
}

/* Results of many tokens take much room, which is kept for the next call only up to a size. */
static void close_group(void) {
    if (einlinear_workspace(0) > KEPT) einlinear_workspace(1);
}

/* Arguments: program dtype threads x x_row bias y y_row, those of read_group, factors...
   Factors hold those of all experts one after the other. With stds, factors are normalised, and the
   scales are written. Rows of x, rows of y are those of tokens (takes, adds) or of pairs. */
EXPORT int einlinear_experts_forward(const int64_t *a) {
    Group group;
    memset(&group, 0, sizeof group);
    Call *call = &group.call;
    int failed = start_call(call, (const int64_t *)(intptr_t)a[0], a[1], 0);
    if (!failed) failed = read_group(&group, a + 8);
    if (failed) return failed;
    call->x = (const void *)(intptr_t)a[3], call->x_row = a[4];
    call->bias = (const void *)(intptr_t)a[5];
    call->y = (void *)(intptr_t)a[6], call->y_row = a[7];
    for (long s = 0; s < call->program[H_STEPS]; s++)
        call->factors[s] = (const void *)(intptr_t)a[18 + s];
    group.mixes = group.adds;
    group.result = call->y, group.result_row = call->y_row, group.width = call->program[H_D_OUT];
    if (!open_group(&group, call->program[H_BLOCK], a[2])) return -1;
    call->tokens = group.mixes ? group.targets : group.pairs;
    ask_for_large_pages(call->y, call->y_row, call);
    parallel(prepare_experts, &group, call->workers);
    parallel(run_experts, &group, call->workers);
    close_group();
    return 0;
}

/* Arguments: program dtype threads x x_row gy gy_row gx gx_row gbias grad_weights,
   those of read_group, factors... gradients...
   An address of 0 leaves out gx, gbias, grad_weights or a gradient. gbias can be had only if rows of
   x and of y are tokens. */
EXPORT int einlinear_experts_backward(const int64_t *a) {
    Group group;
    memset(&group, 0, sizeof group);
    Call *call = &group.call;
    int failed = start_call(call, (const int64_t *)(intptr_t)a[0], a[1], 0);
    if (!failed) failed = read_group(&group, a + 11);
    if (failed) return failed;
    const int64_t *program = call->program, steps = program[H_STEPS];
    call->is_backward = 1;
    call->x = (const void *)(intptr_t)a[3], call->x_row = a[4];
    call->gy = (const void *)(intptr_t)a[5], call->gy_row = a[6];
    group.result = (void *)(intptr_t)a[7], group.result_row = a[8];
    call->gbias = (void *)(intptr_t)a[9];
    group.grad_weights = (void *)(intptr_t)a[10];
    group.is_known = 1;
    int has_gradients = 0;
    for (long s = 0; s < steps; s++) {
        call->factors[s] = (const void *)(intptr_t)a[21 + s];
        call->gradients[s] = (void *)(intptr_t)a[21 + steps + s];
        has_gradients |= call->gradients[s] != 0;
    }
    if (call->gbias && !(group.takes && group.adds)) return -2;
    group.mixes = group.takes;
    group.width = program[H_D_IN];
    group.needs_dots = group.grad_weights || (group.stds && has_gradients);
    /* Inside, the gradient of x is wanted for the sake of the dots, too. */
    call->gx = group.result ? group.result : group.needs_dots ? (void *)(intptr_t)call->x : 0;
    if (!open_group(&group, program[H_CHUNK], a[2])) return -1;
    call->tokens = group.mixes ? group.targets : group.pairs;
    ask_for_large_pages(group.result, group.result_row, call);
    parallel(prepare_experts, &group, call->workers);
    parallel(run_experts, &group, call->workers);
    parallel(join_experts, &group, call->workers);
    for (long e = 0; group.grad_weights && e < group.experts; e++) {
        double scale = 1;
        for (long s = 0; group.stds && s < steps; s++)
            scale *= real_at(call, group.scales, s * group.experts + e);
        for (long p = begin_of(&group, e); p < group.ends[e]; p++)
            set_real(call, group.grad_weights, p, group.dots[p] * scale);
    }
    if (call->gbias) {
        for (long t = 0; t < group.targets; t++) { /* tokens without pairs have gradients, too */
            if (group.count[t]) continue;
            char *line = call->memory + call->at_line;
            call->kernels->take((const char *)call->gy + t * call->gy_row * outer_size(call),
                                program[H_D_OUT], line, program[H_D_OUT], 1, call->half);
            call->kernels->add_rows(line, 0, program[H_D_OUT], 1, call->memory + call->at_bias_sum,
                                    1);
        }
        collect_bias(call);
    }
    close_group();
    return 0;
}
