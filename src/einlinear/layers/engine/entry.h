/* The exported functions. No Python, no torch, no OpenMP: addresses and numbers in, a status out. */

#ifndef EINLINEAR_ENTRY_H
#define EINLINEAR_ENTRY_H

#include <stdint.h>

#include "abi.h"

/* What the library was compiled with; Python compares both with its own when it loads the library. */
int einlinear_abi_fingerprint(void);
int einlinear_sizeof_arguments(void);

/* Use a target (TARGET_*), or the best one that this processor supports (-1). Returns the target in
   use, or -1 if this processor does not support the one requested. */
int einlinear_target(int target);
int einlinear_has_neon(void);

/* Run on libgomp's threads: the addresses of GOMP_parallel, omp_get_thread_num and
   omp_get_num_threads. */
void einlinear_use_gomp(void *parallel, void *thread_number, void *num_threads);

/* How many bytes the calling thread's workspace holds, after releasing it if `release`. */
int64_t einlinear_workspace(int release);

/* Whether the factors are, bit for bit, those of a copy: one after the other. */
int einlinear_has_factors(const CallArguments *arguments, const void *copy);

/* y = W x + bias for rows of x, and its gradients. All return STATUS_*. */
int einlinear_forward(const CallArguments *arguments);
int einlinear_backward(const CallArguments *arguments);

/* The same for many experts, each with its own tokens. The gradient of the bias is available only if
   x and y have one row per token. */
int einlinear_experts_forward(const CallArguments *arguments);
int einlinear_experts_backward(const CallArguments *arguments);

/* Feed-forward nets: an array of layers, up and down, or gate, up and down, with an activation
   (ACTIVATION_*) between them. The first has x and grad_x, the last y and grad_y. */
int einlinear_feedforward_forward(const CallArguments *layers, int64_t count, int64_t activation);
int einlinear_feedforward_backward(const CallArguments *layers, int64_t count, int64_t activation);

/* The experts of every token, and the gradients of a gate. Forward, STATUS_TIED_LOGITS says that equal
   logits decide: then only the logits are written. */
int einlinear_gate_forward(const GateArguments *arguments);
int einlinear_gate_backward(const GateArguments *arguments);

#endif
