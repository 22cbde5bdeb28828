"""Factors of a structure whose matrix is closest to a given dense weight.

In: a dense weight, a Plan and a Metric: what is known of the inputs of the layer and of how much
its outputs matter. Out: a Projection, by closed forms where there are any (splitting, blockwise),
by alternating least squares otherwise (alternating); a layer like a dense one (like).
May import: layers/reference, layers/scaling, layers/computed, structures, errors.
"""
