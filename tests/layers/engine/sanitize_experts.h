/* Calls of many experts on random cases; sanitize.c includes it.

   The file of cases continues with the number of these cases, then for every case

       dtype gap norm weighted bias wanted x_by_token y_by_token experts tokens pairs length,
       the ends of experts, the tokens of pairs, and `length` numbers of a flat program

   wanted: bit 0 for the gradient of x, 1 of the bias, 2 of the weights, then one bit per factor.

   The oracle runs every pair through the calls of one layer, one row at a time in float64, and adds
   up. Outputs, gradients of x and of weights have the same bits for all numbers of threads and all
   places, the other gradients the same bits for all places. Tables that do not fit each other are
   refused, and nothing is written then. */

typedef struct {
    Case of;   /* dtype, gap, bias, norm, wanted, program; tokens are not used */
    Case real; /* the same in the dtype of weights and scales */
    int64_t weighted, x_by_token, y_by_token, experts, tokens, pairs;
    int64_t *ends, *pair_tokens;
} ExpertCase;

typedef struct {
    Rows y, scales, gx, gbias, gweights, gradients[MAX_STEPS];
    int64_t steps;
} ExpertResults;

static const int64_t *sizes_in(const Case *c) {
    return c->program + HEADER_LENGTH + c->program[HEADER_ROW_BUFFERS];
}

static int is_wanted(const ExpertCase *e, int64_t bit) { return e->of.wanted >> bit & 1; }

static void for_expert_results(ExpertResults *r, void (*function)(Array *)) {
    function(&r->y.array), function(&r->scales.array), function(&r->gx.array);
    function(&r->gbias.array), function(&r->gweights.array);
    for (int64_t s = 0; s < r->steps; s++) function(&r->gradients[s].array);
}

static ExpertResults make_expert_results(const ExpertCase *e, int place) {
    const Case *c = &e->of;
    const int64_t *p = c->program, steps = p[HEADER_STEPS];
    const int64_t in = e->x_by_token ? e->tokens : e->pairs,
                  out = e->y_by_token ? e->tokens : e->pairs;
    ExpertResults r = {make_rows(c, out, p[HEADER_D_OUT], c->gap, place),
                       make_rows(&e->real, 1, c->norm ? steps * e->experts : 0, 0, place),
                       make_rows(c, in, p[HEADER_D_IN], c->gap, place),
                       make_rows(c, 1, p[HEADER_D_OUT], 0, place),
                       make_rows(&e->real, 1, e->pairs, 0, place),
                       {{{0}}},
                       steps};
    for (int64_t s = 0; s < steps; s++)
        r.gradients[s] = make_rows(c, 1, e->experts * sizes_in(c)[s], 0, place);
    return r;
}

/* What a case reads. */
typedef struct {
    Rows x, gy, bias, weights, factors[MAX_STEPS];
    Array ends, tokens, stds;
    int64_t steps;
} Inputs;

static Array copy_array(const void *from, size_t bytes, int place) {
    const Array a = make_array(bytes, place);
    if (bytes) memcpy(a.data, from, bytes);
    return a;
}

static Inputs make_inputs(const ExpertCase *e, int place) {
    const Case *c = &e->of;
    const int64_t *p = c->program, steps = p[HEADER_STEPS], *sizes = sizes_in(c);
    double stds[MAX_STEPS];
    for (int64_t s = 0; s < steps; s++) stds[s] = s % 2 ? 0.4 : 0.25;
    Inputs in = {make_rows(c, e->x_by_token ? e->tokens : e->pairs, p[HEADER_D_IN], c->gap, place),
                 make_rows(c, e->y_by_token ? e->tokens : e->pairs, p[HEADER_D_OUT], c->gap, place),
                 make_rows(c, 1, p[HEADER_D_OUT], 0, place),
                 make_rows(&e->real, 1, e->pairs, 0, place),
                 {{{0}}},
                 copy_array(e->ends, (size_t)e->experts * 8, place),
                 copy_array(e->pair_tokens, (size_t)e->pairs * 8, place),
                 copy_array(stds, (size_t)steps * 8, place),
                 steps};
    fill_rows(c, &in.x, 1), fill_rows(c, &in.gy, 2), fill_rows(c, &in.bias, 3);
    fill_rows(&e->real, &in.weights, 4);
    for (int64_t s = 0; s < steps; s++) {
        in.factors[s] = make_rows(c, 1, e->experts * sizes[s], 0, place);
        fill_rows(c, &in.factors[s], (uint64_t)(5 + s));
        for (int64_t i = 0; i < e->experts * sizes[s]; i++) { /* some are below their deviation */
            const double times = (i / sizes[s] + s) % 3 ? 1 : 0.25;
            char *data = in.factors[s].array.data;
            put(data, c->dtype, (size_t)i, times * get(data, c->dtype, (size_t)i));
        }
    }
    return in;
}

