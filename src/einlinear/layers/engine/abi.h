/* The constants and structs of arguments that C and Python share. To change this file,
   edit abi.py and run `python -m einlinear.layers.engine.abi`. */

#ifndef EINLINEAR_ABI_H
#define EINLINEAR_ABI_H

#include <stdint.h>

/* Versions, lengths of entries, and limits. */
enum {
    PROGRAM_VERSION = 6,
    TOKENS_EXTENT = -1,
    LOOP_LENGTH = 4,
    DIM_LENGTH = 3,
    MAX_STEPS = 32,
    MAX_BUFFERS = 256,
    MAX_LOOPS = 64,
};

/* Fields at the start of a flat program. */
enum {
    HEADER_VERSION = 0,
    HEADER_D_IN = 1,
    HEADER_D_OUT = 2,
    HEADER_D_IN_PADDED = 3,
    HEADER_D_OUT_PADDED = 4,
    HEADER_MACS = 5,
    HEADER_STEPS = 6,
    HEADER_BLOCK = 7,
    HEADER_CHUNK = 8,
    HEADER_SCRATCH = 9,
    HEADER_COPIES_ROWS = 10,
    HEADER_ROW_BUFFERS = 11,
    HEADER_FORWARD = 12,
    HEADER_BACKWARD = 13,
    HEADER_TRANSPOSES = 14,
    HEADER_COLLECTS = 15,
    HEADER_LENGTH = 16,
};

/* Fields at the start of every operation. */
enum {
    OP_LENGTH = 0,
    OP_KIND = 1,
    OP_ROLE = 2,
    OP_STEP = 3,
};

/* Further fields of a multiply: C[i, n] (+)= sum over k of S[i, k] * W[k, n]. */
enum {
    MULTIPLY_C = 4,
    MULTIPLY_S = 5,
    MULTIPLY_W = 6,
    MULTIPLY_ROWS = 7,
    MULTIPLY_N = 8,
    MULTIPLY_K = 9,
    MULTIPLY_C_I = 10,
    MULTIPLY_S_I = 11,
    MULTIPLY_S_K = 12,
    MULTIPLY_W_K = 13,
    MULTIPLY_GROUP = 14,
    MULTIPLY_K_BLOCK = 15,
    MULTIPLY_N_BLOCK = 16,
    MULTIPLY_GATHER = 17,
    MULTIPLY_MOST_ROWS = 18,
    MULTIPLY_LOOPS = 19,
};

/* Further fields of a copy. */
enum {
    COPY_TO = 4,
    COPY_FROM = 5,
    COPY_DIMS = 6,
};

/* What an operation does. */
enum {
    KIND_MULTIPLY = 1,
    KIND_COPY = 2,
};

/* What an operation is for. */
enum {
    ROLE_FORWARD = 0,
    ROLE_INPUT_GRADIENT = 1,
    ROLE_WEIGHT_GRADIENT = 2,
    ROLE_PACK = 3,
    ROLE_TRANSPOSE = 4,
    ROLE_COLLECT = 5,
};

/* Numbers of the buffers that hold rows of tokens; INNER is the first intermediate. */
enum {
    BUFFER_X = 0,
    BUFFER_Y = 1,
    BUFFER_GY = 2,
    BUFFER_GX = 3,
    BUFFER_INNER = 4,
};

/* Data types of rows, factors and bias. */
enum {
    DTYPE_FLOAT32 = 0,
    DTYPE_FLOAT64 = 1,
    DTYPE_BFLOAT16 = 2,
};

/* Instruction sets that the kernels are compiled for; NEON is GENERIC on aarch64. */
enum {
    TARGET_GENERIC = 0,
    TARGET_AVX2 = 1,
    TARGET_AVX512 = 2,
};

/* Activations of feed-forward nets; GELU_TANH is the approximation by tanh. */
enum {
    ACTIVATION_RELU = 0,
    ACTIVATION_GELU = 1,
    ACTIVATION_GELU_TANH = 2,
    ACTIVATION_SILU = 3,
};

