"""Fusing: compute the feed-forward nets of a model in one pass each.

In: a model whose linear layers are structured. Out: the same model, whose modules with such nets
have a faster forward, and a Fusion that lists the nets and the layers left alone, with reasons.
May import: models.convert, models.survey, models.adapted, layers, structures, show, errors.
"""
