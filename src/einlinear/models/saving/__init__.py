"""Saving: a converted model on disk, and back into a plain model, bit for bit.

In: a converted model; or what was saved, and a function that makes the plain model. Out: a folder
of tensors and a description of every structured layer; or the model. Also for Hugging Face's
save_pretrained and from_pretrained. No code is stored or run.
May import: models.survey, models.attention, layers, structures, files, show, errors, version.
"""
