/* Runs the engine on random programs, in a process under a sanitizer: see sanitize.py.

   The file of cases holds integers of 8 bytes: the number of cases, then for every case

       dtype tokens gap bias norm wanted length, and `length` numbers of a flat program

   gap: numbers between rows; wanted: bit 0 for the gradient of x, bit 1 for that of the bias, then
   one bit per factor. Where the engine must not read, inputs are NaN; where it must not write,
   outputs hold a pattern. Arrays are placed in three ways: on the heap, at the end of a page before
   a protected one, and at the start of a page after a protected one. AddressSanitizer does not check
   masked vector loads, which are single instructions; protected pages catch those.

   Every case runs forward and backward on every target, in every place, on 1 to 4 threads. Forward
   results have the same bits for all places and numbers of threads, gradients the same bits for all
   places, and both are near those of the first run. Then several threads run cases at once, on the
   engine's own pool and on a pool passed to it, and so does a child after a fork.

   Calls of many experts, of gates and of feed-forward nets follow: see sanitize_experts.h,
   sanitize_gate.h and sanitize_feedforward.h. */

#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "entry.h"

enum { HEAP, AT_END, AT_START, PLACES };
enum { TARGETS = TARGET_AVX512 + 1, CALLERS = 4, PAGE = 4096 };

#define CHECK(condition, ...)                                               \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                   \
            fputc('\n', stderr);                                            \
            abort();                                                        \
        }                                                                   \
    } while (0)

/* ---- arrays: exactly as long as they must be ---- */

typedef struct {
    char *data, *mapped;
    size_t bytes, length;
} Array;

static Array make_array(size_t bytes, int place) {
    Array a = {0, 0, bytes, 0};
    if (place == HEAP) {
        a.data = malloc(bytes ? bytes : 1);
        CHECK(a.data, "no memory");
        return a;
    }
    const size_t inside = (bytes + PAGE - 1) / PAGE * PAGE;
    a.length = inside + PAGE;
    a.mapped = mmap(0, a.length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(a.mapped != MAP_FAILED, "no memory");
    char *closed = place == AT_END ? a.mapped + inside : a.mapped;
    CHECK(!mprotect(closed, PAGE, PROT_NONE), "cannot close a page");
    a.data = place == AT_END ? closed - bytes : closed + PAGE;
    return a;
}

static void free_array(Array *a) {
    if (a->mapped)
        munmap(a->mapped, a->length);
    else
        free(a->data);
    memset(a, 0, sizeof *a);
}

/* ---- numbers of the three types ---- */

typedef struct {
    int64_t dtype, tokens, gap, bias, norm, wanted, length;
    int64_t *program; /* on the heap, exactly as long as it is */
    int64_t number;
} Case;

static size_t size_of(int64_t dtype) {
    return dtype == DTYPE_FLOAT64 ? 8 : dtype == DTYPE_FLOAT32 ? 4 : 2;
}

static void put(void *array, int64_t dtype, size_t i, double value) {
    const float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, 4);
    if (dtype == DTYPE_FLOAT64)
        ((double *)array)[i] = value;
    else if (dtype == DTYPE_FLOAT32)
        ((float *)array)[i] = single;
    else
        ((uint16_t *)array)[i] = (uint16_t)(bits >> 16);
}

