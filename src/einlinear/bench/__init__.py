"""Benchmarks: speed and memory of layers against nn.Linear and other libraries, in one run.

In: structures, widths, token counts. Out: rows of measurements, a page, a table, JSON.
May import: models, layers, structures, show, files, errors.
"""
