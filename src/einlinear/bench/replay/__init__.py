"""Replay: searches compared on tables of finished runs, without training.

In: a table of losses by structure, size, steps and seed, synthetic or from a directory of runs.
Out: how good the structure is that each method chooses, against the compute that it spent.
May import: searches, runs, structures, show, files, errors; Optuna is needed for its methods only.
"""
