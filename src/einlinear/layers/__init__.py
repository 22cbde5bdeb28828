"""Layers: weights, and how they are multiplied.

In: a Plan. Out: EinsumLinear, a drop-in replacement for nn.Linear, and the scaling of each of its
parameters. engine/ holds the compiled engine, moe/ the mixtures of experts.
May import: structures, show, files, errors.
"""
