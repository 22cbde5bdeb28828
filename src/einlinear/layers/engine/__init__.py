"""The compiled engine: a plan becomes a program, a program becomes one call of C.

In: a Plan, tensors. Out: their product and its gradients, computed by the library built from the
C files here. Without that library, `layers` falls back to torch.
May import: structures, show, files, errors.
"""
