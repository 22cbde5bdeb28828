"""Data: texts, tokens and images, from files of any size or embedded in the package.

In: files, folders, or the name of a data set. Out: arrays of tokens and images, checked.
tasks/ makes batches of them. No torch outside tasks/.
May import: structures, show, files, errors.
"""
