"""Benchmarks: speed and memory of layers against nn.Linear and other libraries, in one run.

In: structures, widths, token counts, models, runs. Out: rows of measurements, a page, a table,
JSON, the time of a training step of each model of some runs, and recommendations: which structure
to use for a shape or for each layer of a model.
May import: searches, sweeps, training, laws, runs, models, layers, structures, show, files, errors.
"""