/* What a call returns: OK, or the one reason why it did nothing. */
enum {
    STATUS_OK = 0,
    STATUS_NO_MEMORY = 1,
    STATUS_PROGRAM_VERSION = 2,
    STATUS_TOO_MANY_STEPS = 3,
    STATUS_TOO_MANY_BUFFERS = 4,
    STATUS_UNKNOWN_DTYPE = 5,
    STATUS_NO_INPUT = 6,
    STATUS_BFLOAT16_NORM = 7,
    STATUS_EXPERT_COUNT = 8,
    STATUS_PAIR_COUNT = 9,
    STATUS_EXPERT_ENDS = 10,
    STATUS_PAIR_TOKENS = 11,
    STATUS_BIAS_ROWS = 12,
    STATUS_BAD_NET = 13,
    STATUS_TIED_LOGITS = 14,
    STATUS_ACTIVE_COUNT = 15,
};

/* Identifies this list. */
enum {
    ABI_FINGERPRINT = 934859960,
};

/* The arguments of every call of a program; fields that are not set are 0 or NULL. */
typedef struct {
    /* flat program */
    const int64_t *program;
    /* one of DTYPE_* */
    int64_t dtype;
    /* number of tokens */
    int64_t tokens;
    /* most threads to use */
    int64_t threads;
    /* rows of input; NULL if no gradient of a factor is wanted */
    const void *x;
    /* distance between rows, in numbers, as all fields named *_row */
    int64_t x_row;
    /* one address per step; of experts one after the other */
    const void *const *factors;
    /* added to every row of y, or NULL */
    const void *bias;
    /* rows of output */
    void *y;
    int64_t y_row;
    /* one per step: scale factor M by 1 / max(1, rms(M) / std); or NULL */
    const double *stds;
    /* these scales: double, per step; experts: as pair_weights, per step, expert */
    void *scales;
    /* nonzero: read the scales instead of writing them */
    int64_t scales_known;
    /* from here on for backward calls; NULL: gradient not wanted */
    const void *grad_y;
    int64_t grad_y_row;
    void *grad_x;
    int64_t grad_x_row;
    void *grad_bias;
    /* one address per step */
    void *const *grad_factors;
    void *grad_pair_weights;
    /* from here on for calls of experts */
    int64_t num_experts;
    /* number of (token, expert) pairs, sorted by expert */
    int64_t num_pairs;
    /* the token of each pair */
    const int64_t *pair_tokens;
    /* where the pairs of each expert end */
    const int64_t *expert_ends;
    /* double for DTYPE_FLOAT64, else float; NULL: all are 1 */
    const void *pair_weights;
    /* nonzero: x has one row per token, else one per pair */
    int64_t x_by_token;
    /* nonzero: y has one row per token, else one per pair */
    int64_t y_by_token;
} CallArguments;

/* The arguments of every call of a gate; fields that are not set are 0 or NULL. */
typedef struct {
    /* DTYPE_FLOAT32 or DTYPE_FLOAT64 */
    int64_t dtype;
    /* number of tokens */
    int64_t tokens;
    /* numbers of a row of x */
    int64_t width;
    int64_t num_experts;
    /* how many experts each token uses */
    int64_t num_active;
    /* most threads to use */
    int64_t threads;
    /* rows of input */
    const void *x;
    /* distance between rows, in numbers */
    int64_t x_row;
    /* one row of weights per expert, as x */
    const void *gate;
    /* written forward: one row per token, one number per expert */
    void *logits;
    /* written forward: the active experts of each token, the best first */
    int64_t *chosen;
    /* written forward: where each pair is in `chosen` */
    int64_t *pair_order;
    /* written forward, read backward: as in the call of experts */
    int64_t *pair_tokens;
    /* so are this */
    int64_t *expert_ends;
    /* and this */
    void *pair_weights;
    /* from here on for backward calls */
    const void *grad_pair_weights;
    /* to be added to what comes from the weights; or NULL */
    const void *grad_logits;
    /* the share of the gate is added to it; NULL: not wanted */
    void *grad_x;
    int64_t grad_x_row;
    /* NULL: not wanted */
    void *grad_gate;
} GateArguments;

#endif
