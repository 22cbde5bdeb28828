"""Sweeps: many runs, each trained once, that survive a crash of anything.

In: a Study (grids of settings over a base). Out: a directory of finished runs.
executors/ says where runs are trained: in this process, in local ones, on Ray, on Slurm.
May import: training, runs, data, models, layers, structures, show, files, errors.
"""
