/* Feed-forward nets: up, an activation and down for a few tokens at a time, so that the wide hidden rows
   between the two layers stay in cache and are never written to memory.

       a = activation(h)         h = up(x)           y = down(a)
       a = activation(h) * g     h = gate(x), g = up(x)                  if there are three layers

   The layers of a net are calls (call.h) that share a workspace. The backward pass computes h again from
   x, then goes through down and up. There, the hidden rows of a become those of the gradient of a, and
   those of h the slopes of the activation, then the gradient of h. */

#include <string.h>

#include "arena.h"
#include "call.h"
#include "pool.h"

enum { MAX_UPS = 2 };

typedef struct {
    Call ups[MAX_UPS], down;
    Call again[MAX_UPS]; /* of a backward pass: the ups, forward */
    long num_ups, tokens, block, hidden, row;
    int64_t activation;
    int workers, wants_hidden_gradient;
    char *memory; /* hidden rows, of the first worker */
    size_t buffer, per_worker;
} Net;

/* The layers of a net, its ups first. */
static Call *layer_of(Net *net, long i) { return i < net->num_ups ? &net->ups[i] : &net->down; }

/* Read the arguments. Returns STATUS_OK, or why the call cannot run. */
static int start_net(Net *net, const CallArguments *layers, int64_t count, int64_t activation,
                     int is_backward) {
    if (count < 2 || count > MAX_UPS + 1 || activation < ACTIVATION_RELU ||
        activation > ACTIVATION_SILU)
        return STATUS_BAD_NET;
    net->num_ups = (long)count - 1;
    net->activation = activation;
    for (long i = 0; i < count; i++) {
        const int status = start_call(layer_of(net, i), &layers[i], is_backward);
        if (status) return status;
        if (layers[i].dtype != layers[0].dtype || layers[i].tokens != layers[0].tokens)
            return STATUS_BAD_NET;
    }
    Call *down = &net->down;
    net->tokens = down->tokens;
    net->hidden = down->program[HEADER_D_IN];
    long widest = down->program[HEADER_D_IN_PADDED];
    for (long i = 0; i < net->num_ups; i++) {
        Call *up = &net->ups[i];
        const int64_t *program = up->program;
        if (program[HEADER_D_OUT] != net->hidden ||
            program[HEADER_D_IN] != net->ups[0].program[HEADER_D_IN])
            return STATUS_BAD_NET;
        if (program[HEADER_D_OUT_PADDED] > widest) widest = program[HEADER_D_OUT_PADDED];
        /* Hidden rows are floats or doubles, padded with zeros: nothing is copied. */
        up->stage_y = up->stage_gy = 0;
        up->bias = layers[i].bias; /* for the forward pass within a backward pass */
        up->x = layers[0].x, up->x_row = layers[0].x_row;
    }
    down->stage_x = down->stage_gx = 0;
    const long line = 64 / net->down.size; /* an odd number of cache lines, see flat.py */
    net->row = ((widest + line - 1) / line | 1) * line;
    return STATUS_OK;
}

/* Hidden rows of a worker: of each up, and after them those of a, which are a quarter page further off
   to keep loads from waiting for stores: see measure() in call.c. */
static char *hidden_rows(const Net *net, int worker, long number) {
    return net->memory + net->per_worker * worker + net->buffer * number +
           (number == net->num_ups ? PAGE / 4 : 0);
}

/* Choose block and workers, reserve the workspace and place everything in it. */
static int lay_out_net(Net *net, const CallArguments *layers) {
    const long count = net->num_ups + 1;
    const int is_backward = net->down.is_backward,
              field = is_backward ? HEADER_CHUNK : HEADER_BLOCK;
    size_t bytes = 0, needed[MAX_UPS + 1];
    net->block = net->tokens;
    for (long i = 0; i < count; i++) {
        const long block = layer_of(net, i)->program[field];
        if (block < net->block) net->block = block;
    }
    net->workers = 1;
    for (long i = 0; i < count; i++) {
        Call *call = layer_of(net, i);
        call->block = net->block;
        const int workers = choose_workers(call, layers[0].threads);
        if (workers > net->workers) net->workers = workers;
    }
    for (long i = 0; i < count; i++) {
        Call *call = layer_of(net, i);
        const int finds_scales = layers[i].stds && !layers[i].scales_known;
        call->workers = net->workers;
        needed[i] = measure(call, is_backward ? layers[i].scales != 0 : finds_scales);
        bytes += needed[i];
    }
    const size_t rows = (size_t)(net->row * net->block * net->down.size);
    net->buffer = (rows + PAGE / 4 + PAGE - 1) / PAGE * PAGE + PAGE;
    net->per_worker = net->buffer * (size_t)(net->num_ups + is_backward);
    char *memory = reserve_arena(bytes + net->per_worker * (size_t)net->workers);
    if (!memory) return 0;
    for (long i = 0; i < count; i++) {
        place_at(layer_of(net, i), memory);
        memory += needed[i];
    }
    net->memory = memory;
    for (long w = 0; w < net->workers; w++)
        for (long b = 0; b < net->num_ups + is_backward; b++)
            (void)unpoisoned(hidden_rows(net, (int)w, b), rows);
    return 1;
}