static void free_inputs(Inputs *in) {
    free_array(&in->x.array), free_array(&in->gy.array), free_array(&in->bias.array);
    free_array(&in->weights.array), free_array(&in->ends), free_array(&in->tokens);
    free_array(&in->stds);
    for (int64_t s = 0; s < in->steps; s++) free_array(&in->factors[s].array);
}

static void *address(const Array *array, int64_t is_there) { return is_there ? array->data : 0; }

/* The arguments of both calls. If no rows are tokens, the table of tokens must not be read. */
static CallArguments both_arguments(const ExpertCase *e, const Inputs *in, const ExpertResults *r,
                                    int64_t threads, const void *const *factors) {
    return (CallArguments){.program = e->of.program,
                           .dtype = e->of.dtype,
                           .tokens = e->tokens,
                           .threads = threads,
                           .x = in->x.array.data,
                           .x_row = in->x.row,
                           .factors = factors,
                           .stds = address(&in->stds, e->of.norm),
                           .scales = address(&r->scales.array, e->of.norm),
                           .num_experts = e->experts,
                           .num_pairs = e->pairs,
                           .pair_tokens = address(&in->tokens, e->x_by_token || e->y_by_token),
                           .expert_ends = address(&in->ends, 1),
                           .pair_weights = address(&in->weights.array, e->weighted),
                           .x_by_token = e->x_by_token,
                           .y_by_token = e->y_by_token};
}

/* Both calls of a case. */
typedef struct {
    Array addresses, forward, backward;
} Calls;

static Calls make_calls(const ExpertCase *e, const Inputs *in, const ExpertResults *r,
                        int64_t threads, int place) {
    void *at[2 * MAX_STEPS];
    for (int64_t s = 0; s < r->steps; s++) {
        at[s] = in->factors[s].array.data;
        at[r->steps + s] = address(&r->gradients[s].array, is_wanted(e, 3 + s));
    }
    Calls calls;
    calls.addresses = copy_array(at, (size_t)(2 * r->steps) * sizeof *at, place);
    void **addresses = (void **)calls.addresses.data;
    CallArguments f = both_arguments(e, in, r, threads, (const void *const *)addresses), b = f;
    f.bias = address(&in->bias.array, e->of.bias);
    f.y = r->y.array.data, f.y_row = r->y.row;
    b.grad_y = in->gy.array.data, b.grad_y_row = in->gy.row;
    b.grad_x = address(&r->gx.array, is_wanted(e, 0)), b.grad_x_row = r->gx.row;
    b.grad_bias = address(&r->gbias.array, is_wanted(e, 1));
    b.grad_pair_weights = address(&r->gweights.array, is_wanted(e, 2));
    b.grad_factors = addresses + r->steps;
    calls.forward = copy_array(&f, sizeof f, place);
    calls.backward = copy_array(&b, sizeof b, place);
    return calls;
}

static int call_forward(const Calls *calls) {
    return einlinear_experts_forward((const CallArguments *)calls->forward.data);
}

static int call_backward(const Calls *calls) {
    return einlinear_experts_backward((const CallArguments *)calls->backward.data);
}

static void free_calls(Calls *calls) {
    free_array(&calls->addresses), free_array(&calls->forward), free_array(&calls->backward);
}

/* Whether everything is written that should be, and nothing else. */
static void check_expert_results(const ExpertCase *e, const ExpertResults *r, int forward,
                                 int backward) {
    const Case *c = &e->of;
    check_rows(c, &r->y, forward, "y of experts");
    check_rows(&e->real, &r->scales, forward, "scales of experts");
    check_rows(c, &r->gx, backward && is_wanted(e, 0), "gradient of x of experts");
    check_rows(c, &r->gbias, backward && is_wanted(e, 1), "gradient of the bias of experts");
    check_rows(&e->real, &r->gweights, backward && is_wanted(e, 2), "gradient of weights");
    for (int64_t s = 0; s < r->steps; s++)
        check_rows(c, &r->gradients[s], backward && is_wanted(e, 3 + s), "gradient of experts");
}

static ExpertResults run_experts_case(const ExpertCase *e, int place, int64_t threads) {
    Inputs in = make_inputs(e, place);
    ExpertResults r = make_expert_results(e, place);
    Calls calls = make_calls(e, &in, &r, threads, place);
    const long number = (long)e->of.number;
    CHECK(!call_forward(&calls), "case %ld failed", number);
    check_expert_results(e, &r, 1, 0);
    CHECK(!call_backward(&calls), "case %ld failed", number);
    check_expert_results(e, &r, 1, 1);
    free_calls(&calls), free_inputs(&in);
    return r;
}