static double get(const void *array, int64_t dtype, size_t i) {
    if (dtype == DTYPE_FLOAT64) return ((const double *)array)[i];
    if (dtype == DTYPE_FLOAT32) return ((const float *)array)[i];
    const uint32_t bits = (uint32_t)((const uint16_t *)array)[i] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static double draw(uint64_t *state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return (double)(*state >> 11) / (double)(1ull << 52) - 1;
}

/* Rows with gaps between them, none after the last. */
typedef struct {
    Array array;
    int64_t rows, width, row;
} Rows;

static Rows make_rows(const Case *c, int64_t rows, int64_t width, int64_t gap, int place) {
    const int64_t row = width + gap;
    const size_t numbers = rows ? (size_t)((rows - 1) * row + width) : 0;
    const Rows r = {make_array(numbers * size_of(c->dtype), place), rows, width, row};
    memset(r.array.data, 0xff, r.array.bytes); /* no number in any of the types */
    return r;
}

static void fill_rows(const Case *c, Rows *r, uint64_t seed) {
    uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
    for (int64_t t = 0; t < r->rows; t++)
        for (int64_t i = 0; i < r->width; i++)
            put(r->array.data, c->dtype, (size_t)(t * r->row + i), draw(&state));
}

/* All written, nothing beside it. */
static void check_rows(const Case *c, const Rows *r, int written, const char *name) {
    const size_t size = size_of(c->dtype);
    for (size_t i = 0; i < r->array.bytes / size; i++) {
        if (written && (int64_t)i % r->row < r->width) {
            const double value = get(r->array.data, c->dtype, i);
            CHECK(isfinite(value), "case %ld: %s[%zu] is %g", (long)c->number, name, i, value);
            continue;
        }
        for (size_t b = 0; b < size; b++)
            CHECK((unsigned char)r->array.data[i * size + b] == 0xff,
                  "case %ld: %s[%zu] was written", (long)c->number, name, i);
    }
}

static void check_near(const Case *c, const Rows *a, const Rows *b, const char *name) {
    const double tolerance = c->dtype == DTYPE_FLOAT64   ? 1e-11
                             : c->dtype == DTYPE_FLOAT32 ? 1e-4
                                                         : 3e-2;
    /* A gradient through normalisation is a difference, and may be nothing but rounding. */
    double most = c->norm ? 1 : 0, apart = 0;
    for (size_t i = 0; i < a->array.bytes / size_of(c->dtype); i++) {
        if ((int64_t)i % a->row >= a->width) continue;
        const double x = get(a->array.data, c->dtype, i), y = get(b->array.data, c->dtype, i);
        most = fmax(most, fabs(x)), apart = fmax(apart, fabs(x - y));
    }
    CHECK(apart <= tolerance * most, "case %ld: %s differs by %g of %g", (long)c->number, name,
          apart, most);
}

/* ---- one case in one place ---- */

typedef struct {
    Rows y, y_norm, gx, gbias, gradients[MAX_STEPS];
    double scales[MAX_STEPS];
    int64_t steps;
} Results;

static void for_results(Results *r, void (*function)(Array *)) {
    function(&r->y.array), function(&r->y_norm.array);
    function(&r->gx.array), function(&r->gbias.array);
    for (int64_t s = 0; s < r->steps; s++) function(&r->gradients[s].array);
}

static Results run(const Case *c, int place, int64_t threads) {
    const int64_t *p = c->program, steps = p[HEADER_STEPS],
                  *sizes = p + HEADER_LENGTH + p[HEADER_ROW_BUFFERS];
    Rows x = make_rows(c, c->tokens, p[HEADER_D_IN], c->gap, place);
    Rows gy = make_rows(c, c->tokens, p[HEADER_D_OUT], c->gap, place);
    Rows bias = make_rows(c, 1, p[HEADER_D_OUT], 0, place), factors[MAX_STEPS];
    fill_rows(c, &x, 1), fill_rows(c, &gy, 2), fill_rows(c, &bias, 3);
    Results r = {make_rows(c, c->tokens, p[HEADER_D_OUT], c->gap, place),
                 make_rows(c, c->tokens, p[HEADER_D_OUT], c->gap, place),
                 make_rows(c, c->tokens, p[HEADER_D_IN], c->gap, place),
                 make_rows(c, 1, p[HEADER_D_OUT], 0, place),
                 {{{0}}},
                 {0},
                 steps};
    Array addresses = make_array((size_t)(2 * steps) * sizeof(void *), place);
    Array forward = make_array(sizeof(CallArguments), place);
    Array backward = make_array(sizeof(CallArguments), place);
    Array stds = make_array((size_t)steps * 8, place),
          scales = make_array((size_t)steps * 8, place);
    void **factors_at = (void **)addresses.data, **gradients_at = factors_at + steps;
    CallArguments *f = (CallArguments *)forward.data, *b = (CallArguments *)backward.data;
    *f = *b = (CallArguments){.program = p,
                              .dtype = c->dtype,
                              .tokens = c->tokens,
                              .threads = threads,
                              .x = x.array.data,
                              .x_row = x.row,
                              .factors = (const void *const *)factors_at};
    f->bias = c->bias ? bias.array.data : 0;
    f->y = r.y.array.data, f->y_row = r.y.row;
    b->grad_y = gy.array.data, b->grad_y_row = gy.row;
    b->grad_x = c->wanted & 1 ? r.gx.array.data : 0, b->grad_x_row = r.gx.row;
    b->grad_bias = c->wanted & 2 ? r.gbias.array.data : 0;
    b->grad_factors = gradients_at;
    for (int64_t s = 0; s < steps; s++) {
        factors[s] = make_rows(c, 1, sizes[s], 0, place);
        fill_rows(c, &factors[s], (uint64_t)(4 + s));
        r.gradients[s] = make_rows(c, 1, sizes[s], 0, place);
        factors_at[s] = factors[s].array.data;
        gradients_at[s] = c->wanted >> (2 + s) & 1 ? r.gradients[s].array.data : 0;
        ((double *)stds.data)[s] = s % 2 ? 10 : 0.25;
    }
    CHECK(!einlinear_forward(f), "case %ld failed", (long)c->number);
    check_rows(c, &r.y, 1, "y");
    if (c->norm && c->tokens) { /* scales found by the call, then given to it */
        Rows again = make_rows(c, c->tokens, p[HEADER_D_OUT], c->gap, place);
        memset(scales.data, 0xff, scales.bytes);
        f->y = r.y_norm.array.data;
        f->stds = (const double *)stds.data, f->scales = scales.data;
        CHECK(!einlinear_forward(f), "case %ld failed", (long)c->number);
        check_rows(c, &r.y_norm, 1, "normalised y");
        memcpy(r.scales, scales.data, scales.bytes);
        f->y = again.array.data, f->scales_known = 1;
        CHECK(!einlinear_forward(f), "case %ld failed", (long)c->number);
        CHECK(!memcmp(again.array.data, r.y_norm.array.data, again.array.bytes),
              "case %ld: known scales give other results", (long)c->number);
        free_array(&again.array);
    }
    if (c->norm && c->tokens && c->dtype != DTYPE_BFLOAT16)
        b->stds = (const double *)stds.data, b->scales = scales.data;
    CHECK(!einlinear_backward(b), "case %ld failed backward", (long)c->number);
    check_rows(c, &r.gx, c->wanted & 1, "gradient of x");
    check_rows(c, &r.gbias, c->wanted >> 1 & 1, "gradient of the bias");
    for (int64_t s = 0; s < steps; s++) {
        check_rows(c, &r.gradients[s], c->wanted >> (2 + s) & 1, "gradient of a factor");
        free_array(&factors[s].array);
    }
    free_array(&addresses), free_array(&x.array), free_array(&gy.array), free_array(&bias.array);
    free_array(&forward), free_array(&backward), free_array(&stds), free_array(&scales);
    return r;
}

static int is_same(const Rows *a, const Rows *b) {
    return !memcmp(a->array.data, b->array.data, a->array.bytes);
}

/* `same`: whether gradients were summed by as many threads. */
static void compare(const Case *c, const Results *a, const Results *b, int same) {
    const long number = (long)c->number;
    CHECK(is_same(&a->y, &b->y), "case %ld: y depends on threads or places", number);
    CHECK(is_same(&a->y_norm, &b->y_norm), "case %ld: y depends on threads or places", number);
    CHECK(!memcmp(a->scales, b->scales, sizeof a->scales), "case %ld: scales differ", number);
    if (c->wanted & 1)
        CHECK(is_same(&a->gx, &b->gx), "case %ld: the gradient of x depends on threads", number);
    if (c->wanted & 2) check_near(c, &a->gbias, &b->gbias, "gradient of the bias");
    CHECK(!same || is_same(&a->gbias, &b->gbias), "case %ld: the bias's gradient differs", number);
    for (int64_t s = 0; s < a->steps; s++) {
        if (c->wanted >> (2 + s) & 1)
            check_near(c, &a->gradients[s], &b->gradients[s], "gradient of a factor");
        CHECK(!same || is_same(&a->gradients[s], &b->gradients[s]),
              "case %ld: a factor's gradient depends on places", number);
    }
}

static void check_case(const Case *c, int target, Results *first, int places) {
    CHECK(einlinear_target(target) == target, "target %d", target);
    Results all = run(c, HEAP, 1);
    if (target == 0) {
        *first = all;
    } else if (c->wanted & 1 && c->tokens) {
        check_near(c, &first->y, &all.y, "y between targets");
        check_near(c, &first->gx, &all.gx, "gradient of x between targets");
    }
    for (int64_t threads = 1; threads <= 4; threads++) {
        Results one = run(c, HEAP, threads);
        compare(c, &all, &one, threads == 1);
        for (int place = AT_END; place < places; place++) {
            Results other = run(c, place, threads);
            compare(c, &one, &other, 1);
            for_results(&other, free_array);
        }
        for_results(&one, free_array);
    }
    if (target) for_results(&all, free_array);
}

static int64_t next(FILE *file) {
    int64_t number = 0;
    CHECK(fread(&number, sizeof number, 1, file) == 1, "the file of cases ends too early");
    return number;
}

#include "sanitize_experts.h"
#include "sanitize_feedforward.h"
#include "sanitize_gate.h"

/* ---- several callers at once ---- */

typedef struct {
    const Case *cases;
    const ExpertCase *expert_cases;
    const NetCase *net_cases;
    long count, expert_count, net_count;
} Cases;

typedef struct {
    const Cases *all;
    long number;
} Caller;

static void *call_all(void *argument) {
    const Caller *caller = argument;
    const Cases *all = caller->all;
    for (long i = 0; i < all->count; i++) {
        const long at = all->count * caller->number / CALLERS + i;
        const Case *c = all->cases + at % all->count;
        Results a = run(c, HEAP, 1 + at % 4), b = run(c, AT_END, 2);
        compare(c, &a, &b, 0);
        for_results(&a, free_array), for_results(&b, free_array);
    }
    for (long i = 0; i < all->expert_count; i++) {
        const long at = all->expert_count * caller->number / CALLERS + i;
        const ExpertCase *e = all->expert_cases + at % all->expert_count;
        ExpertResults a = run_experts_case(e, HEAP, 1 + at % 4), b = run_experts_case(e, AT_END, 2);
        compare_experts(e, &a, &b, 0);
        for_expert_results(&a, free_array), for_expert_results(&b, free_array);
    }
    for (long i = 0; i < all->net_count; i++) {
        const long at = all->net_count * caller->number / CALLERS + i;
        const NetCase *n = all->net_cases + at % all->net_count;
        NetResults a = run_net_case(n, HEAP, 1 + at % 4), b = run_net_case(n, AT_END, 2);
        compare_nets(n, &a, &b, 0);
        for_net_results(&a, free_array), for_net_results(&b, free_array);
    }
    return 0;
}

static void call_at_once(const Cases *all) {
    pthread_t threads[CALLERS];
    Caller callers[CALLERS];
    for (long i = 0; i < CALLERS; i++) {
        callers[i] = (Caller){all, i};
        CHECK(!pthread_create(&threads[i], 0, call_all, &callers[i]), "no thread");
    }
    for (int i = 0; i < CALLERS; i++) pthread_join(threads[i], 0);
}

/* A pool with libgomp's interface, which starts one thread fewer than requested. */

typedef struct {
    void (*function)(void *);
    void *argument;
    int number, given;
} Member;

static __thread Member member = {0, 0, 0, 1};

static void *run_member(void *argument) {
    member = *(Member *)argument;
    member.function(member.argument);
    return 0;
}

static void pool_parallel(void (*function)(void *), void *argument, unsigned asked,
                          unsigned flags) {
    const int given = asked > 2 ? (int)asked - 1 : (int)asked;
    pthread_t threads[8];
    Member members[8];
    (void)flags;
    CHECK(given <= 8, "asked for %u threads", asked);
    for (int i = 1; i < given; i++) {
        members[i] = (Member){function, argument, i, given};
        CHECK(!pthread_create(&threads[i], 0, run_member, &members[i]), "no thread");
    }
    const Member before = member;
    member = (Member){function, argument, 0, given};
    function(argument);
    member = before;
    for (int i = 1; i < given; i++) pthread_join(threads[i], 0);
}

static int pool_thread_number(void) { return member.number; }
static int pool_num_threads(void) { return member.given; }

static void hand_in_pool(void) {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned) = pool_parallel;
    int (*number)(void) = pool_thread_number, (*count)(void) = pool_num_threads;
    void *addresses[3];
    memcpy(addresses, &parallel, sizeof parallel);
    memcpy(addresses + 1, &number, sizeof number);
    memcpy(addresses + 2, &count, sizeof count);
    einlinear_use_gomp(addresses[0], addresses[1], addresses[2]);
}

