/* Calls of gates of random sizes; sanitize.c includes it.

   The oracle is a triple loop in double. Everything has the same bits for all numbers of threads and
   all places. Tied logits are refused, and then nothing but logits is written. */

typedef struct {
    int64_t dtype, tokens, width, experts, active, gap, has_logits; /* gradients of logits */
} GateCase;

typedef struct {
    Rows logits, weights, gx, ggate;
    Array chosen, order, tokens, ends;
} GateResults;

static void for_gate_results(GateResults *r, void (*function)(Array *)) {
    function(&r->logits.array), function(&r->weights.array), function(&r->gx.array);
    function(&r->ggate.array), function(&r->chosen), function(&r->order);
    function(&r->tokens), function(&r->ends);
}

static GateResults run_gate_case(const GateCase *g, int place, int64_t threads, int is_tied) {
    const Case c = {.dtype = g->dtype};
    const int64_t pairs = g->tokens * g->active;
    GateResults r = {make_rows(&c, g->tokens, g->experts, 0, place),
                     make_rows(&c, 1, pairs, 0, place),
                     make_rows(&c, g->tokens, g->width, g->gap, place),
                     make_rows(&c, g->experts, g->width, 0, place),
                     make_array((size_t)pairs * 8, place),
                     make_array((size_t)pairs * 8, place),
                     make_array((size_t)pairs * 8, place),
                     make_array((size_t)g->experts * 8, place)};
    Rows x = make_rows(&c, g->tokens, g->width, g->gap, place);
    Rows gate = make_rows(&c, g->experts, g->width, 0, place);
    Rows gw = make_rows(&c, 1, pairs, 0, place),
         gl = make_rows(&c, g->tokens, g->experts, 0, place);
    fill_rows(&c, &x, 1), fill_rows(&c, &gate, 2), fill_rows(&c, &gw, 3), fill_rows(&c, &gl, 4);
    fill_rows(&c, &r.gx, 5);
    if (is_tied) memset(gate.array.data, 0, gate.array.bytes);
    Array both = make_array(sizeof(GateArguments), place);
    GateArguments *a = (GateArguments *)both.data;
    *a = (GateArguments){.dtype = g->dtype,
                         .tokens = g->tokens,
                         .width = g->width,
                         .num_experts = g->experts,
                         .num_active = g->active,
                         .threads = threads,
                         .x = x.array.data,
                         .x_row = x.row,
                         .gate = gate.array.data,
                         .logits = r.logits.array.data,
                         .chosen = (int64_t *)r.chosen.data,
                         .pair_order = (int64_t *)r.order.data,
                         .pair_tokens = (int64_t *)r.tokens.data,
                         .expert_ends = (int64_t *)r.ends.data,
                         .pair_weights = r.weights.array.data,
                         .grad_pair_weights = gw.array.data,
                         .grad_logits = address(&gl.array, g->has_logits),
                         .grad_x = r.gx.array.data,
                         .grad_x_row = r.gx.row,
                         .grad_gate = r.ggate.array.data};
    const int status = einlinear_gate_forward(a);
    CHECK(status == (is_tied ? STATUS_TIED_LOGITS : STATUS_OK), "gate: status %d", status);
    check_rows(&c, &r.logits, 1, "logits");
    check_rows(&c, &r.weights, !is_tied, "weights of a gate");
    if (!is_tied) {
        CHECK(!einlinear_gate_backward(a), "gate failed backward");
        check_rows(&c, &r.gx, 1, "gradient of x of a gate");
        check_rows(&c, &r.ggate, 1, "gradient of a gate");
    }
    free_array(&x.array), free_array(&gate.array), free_array(&gw.array), free_array(&gl.array);
    free_array(&both);
    return r;
}

static void compare_gates(const GateResults *a, const GateResults *b) {
    const Array *one = &a->chosen, *other = &b->chosen;
    for (int i = 0; i < 4; i++)
        CHECK(!memcmp(one[i].data, other[i].data, one[i].bytes), "tables of gates differ");
    CHECK(is_same(&a->logits, &b->logits), "logits depend on threads or places");
    CHECK(is_same(&a->weights, &b->weights), "weights depend on threads or places");
    CHECK(is_same(&a->gx, &b->gx), "gradients of x of gates differ");
    CHECK(is_same(&a->ggate, &b->ggate), "gradients of gates differ");
}

