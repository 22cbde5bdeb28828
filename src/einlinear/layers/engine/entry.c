/* The exported functions: all that Python calls. Everything else is hidden. */

#include "entry.h"

#include <string.h>

#include "arena.h"
#include "call.h"
#include "gate.h"
#include "pool.h"
#include "targets.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT int einlinear_abi_fingerprint(void) { return ABI_FINGERPRINT; }
EXPORT int einlinear_sizeof_arguments(void) {
    return (int)(sizeof(CallArguments) + sizeof(GateArguments));
}

EXPORT int einlinear_target(int target) { return choose_target(target); }
EXPORT int einlinear_has_neon(void) { return has_neon(); }

EXPORT void einlinear_use_gomp(void *parallel, void *thread_number, void *num_threads) {
    use_gomp(parallel, thread_number, num_threads);
}

EXPORT int64_t einlinear_workspace(int release) {
    if (release) release_arena();
    return (int64_t)arena_size();
}

EXPORT int einlinear_forward(const CallArguments *arguments) {
    return run_layer_forward(arguments);
}

EXPORT int einlinear_backward(const CallArguments *arguments) {
    return run_layer_backward(arguments);
}

EXPORT int einlinear_experts_forward(const CallArguments *arguments) {
    return run_experts_forward(arguments);
}

EXPORT int einlinear_experts_backward(const CallArguments *arguments) {
    return run_experts_backward(arguments);
}

EXPORT int einlinear_has_factors(const CallArguments *arguments, const void *copy) {
    const int64_t *program = arguments->program, dtype = arguments->dtype;
    const int64_t *sizes = program + HEADER_LENGTH + program[HEADER_ROW_BUFFERS];
    const int64_t size = dtype == DTYPE_FLOAT64 ? 8 : dtype == DTYPE_BFLOAT16 ? 2 : 4;
    const char *expected = copy;
    for (int64_t s = 0; s < program[HEADER_STEPS]; s++) {
        const size_t bytes = (size_t)(sizes[s] * size);
        if (memcmp(arguments->factors[s], expected, bytes)) return 0;
        expected += bytes;
    }
    return 1;
}

EXPORT int einlinear_feedforward_forward(const CallArguments *layers, int64_t count,
                                         int64_t activation) {
    return run_feedforward_forward(layers, count, activation);
}

EXPORT int einlinear_feedforward_backward(const CallArguments *layers, int64_t count,
                                          int64_t activation) {
    return run_feedforward_backward(layers, count, activation);
}

EXPORT int einlinear_gate_forward(const GateArguments *arguments) {
    return run_gate_forward(arguments);
}

EXPORT int einlinear_gate_backward(const GateArguments *arguments) {
    return run_gate_backward(arguments);
}
