"""Benchmarks: speed and memory of layers against nn.Linear and other libraries, in one run.

In: structures, widths, token counts, models. Out: rows of measurements, a page, a table, JSON, and
recommendations: which structure to use for a shape or for each layer of a model.
May import: models, layers, structures, show, files, errors.
"""
