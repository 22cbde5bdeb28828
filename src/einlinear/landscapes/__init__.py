"""Landscapes: the best learning rate by width and structure, measured.

In: structures, widths, rates, seeds. Out: a Landscape with the best rate of each cell, how far it
moves, and a verdict in words.
May import: sweeps, runs, data, models.choices, layers, structures, show, files, errors.
"""
