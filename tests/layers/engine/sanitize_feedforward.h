/* Calls of feed-forward nets on random cases; sanitize.c includes it.

   The file of cases continues with the number of these cases, then for every case

       dtype tokens gap bias norm wanted activation count, and for each of `count` layers
       length, and `length` numbers of a flat program

   wanted: bit 0 for the gradient of x, bit 1 for those of biases, bit 2 for those of factors.

   Outputs and the gradient of x have the same bits for all places and numbers of threads, the other
   gradients the same bits for all places. The outputs are near those of the first target. Arrays of
   layers that do not fit each other are refused, and nothing is written then. */

enum { MOST_LAYERS = 3 };

typedef struct {
    Case layers[MOST_LAYERS]; /* all of the same dtype, tokens, gap, norm */
    int64_t activation, count, wants_x, wants_bias, wants_factors;
} NetCase;

typedef struct {
    Rows y, gx, gbias[MOST_LAYERS], gradients[MOST_LAYERS][MAX_STEPS];
    int64_t count, steps[MOST_LAYERS];
} NetResults;

static void for_net_results(NetResults *r, void (*function)(Array *)) {
    function(&r->y.array), function(&r->gx.array);
    for (int64_t i = 0; i < r->count; i++) {
        function(&r->gbias[i].array);
        for (int64_t s = 0; s < r->steps[i]; s++) function(&r->gradients[i][s].array);
    }
}

/* The arrays that the arguments of one layer point to. */
typedef struct {
    Rows bias, factors[MAX_STEPS];
    const void *factors_at[MAX_STEPS];
    void *gradients_at[MAX_STEPS];
    double stds[MAX_STEPS], scales[MAX_STEPS];
} LayerInputs;

static void fill_layer(const NetCase *n, int64_t i, int place, LayerInputs *in, NetResults *r,
                       CallArguments *a) {
    const Case *c = &n->layers[i];
    const int64_t *p = c->program, *sizes = p + HEADER_LENGTH + p[HEADER_ROW_BUFFERS];
    r->steps[i] = p[HEADER_STEPS];
    r->gbias[i] = make_rows(c, 1, p[HEADER_D_OUT], 0, place);
    in->bias = make_rows(c, 1, p[HEADER_D_OUT], 0, place);
    fill_rows(c, &in->bias, (uint64_t)(3 + 50 * i));
    for (int64_t s = 0; s < r->steps[i]; s++) {
        in->factors[s] = make_rows(c, 1, sizes[s], 0, place);
        r->gradients[i][s] = make_rows(c, 1, sizes[s], 0, place);
        fill_rows(c, &in->factors[s], (uint64_t)(4 + s + 50 * i));
        in->factors_at[s] = in->factors[s].array.data;
        in->gradients_at[s] = n->wants_factors ? r->gradients[i][s].array.data : 0;
        in->stds[s] = s % 2 ? 10 : 0.25;
    }
    *a = (CallArguments){.program = p,
                         .dtype = c->dtype,
                         .tokens = c->tokens,
                         .factors = in->factors_at,
                         .bias = c->bias ? in->bias.array.data : 0,
                         .stds = c->norm ? in->stds : 0,
                         .scales = c->norm ? in->scales : 0};
}

