"""Executors: where the runs of a sweep are trained.

In: jobs. Out: how each ended. One module for each place: this process, processes of this
machine, Ray, Slurm.
May import: sweeps (jobs and claims), training, runs, show, files, errors.
"""
