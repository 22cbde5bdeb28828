"""Conversion: replace the linear layers of any model by structured ones.

In: a model and rules (a structure, or patterns on layer names). Out: the same model, changed in
place, and a Conversion that lists what was replaced, what was left alone, and why.
May import: models.saving, models.survey, layers, structures, show, files, errors.
"""
