"""Layers: weights, and how they are multiplied.

In: a Plan. Out: EinsumLinear, a drop-in replacement for nn.Linear, and the scaling of each of its
parameters. engine/ holds the compiled engine, moe/ the mixtures of experts, export/ layers
in the programs of others.
May import: structures, show, files, errors.
"""
