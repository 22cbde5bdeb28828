/* The gate of a mixture: which experts each token goes to, with which weights, and the gradients. */

#ifndef EINLINEAR_GATE_H
#define EINLINEAR_GATE_H

#include "abi.h"

/* Both return STATUS_*. Forward, STATUS_TIED_LOGITS says that only the logits were written. */
int run_gate_forward(const GateArguments *arguments);
int run_gate_backward(const GateArguments *arguments);

#endif
