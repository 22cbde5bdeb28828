/* One call: what it was given, where its buffers are, and the parts of a pass that calls of one layer
   (program.c) and of experts (experts.c) share. */

#ifndef EINLINEAR_CALL_H
#define EINLINEAR_CALL_H

#include <stddef.h>
#include <stdint.h>

#include "abi.h"
#include "arena.h"
#include "targets.h"

typedef struct {
    const int64_t *program;
    const Kernels *kernels;
    long tokens, block;
    long size, outer_size; /* bytes of a number: inside the engine, in the caller's arrays */
    int is_bfloat16, workers, is_backward;
    int is_grouped;       /* a call of experts */
    int has_inner;        /* a backward pass whose intermediates are in the workspace already */
    size_t shared_prefix; /* bytes to reserve at the start of the shared memory */
    const void *x, *gy;
    void *y, *gx;
    long x_row, y_row, gy_row, gx_row;
    int stage_x, stage_y, stage_gy, stage_gx; /* whether these rows are copied to the workspace */
    const void *bias;
    void *gbias;
    Epilogue epilogue;
    const void *factors[MAX_STEPS]; /* the caller's */
    const void *weights[MAX_STEPS]; /* the factors to compute with: the caller's, or converted */
    void *gradients[MAX_STEPS];     /* the caller's; NULL if not wanted */
    char *transposed[MAX_STEPS];
    /* ---- all above starts as zero ---- */
    int64_t at_row[MAX_BUFFERS]; /* offsets of row buffers in a worker's memory */
    int64_t at_sum[MAX_STEPS], at_bias_sum, at_scratch;
    int64_t at_weights[MAX_STEPS],
        at_transposed[MAX_STEPS]; /* in shared memory; experts: worker's */
    int64_t at_bias, at_partial;  /* in shared memory; -1 if not needed */
    int64_t shared_bytes, partial_bytes;
    int64_t at_split[MAX_STEPS], at_line; /* experts only */
    char *shared;
    char *memory; /* of the first worker */
    size_t per_worker;
    double *partial;       /* sums over pieces of factors */
    const double *amounts; /* how much of each factor to subtract from its gradient */
} Call;

/* How many numbers each factor has; then each transposed factor. */
static inline const int64_t *sizes_of(const Call *call) {
    return call->program + HEADER_LENGTH + call->program[HEADER_ROW_BUFFERS];
}

/* Work on factors is cut into pieces of this many numbers. */
enum { PIECE = 16384 };

static inline long num_pieces(int64_t size) { return (size + PIECE - 1) / PIECE; }

/* Numbers of `size` bytes, read and written as double. */
static inline double real_at(long size, const void *numbers, long i) {
    return size == 8 ? ((const double *)numbers)[i] : (double)((const float *)numbers)[i];
}

static inline void set_real(long size, void *numbers, long i, double value) {
    if (size == 8)
        ((double *)numbers)[i] = value;
    else
        ((float *)numbers)[i] = (float)value;
}

static inline size_t round_up(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

/* ---- call.c: start a call ---- */

/* Read the arguments. Returns STATUS_OK, or why the call cannot run. */
int start_call(Call *call, const CallArguments *arguments, int is_backward);

/* How many workers pay off for as many multiply-adds, which can be cut into blocks. */
int count_workers(double macs, long blocks, long threads);

/* The same for the tokens of a call. */
int choose_workers(const Call *call, long threads);

/* Reserve the workspace and place all buffers in it. Returns 0 if there is no memory. */
int lay_out(Call *call, int needs_partial_sums);

/* The same in two parts, for calls that share a workspace: find all offsets, and return how many bytes
   the call needs, in whole pages; then place the buffers in that memory. */
size_t measure(Call *call, int needs_partial_sums);
void place_at(Call *call, char *memory);

/* Find the factors to compute with, given the memory they were placed in. */
void locate_weights(Call *call, char *memory);

/* Bytes of the longest row of input or output. */
size_t line_bytes(const Call *call);

/* Ask the system for large pages for rows that are about to be written. */
void request_large_pages(void *rows, int64_t row, const Call *call);

/* ---- program.c: run a program ---- */

int run_layer_forward(const CallArguments *arguments);
int run_layer_backward(const CallArguments *arguments);

/* How many units a copy has: see kernel.h. */
long copy_units(const int64_t *op);

/* The address of every buffer of a worker, and the distance between its rows. */
void find_buffers(const Call *call, char *memory, void **base, int64_t *row);

/* Run the operations of a pass on the tokens in the buffers. */
void run_operations(const Call *call, char *memory, long tokens, int is_first, void *const *base,
                    const int64_t *row);

/* Add up the workers' sums of the gradient of the bias. */
void collect_bias(const Call *call);

/* Gradients of no tokens are zero. */
void clear_gradients(const Call *call);

/* Before the first block of a pass: convert or transpose the factors, and set the epilogue. */
void prepare_forward(Call *call, const CallArguments *arguments);
void prepare_backward(Call *call, const CallArguments *arguments);

/* After the last block of a backward pass: write the gradients of factors and bias. */
void finish_backward(Call *call, const CallArguments *arguments);

/* Whether to copy rows for a backward pass: a weight gradient reads columns, and rows a power of two
   apart share a few sets of the first-level cache, which not every processor can bear. */
static inline int is_aliased(const Call *call, long row) {
    return call->program[HEADER_COPIES_ROWS] && row * call->size % (PAGE / 4) == 0;
}

/* ---- feedforward.c: layers and an activation between them ---- */

int run_feedforward_forward(const CallArguments *layers, int64_t count, int64_t activation);
int run_feedforward_backward(const CallArguments *layers, int64_t count, int64_t activation);

/* ---- experts.c ---- */

int run_experts_forward(const CallArguments *arguments);
int run_experts_backward(const CallArguments *arguments);

#endif