static char *memory_of(const Call *call, int worker) {
    return call->memory + call->per_worker * worker;
}

/* Point a row buffer at rows of the caller, or of a net; or copy the former into the workspace. */
static void read_rows(const Call *call, int buffer, const void *from, long from_row, int is_staged,
                      long tokens, void **base, int64_t *row) {
    const int64_t *program = call->program;
    const int is_input = buffer == BUFFER_X;
    if (is_staged) {
        call->kernels->stage_in(from, from_row, program[is_input ? HEADER_D_IN : HEADER_D_OUT],
                                base[buffer], row[buffer],
                                program[is_input ? HEADER_D_IN_PADDED : HEADER_D_OUT_PADDED],
                                tokens, call->is_bfloat16);
    } else {
        base[buffer] = (void *)from, row[buffer] = from_row;
    }
}

static const char *from_token(const Call *call, const void *rows, long row, long token) {
    return (const char *)rows + token * row * call->outer_size;
}

static void run_forward_block(const Net *net, int worker, long start, long tokens) {
    void *base[MAX_BUFFERS], *hidden[MAX_UPS] = {0};
    int64_t row[MAX_BUFFERS];
    const Kernels *kernels = net->down.kernels;
    for (long i = 0; i < net->num_ups; i++) {
        const Call *up = &net->ups[i];
        hidden[i] = hidden_rows(net, worker, i);
        find_buffers(up, memory_of(up, worker), base, row);
        read_rows(up, BUFFER_X, from_token(up, up->x, up->x_row, start), up->x_row, up->stage_x,
                  tokens, base, row);
        base[BUFFER_Y] = hidden[i], row[BUFFER_Y] = net->row;
        run_operations(up, memory_of(up, worker), tokens, 1, base, row);
    }
    kernels->activate(net->activation, 0, hidden[0], hidden[1], hidden[0], net->hidden, net->row,
                      tokens);
    const Call *down = &net->down;
    char *y = (char *)down->y + start * down->y_row * down->outer_size;
    find_buffers(down, memory_of(down, worker), base, row);
    base[BUFFER_X] = hidden[0], row[BUFFER_X] = net->row;
    if (!down->stage_y) base[BUFFER_Y] = y, row[BUFFER_Y] = down->y_row;
    run_operations(down, memory_of(down, worker), tokens, 1, base, row);
    if (down->stage_y)
        kernels->stage_out(base[BUFFER_Y], row[BUFFER_Y], y, down->y_row,
                           down->program[HEADER_D_OUT], tokens, down->is_bfloat16);
}

/* The gradient of x: that of the first up, plus that of the second, in the caller's rows. */
static void write_input_gradient(const Net *net, void *const rows[MAX_UPS],
                                 const int64_t row[MAX_UPS], long start, long tokens) {
    const Call *up = &net->ups[0];
    const long d_in = up->program[HEADER_D_IN];
    const double one = 1;
    if (net->num_ups > 1)
        for (long t = 0; t < tokens; t++) {
            char *to = (char *)rows[0] + t * row[0] * up->size;
            const void *from = (char *)rows[1] + t * row[1] * up->size;
            up->kernels->combine(to, to, &from, &one, 1, d_in);
        }
    if (up->stage_gx)
        up->kernels->stage_out(rows[0], row[0],
                               (char *)up->gx + start * up->gx_row * up->outer_size, up->gx_row,
                               d_in, tokens, up->is_bfloat16);
}

static void run_backward_block(const Net *net, int worker, long start, long tokens, int is_first) {
    void *base[MAX_UPS][MAX_BUFFERS], *down_base[MAX_BUFFERS];
    int64_t row[MAX_UPS][MAX_BUFFERS], down_row[MAX_BUFFERS];
    void *hidden[MAX_UPS] = {0}, *input_gradient[MAX_UPS];
    int64_t input_row[MAX_UPS];
    const Call *down = &net->down;
    const Kernels *kernels = down->kernels;
    void *a = hidden_rows(net, worker, net->num_ups);
    for (long i = 0; i < net->num_ups; i++) {
        const Call *up = &net->again[i];
        hidden[i] = hidden_rows(net, worker, i);
        find_buffers(up, memory_of(up, worker), base[i], row[i]);
        read_rows(up, BUFFER_X, from_token(up, up->x, up->x_row, start), up->x_row, up->stage_x,
                  tokens, base[i], row[i]);
        base[i][BUFFER_Y] = hidden[i], row[i][BUFFER_Y] = net->row;
        run_operations(up, memory_of(up, worker), tokens, 1, base[i], row[i]);
    }
    kernels->activate(net->activation, 1, hidden[0], hidden[1], a, net->hidden, net->row, tokens);

    /* The last operation that reads a is before the one that writes the gradient of a. */
    find_buffers(down, memory_of(down, worker), down_base, down_row);
    read_rows(down, BUFFER_GY, from_token(down, down->gy, down->gy_row, start), down->gy_row,
              down->stage_gy, tokens, down_base, down_row);
    down_base[BUFFER_X] = down_base[BUFFER_GX] = a;
    down_row[BUFFER_X] = down_row[BUFFER_GX] = net->row;
    run_operations(down, memory_of(down, worker), tokens, is_first, down_base, down_row);
    if (down->gbias)
        kernels->add_rows(down_base[BUFFER_GY], down_row[BUFFER_GY], down->program[HEADER_D_OUT],
                          tokens, memory_of(down, worker) + down->at_bias_sum, !is_first);
    if (!net->wants_hidden_gradient) return;

    for (long i = 0; i < net->num_ups; i++) {
        const Call *up = &net->ups[i];
        kernels->multiply_rows(hidden[i], a, net->hidden, net->row, tokens);
        base[i][BUFFER_GY] = hidden[i], row[i][BUFFER_GY] = net->row;
        if (!up->stage_gx) {
            base[i][BUFFER_GX] = (char *)up->gx + start * up->gx_row * up->size;
            row[i][BUFFER_GX] = up->gx_row;
        }
        run_operations(up, memory_of(up, worker), tokens, is_first, base[i], row[i]);
        if (up->gbias)
            kernels->add_rows(hidden[i], net->row, net->hidden, tokens,
                              memory_of(up, worker) + up->at_bias_sum, !is_first);
        input_gradient[i] = base[i][BUFFER_GX], input_row[i] = row[i][BUFFER_GX];
    }
    if (net->ups[0].gx) write_input_gradient(net, input_gradient, input_row, start, tokens);
}

