"""Training: a RunConfig goes in, a RunRecord comes out.

In: a RunConfig. Out: a run directory with metrics, checkpoints, a model and, last, its record.
Interrupt it at any time; a resumed run gives the same numbers as an uninterrupted one.
May import: runs, data, models, layers, structures, show, files, errors.
"""
