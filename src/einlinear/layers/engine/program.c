/* Running a program: a few tokens at a time go through all steps, so that intermediates stay in cache.

   Each worker takes a run of tokens. Weight gradients are summed per worker and added up at the end,
   in order. bfloat16 rows are converted to float where they enter and leave the workspace. */

#include <string.h>

#include "arena.h"
#include "call.h"
#include "pool.h"

long copy_units(const int64_t *op) {
    const int64_t *dims = op + COPY_DIMS, num = (op[OP_LENGTH] - COPY_DIMS) / DIM_LENGTH;
    long units = (dims[DIM_LENGTH * (num - 2)] + COPY_BLOCK - 1) / COPY_BLOCK;
    for (long d = 0; d < num - 2; d++) units *= dims[DIM_LENGTH * d];
    return units;
}

/* Whether a pass needs an operation, given the gradients that are wanted. */
static int is_needed(const Call *call, const int64_t *op) {
    const long step = op[OP_STEP], steps = call->program[HEADER_STEPS];
    if (op[OP_ROLE] == ROLE_WEIGHT_GRADIENT || op[OP_ROLE] == ROLE_PACK)
        return call->gradients[step] != 0;
    if (op[OP_ROLE] == ROLE_INPUT_GRADIENT) {
        if (call->gx) return 1;
        for (long s = 0; s < step; s++)
            if (call->gradients[s]) return 1;
        return 0;
    }
    if (call->has_inner) return 0;
    for (long s = step + 1; s < steps; s++)
        if (call->gradients[s]) return 1;
    return !call->is_backward;
}

void find_buffers(const Call *call, char *memory, void **base, int64_t *row) {
    const int64_t *program = call->program;
    const long row_buffers = program[HEADER_ROW_BUFFERS], steps = program[HEADER_STEPS];
    for (long b = 0; b < row_buffers; b++) {
        base[b] = memory + call->at_row[b];
        row[b] = program[HEADER_LENGTH + b];
    }
    for (long s = 0; s < steps; s++) {
        base[row_buffers + s] = (void *)call->weights[s];
        base[row_buffers + steps + s] = call->transposed[s];
        base[row_buffers + 2 * steps + s] = memory + call->at_sum[s];
    }
}

void run_operations(const Call *call, char *memory, long tokens, int is_first, void *const *base,
                    const int64_t *row) {
    const Kernels *kernels = call->kernels;
    const Epilogue no_epilogue = {0, 1, 0};
    const int64_t *op =
        call->program + call->program[call->is_backward ? HEADER_BACKWARD : HEADER_FORWARD];
    for (long count = *op++; count > 0; count--, op += op[OP_LENGTH]) {
        if (call->is_backward && !is_needed(call, op)) continue;
        if (op[OP_ROLE] == ROLE_PACK) {
            const long units = copy_units(op);
            for (long t = 0; t < tokens; t++)
                kernels->copy(
                    op, 0, units, (char *)base[op[COPY_FROM]] + t * row[op[COPY_FROM]] * call->size,
                    0, (char *)base[op[COPY_TO]] + t * row[op[COPY_TO]] * call->size, 0, 1, 0);
            continue;
        }
        kernels->multiply(op, tokens, base, row, op[OP_ROLE] == ROLE_WEIGHT_GRADIENT && !is_first,
                          op[MULTIPLY_C] == BUFFER_Y || op[MULTIPLY_C] == BUFFER_GX
                              ? &call->epilogue
                              : &no_epilogue,
                          memory + call->at_scratch);
    }
}

