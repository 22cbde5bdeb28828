"""Whole models: a GPT and two MLPs of plain linear layers, and text generation.

In: widths and depths. Out: an nn.Module that knows nothing about structures.
survey/ finds what is in a model, mup/ sets its learning rates, convert/ replaces its linear layers.
May import: layers, structures, show, files, errors.
"""
