"""The doctor: what works for a user's own model with structured layers, and why not.

In: the name of a model, a structure, an example of its input. Out: one result for each check,
with the reason where something fails, and a table of them.
May import: bench, models, layers, structures, show, files, errors.
"""
