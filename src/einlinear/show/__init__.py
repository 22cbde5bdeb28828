"""Output for people: numbers and symbols as text, text tables, progress, HTML pages, plots.

In: plain values. Out: strings, and matplotlib figures. Knows nothing about layers or runs.
May import: errors, files.
"""
