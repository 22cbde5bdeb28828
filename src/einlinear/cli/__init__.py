"""The command line: one module for each command in commands/, and no other logic.

In: words typed after `einlinear`. Out: a call of the public function, progress, a printed result,
or an error of three lines (what, rule, fix).
May import: every room.
"""
