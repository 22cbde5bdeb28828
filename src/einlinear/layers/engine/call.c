/* Starting a call: read its arguments, choose the number of workers, lay out its workspace. */

#define _GNU_SOURCE
#include "call.h"

#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "arena.h"
#include "pool.h"

enum { LARGE_PAGE = 2 << 20 };
static const double LEAST_PARALLEL_MACS = 200e3; /* below this, waking threads costs more */

int start_call(Call *call, const CallArguments *arguments, int is_backward) {
    const int64_t *program = arguments->program;
    const int64_t dtype = arguments->dtype, steps = program[HEADER_STEPS];
    if (program[HEADER_VERSION] != PROGRAM_VERSION) return STATUS_PROGRAM_VERSION;
    if (steps > MAX_STEPS) return STATUS_TOO_MANY_STEPS;
    if (program[HEADER_ROW_BUFFERS] + 3 * steps > MAX_BUFFERS) return STATUS_TOO_MANY_BUFFERS;
    if (dtype != DTYPE_FLOAT32 && dtype != DTYPE_FLOAT64 && dtype != DTYPE_BFLOAT16)
        return STATUS_UNKNOWN_DTYPE;
    memset(call, 0, offsetof(Call, at_row));
    call->program = program;
    call->kernels = current_kernels(dtype == DTYPE_FLOAT64);
    call->tokens = arguments->tokens;
    call->is_bfloat16 = dtype == DTYPE_BFLOAT16;
    call->size = dtype == DTYPE_FLOAT64 ? 8 : 4;
    call->outer_size = call->is_bfloat16 ? 2 : call->size;
    call->is_backward = is_backward;
    call->x = arguments->x, call->x_row = arguments->x_row;
    if (is_backward) {
        call->gy = arguments->grad_y, call->gy_row = arguments->grad_y_row;
        call->gx = arguments->grad_x, call->gx_row = arguments->grad_x_row;
        call->gbias = arguments->grad_bias;
    } else {
        call->y = arguments->y, call->y_row = arguments->y_row;
        call->bias = arguments->bias;
    }
    for (long s = 0; s < steps; s++) {
        call->factors[s] = arguments->factors[s];
        call->gradients[s] = is_backward ? arguments->grad_factors[s] : 0;
    }
    /* Rows are copied if they are converted or padded. */
    const int pads_in = program[HEADER_D_IN] != program[HEADER_D_IN_PADDED];
    const int pads_out = program[HEADER_D_OUT] != program[HEADER_D_OUT_PADDED];
    call->stage_x = call->stage_gx = call->is_bfloat16 || pads_in;
    call->stage_y = call->stage_gy = call->is_bfloat16 || pads_out;
    call->epilogue.scale = 1;
    return STATUS_OK;
}

int count_workers(double macs, long blocks, long threads) {
    if (threads > blocks) threads = blocks;
    if (macs < LEAST_PARALLEL_MACS || threads < 1) threads = 1;
    return (int)(threads > MAX_THREADS ? MAX_THREADS : threads);
}

int choose_workers(const Call *call, long threads) {
    const double macs = (double)call->program[HEADER_MACS] * (double)call->tokens;
    return count_workers(macs, (call->tokens + call->block - 1) / call->block, threads);
}

/* ---- the workspace ---- */