/* Run a pass for `tokens` tokens from `start` on. */
static void run_block(const Call *call, char *memory, long start, long tokens, int is_first) {
    const int64_t *program = call->program;
    const Kernels *kernels = call->kernels;
    const long outer = call->outer_size, d_in = program[HEADER_D_IN], d_out = program[HEADER_D_OUT];
    void *base[MAX_BUFFERS];
    int64_t row[MAX_BUFFERS];
    find_buffers(call, memory, base, row);
    const char *x = (const char *)call->x + start * call->x_row * outer;
    const char *gy = call->gy ? (const char *)call->gy + start * call->gy_row * outer : 0;
    char *y = call->y ? (char *)call->y + start * call->y_row * outer : 0;
    char *gx = call->gx ? (char *)call->gx + start * call->gx_row * outer : 0;
    if (call->stage_x)
        kernels->stage_in(x, call->x_row, d_in, base[BUFFER_X], row[BUFFER_X],
                          program[HEADER_D_IN_PADDED], tokens, call->is_bfloat16);
    else
        base[BUFFER_X] = (void *)x, row[BUFFER_X] = call->x_row;
    if (gy && call->stage_gy)
        kernels->stage_in(gy, call->gy_row, d_out, base[BUFFER_GY], row[BUFFER_GY],
                          program[HEADER_D_OUT_PADDED], tokens, call->is_bfloat16);
    else
        base[BUFFER_GY] = (void *)gy, row[BUFFER_GY] = call->gy_row;
    if (!call->stage_y) base[BUFFER_Y] = y, row[BUFFER_Y] = call->y_row;
    if (!call->stage_gx) base[BUFFER_GX] = gx, row[BUFFER_GX] = call->gx_row;
    run_operations(call, memory, tokens, is_first, base, row);
    if (call->gbias)
        kernels->add_rows(base[BUFFER_GY], row[BUFFER_GY], d_out, tokens,
                          memory + call->at_bias_sum, !is_first);
    if (gx && call->stage_gx)
        kernels->stage_out(base[BUFFER_GX], row[BUFFER_GX], gx, call->gx_row, d_in, tokens,
                           call->is_bfloat16);
    if (y && call->stage_y)
        kernels->stage_out(base[BUFFER_Y], row[BUFFER_Y], y, call->y_row, d_out, tokens,
                           call->is_bfloat16);
}

/* Run a pass for a worker's share of the tokens, in blocks of about equal length. */
static void run_share(void *context, int worker) {
    const Call *call = context;
    const long first = call->tokens * worker / call->workers;
    const long last = call->tokens * (worker + 1) / call->workers;
    const long blocks = (last - first + call->block - 1) / call->block;
    char *memory = call->memory + call->per_worker * worker;
    for (long b = 0; b < blocks; b++) {
        const long start = first + (last - first) * b / blocks;
        const long end = first + (last - first) * (b + 1) / blocks;
        run_block(call, memory, start, end - start, b == 0);
    }
}

/* The smallest factor whose gradient is wanted, or -1. */
static long smallest_wanted(const Call *call) {
    const int64_t *sizes = sizes_of(call);
    long found = -1;
    for (long s = 0; s < call->program[HEADER_STEPS]; s++)
        if (call->gradients[s] && (found < 0 || sizes[s] < sizes[found])) found = s;
    return found;
}

/* Before a pass: convert bfloat16 factors, sum up squares, transpose. Each worker takes an equal share
   of the pieces of every factor. */
static void prepare_share(void *context, int worker) {
    const Call *call = context;
    const int64_t *sizes = sizes_of(call);
    const long steps = call->program[HEADER_STEPS], workers = call->workers;
    long piece = 0;
    for (long s = 0; s < steps; s++) {
        const long pieces = num_pieces(sizes[s]);
        for (long p = pieces * worker / workers; p < pieces * (worker + 1) / workers; p++) {
            const long start = p * PIECE, rest = sizes[s] - start;
            const long count = rest < PIECE ? rest : PIECE;
            if (call->is_bfloat16)
                call->kernels->stage_in((const uint16_t *)call->factors[s] + start, 0, count,
                                        (float *)call->weights[s] + start, 0, count, 1, 1);
            if (call->partial && !call->is_backward)
                call->partial[piece + p] =
                    call->kernels->dot((const char *)call->weights[s] + start * call->size,
                                       (const char *)call->weights[s] + start * call->size, count);
        }
        piece += pieces;
    }
    if (!call->is_backward) return;
    const int64_t *op = call->program + call->program[HEADER_TRANSPOSES];
    for (long count = *op++; count > 0; count--, op += op[OP_LENGTH]) {
        const long units = copy_units(op), s = op[OP_STEP];
        call->kernels->copy(op, units * worker / workers, units * (worker + 1) / workers,
                            call->factors[s], call->is_bfloat16, call->transposed[s], 0, 1, 0);
    }
}

