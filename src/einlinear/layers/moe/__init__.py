"""Mixtures of experts that compute only what is active.

In: a Plan, the number of experts, tokens. Out: MoELinear and MoEFeedForward, their routing, and
sharding of experts over many devices.
May import: layers, layers.engine, structures, show, files, errors.
"""
