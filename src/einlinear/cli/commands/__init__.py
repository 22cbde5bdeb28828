"""The commands of `einlinear`, one module each.

In: arguments. Out: what the command prints and writes. May import: every room.
"""
