"""Tasks: what models are trained on, each batch a pure function of seed and step.

In: the name of a task and its data. Out: a Task with batches, a validation set and a loss.
May import: data, structures, show, files, errors.
"""