/* After a backward pass: add up the workers' sums of weight gradients, in order. */
static void collect_share(void *context, int worker) {
    const Call *call = context;
    const int64_t *op = call->program + call->program[HEADER_COLLECTS];
    const long workers = call->workers;
    for (long count = *op++; count > 0; count--, op += op[OP_LENGTH]) {
        const long units = copy_units(op), s = op[OP_STEP];
        if (!call->gradients[s]) continue;
        call->kernels->copy(op, units * worker / workers, units * (worker + 1) / workers,
                            call->memory + call->at_sum[s], 0, call->gradients[s],
                            call->is_bfloat16, workers, (long)(call->per_worker / call->size));
    }
}

void collect_bias(const Call *call) {
    const int64_t op[] = {COPY_DIMS + 2 * DIM_LENGTH,
                          KIND_COPY,
                          ROLE_COLLECT,
                          0,
                          0,
                          0,
                          1,
                          0,
                          0,
                          call->program[HEADER_D_OUT],
                          1,
                          1};
    call->kernels->copy(op, 0, 1, call->memory + call->at_bias_sum, 0, call->gbias,
                        call->is_bfloat16, call->workers, (long)(call->per_worker / call->size));
}

/* The dot product of the smallest factor and its gradient, piece by piece. */
static void compare_share(void *context, int worker) {
    const Call *call = context;
    const long s = smallest_wanted(call), workers = call->workers, size = sizes_of(call)[s];
    const long pieces = num_pieces(size);
    for (long p = pieces * worker / workers; p < pieces * (worker + 1) / workers; p++) {
        const long start = p * PIECE, count = size - start < PIECE ? size - start : PIECE;
        call->partial[p] =
            call->kernels->dot((const char *)call->factors[s] + start * call->size,
                               (const char *)call->gradients[s] + start * call->size, count);
    }
}

/* Scale the gradients, and subtract what normalisation takes off. */
static void adjust_share(void *context, int worker) {
    const Call *call = context;
    const int64_t *sizes = sizes_of(call);
    for (long s = 0; s < call->program[HEADER_STEPS]; s++) {
        if (!call->gradients[s]) continue;
        const long first = sizes[s] * worker / call->workers;
        const long last = sizes[s] * (worker + 1) / call->workers;
        call->kernels->adjust((char *)call->gradients[s] + first * call->size,
                              (const char *)call->factors[s] + first * call->size, last - first,
                              call->epilogue.scale, call->amounts[s]);
    }
}

/* Turn the gradients of the scaled factors s M into those of M, where s = min(1, std / rms(M)).

   The output is S f(M, ...) with S the product of all s and f linear in every M. With g the gradient
   of f with respect to M, the gradient of M is S g if s = 1, and S (g - <g, M> / (n rms^2) M) if s < 1.
   The dot product <g, M> = <grad y, f> is the same for every factor, so it is computed once. */
static void normalise_gradients(Call *call, const double *stds, const double *scales) {
    const int64_t *sizes = sizes_of(call);
    const long pivot = smallest_wanted(call);
    double amounts[MAX_STEPS], common = 0;
    if (pivot < 0) return;
    run_parallel(compare_share, call, call->workers);
    for (long p = 0; p < num_pieces(sizes[pivot]); p++) common += call->partial[p];
    for (long s = 0; s < call->program[HEADER_STEPS]; s++) {
        const double ratio = scales[s] / stds[s]; /* 1 / rms if s < 1 */
        amounts[s] =
            scales[s] < 1 ? call->epilogue.scale * common * ratio * ratio / (double)sizes[s] : 0;
    }
    call->amounts = amounts;
    run_parallel(adjust_share, call, call->workers);
}