static size_t round_to_page(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

/* Whether a row buffer is in the workspace. */
static int has_rows(const Call *call, long buffer) {
    switch (buffer) {
        case BUFFER_X:
            return call->stage_x;
        case BUFFER_Y:
            return call->stage_y && !call->is_backward;
        case BUFFER_GY:
            return call->stage_gy && call->is_backward;
        case BUFFER_GX:
            return call->stage_gx && call->is_backward;
    }
    return call->is_backward || buffer < BUFFER_INNER + call->program[HEADER_STEPS] - 1;
}

void locate_weights(Call *call, char *memory) {
    const int64_t *sizes = sizes_of(call), steps = call->program[HEADER_STEPS];
    (void)sizes; /* used only with AddressSanitizer */
    for (long s = 0; s < steps; s++) {
        call->weights[s] = call->factors[s];
        if (call->is_bfloat16)
            call->weights[s] =
                unpoisoned(memory + call->at_weights[s], (size_t)(sizes[s] * call->size));
        if (call->is_backward)
            call->transposed[s] = unpoisoned(memory + call->at_transposed[s],
                                             (size_t)(sizes[steps + s] * call->size));
    }
}

size_t line_bytes(const Call *call) {
    const int64_t d_in = call->program[HEADER_D_IN_PADDED];
    const int64_t d_out = call->program[HEADER_D_OUT_PADDED];
    return (size_t)((d_in > d_out ? d_in : d_out) * call->size);
}

static void unpoison_workers(const Call *call) {
#ifdef __SANITIZE_ADDRESS__
    const int64_t *program = call->program, per_token = call->block * call->size;
    for (long w = 0; w < call->workers; w++) {
        char *own = call->memory + call->per_worker * w;
        for (long b = 0; b < program[HEADER_ROW_BUFFERS]; b++)
            if (has_rows(call, b))
                unpoisoned(own + call->at_row[b], program[HEADER_LENGTH + b] * per_token);
        for (long s = 0; s < program[HEADER_STEPS]; s++)
            if (call->gradients[s]) {
                unpoisoned(own + call->at_sum[s], sizes_of(call)[s] * call->size);
                if (call->is_grouped)
                    unpoisoned(own + call->at_split[s], sizes_of(call)[s] * call->size);
            }
        if (call->is_grouped) unpoisoned(own + call->at_line, line_bytes(call));
        unpoisoned(own + call->at_scratch, program[HEADER_SCRATCH] * per_token);
        if (call->gbias) unpoisoned(own + call->at_bias_sum, program[HEADER_D_OUT] * call->size);
    }
#else
    (void)call;
#endif
}

/* The memory that workers share comes first, then that of each worker.

   The buffer that a step reads and the one it writes start half a page apart, modulo a page. A
   processor assumes that a load depends on an earlier store if the lower 12 bits of their addresses
   agree, and waits for the store: that can halve the speed of a step. */
size_t measure(Call *call, int needs_partial_sums) {
    const int64_t *program = call->program, *sizes = sizes_of(call);
    const long steps = program[HEADER_STEPS], rows = program[HEADER_ROW_BUFFERS];
    size_t shared = round_up(call->shared_prefix), own = 0, pieces = 0;
    for (long s = 0; s < steps; s++) {
        size_t *place = call->is_grouped ? &own : &shared;
        call->at_weights[s] = (int64_t)*place;
        if (call->is_bfloat16) *place += round_up((size_t)(sizes[s] * call->size));
        call->at_transposed[s] = (int64_t)*place;
        if (call->is_backward) *place += round_up((size_t)(sizes[steps + s] * call->size));
        pieces += (size_t)num_pieces(sizes[s]);
    }
    const size_t bias_bytes = (size_t)(program[HEADER_D_OUT_PADDED] * call->size);
    const int pads_bias = program[HEADER_D_OUT] != program[HEADER_D_OUT_PADDED];
    const int stages_bias = call->bias && (call->is_bfloat16 || pads_bias);
    call->at_bias = stages_bias ? (int64_t)shared : -1;
    if (stages_bias) shared += round_up(bias_bytes);
    call->at_partial = needs_partial_sums ? (int64_t)shared : -1;
    call->partial_bytes = (int64_t)(pieces * sizeof(double));
    if (needs_partial_sums) shared += round_up((size_t)call->partial_bytes);
    own = round_to_page(own);
    const size_t phase = call->stage_x ? 0 : (size_t)call->x & (PAGE / 2 - 64);
    for (long b = 0; b < rows; b++) {
        call->at_row[b] = 0;
        if (!has_rows(call, b)) continue;
        const long inner = b - BUFFER_INNER;
        const int is_odd = inner >= 0 && inner % (steps > 1 ? steps - 1 : 1) % 2 == 0;
        call->at_row[b] = (int64_t)(own + (phase + (is_odd ? PAGE / 2 : 0)) % PAGE);
        own +=
            round_to_page((size_t)(program[HEADER_LENGTH + b] * call->block * call->size)) + PAGE;
    }
    for (long s = 0; s < steps; s++) {
        call->at_sum[s] = (int64_t)(own + phase);
        if (call->gradients[s]) own += round_to_page((size_t)(sizes[s] * call->size)) + PAGE;
        call->at_split[s] = (int64_t)(own + phase);
        if (call->gradients[s] && call->is_grouped)
            own += round_to_page((size_t)(sizes[s] * call->size)) + PAGE;
    }
    call->at_line = (int64_t)own;
    if (call->is_grouped) own += round_up(line_bytes(call));
    call->at_scratch = (int64_t)(own + phase + PAGE / 4);
    own += round_to_page((size_t)(program[HEADER_SCRATCH] * call->block * call->size)) + PAGE;
    call->at_bias_sum = (int64_t)own;
    if (call->gbias) own += round_up(bias_bytes);
    call->per_worker = round_to_page(own);
    call->shared_bytes = (int64_t)round_to_page(shared);
    return (size_t)call->shared_bytes + call->per_worker * (size_t)call->workers;
}

void place_at(Call *call, char *memory) {
    const int64_t *program = call->program;
    call->shared = unpoisoned(memory, call->shared_prefix);
    if (!call->is_grouped) locate_weights(call, memory);
    call->epilogue.bias = call->bias;
    if (call->at_bias >= 0) {
        char *bias =
            unpoisoned(memory + call->at_bias, (size_t)(program[HEADER_D_OUT_PADDED] * call->size));
        call->kernels->stage_in(call->bias, 0, program[HEADER_D_OUT], bias, 0,
                                program[HEADER_D_OUT_PADDED], 1, call->is_bfloat16);
        call->epilogue.bias = bias;
    }
    call->partial = 0;
    if (call->at_partial >= 0)
        call->partial =
            (double *)unpoisoned(memory + call->at_partial, (size_t)call->partial_bytes);
    call->memory = memory + call->shared_bytes;
    unpoison_workers(call);
}

int lay_out(Call *call, int needs_partial_sums) {
    char *memory = reserve_arena(measure(call, needs_partial_sums));
    if (memory) place_at(call, memory);
    return memory != 0;
}

/* Tensors of more than 32 MB are fresh memory at every call, and page faults on pages of 4 KB would
   cost as much as the arithmetic. This is only a hint: if the system refuses, nothing changes. */
void request_large_pages(void *rows, int64_t row, const Call *call) {
#ifdef MADV_HUGEPAGE
    const uintptr_t large = LARGE_PAGE, first = ((uintptr_t)rows + large - 1) / large * large;
    const uintptr_t bytes = (uintptr_t)(row * call->tokens * call->outer_size);
    const uintptr_t last = ((uintptr_t)rows + bytes) / large * large;
    if (rows && bytes >= 2 * large && last > first)
        madvise((void *)first, last - first, MADV_HUGEPAGE);
#else
    (void)rows, (void)row, (void)call;
#endif
}
