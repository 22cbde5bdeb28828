"""Search: from a task and a budget to a ranked choice of structure.

In: a task, a budget and a space of candidates. Out: runs, and a leaderboard with intervals. The
truth is the run directories; everything else is computed from them.
May import: sweeps, training, laws, runs, models, structures, show, files, errors.
"""
