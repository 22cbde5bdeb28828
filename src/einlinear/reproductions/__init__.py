"""The paper in the package: its figures as studies, on a CPU and at the scale of the paper.

In: the name of a figure, a scale, and perhaps data. Out: a Study or a LandscapeConfig to train, and
what it costs. The TOML files in studies/ hold all of them.
May import: landscapes, sweeps, runs, data, structures, show, files, errors.
"""