/* ---- the oracle ---- */

/* Sums in float64, laid out as the results without gaps; `most` is of terms, not of their sums. */
typedef struct {
    double *y, *gx, *gbias, *gweights, *gradients[MAX_STEPS], *scales;
    double most[MAX_STEPS];
} Sums;

static double *zeros(int64_t count) {
    double *made = calloc((size_t)(count ? count : 1), sizeof *made);
    CHECK(made, "no memory");
    return made;
}

static double *as_double(const Case *c, const Rows *r, int64_t row) {
    double *made = zeros(r->width);
    for (int64_t i = 0; i < r->width; i++)
        made[i] = get(r->array.data, c->dtype, (size_t)(row * r->row + i));
    return made;
}

/* Some numbers of one pair, times a number, into a sum. */
static double add_to(double *sum, const double *terms, int64_t count, double times) {
    double most = 0;
    for (int64_t i = 0; i < count; i++) {
        sum[i] += times * terms[i];
        most = fmax(most, fabs(times * terms[i]));
    }
    return most;
}

/* One pair, by the calls of a single layer. */
static void add_pair(const ExpertCase *e, const Inputs *in, int64_t pair, int64_t expert,
                     double *const *factors, Sums *sums) {
    const Case *c = &e->of;
    const int64_t *p = c->program, steps = p[HEADER_STEPS], *sizes = sizes_in(c);
    const int64_t token = e->x_by_token || e->y_by_token ? e->pair_tokens[pair] : -1;
    const int64_t in_row = e->x_by_token ? token : pair, out_row = e->y_by_token ? token : pair;
    const double w = e->weighted ? get(in->weights.array.data, e->real.dtype, (size_t)pair) : 1;
    double *x = as_double(c, &in->x, in_row), *gy = as_double(c, &in->gy, out_row);
    double *y = zeros(p[HEADER_D_OUT]), *gx = zeros(p[HEADER_D_IN]), *raw[MAX_STEPS],
           *grads[MAX_STEPS];
    double scales[MAX_STEPS], dot = 0;
    const void *at[MAX_STEPS];
    void *gradients_at[MAX_STEPS];
    for (int64_t s = 0; s < steps; s++) {
        raw[s] = zeros(sizes[s]), grads[s] = zeros(sizes[s]), scales[s] = 1;
        at[s] = factors[s] + expert * sizes[s];
        gradients_at[s] = raw[s];
    }
    CallArguments f = {.program = p,
                       .dtype = DTYPE_FLOAT64,
                       .tokens = 1,
                       .threads = 1,
                       .x = x,
                       .x_row = p[HEADER_D_IN],
                       .factors = at};
    CallArguments b = f;
    f.y = y, f.y_row = p[HEADER_D_OUT];
    b.grad_y = gy, b.grad_y_row = p[HEADER_D_OUT], b.grad_x = gx, b.grad_x_row = p[HEADER_D_IN];
    b.grad_factors = gradients_at;
    if (c->norm) f.stds = (const double *)in->stds.data, f.scales = scales;
    CHECK(!einlinear_forward(&f) && !einlinear_backward(&b), "the oracle failed");
    double product = 1; /* how large the terms are that normalisation subtracts from each other */
    for (int64_t s = 0; s < steps; s++) product *= scales[s];
    for (int64_t s = 0; s < steps; s++) {
        double *unused = zeros(sizes[s]);
        sums->most[s] = fmax(sums->most[s], add_to(unused, raw[s], sizes[s], w * product));
        gradients_at[s] = grads[s];
        free(unused);
    }
    if (c->norm) b.stds = (const double *)in->stds.data, b.scales = scales;
    CHECK(!einlinear_backward(&b), "the oracle failed");
    for (int64_t i = 0; i < p[HEADER_D_OUT]; i++) dot += gy[i] * y[i];
    sums->gweights[pair] = dot;
    add_to(sums->y + out_row * p[HEADER_D_OUT], y, p[HEADER_D_OUT], w);
    add_to(sums->gx + in_row * p[HEADER_D_IN], gx, p[HEADER_D_IN], w);
    for (int64_t s = 0; s < steps; s++) {
        add_to(sums->gradients[s] + expert * sizes[s], grads[s], sizes[s], w);
        sums->scales[s * e->experts + expert] = scales[s];
        free(raw[s]), free(grads[s]);
    }
    free(x), free(gy), free(y), free(gx);
}

