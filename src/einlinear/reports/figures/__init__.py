"""Figures of a report: values first, then drawings by the page or by matplotlib.

In: an analysis of runs. Out: panels of series as plain values, and SVG or PNG files.
May import: reports, laws, runs, structures, show, files, errors.
"""
