"""µP: initial weights and learning rates that transfer across widths and structures.

In: a model. Out: initialised weights, parameter groups for any torch optimizer and for Muon, a
table of both, and a check that every layer moves by the same amount at every width.
May import: models.survey, layers, structures, show, files, errors.
"""