static Sums find_sums(const ExpertCase *e) {
    const Case *c = &e->of;
    const int64_t *p = c->program, steps = p[HEADER_STEPS], *sizes = sizes_in(c);
    Inputs in = make_inputs(e, HEAP);
    Sums sums = {zeros(in.gy.rows * p[HEADER_D_OUT]),
                 zeros(in.x.rows * p[HEADER_D_IN]),
                 zeros(p[HEADER_D_OUT]),
                 zeros(e->pairs),
                 {0},
                 zeros(steps * e->experts),
                 {0}};
    double *factors[MAX_STEPS];
    for (int64_t s = 0; s < steps; s++) {
        factors[s] = as_double(c, &in.factors[s], 0);
        sums.gradients[s] = zeros(e->experts * sizes[s]);
    }
    for (int64_t expert = 0, pair = 0; expert < e->experts; expert++)
        for (; pair < e->ends[expert]; pair++) add_pair(e, &in, pair, expert, factors, &sums);
    for (int64_t t = 0; t < in.gy.rows; t++) {
        double *gy = as_double(c, &in.gy, t), *bias = as_double(c, &in.bias, 0);
        add_to(sums.gbias, gy, p[HEADER_D_OUT], 1);
        if (c->bias) add_to(sums.y + t * p[HEADER_D_OUT], bias, p[HEADER_D_OUT], 1);
        free(gy), free(bias);
    }
    for (int64_t s = 0; s < steps; s++) free(factors[s]);
    free_inputs(&in);
    return sums;
}

static void free_sums(Sums *sums) {
    free(sums->y), free(sums->gx), free(sums->gbias), free(sums->gweights), free(sums->scales);
    for (int64_t s = 0; s < MAX_STEPS; s++) free(sums->gradients[s]);
}

static void check_sum(const Case *c, const Rows *got, const double *wanted, double most,
                      const char *name) {
    const double tolerance = c->dtype == DTYPE_FLOAT64   ? 1e-11
                             : c->dtype == DTYPE_FLOAT32 ? 1e-4
                                                         : 2e-2;
    double apart = 0;
    for (int64_t t = 0; t < got->rows; t++)
        for (int64_t i = 0; i < got->width; i++) {
            const double right = wanted[t * got->width + i];
            const double value = get(got->array.data, c->dtype, (size_t)(t * got->row + i));
            most = fmax(most, fabs(right)), apart = fmax(apart, fabs(value - right));
        }
    CHECK(apart <= tolerance * most, "case %ld: %s of experts is off by %g of %g", (long)c->number,
          name, apart, most);
}

static void check_sums(const ExpertCase *e, const ExpertResults *r, const Sums *sums) {
    const Case *c = &e->of;
    check_sum(c, &r->y, sums->y, 0, "y");
    if (is_wanted(e, 0)) check_sum(c, &r->gx, sums->gx, 0, "gradient of x");
    if (is_wanted(e, 1)) check_sum(c, &r->gbias, sums->gbias, 0, "gradient of the bias");
    if (is_wanted(e, 2))
        check_sum(&e->real, &r->gweights, sums->gweights, 0, "gradient of weights");
    for (int64_t s = 0; s < r->steps; s++) {
        if (is_wanted(e, 3 + s))
            check_sum(c, &r->gradients[s], sums->gradients[s], sums->most[s], "factor's gradient");
        for (int64_t i = 0; c->norm && i < e->experts; i++) {
            const double right = sums->scales[s * e->experts + i];
            const double found =
                get(r->scales.array.data, e->real.dtype, (size_t)(s * e->experts + i));
            CHECK(right == 0 || fabs(found - right) < 1e-5 * right, "case %ld: scale %g for %g",
                  (long)c->number, found, right); /* 0: an expert without pairs */
        }
    }
}

/* ---- comparing, refusing ---- */

static void compare_experts(const ExpertCase *e, const ExpertResults *a, const ExpertResults *b,
                            int same) {
    const long number = (long)e->of.number;
    CHECK(is_same(&a->y, &b->y), "case %ld: y of experts depends on threads", number);
    CHECK(is_same(&a->scales, &b->scales), "case %ld: scales of experts differ", number);
    CHECK(is_same(&a->gx, &b->gx), "case %ld: the gradient of x depends on threads", number);
    CHECK(is_same(&a->gweights, &b->gweights), "case %ld: that of weights does", number);
    CHECK(!same || is_same(&a->gbias, &b->gbias), "case %ld: the bias's gradient differs", number);
    for (int64_t s = 0; s < a->steps; s++)
        CHECK(!same || is_same(&a->gradients[s], &b->gradients[s]),
              "case %ld: a factor's gradient depends on places", number);
}

