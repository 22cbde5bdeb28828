"""Adapters: structured updates that are trained beside the frozen layers of a model.

In: a model and rules (a structure, or patterns on layer names). Out: the same model with
AdaptedLinear layers, and an Adaptation that lists them; then plain layers again, merged or as they
were; or a folder of the adapters alone.
May import: models.convert, models.saving, models.survey, models.attention, layers, structures,
show, files, errors.
"""