static void call_after_fork(const Cases *all) {
    fflush(stdout);
    const pid_t child = fork();
    CHECK(child >= 0, "no fork");
    if (child == 0) {
        alarm(60); /* in case it waits for a thread that did not survive the fork */
        call_at_once(all);
        _exit(0);
    }
    call_at_once(all); /* the parent's pool is as it was */
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child, "no child");
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with %d", status);
}

int main(int argc, char **argv) {
    CHECK(argc == 2 || argc == 3, "usage: driver CASES [--threads]");
    const int is_short = argc == 3; /* for ThreadSanitizer: one place, no forks */
    FILE *file = fopen(argv[1], "rb");
    CHECK(file, "cannot read %s", argv[1]);
    const long count = (long)next(file);
    Case *cases = calloc((size_t)count, sizeof *cases);
    CHECK(cases, "no memory");
    for (long i = 0; i < count; i++) {
        Case *c = cases + i;
        c->number = i, c->dtype = next(file), c->tokens = next(file), c->gap = next(file);
        c->bias = next(file), c->norm = next(file), c->wanted = next(file), c->length = next(file);
        c->program = malloc((size_t)c->length * 8);
        CHECK(c->program, "no memory");
        for (int64_t n = 0; n < c->length; n++) c->program[n] = next(file);
    }
    long expert_count;
    ExpertCase *expert_cases = read_expert_cases(file, &expert_count);
    long net_count;
    NetCase *net_cases = read_net_cases(file, &net_count);
    fclose(file);
    int targets = 0;
    for (long i = 0; i < count; i++) {
        Results first = {0};
        targets = 0;
        for (int target = 0; target < TARGETS; target++)
            if (einlinear_target(target) == target) {
                check_case(cases + i, target, &first, is_short ? AT_END : PLACES);
                targets++;
            }
        for_results(&first, free_array);
    }
    for (long i = 0; i < expert_count; i++)
        check_experts(expert_cases + i, is_short ? AT_END : PLACES);
    for (long i = 0; i < net_count; i++) check_net(net_cases + i, is_short ? AT_END : PLACES);
    check_gates(is_short ? AT_END : PLACES);
    einlinear_target(-1);
    const Cases all = {cases, expert_cases, net_cases, count, expert_count, net_count};
    Cases third = all, few = all;
    third.count = (count + 2) / 3, third.expert_count = (expert_count + 2) / 3;
    third.net_count = (net_count + 2) / 3;
    few.count = count < 20 ? count : 20;
    few.expert_count = expert_count < 10 ? expert_count : 10;
    few.net_count = net_count < 10 ? net_count : 10;
    call_at_once(is_short ? &third : &all);
    if (!is_short) call_after_fork(&few);
    hand_in_pool();
    call_at_once(is_short ? &third : &all);
    if (!is_short) call_after_fork(&few);
    for (long i = 0; i < count; i++) free(cases[i].program);
    free(cases), free_expert_cases(expert_cases, expert_count);
    free_net_cases(net_cases, net_count);
    printf("%ld cases, %ld of experts and %ld of nets on %d targets\n", count, expert_count,
           net_count, targets);
    return 0;
}