/* Run a pass for a worker's share of the tokens, in blocks of about equal length. */
static void run_net_share(void *context, int worker) {
    const Net *net = context;
    const long first = net->tokens * worker / net->workers;
    const long last = net->tokens * (worker + 1) / net->workers;
    const long blocks = (last - first + net->block - 1) / net->block;
    for (long b = 0; b < blocks; b++) {
        const long start = first + (last - first) * b / blocks;
        const long end = first + (last - first) * (b + 1) / blocks;
        if (net->down.is_backward)
            run_backward_block(net, worker, start, end - start, b == 0);
        else
            run_forward_block(net, worker, start, end - start);
    }
}

int run_feedforward_forward(const CallArguments *layers, int64_t count, int64_t activation) {
    Net net;
    const int status = start_net(&net, layers, count, activation, 0);
    if (status || net.tokens <= 0) return status;
    if (!net.ups[0].x) return STATUS_NO_INPUT;
    request_large_pages(net.down.y, net.down.y_row, &net.down);
    if (!lay_out_net(&net, layers)) return STATUS_NO_MEMORY;
    for (long i = 0; i < count; i++) prepare_forward(layer_of(&net, i), &layers[i]);
    run_parallel(run_net_share, &net, net.workers);
    return STATUS_OK;
}

/* Whether a gradient of a layer is wanted, other than that of its input. */
static int wants_own_gradient(const Call *call) {
    for (long s = 0; s < call->program[HEADER_STEPS]; s++)
        if (call->gradients[s]) return 1;
    return call->gbias != 0;
}

int run_feedforward_backward(const CallArguments *layers, int64_t count, int64_t activation) {
    Net net;
    const int status = start_net(&net, layers, count, activation, 1);
    if (status) return status;
    Call *down = &net.down;
    for (long i = 0; i < count; i++)
        if (layers[i].scales && down->is_bfloat16) return STATUS_BFLOAT16_NORM;
    if (net.tokens <= 0) {
        for (long i = 0; i < count; i++) clear_gradients(layer_of(&net, i));
        return STATUS_OK;
    }
    if (!net.ups[0].x) return STATUS_NO_INPUT;
    request_large_pages(layers[0].grad_x, layers[0].grad_x_row, &net.ups[0]);
    net.wants_hidden_gradient = layers[0].grad_x != 0;
    for (long i = 0; i < net.num_ups; i++) {
        Call *up = &net.ups[i];
        up->gx = layers[0].grad_x, up->gx_row = layers[0].grad_x_row;
        up->stage_gx |= i > 0; /* to be added to that of the first */
        up->stage_x |= is_aliased(up, up->x_row);
        net.wants_hidden_gradient |= wants_own_gradient(up);
    }
    down->stage_gy |= is_aliased(down, down->gy_row);
    /* Only whether this is NULL matters from here on, and how far from a page rows of a start. */
    down->gx = net.wants_hidden_gradient ? (void *)(PAGE / 4) : 0;
    down->x = (const void *)(PAGE / 4);
    if (!lay_out_net(&net, layers)) return STATUS_NO_MEMORY;
    for (long i = 0; i < count; i++) {
        Call *call = layer_of(&net, i);
        prepare_backward(call, &layers[i]);
        if (i == net.num_ups) continue;
        net.again[i] = *call;
        net.again[i].is_backward = 0;
        net.again[i].epilogue.is_wanted |= call->bias != 0;
        call->epilogue.bias = 0;
        call->has_inner = 1;
    }
    run_parallel(run_net_share, &net, net.workers);
    for (long i = 0; i < count; i++) finish_backward(layer_of(&net, i), &layers[i]);
    return STATUS_OK;
}