static NetResults run_net_case(const NetCase *n, int place, int64_t threads) {
    const Case *first = &n->layers[0], *last = &n->layers[n->count - 1];
    const int64_t d_in = first->program[HEADER_D_IN], d_out = last->program[HEADER_D_OUT];
    Rows x = make_rows(first, first->tokens, d_in, first->gap, place);
    Rows gy = make_rows(last, last->tokens, d_out, last->gap, place);
    fill_rows(first, &x, 1), fill_rows(last, &gy, 2);
    NetResults r = {.count = n->count};
    r.y = make_rows(last, last->tokens, d_out, last->gap, place);
    r.gx = make_rows(first, first->tokens, d_in, first->gap, place);
    Array calls = make_array((size_t)n->count * sizeof(CallArguments), place);
    CallArguments *a = (CallArguments *)calls.data;
    LayerInputs in[MOST_LAYERS];
    for (int64_t i = 0; i < n->count; i++) fill_layer(n, i, place, &in[i], &r, &a[i]);
    CallArguments *end = &a[n->count - 1];
    a->threads = threads;
    a->x = x.array.data, a->x_row = x.row;
    end->y = r.y.array.data, end->y_row = r.y.row;
    CHECK(einlinear_feedforward_forward(a, 1, n->activation) == STATUS_BAD_NET, "one layer");
    CHECK(einlinear_feedforward_forward(a, n->count, -1) == STATUS_BAD_NET, "no activation");
    check_rows(last, &r.y, 0, "y of a refused call");
    CHECK(!einlinear_feedforward_forward(a, n->count, n->activation), "net %ld failed",
          (long)first->number);
    check_rows(last, &r.y, 1, "y");
    for (int64_t i = 0; i < n->count; i++) {
        a[i].grad_factors = in[i].gradients_at;
        a[i].grad_bias = n->wants_bias ? r.gbias[i].array.data : 0;
        a[i].scales_known = 1;
        if (first->dtype == DTYPE_BFLOAT16 || !first->tokens) a[i].stds = 0, a[i].scales = 0;
    }
    a->grad_x = n->wants_x ? r.gx.array.data : 0, a->grad_x_row = r.gx.row;
    end->grad_y = gy.array.data, end->grad_y_row = gy.row;
    CHECK(!einlinear_feedforward_backward(a, n->count, n->activation), "net %ld failed backward",
          (long)first->number);
    check_rows(first, &r.gx, (int)n->wants_x, "gradient of x");
    for (int64_t i = 0; i < n->count; i++) {
        const Case *c = &n->layers[i];
        check_rows(c, &r.gbias[i], (int)n->wants_bias, "gradient of a bias");
        free_array(&in[i].bias.array);
        for (int64_t s = 0; s < r.steps[i]; s++) {
            check_rows(c, &r.gradients[i][s], (int)n->wants_factors, "gradient of a factor");
            free_array(&in[i].factors[s].array);
        }
    }
    free_array(&x.array), free_array(&gy.array), free_array(&calls);
    return r;
}

/* `same`: whether gradients were summed by as many threads. */
static void compare_nets(const NetCase *n, const NetResults *a, const NetResults *b, int same) {
    const long number = (long)n->layers[0].number;
    CHECK(is_same(&a->y, &b->y), "net %ld: y depends on threads or places", number);
    CHECK(is_same(&a->gx, &b->gx), "net %ld: the gradient of x depends on threads", number);
    for (int64_t i = 0; i < n->count; i++) {
        if (n->wants_bias) check_near(&n->layers[i], &a->gbias[i], &b->gbias[i], "bias gradient");
        CHECK(!same || is_same(&a->gbias[i], &b->gbias[i]), "net %ld: bias gradients", number);
        for (int64_t s = 0; s < a->steps[i]; s++) {
            const Rows *one = &a->gradients[i][s], *other = &b->gradients[i][s];
            if (n->wants_factors) check_near(&n->layers[i], one, other, "factor gradient");
            CHECK(!same || is_same(one, other), "net %ld: factor gradients", number);
        }
    }
}

static void check_net(const NetCase *n, int places) {
    NetResults first = {0};
    for (int target = 0; target < TARGETS; target++) {
        if (einlinear_target(target) != target) continue;
        NetResults all = run_net_case(n, HEAP, 1);
        if (target) check_near(&n->layers[n->count - 1], &first.y, &all.y, "y between targets");
        for (int64_t threads = 1; threads <= 4; threads++) {
            NetResults one = run_net_case(n, HEAP, threads);
            compare_nets(n, &all, &one, threads == 1);
            for (int place = AT_END; place < places; place++) {
                NetResults other = run_net_case(n, place, threads);
                compare_nets(n, &one, &other, 1);
                for_net_results(&other, free_array);
            }
            for_net_results(&one, free_array);
        }
        if (target)
            for_net_results(&all, free_array);
        else
            first = all;
    }
    for_net_results(&first, free_array);
}

static NetCase *read_net_cases(FILE *file, long *count) {
    *count = (long)next(file);
    NetCase *cases = calloc((size_t)*count + 1, sizeof *cases);
    CHECK(cases, "no memory");
    for (long k = 0; k < *count; k++) {
        NetCase *n = cases + k;
        Case c = {.number = k};
        c.dtype = next(file), c.tokens = next(file), c.gap = next(file);
        c.bias = next(file), c.norm = next(file);
        const int64_t wanted = next(file);
        n->wants_x = wanted & 1, n->wants_bias = wanted >> 1 & 1,
        n->wants_factors = wanted >> 2 & 1;
        n->activation = next(file), n->count = next(file);
        for (int64_t i = 0; i < n->count; i++) {
            c.length = next(file);
            c.program = malloc((size_t)c.length * 8);
            CHECK(c.program, "no memory");
            for (int64_t j = 0; j < c.length; j++) c.program[j] = next(file);
            n->layers[i] = c;
        }
    }
    return cases;
}

static void free_net_cases(NetCase *cases, long count) {
    for (long k = 0; k < count; k++)
        for (int64_t i = 0; i < cases[k].count; i++) free(cases[k].layers[i].program);
    free(cases);
}