static void check_refused(const ExpertCase *e, int expected) {
    Inputs in = make_inputs(e, HEAP);
    ExpertResults r = make_expert_results(e, HEAP);
    Calls calls = make_calls(e, &in, &r, 2, HEAP);
    const int forward = call_forward(&calls), backward = call_backward(&calls);
    CHECK(forward == expected && backward == expected, "case %ld: %d and %d for %d",
          (long)e->of.number, forward, backward, expected);
    check_expert_results(e, &r, 0, 0);
    free_calls(&calls), free_inputs(&in), for_expert_results(&r, free_array);
}

/* Check that a case with one wrong number is refused. */
static void spoil(ExpertCase *e, int64_t *number, int64_t value, int expected) {
    const int64_t before = *number;
    *number = value;
    check_refused(e, expected);
    *number = before;
}

static void check_refusals(ExpertCase *e) {
    int64_t *last = &e->ends[e->experts - 1], middle = e->pairs / 2;
    spoil(e, last, e->pairs + 1, STATUS_EXPERT_ENDS);
    spoil(e, last, e->pairs - 1, STATUS_EXPERT_ENDS);
    if (e->experts > 1) {
        spoil(e, &e->ends[0], e->ends[1] + 1, STATUS_EXPERT_ENDS);
        spoil(e, &e->ends[0], -1, STATUS_EXPERT_ENDS);
    }
    if (e->pairs && (e->x_by_token || e->y_by_token)) {
        spoil(e, &e->pair_tokens[middle], e->tokens, STATUS_PAIR_TOKENS);
        spoil(e, &e->pair_tokens[middle], -1, STATUS_PAIR_TOKENS);
        spoil(e, &e->pair_tokens[middle], INT64_MAX, STATUS_PAIR_TOKENS);
    }
    spoil(e, &e->of.program[HEADER_VERSION], PROGRAM_VERSION + 1, STATUS_PROGRAM_VERSION);
    spoil(e, &e->of.dtype, 9, STATUS_UNKNOWN_DTYPE);
}

static void check_experts(ExpertCase *e, int places) {
    const Sums sums = find_sums(e);
    for (int target = 0; target < TARGETS; target++) {
        if (einlinear_target(target) != target) continue;
        ExpertResults all = run_experts_case(e, HEAP, 1);
        check_sums(e, &all, &sums);
        for (int64_t threads = 1; threads <= 4; threads++) {
            ExpertResults one = run_experts_case(e, HEAP, threads);
            compare_experts(e, &all, &one, threads == 1);
            check_sums(e, &one, &sums);
            for (int place = AT_END; place < places; place++) {
                ExpertResults other = run_experts_case(e, place, threads);
                compare_experts(e, &one, &other, 1);
                for_expert_results(&other, free_array);
            }
            for_expert_results(&one, free_array);
        }
        for_expert_results(&all, free_array);
    }
    check_refusals(e);
    free_sums((Sums *)&sums);
}

static int64_t *read_numbers(FILE *file, int64_t count) {
    int64_t *made = malloc((size_t)(count ? count : 1) * 8);
    CHECK(made, "no memory");
    for (int64_t i = 0; i < count; i++) made[i] = next(file);
    return made;
}

static ExpertCase *read_expert_cases(FILE *file, long *count) {
    *count = (long)next(file);
    ExpertCase *cases = calloc((size_t)(*count ? *count : 1), sizeof *cases);
    CHECK(cases, "no memory");
    for (long i = 0; i < *count; i++) {
        ExpertCase *e = cases + i;
        Case *c = &e->of;
        c->number = i, c->dtype = next(file), c->gap = next(file), c->norm = next(file);
        e->weighted = next(file), c->bias = next(file), c->wanted = next(file);
        e->x_by_token = next(file), e->y_by_token = next(file), e->experts = next(file);
        e->tokens = next(file), e->pairs = next(file), c->length = next(file);
        e->ends = read_numbers(file, e->experts);
        e->pair_tokens = read_numbers(file, e->pairs);
        c->program = read_numbers(file, c->length);
        e->real = *c;
        e->real.dtype = c->dtype == DTYPE_FLOAT64 ? DTYPE_FLOAT64 : DTYPE_FLOAT32;
    }
    return cases;
}

static void free_expert_cases(ExpertCase *cases, long count) {
    for (long i = 0; i < count; i++)
        free(cases[i].ends), free(cases[i].pair_tokens), free(cases[i].of.program);
    free(cases);
}