/* The same by plain loops in double, given the experts that were chosen. */
static void check_gate(const GateCase *g, const GateResults *r) {
    const Case c = {.dtype = g->dtype};
    Rows x = make_rows(&c, g->tokens, g->width, 0, HEAP);
    Rows gate = make_rows(&c, g->experts, g->width, 0, HEAP);
    const int64_t pairs = g->tokens * g->active, *ends = (const int64_t *)r->ends.data;
    Rows gw = make_rows(&c, 1, pairs, 0, HEAP), gl = make_rows(&c, g->tokens, g->experts, 0, HEAP);
    fill_rows(&c, &x, 1), fill_rows(&c, &gate, 2), fill_rows(&c, &gw, 3), fill_rows(&c, &gl, 4);
    Rows start = make_rows(&c, g->tokens, g->width, g->gap, HEAP);
    fill_rows(&c, &start, 5);
    double *logits = zeros(g->tokens * g->experts), *grads = zeros(g->tokens * g->experts);
    double *gx = zeros(g->tokens * g->width), *ggate = zeros(g->experts * g->width);
    double *weights = zeros(pairs), *total = zeros(g->tokens), *dot = zeros(g->tokens);
    const int64_t *tokens = (const int64_t *)r->tokens.data;
    const int64_t d = g->width, n = g->experts;
    for (int64_t t = 0; t < g->tokens; t++)
        for (int64_t e = 0; e < n; e++) {
            if (g->has_logits) grads[t * n + e] = get(gl.array.data, g->dtype, (size_t)(t * n + e));
            for (int64_t i = 0; i < d; i++)
                logits[t * n + e] += get(x.array.data, g->dtype, (size_t)(t * d + i)) *
                                     get(gate.array.data, g->dtype, (size_t)(e * d + i));
        }
    CHECK(ends[n - 1] == pairs, "gate: %ld pairs", (long)ends[n - 1]);
    for (int pass = 0; pass < 3; pass++)
        for (int64_t e = 0, p = 0; e < n; e++)
            for (; p < ends[e]; p++) {
                const int64_t t = tokens[p];
                const double g_w = get(gw.array.data, g->dtype, (size_t)p);
                if (pass == 0) total[t] += exp(logits[t * n + e]);
                if (pass == 1) weights[p] = exp(logits[t * n + e]) / total[t];
                if (pass == 1) dot[t] += weights[p] * g_w;
                if (pass == 2) grads[t * n + e] += weights[p] * (g_w - dot[t]);
            }
    for (int64_t t = 0; t < g->tokens; t++)
        for (int64_t i = 0; i < d; i++) {
            gx[t * d + i] = get(start.array.data, g->dtype, (size_t)(t * start.row + i));
            for (int64_t e = 0; e < n; e++) {
                const size_t at = (size_t)(e * d + i);
                gx[t * d + i] += grads[t * n + e] * get(gate.array.data, g->dtype, at);
                ggate[at] += grads[t * n + e] * get(x.array.data, g->dtype, (size_t)(t * d + i));
            }
        }
    check_sum(&c, &r->logits, logits, 1, "logits"), check_sum(&c, &r->gx, gx, 1, "x of gates");
    check_sum(&c, &r->weights, weights, 1, "weights"), check_sum(&c, &r->ggate, ggate, 1, "gate");
    free(logits), free(grads), free(gx), free(ggate), free(weights), free(total), free(dot);
    free_array(&x.array), free_array(&gate.array), free_array(&gw.array), free_array(&gl.array);
    free_array(&start.array);
}

static void check_gates(int places) {
    /* The first two are long enough for several threads. */
    const GateCase cases[] = {
        {DTYPE_FLOAT32, 30, 4100, 3, 2, 1, 1}, {DTYPE_FLOAT64, 26, 2500, 5, 2, 0, 1},
        {DTYPE_FLOAT32, 30, 4100, 3, 2, 1, 0}, {DTYPE_FLOAT64, 26, 2500, 50, 2, 0, 0},
        {DTYPE_FLOAT32, 20, 70, 64, 1, 1, 1},  {DTYPE_FLOAT64, 21, 130, 35, 3, 3, 0},
        {DTYPE_FLOAT32, 0, 20, 4, 2, 0, 1},    {DTYPE_FLOAT32, 0, 20, 4, 2, 0, 0},
        {DTYPE_FLOAT64, 9, 1, 3, 1, 0, 1},     {DTYPE_FLOAT32, 140, 10, 7, 7, 2, 1},
        {DTYPE_FLOAT32, 140, 10, 7, 7, 2, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int target = 0; target < TARGETS; target++) {
            if (einlinear_target(target) != target) continue;
            const GateCase *g = &cases[i];
            GateResults first = run_gate_case(g, HEAP, 1, 0);
            check_gate(g, &first);
            for (int64_t threads = 1; threads <= 4; threads++)
                for (int place = HEAP; place < places; place++) {
                    GateResults other = run_gate_case(g, place, threads, 0);
                    compare_gates(&first, &other);
                    for_gate_results(&other, free_array);
                }
            for_gate_results(&first, free_array);
            if (!g->tokens) continue;
            GateResults tied = run_gate_case(g, AT_END, 2, 1);
            for_gate_results(&tied, free_array);
        }
}
