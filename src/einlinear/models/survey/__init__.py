"""The survey of a model: its linear layers, its parameters, and what is known about each.

In: any nn.Module. Out: sites (linear layers and reasons they cannot be replaced), facts (how each
parameter scales), and whether weights look trained. Changes nothing.
May import: models.attention, layers, structures, show, files, errors.
"""