/* Find the scale min(1, std / rms(M)) of each factor from its sum of squares. Returns their product. */
static double find_scales(const Call *call, const double *stds, double *scales) {
    const int64_t *sizes = sizes_of(call);
    double product = 1;
    long piece = 0;
    for (long s = 0; s < call->program[HEADER_STEPS]; s++) {
        double total = 0;
        for (long p = num_pieces(sizes[s]); p > 0; p--) total += call->partial[piece++];
        const double excess = total / (double)sizes[s] / (stds[s] * stds[s]);
        scales[s] = excess > 1 || excess != excess ? 1 / __builtin_sqrt(excess) : 1;
        product *= scales[s];
    }
    return product;
}

void prepare_forward(Call *call, const CallArguments *arguments) {
    const double *stds = arguments->stds;
    double unread[MAX_STEPS], *scales = arguments->scales;
    const int is_known = arguments->scales_known != 0, finds_scales = stds && !is_known;
    if (call->is_bfloat16 || finds_scales) run_parallel(prepare_share, call, call->workers);
    if (finds_scales) {
        call->epilogue.scale = find_scales(call, stds, scales ? scales : unread);
    } else if (scales && is_known) {
        for (long s = 0; s < call->program[HEADER_STEPS]; s++) call->epilogue.scale *= scales[s];
    }
    call->epilogue.is_wanted = call->epilogue.bias != 0 || stds != 0 || scales != 0;
}

int run_layer_forward(const CallArguments *arguments) {
    Call call;
    const int status = start_call(&call, arguments, 0);
    if (status || call.tokens <= 0) return status;
    if (!call.x) return STATUS_NO_INPUT;
    const int64_t block = call.program[HEADER_BLOCK];
    call.block = block < call.tokens ? block : call.tokens;
    request_large_pages(call.y, call.y_row, &call);
    call.workers = choose_workers(&call, arguments->threads);
    if (!lay_out(&call, arguments->stds && !arguments->scales_known)) return STATUS_NO_MEMORY;
    prepare_forward(&call, arguments);
    run_parallel(run_share, &call, call.workers);
    return STATUS_OK;
}

void clear_gradients(const Call *call) {
    for (long s = 0; s < call->program[HEADER_STEPS]; s++)
        if (call->gradients[s])
            memset(call->gradients[s], 0, (size_t)(call->outer_size * sizes_of(call)[s]));
    if (call->gbias)
        memset(call->gbias, 0, (size_t)(call->outer_size * call->program[HEADER_D_OUT]));
}

void prepare_backward(Call *call, const CallArguments *arguments) {
    const double *scales = arguments->scales;
    call->epilogue.is_wanted = scales != 0;
    for (long s = 0; scales && s < call->program[HEADER_STEPS]; s++)
        call->epilogue.scale *= scales[s];
    run_parallel(prepare_share, call, call->workers);
}

void finish_backward(Call *call, const CallArguments *arguments) {
    run_parallel(collect_share, call, call->workers);
    if (arguments->scales) normalise_gradients(call, arguments->stds, arguments->scales);
    if (call->gbias) collect_bias(call);
}

int run_layer_backward(const CallArguments *arguments) {
    Call call;
    const int status = start_call(&call, arguments, 1);
    if (status) return status;
    if (arguments->scales && call.is_bfloat16) return STATUS_BFLOAT16_NORM;
    if (call.tokens <= 0) {
        clear_gradients(&call);
        return STATUS_OK;
    }
    if (!call.x && smallest_wanted(&call) >= 0) return STATUS_NO_INPUT;
    const int64_t chunk = call.program[HEADER_CHUNK];
    call.block = chunk < call.tokens ? chunk : call.tokens;
    request_large_pages(call.gx, call.gx_row, &call);
    call.workers = choose_workers(&call, arguments->threads);
    call.stage_x |= is_aliased(&call, call.x_row);
    call.stage_gy |= is_aliased(&call, call.gy_row);
    if (!call.x) call.stage_x = 0;
    if (!lay_out(&call, arguments->scales != 0)) return STATUS_NO_MEMORY;
    prepare_backward(&call, arguments);
    run_parallel(run_share, &call, call.workers);
    finish_backward(&call, arguments);
    return STATUS_OK;
}
