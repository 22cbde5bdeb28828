/* The exported functions: all that Python calls. Everything else is hidden. */

#include "entry.h"

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

EXPORT int einlinear_gate_forward(const GateArguments *arguments) {
    return run_gate_forward(arguments);
}

EXPORT int einlinear_gate_backward(const GateArguments *arguments) {
    return run_gate_backward(arguments);
}
